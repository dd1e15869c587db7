"""skip_spikes against NumPy: the median of the last norms, and which updates are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import square_error

import optfn

X = np.random.default_rng(0).normal(size=(30, 8, 3)).astype(np.float32)


def skipped_and_ratios(norms, factor, window, most):
    """Return which of some updates are skipped, and their ratios to the median."""
    made, skipped, ratios, consecutive = [], [], [], 0
    for n in map(np.float32, norms):
        before = [np.inf] * window + made
        median = np.median(np.float32(before[-window:]))
        with np.errstate(invalid="ignore"):
            is_spike = bool(n > factor * median)
        consecutive = consecutive + 1 if is_spike else 0
        skipped.append(is_spike and consecutive <= most)
        ratios.append(n / median)
        if not skipped[-1] and np.isfinite(n) and n > 0:
            made.append(n)
    return skipped, ratios


NORMS = [1, 2, 1.5, 40, 3, 2, 50, 1, 0, 0, 2, np.nan, 3, 90, 90, 90, 90, 90, 90, np.inf, 80, 1, 700]


@pytest.mark.parametrize(("window", "most"), [(1, 2), (2, 100), (3, 0), (4, 2), (7, 100)])
def test_skipped_updates_and_ratios_are_those_of_numpy(window, most):
    tx = optfn.skip_spikes(optfn.momentum(1.0, 0.0), 5, window=window, max_consecutive=most)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    state, update = tx.init(params), jax.jit(tx.update)
    skipped, ratios = skipped_and_ratios(NORMS, 5, window, most)
    for k, n in enumerate(NORMS):
        before = state
        grads = {"a": jnp.array([0.6 * n, 0.0]), "b": jnp.array(0.8 * n)}
        updates, state = update(grads, before, params)
        np.testing.assert_allclose(state.ratio, ratios[k], rtol=1e-6)
        if skipped[k]:
            assert all(np.all(np.signbit(u) & (u == 0)) for u in jax.tree.leaves(updates))
            jax.tree.map(np.testing.assert_array_equal, state.inner_state, before.inner_state)
        elif n > 0:
            np.testing.assert_allclose(updates["b"], -0.8 * n, rtol=1e-6)
    assert int(state.skipped) == sum(skipped)
    assert any(skipped) == (most > 0)


def test_the_guard_may_be_added_in_mid_run(tmp_path):
    options = {"checkpoint": tmp_path, "progress": False}
    optfn.minimize(square_error, optfn.adam(0.1), jnp.zeros(3), X[:5], **options)
    tx = optfn.skip_spikes(optfn.adam(0.1), window=3)
    state, history = optfn.minimize(square_error, tx, jnp.zeros(3), X, **options)
    assert int(state.step) == 30
    assert np.isnan(history["spike_ratio"][:5]).all() and history["spike_ratio"][8:].all()
    optfn.save_checkpoint(tmp_path, state, history)
    found, _ = optfn.restore_checkpoint(tmp_path, state)
    np.testing.assert_array_equal(found.opt_state.norms, state.opt_state.norms)
