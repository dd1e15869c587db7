"""Masters of params; arguments, states and leaves that optimizers and wrappers refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import suite

import optfn
from optfn import core
from optfn.optimizers.assembly import optimizer


@pytest.mark.parametrize("apply", [optax.apply_updates, optfn.apply_updates])
def test_master_weights_land_on_the_rounded_master(apply):
    """Over magnitudes from 1e-4 to 1e4, steps small and large, both ways of applying."""
    rng = np.random.default_rng(0)
    p = {"w": jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.uniform(-4, 4, 4096), "bfloat16")}
    tx = optfn.master_weights(optfn.sgd(1.0))
    state = tx.init(p)
    for size in (1e-6, 1e-3, 0.3, 1.0):
        g = {"w": p["w"].astype(jnp.float32) * jnp.asarray(rng.normal(size=4096) * size)}
        updates, state = tx.update(g, state, p)
        assert updates["w"].dtype == jnp.float32
        p = apply(p, updates)
        np.testing.assert_array_equal(p["w"], state.master["w"].astype("bfloat16"))


def test_a_call_without_weight_adds_nothing_of_a_gradient_that_is_nan():
    p, nan, g = (jnp.full(2, x) for x in (1.0, np.nan, 3.0))
    tx = optfn.accumulate(optfn.sgd(1.0), 3)
    state = tx.init(p)
    for gradient, weight in ((nan, 0.0), (g, 2.0), (nan, 0.0)):
        updates, state = jax.jit(tx.update)(gradient, state, p, weight=weight)
    np.testing.assert_array_equal(updates, -3.0)


def test_numbers_that_a_rule_hashes_reach_it_through_an_accumulation():
    """As Python has them; an array would be traced."""
    p = {"w": jnp.ones(2)}
    tx = optfn.accumulate(optfn.chain(optfn.add_decayed_weights(0.1), optfn.sgd(1.0)), 1)
    updates, _ = tx.update(p, tx.init(p), p, decay_factors={"w": 0.5})
    np.testing.assert_allclose(updates["w"], -1.05, rtol=1e-6)


def test_wide_leaves_have_no_master():
    tx = optfn.sgd(0.1, multi_precision=True)
    state = tx.init({"w": jnp.ones(3), "h": jnp.ones(3, jnp.float16), "ids": jnp.arange(3)})
    assert [x.shape for x in jax.tree.leaves(state.master)] == [(3,)]
    with pytest.raises(ValueError, match="dtype must be float32 or float64"):
        optfn.master_weights(optfn.sgd(0.1), jnp.bfloat16)


@pytest.mark.parametrize(
    "tx",
    [
        optfn.accumulate(optfn.sgd(0.1), 2),
        optfn.skip_nonfinite(optfn.sgd(0.1)),
        optfn.record_metrics(optfn.sgd(0.1)),
        optfn.master_weights(optfn.sgd(0.1)),
        optfn.exponential_moving_average(),
        optfn.model_average(0.5),
        optfn.chain(optfn.sgd(0.1)),
        optfn.sgd(0.1),
    ],
    ids=repr,
)
def test_the_state_of_another_optimizer_is_an_error(tx):
    params = {"w": jnp.ones(2)}
    for state in (optfn.adam(0.1).init(params), None, 3, {}):
        with pytest.raises(TypeError, match=r"the state must be a .*made by another optimizer"):
            tx.update(params, state, params)


def test_functions_among_the_leaves_are_told_how_to_part():
    """As in an equinox module that is not partitioned."""
    with pytest.raises(
        TypeError, match=r"parameter 'act' must be a floating-point array.*eqx\.partition"
    ):
        optfn.adam(0.1).init({"act": jnp.tanh, "w": jnp.ones(3)})


@pytest.mark.parametrize("chained", [False, True])
def test_an_optimizer_of_one_transform_need_not_be_a_chain(chained):
    @optimizer
    def descent(
        rate, *, grad_clip=None, regularization=None, param_attrs=None, multi_precision=False
    ):
        tx = optfn.scale_by_learning_rate(rate)
        return optfn.chain(tx) if chained else tx

    tx, params = descent(0.5, grad_clip=optfn.clip_by_value(1.0)), 3.0
    updates, _ = tx.update(4.0, tx.init(params), params)
    assert float(updates) == -0.5


def types_of(state):
    """The types of the states of a chain's links; an empty state serves for any other."""
    if type(state) is tuple:
        return tuple(map(types_of, state))
    return type(state) if jax.tree.leaves(state) else ()


