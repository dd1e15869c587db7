"""PowerSGD: the factors of one worker, and the exchange of them."""

import chex
import jax
import numpy as np
import optax
import pytest
import reference_exchange as reference
from arrays import normal
from exchanges import gradients, zeros
from simulation import N, stacked
from simulation import simulated_update as simulated

import optfn
from optfn.compression.power_sgd import orthonormalize
from optfn.distributed import exchange, power_sgd


@pytest.mark.parametrize("rank", [1, 4])
def test_an_orthonormal_basis(rank):
    """Of any rows, also of equal ones, zeros, and very large and small ones, in a batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, rank, 30))
    x[1, -1] = x[1, 0]
    x[2] = 0
    x[3] *= 1e30
    x[4] *= 1e-30
    x[5, -1] = x[5, 0] + 1e-3 * x[5, -1]
    found = np.asarray(jax.jit(orthonormalize)(x.astype(np.float32)), np.float64)
    for rows, basis in zip(x, found, strict=True):
        np.testing.assert_allclose(basis @ basis.T, np.eye(rank), atol=1e-6)
        rows = rows / max(np.abs(rows).max(), 1e-300)
        np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_power_sgd_of_one_worker(batch):
    """The product of the two factors is the projection of a matrix, and of each one of a batch."""
    compressor, x = power_sgd(3), normal(0, *batch, 20, 15)
    q = compressor.init(x.shape)
    assert q.shape == (*batch, 3, 15)
    packet, q_next = jax.jit(compressor.encode)(x, q)
    assert sum(a.nbytes for a in packet) == compressor.num_bytes(x.shape)
    decoded = compressor.decode(packet, x.shape)
    for i in np.ndindex(batch):
        np.testing.assert_array_equal(q[i], compressor.init((20, 15)))
        sent, want_q, _ = reference.power_sgd(x[i][None].astype(np.float64), np.asarray(q[i]))
        np.testing.assert_allclose(decoded[i], sent[0], atol=1e-5)
        np.testing.assert_allclose(q_next[i], want_q, atol=1e-5)


def test_power_sgd_of_stacked_layers_is_that_of_each():
    """Directions, residuals and factors of layers with different gradients, stacked and alone."""
    layers, shape = 3, (24, 40)
    tx = exchange(power_sgd(2), min_size=100)
    together = {"layers": optfn.Stacked({"w": np.zeros((layers, *shape), np.float32)})}
    alone = {f"w{i}": np.zeros(shape, np.float32) for i in range(layers)}
    update, states = simulated(tx), [stacked(tx.init(together)), stacked(tx.init(alone))]
    for t in range(3):
        g = normal(t, N, layers, *shape) * np.float32([1, 10, 0.1])[:, None, None]
        got, states[0] = update({"layers": optfn.Stacked({"w": g})}, states[0])
        want, states[1] = update({f"w{i}": g[:, i] for i in range(layers)}, states[1])
        (direction,) = jax.tree.leaves(got)
        for i in range(layers):
            of = [want[f"w{i}"], direction[:, i]]
            np.testing.assert_allclose(*of, rtol=1e-4, atol=1e-5 * np.abs(of[0]).max())
    kept = np.asarray(jax.tree.leaves(states[0].residual.value)[0])
    q = np.asarray(jax.tree.leaves(states[0].compressor)[0])
    for i in range(layers):
        own = states[1].residual.value[f"w{i}"], states[1].compressor[f"w{i}"]
        for x, y in zip((kept[:, i], q[:, i]), own, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


def test_a_factor_of_another_shape_is_refused():
    """The error has both shapes."""
    tx = exchange(power_sgd(2), min_size=100)
    template = tx.init({"w": np.zeros((4, 24, 40), np.float32)})
    saved = optfn.state_dict(template)
    (name,) = [k for k in saved if "compressor" in k]
    saved[name] = np.zeros((960, 2), np.float32)
    with pytest.raises(ValueError, match=r"w.*shape \(960, 2\).*template has \(4, 2, 40\)"):
        optfn.load_state_dict(template, saved)


def test_power_sgd_follows_its_equations():
    """Q̄ is shared and warm; each worker keeps M − P̂Q_wᵀ; vectors are exchanged densely."""
    tx = exchange(power_sgd(3), min_size=100)
    state, update = stacked(tx.init(zeros())), simulated(tx)
    assert sorted(state.residual.value) == ["b", "v", "w"]
    assert isinstance(state.residual.value["v"], optax.MaskedNode)
    for t in range(4):
        g, before, q = gradients(t), *jax.device_get((state.residual.value, state.compressor["w"]))
        direction, state = jax.device_get(update(g, state))
        total = before["w"].reshape(N, 50, 40) + g["w"].astype(np.float64)
        sent, q_next, mean = reference.power_sgd(total, q[0].astype(np.float64))
        kept = state.residual.value["w"].reshape(N, 50, 40)
        np.testing.assert_allclose(kept, total - sent, atol=2e-5)
        np.testing.assert_allclose(direction["w"], np.stack([mean] * N), atol=2e-5)
        np.testing.assert_allclose(state.compressor["w"][2], q_next, atol=2e-5)
        np.testing.assert_allclose(
            direction["w"][0] + kept.mean(axis=0, dtype=np.float64), total.mean(axis=0), atol=1e-5
        )
        np.testing.assert_allclose(direction["v"][3], g["v"].mean(axis=0), atol=1e-6)


def test_power_sgd_after_a_gradient_of_zeros():
    """Q̄ becomes zero, and recovers."""
    tx = exchange(power_sgd(2), min_size=1)
    state, update = stacked(tx.init({"w": np.zeros((5, 4))}), 2), simulated(tx)
    for g in (np.zeros((2, 5, 4), np.float32), normal(0, 2, 5, 4)):
        direction, state = update({"w": g}, state)
        chex.assert_tree_all_finite((direction, state))
    assert np.abs(direction["w"]).max() > 0.01
