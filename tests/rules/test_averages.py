"""Averages of params, against NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import run, tree

import optfn


def numpy_ema(trail, decay, thres_steps):
    e, product = np.zeros_like(trail[0], np.float64), 1.0
    for s, p in enumerate(trail):
        d = min(decay, (1 + s) / (10 + s)) if thres_steps else decay
        e, product = d * e + (1 - d) * p, product * d
    return e / (1 - product)


@pytest.mark.parametrize("thres_steps", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_ema_against_numpy(decay, thres_steps):
    tx = optfn.chain(
        optfn.sgd(0.1), optfn.exponential_moving_average(decay, thres_steps=thres_steps)
    )
    params = tree(0)
    chex.assert_trees_all_equal(optfn.averaged_params(tx.init(params), params), params)
    trail, state = run(tx, params, [tree(k) for k in range(1, 8)])
    before = jax.device_get(state)
    got = optfn.averaged_params(state, trail[-1])
    chex.assert_trees_all_equal(before, jax.device_get(state))
    for path in (("a", "w"), ("a", "b")):
        series = [np.asarray(p[path[0]][path[1]]) for p in trail]
        want = numpy_ema(series, decay, thres_steps)
        np.testing.assert_allclose(got[path[0]][path[1]], want, rtol=2e-6, atol=1e-7)


def numpy_model_average(trail, rate, shortest, longest):
    s1 = s2 = s3 = 0.0
    updates = acc = old = 0
    for p in trail:
        updates, acc, s1 = updates + 1, acc + 1, s1 + p.astype(np.float64)
        if updates % 16384 == 0:
            s2, s1 = s2 + s1, 0.0
        if acc >= shortest and acc >= min(longest, int(np.float32(updates) * np.float32(rate))):
            s3, s1, s2, old, acc = s1 + s2, 0.0, 0.0, acc, 0
    return (s1 + s2 + s3) / (acc + old)


@pytest.mark.parametrize(
    ("rate", "shortest", "longest"), [(0.5, 2, 5), (0.15, 1, 100), (1.0, 9, 9)]
)
def test_model_average_against_numpy(rate, shortest, longest):
    tx = optfn.chain(
        optfn.sgd(0.1),
        optfn.model_average(rate, min_average_window=shortest, max_average_window=longest),
    )
    params = {"w": jnp.arange(3.0)}
    chex.assert_trees_all_equal(optfn.averaged_params(tx.init(params), params), params)
    gradients = [{"w": jnp.asarray(np.random.default_rng(k).normal(size=3))} for k in range(20)]
    trail, _ = run(tx, params, gradients)
    for k in (1, 7, 20):
        _, state = run(tx, params, gradients[:k])
        want = numpy_model_average([np.asarray(p["w"]) for p in trail[:k]], rate, shortest, longest)
        got = optfn.averaged_params(state, trail[k - 1])["w"]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_model_average_at_its_sum_boundary():
    """The first sum moves into the second at update 16384, in one scan."""
    tx = optfn.model_average(0.15, min_average_window=20000, max_average_window=20000)
    zero = {"w": jnp.zeros(1)}

    def step(state, p):
        return tx.update(zero, state, {"w": p})[1], None

    values = np.random.default_rng(0).normal(size=(16390, 1)).astype(np.float32)
    state, _ = jax.jit(lambda s, v: jax.lax.scan(step, s, v))(tx.init(zero), values)
    np.testing.assert_allclose(state.sum_1["w"], values[16384:].sum(0), rtol=1e-4)
    got = optfn.averaged_params(state, zero)["w"]
    np.testing.assert_allclose(got, values.mean(0, np.float64), atol=1e-5)


def test_averages_share_no_buffer_and_choose_by_name():
    tx = optfn.chain(
        optfn.sgd(0.1), optfn.exponential_moving_average(0.9), optfn.model_average(0.5)
    )
    params = tree(0) | {"ids": jnp.arange(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="'exponential_moving_average', 'model_average'"):
        optfn.averaged_params(state, params)
    for name in ("exponential_moving_average", "model_average"):
        averaged = optfn.averaged_params(state, params, name=name)
        chex.assert_trees_all_equal(averaged, params)
        theirs = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
        assert theirs.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(averaged))
    with pytest.raises(ValueError, match="has no average"):
        optfn.averaged_params(optfn.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="min_average_window must be <= max"):
        optfn.model_average(0.5, min_average_window=5, max_average_window=4)


def test_averages_see_what_apply_updates_makes():
    """Rounded to the parameter's dtype outside master_weights, the master inside."""
    params, gradients = tree(0, jnp.bfloat16), [tree(k, jnp.bfloat16) for k in (1, 2)]
    average = optfn.exponential_moving_average(0.0)
    trail, state = run(optfn.chain(optfn.sgd(0.1), average), params, gradients)
    chex.assert_trees_all_equal(optfn.averaged_params(state, trail[-1]), trail[-1])
    inside = optfn.master_weights(optfn.chain(optfn.sgd(0.1), average))
    _, state = run(inside, params, gradients)
    chex.assert_trees_all_equal(state.inner_state[1].average, state.master)


@pytest.mark.parametrize(
    ("average", "field"),
    [
        (lambda: optfn.model_average(1.0), "sum_1"),
        (lambda: optfn.exponential_moving_average(0.0), "average"),
    ],
)
def test_a_compiled_average_is_of_the_rounded_params(average, field):
    tx = optfn.chain(optfn.sgd(0.1), average())
    params = jnp.asarray(np.linspace(0.1, 1.0, 7), jnp.bfloat16)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.cos(params), state, params)
        return optfn.apply_updates(params, updates), state

    params, state = step(params, tx.init(params))
    np.testing.assert_array_equal(getattr(state[-1], field), params.astype(jnp.float32))