@functools.cache
def states_of_all():
    params = {"w": np.ones(2, np.float32)}
    return {k: jax.eval_shape(x.make().init, params) for k, x in registry.OPTIMIZERS.items()}


@pytest.mark.parametrize("name", suite(registry.OPTIMIZERS, *registry.SUITE_OF_OPTIMIZERS))
def test_the_state_of_each_other_optimizer_is_an_error(name):
    params = {"w": np.ones(2, np.float32)}
    tx, states = registry.OPTIMIZERS[name].make(), states_of_all()
    for state in states.values():
        if types_of(state) != types_of(states[name]):
            with pytest.raises(TypeError, match=r"the state must be a .*made by another optimizer"):
                jax.eval_shape(tx.update, params, state, params)


def test_a_rule_that_needs_leaves():
    """Its state is not compared with that of an empty tree."""

    @core.transform()
    def scale_by_largest():
        def init(params):
            return {"largest": jnp.max(jnp.stack([jnp.max(p) for p in jax.tree.leaves(params)]))}

        def update(updates, state, params=None, **extra):
            return jax.tree.map(lambda g: g / state["largest"], updates), state

        return core.rule(init, update)

    params, tx = {"w": jnp.array([1.0, 4.0])}, scale_by_largest()
    assert tx.update(params, tx.init(params), params)[0]["w"].tolist() == [0.25, 1.0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: optfn.adam(0.1, multi_precision=True),
        lambda: optfn.adam(0.1, multi_precision=32),
        lambda: optfn.accumulate(optfn.adam(0.1), 2),
        lambda: optfn.chain(optfn.adam(0.1), optfn.exponential_moving_average(0.9)),
        lambda: optfn.chain(optfn.adam(0.1), optfn.model_average(0.5)),
        lambda: optfn.skip_nonfinite(optfn.adam(0.1)),
        lambda: optfn.record_metrics(optfn.skip_spikes(optfn.adam(0.1), 2.0)),
        lambda: optfn.dynamic_loss_scale(optfn.adam(0.1)),
    ],
)
def test_a_python_number_as_a_leaf_is_trained_as_its_array_is(wrap):
    numbers = {"w": jnp.ones(3, jnp.bfloat16), "s": 2.0}
    arrays = jax.tree.map(jnp.asarray, numbers)
    found = []
    for params in (numbers, arrays):
        tx = wrap()
        state, grads = tx.init(params), jax.tree.map(lambda x: 0.5 * jnp.asarray(x), numbers)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = optfn.apply_updates(params, updates)
        found.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_an_accumulation_begins_anew_though_another_label_drops_its_first_call():
    """The second of three steps of b: its first call is dropped with the NaN of a."""
    labels = {"a": optfn.skip_nonfinite(optfn.sgd(0.1)), "b": optfn.accumulate(optfn.sgd(0.1), 2)}
    tx = optax.partition(labels, {"a": "a", "b": "b"})
    step = optfn.make_train_step(lambda p, x: p["a"] * x[0] + p["b"] * x[1], tx)
    state, found = step.init({"a": jnp.float32(0.0), "b": jnp.float32(0.0)}), []
    for x in ((1, 1), (1, 2), (np.nan, 3), (1, 4), (1, 5), (1, 6)):
        state, _ = step(state, np.float32(x))
        found.append(float(state.params["b"]))
    np.testing.assert_allclose(found, [0, -0.15, -0.15, -0.55, -0.55, -1.1], rtol=1e-6)


def test_a_dropped_update_of_a_complex_leaf_leaves_its_bits():
    p = jnp.array([complex(1.0, -0.0), complex(-0.0, -0.0)], jnp.complex64)
    for tx in (optfn.skip_nonfinite(optfn.sgd(0.1)), optfn.accumulate(optfn.sgd(0.1), 2)):
        u, _ = tx.update(jnp.full(2, complex(np.nan, 0.0), jnp.complex64), tx.init(p), p)
        after = np.asarray(optfn.apply_updates(p, u))
        assert after.tobytes() == np.asarray(p).tobytes()


def test_a_call_without_weight_leaves_the_state_of_24_bit_masters():
    step = optfn.make_train_step(
        lambda p, x: optfn.Mean(jnp.sum(p * x), jnp.sum(x)), optfn.adam(0.1, multi_precision=24)
    )
    state = step.init(jnp.ones(4, jnp.bfloat16))
    before = jax.tree.map(np.array, state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, before, step(state, jnp.zeros(4))[0].opt_state)
