"""The guard that leaves out updates that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn


def test_a_skipped_update_is_minus_zero():
    tx, params = optfn.skip_nonfinite(optfn.sgd(0.1)), {"w": jnp.ones(1)}
    updates, _ = tx.update({"w": jnp.full(1, jnp.nan)}, tx.init(params), params)
    np.testing.assert_equal(float(updates["w"][0]), -0.0)


def test_training_stops_on_the_host_after_too_many():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=1)
    with pytest.raises(FloatingPointError, match="max_consecutive gradients in a row"):
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
