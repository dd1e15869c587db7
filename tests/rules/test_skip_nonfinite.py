"""The guard that leaves out updates that are not finite."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry
from grids import by_entry
from problems import run, tree

import optfn

SKIPPING = (
    "sgd_clip_l1", "asgd", "rmsprop", "adam_lazy", "adamw_exclude", "ftrl", "muon",
)  # fmt: skip


@by_entry(registry.OPTIMIZERS, *SKIPPING)
def test_skip_leaves_params_and_state_bit_identical(entry):
    tx = optfn.skip_nonfinite(entry.make(), max_consecutive=2)
    params = tree(0)
    trail, state = run(tx, params, [tree(1)])
    for bad in (jnp.nan, jnp.inf):
        grads = tree(2)
        grads["a"]["w"] = grads["a"]["w"].at[1, 1].set(bad)
        updates, after = jax.jit(tx.update)(grads, state, trail[0])
        chex.assert_trees_all_equal(optfn.apply_updates(trail[0], updates), trail[0])
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
        assert (int(after.consecutive), int(after.skipped)) == (1, 1)
    good, _ = tx.update(tree(2), after, trail[0])
    want, _ = entry.make().update(tree(2), state.inner_state, trail[0])
    chex.assert_trees_all_close(good, want, rtol=1e-5, atol=1e-7)


def test_skip_lets_a_long_run_through_and_counts():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=2)
    params, state = {"w": jnp.ones(1)}, None
    state = tx.init(params)
    seen = []
    for g in (jnp.nan, jnp.nan, jnp.nan, 10.0, jnp.nan):
        updates, state = tx.update({"w": jnp.full(1, g)}, state, params)
        seen.append(
            (
                float(updates["w"][0]),
                int(state.consecutive),
                int(state.skipped),
                bool(state.gave_up),
            )
        )
    np.testing.assert_equal(
        seen,
        [
            (-0.0, 1, 1, False),
            (-0.0, 2, 2, False),
            (np.nan, 3, 2, True),
            (-1.0, 0, 2, False),
            (-0.0, 1, 3, False),
        ],
    )


def test_workers_agree_to_skip():
    """One worker's NaN makes all of them skip; without the axis they would part ways."""
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), axis_name="data")
    p = jnp.ones(2)
    g = jnp.ones((4, 2)).at[2, 0].set(jnp.nan)
    updates, state = jax.vmap(lambda g: tx.update(g, tx.init(p), p), axis_name="data")(g)
    assert not np.any(updates)
    np.testing.assert_array_equal(state.skipped, 1)
    with pytest.raises(ValueError, match=r"axis 'data' is not bound.*shard_map"):
        tx.update(p, tx.init(p), p)


def test_training_stops_on_the_host_after_too_many():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=1)
    with pytest.raises(FloatingPointError, match="in a row"):
        optfn.minimize(
            lambda p, x: jnp.sum(p * x), tx, jnp.ones(2), [jnp.full(2, jnp.nan)] * 5,
            progress=False,
        )  # fmt: skip


@pytest.mark.optimized
def test_a_guard_does_not_repeat_its_verdict_in_the_update_of_each_leaf():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1))

    def conjunctions(leaves):
        params = {str(i): jnp.ones(3) for i in range(leaves)}
        compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
        return compiled.as_text().count(" and(")

    # Each leaf adds the same number of them; the verdict in each update would make it quadratic.
    assert conjunctions(48) - conjunctions(32) == conjunctions(32) - conjunctions(16)
