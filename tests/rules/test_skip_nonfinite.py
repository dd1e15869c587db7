"""The guard that leaves out updates that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn


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
