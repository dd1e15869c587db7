"""Clips, and norms as sums of squares in float32: docs/precision.md has numbers beyond range."""

import jax.numpy as jnp
import numpy as np
import pytest

import optfn

LARGE, SMALL = 1e20, 1e-22  # Their squares are ∞ and 0 in float32.


def update(tx, number):
    g = {"w": jnp.full((2, 2), number, jnp.float32)}
    params = {"w": jnp.ones((2, 2), jnp.float32)}
    updates, state = tx.update(g, tx.init(params), params)
    return np.asarray(updates["w"]), state


@pytest.mark.parametrize("clip", [optfn.clip_by_norm, optfn.clip_by_global_norm])
def test_a_clip_makes_a_gradient_of_infinite_norm_zero_and_keeps_one_of_norm_zero(clip):
    np.testing.assert_array_equal(update(clip(1.0), LARGE)[0], 0.0)
    np.testing.assert_array_equal(update(clip(1.0), SMALL)[0], np.float32(SMALL))
    np.testing.assert_allclose(update(clip(1.0), 1e18)[0], 0.5, rtol=1e-6)
    np.testing.assert_allclose(update(clip(1e-3), 1e-3)[0], 5e-4, rtol=1e-6)


@pytest.mark.parametrize("number, clipped", [(2.0, 1.0), (0.7, 0.7), (-2.0, -0.5)])
def test_a_clip_by_value_may_have_two_bounds(number, clipped):
    np.testing.assert_array_equal(
        update(optfn.clip_by_value(1.0, -0.5), number)[0], np.float32(clipped)
    )


@pytest.mark.parametrize("number, norm", [(LARGE, np.inf), (SMALL, 0.0), (1e18, 2e18)])
def test_the_metric_of_a_gradient_beyond_the_range(number, norm):
    updates, state = update(optfn.record_metrics(optfn.sgd(1.0)), number)
    np.testing.assert_allclose(optfn.metrics(state)["grad_norm"], norm, rtol=1e-6)
    np.testing.assert_array_equal(updates, -np.float32(number))


def test_trust_ratios_beyond_the_range():
    """‖w‖/∞ is 0; a tensor of norm 0 has the ratio 1."""
    lars = optfn.lars(1.0, 0.0, lars_weight_decay=0.0)
    np.testing.assert_array_equal(update(lars, LARGE)[0], 0.0)
    np.testing.assert_allclose(update(lars, SMALL)[0] / -np.float32(SMALL), 1.0, rtol=1e-2)
