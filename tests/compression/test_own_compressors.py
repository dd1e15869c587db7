"""Compressors of users; the bytes that a program sends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from exchanges import Threshold, first, gradients, lowered_collectives, zeros
from grids import suite
from jax.sharding import PartitionSpec as P
from simulation import N, stacked
from simulation import simulated_update as simulated

import optfn
from optfn.distributed import (
    data_mesh,
    exchange,
    init_state,
    power_sgd,
    quantize,
    state_specs,
    top_k,
)


def test_a_compressor_of_ones_own():
    tx = exchange({"w": Threshold(1.5), ".*": quantize(1)}, min_size=100)
    state, update, g = stacked(tx.init(zeros())), simulated(tx), gradients(0)
    direction, state = update(g, state)
    size = np.abs(g["w"]).mean(axis=(1, 2), keepdims=True)
    sent = np.where(np.abs(g["w"]) > 1.5 * size, np.sign(g["w"]) * 2 * size, 0)
    np.testing.assert_allclose(direction["w"][0], sent.mean(axis=0), atol=1e-5)
    kept = state.residual.value["w"].reshape(g["w"].shape)
    np.testing.assert_allclose(kept, g["w"] - sent, atol=1e-5)
    assert state.compressor["w"]["calls"].tolist() == [1] * N
    mapping = optfn.state_dict(first(state))
    assert "exchange/compressor/w/calls" in mapping


class Together:
    """Sends matrices as they are, by the optional methods alone: `encode`, `decode` would raise."""

    def init(self, shape):
        return ()

    def encode(self, x, state):
        raise AssertionError("encode")

    def decode(self, packet, shape):
        raise AssertionError("decode")

    def num_bytes(self, shape):
        return 4 * math.prod(shape)

    def accepts(self, shape):
        return len(shape) == 2

    def encode_all(self, xs, states):
        return [(2 * x, state) for x, state in zip(xs, states, strict=True)]

    def add_to(self, total, packet, scale):
        return total + scale * packet / 2


class Summed(Together):
    """Sends matrices through an all-reduce, half of each; `encode_all`, `add_to` would raise."""

    is_reduced = True
    encode_all = add_to = None

    @staticmethod
    def reduced(leaves, axis_name):
        return [
            leaf._replace(
                direction=jax.lax.pmean(leaf.residual / 2, axis_name), residual=leaf.residual / 2
            )
            for leaf in leaves
        ]


@pytest.mark.parametrize(
    ("compressor", "share", "num_bytes"),
    [(Together(), 1.0, (4800, 4800)), (Summed(), 0.5, (0, 9600))],
)
def test_optional_methods_of_a_class_of_ones_own_are_called(compressor, share, num_bytes):
    """Also without BaseCompressor as the base."""
    shapes = {"w": (40, 30), "b": (1200,)}
    g = {k: normal(i, N, *shape) for i, (k, shape) in enumerate(shapes.items())}
    tx = exchange(compressor, min_size=100)
    state = stacked(tx.init({k: jnp.zeros(shape) for k, shape in shapes.items()}))
    direction, state = simulated(tx)(g, state)
    np.testing.assert_allclose(direction["w"][0], share * g["w"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(direction["b"][0], g["b"].mean(0), rtol=1e-5, atol=1e-6)
    kept = np.asarray(state.residual.value["w"]).reshape(g["w"].shape)
    np.testing.assert_allclose(kept, (1 - share) * g["w"], rtol=1e-6, atol=1e-6)
    assert isinstance(state.residual.value["b"], optax.MaskedNode)
    traffic = state.exchanged.traffic
    assert (traffic.gathered, traffic.reduced) == num_bytes


SENDING = [
    top_k(1 / 64, values="int2"),
    top_k(0.01),
    quantize(1),
    quantize(4, stochastic=True),
    power_sgd(2),
    Threshold(1.0),
]


@pytest.mark.parametrize(
    "compressor",
    suite(SENDING, top_k(1 / 64, values="int2"), quantize(1), power_sgd(2)),
    ids=repr,
)
def test_bytes_on_the_network(compressor):
    """One all-gather of one worker's num_bytes, or two all-reduces of them; small leaves in one."""
    shapes = {"w": (64, 96), "v": (40, 50), "b": (30,), "c": (9,)}
    tx, params = exchange(compressor), {k: jnp.zeros(s) for k, s in shapes.items()}
    specs, mesh = state_specs(tx, params), data_mesh(N)
    run = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
        check_vma=False,
    )
    g = {k: jnp.zeros((N, *s)) for k, s in shapes.items()}
    text = jax.jit(run).lower(g, init_state(tx, params, mesh)).as_text()
    expected = sum(compressor.num_bytes(shapes[k]) for k in ("w", "v"))
    operands = lowered_collectives(text)
    flags, small = 8, 4 * 39
    if isinstance(compressor, Threshold):  # its codes are int8, its sizes float32
        assert sorted(operands["all_gather"]) == [8, expected - 8]
    elif compressor == power_sgd(2):
        assert "all_gather" not in operands and len(operands["all_reduce"]) == 4
        assert sum(operands["all_reduce"]) == expected + flags + small
        return
    else:
        assert operands["all_gather"] == [expected]
    assert sorted(operands["all_reduce"]) == [flags, small]
