"""Accumulation of gradients over several calls."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry
from grids import by_entry
from problems import run, tree

import optfn

OPTIMIZERS = pytest.mark.parametrize("entry", registry.OPTIMIZERS.values(), ids=registry.OPTIMIZERS)


@by_entry(registry.OPTIMIZERS, "sgd", "decayed_adagrad", "adam_clip_l2", "ftrl_dense_rows")
def test_accumulate_is_the_step_of_the_mean_gradient(entry):
    """Every third call steps; the others change neither params nor inner state."""
    tx = optfn.accumulate(entry.make(), 3)
    params, gradients = tree(0), [tree(k) for k in range(1, 7)]
    trail, state = run(tx, params, gradients)
    means = [jax.tree.map(lambda *g: sum(g) / 3, *gradients[k : k + 3]) for k in (0, 3)]
    want, inner = run(entry.make(), params, means)
    chex.assert_trees_all_close(trail[2], want[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(trail[5], want[1], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal(trail[0], params)
    chex.assert_trees_all_equal(trail[4], trail[2])
    chex.assert_trees_all_close(state.inner_state, inner, rtol=1e-4, atol=1e-5)


def test_accumulate_equals_the_big_batch():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def loss(w, batch):
        return jnp.mean((batch @ w - 1.0) ** 2)

    small, _ = optfn.minimize(
        loss, optfn.accumulate(optfn.adam(0.1), 4), jnp.zeros(3), list(x.reshape(4, 3, 3)),
        progress=False,
    )  # fmt: skip
    big, _ = optfn.minimize(loss, optfn.adam(0.1), jnp.zeros(3), [x], progress=False)
    np.testing.assert_allclose(small.params, big.params, rtol=1e-5)


def test_accumulate_runs_the_inner_update_only_when_due():
    """In the compiled program it stands inside a loop, and averages advance with real steps."""
    tx = optfn.accumulate(optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average(0.9)), 2)
    _, state = run(tx, tree(0), [tree(k) for k in range(1, 6)])
    assert int(state.inner_state[1].step) == 2
    assert int(state.micro_step) == 1
    jaxpr = str(jax.make_jaxpr(tx.update)(tree(1), tx.init(tree(0)), tree(0)))
    assert jaxpr.count("while[") == 1


def test_accumulate_writes_the_update_over_the_sum():
    """What is there at micro-step 0 is not added to the next gradient, whatever it is."""
    tx, p = optfn.accumulate(optfn.sgd(0.5), 2), jnp.float32(3.0)
    state = tx.init(p)
    for g in (1.0, 3.0):
        u, state = tx.update(jnp.float32(g), state, p)
    assert u == state.total == -1.0
    _, state = tx.update(jnp.float32(5.0), state._replace(total=jnp.float32(np.nan)), p)
    assert state.total == 5.0


def test_bad_accumulate():
    with pytest.raises(ValueError, match="every must be >= 1"):
        optfn.accumulate(optfn.sgd(0.1), 0)
