"""The errors that an author of a rule gets."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import optfn
from optfn import core
from optfn.core import leafwise

PARAMS = {"w": jnp.ones(3), "v": jnp.ones((2, 2))}


class State(NamedTuple):
    moments: list


def transform_of(rule, accumulators=1, **options):
    """Return a transform that applies `rule`, with some accumulators."""

    def init(params):
        return State([leafwise.zeros_like(params) for _ in range(accumulators)])

    def update(updates, state, params=None, **extra):
        updates, *new = leafwise.apply(rule, updates, *state.moments, params=params)
        return updates, State(new)

    @core.transform(**options)
    def scale_by_mine():
        return core.rule(init, update)

    return scale_by_mine()


@pytest.mark.parametrize("jitted", [True, False])
def test_a_rule_that_forgets_its_update_is_named_with_its_leaf(jitted):
    tx = transform_of(lambda g, mu, nu: (mu + g, nu + g * g), 2)
    update = jax.jit(tx.update) if jitted else tx.update
    message = (
        "a rule must return 1 update and 2 accumulators, of shapes [(2, 2), (2, 2)]; "
        "it returned 2 arrays: [(2, 2), (2, 2)]"
    )
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        update(PARAMS, tx.init(PARAMS))
    note = "in the rule test_a_rule_that_forgets.*<locals>.<lambda> of leaf 'v'"
    assert re.match(note, caught.value.__notes__[0])


def test_any_error_of_a_rule_names_its_leaf():
    tx = transform_of(lambda g, mu: (g @ jnp.ones(5), mu))
    with pytest.raises(TypeError) as caught:
        tx.update(PARAMS, tx.init(PARAMS))
    assert re.match("in the rule .*lambda> of leaf 'v'", caught.value.__notes__[-1])


def test_a_rule_that_reads_params_asks_for_them():
    def decay(g, mu, p):
        return g + p, mu

    tx = transform_of(decay)
    with pytest.raises(TypeError, match="'p'") as caught:
        tx.update(PARAMS, tx.init(PARAMS))
    note = "in the rule .*decay of leaf 'v', which got no parameter.*needs_params=True"
    assert re.match(note, caught.value.__notes__[0])
    tx = transform_of(decay, needs_params=True)
    with pytest.raises(ValueError, match="scale_by_mine needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_a_step_may_begin_as_a_number():
    def update(updates, state, params=None, **extra):
        return updates, core.next_step(state)

    tx = core.transform()(lambda: core.rule(lambda params: 0, update))()
    state = tx.init(PARAMS)
    for expected in (1, 2):
        _, state = tx.update(PARAMS, state, PARAMS)
        assert int(state) == expected and state.dtype == jnp.int32
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), tx)
    state = step.init(PARAMS)
    assert int(step(step(state, 0.0)[0], 0.0)[0].opt_state) == 2


@pytest.mark.parametrize("dtype", ["int8", jnp.int32, bool])
def test_accumulators_are_floating_point(dtype):
    with pytest.raises(TypeError, match=r"dtype must be floating point.*; got (int8|int32|bool)"):
        leafwise.zeros_like(PARAMS, dtype=dtype)
    assert leafwise.zeros_like(PARAMS, dtype="bfloat16")["w"].dtype == jnp.bfloat16


def test_a_transformation_of_optax_is_shown_by_its_factory():
    tx = optax.masked(optax.scale_by_adam(), {"w": True, "v": False})
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), tx)
    with pytest.warns(UserWarning, match=r"tx=optax\.masked\(…\) applies no learning rate"):
        step.init(PARAMS)
    assert "optax.masked(…)" in repr(step)
    chained = optfn.chain(optax.adaptive_grad_clip(0.1), optfn.accumulate(optax.lamb(0.1), every=2))
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), chained)
    shown = "chain(optax.adaptive_grad_clip(…), accumulate(optax.chain(…), every=2))"
    assert shown in repr(step)
