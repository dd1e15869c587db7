"""The wrappers of optax and `optax.contrib`, around a rule of optfn as around that of optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clients import RULES, Rule, assert_same_run, with_rules
from optax import contrib

import optfn

PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, 0.1]]), "b": jnp.array([0.3, -0.2])}
TARGET = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
SCALES = np.linspace(0.5, 1.5, 8)


def loss(params, scale=1.0):
    return scale * sum(
        jnp.sum((p - t) ** 4) for p, t in zip(*map(jax.tree.leaves, (params, TARGET)), strict=True)
    )


def train(tx, read=lambda state, params: params, scales=SCALES):
    """Return what `read` sees after a step for each scale of the loss."""
    tx = optax.with_extra_args_support(tx)
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, scale):
        value_fn = functools.partial(loss, scale=scale)
        value, grads = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for scale in scales:
        params, state = step(params, state, scale)
    return read(state, params)


def at_even_steps(step, updates=None, params=None):
    return step % 2 == 0


def one_leaf_masked(tx):
    frozen = optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    return optax.chain(optax.masked(tx, {"w": True, "b": False}), frozen)


def partitioned(tx):
    labels = {"w": "trained", "b": "frozen"}
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, at_even_steps),
    "conditionally_transform": lambda tx: optax.chain(
        optax.conditionally_transform(tx, at_even_steps), optax.clip(0.05)
    ),
    "masked": one_leaf_masked,
    "partition": partitioned,
    "flatten": optax.flatten,
    "chain": lambda tx: optax.chain(tx, optax.ema(0.9), optax.scale(0.5)),
    "named_chain": lambda tx: optax.named_chain(("rule", tx), ("half", optax.scale(0.5))),
    "with_extra_args_support": optax.with_extra_args_support,
    "keep_params_nonnegative": lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
    "reduce_on_plateau": lambda tx: optax.chain(tx, contrib.reduce_on_plateau(patience=1)),
    # Its update takes no extra arguments, though its type says so.
    "sam": lambda tx: optax.GradientTransformation(*contrib.sam(tx, optax.sgd(0.05))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@with_rules()
def test_a_wrapper(wrapper, rule):
    assert_same_run(lambda tx: train(wrapper(tx)), rule, 0.01)


@with_rules()
def test_apply_if_finite_with_a_gradient_that_is_not(rule):
    scales = [1.0, 2.0, np.nan, 1.0, np.inf, 1.0]
    assert_same_run(lambda tx: train(optax.apply_if_finite(tx, 2), scales=scales), rule, 0.01)


@with_rules()
def test_lookahead(rule):
    def run(tx):
        tx = optax.lookahead(tx, 3, 0.5)
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = tx.init(params)
        for _ in range(7):
            updates, state = tx.update(jax.grad(loss)(params.fast), state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert_same_run(run, rule, 0.01)


@with_rules()
def test_schedule_free(rule):
    def run(tx):
        tx = contrib.schedule_free(tx, learning_rate=0.01)
        return train(tx, contrib.schedule_free_eval_params)

    assert_same_run(run, rule, 0.01)


def test_mechanize_with_the_rate_1():
    assert_same_run(lambda tx: train(contrib.mechanize(tx)), RULES["momentum"], 1.0)


def test_inject_hyperparams_with_a_schedule():
    ours = optax.inject_hyperparams(functools.partial(optfn.adam, eps_hat=False))
    rule = Rule(ours, optax.inject_hyperparams(optax.adam))
    assert_same_run(train, rule, optax.linear_schedule(0.01, 0.001, 8))


@with_rules()
def test_complex_params_split_in_two(rule):
    def run(tx):
        tx = contrib.split_real_and_imaginary(tx)
        params = jnp.array([1.0 + 2.0j, -0.5j])
        state = tx.init(params)
        for _ in range(5):
            grads = jax.grad(lambda p: jnp.sum(jnp.abs(p - 1.0j) ** 4))(params).conj()
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert_same_run(run, rule, 0.01)
