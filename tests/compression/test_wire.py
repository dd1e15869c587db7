"""Packets: their encoding, their sums, and the bytes of the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import nightly
from hlo import collectives
from jax.sharding import PartitionSpec as P

import optfn
from optfn.compression.dgc_phases import VALUES, Ramp
from optfn.compression.packet_format import PacketFormat
from optfn.compression.segments import Segments
from optfn.distributed import data_mesh

N = 4


def of_leaves(sizes, k, wire):
    """Return the format of the packets of Deep Gradient Compression."""
    bits = {"float32": 32, "bfloat16": 16}[wire]
    return PacketFormat(Segments(sizes), np.array(k, np.int32), VALUES[wire], bits)


@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
def test_a_packet_comes_out_as_it_went_in(value_dtype):
    """Leaves of one block and of several, empty blocks, entries at the edges of blocks."""
    sizes, k = (300, 200_000, 65_536, 65_537), (3, 6, 2, 2)
    indices = [
        [0, 7, 299],
        [0, 65_535, 65_536, 65_537, 199_998, 199_999],
        [0, 65_535],
        [65_535, 65_536],
    ]
    indices = np.concatenate(indices).astype(np.int32)
    values = normal(0, sum(k))
    packet_format = of_leaves(sizes, k, value_dtype)
    sent = packet_format.round_values(values)
    packet = jax.jit(packet_format.encode)(sent, indices)
    assert packet.dtype == np.uint32 and packet.nbytes == packet_format.num_bytes
    got_values, got_indices = jax.jit(packet_format.decode)(packet)
    np.testing.assert_array_equal(got_indices, indices)
    np.testing.assert_array_equal(got_values, sent)
    if value_dtype == "float32":
        np.testing.assert_array_equal(sent, values)
    else:
        np.testing.assert_array_equal(sent, values.astype(jnp.bfloat16).astype(np.float32))


def test_rounding_keeps_what_is_finite_finite():
    packet_format = of_leaves((9,), (5,), "bfloat16")
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, np.inf, 0.0, 1.00390625], np.float32)
    rounded = np.asarray(packet_format.round_values(values))
    assert np.isfinite(rounded[:2]).all() and np.isinf(rounded[2])
    assert rounded[3:].tolist() == [0.0, 1.0]  # a tie goes to even


def test_what_is_sent_dense():
    """From the point on where an all-gather of entries takes more bytes than a ring."""
    for value_dtype, entry in (("float32", 8), ("bfloat16", 4)):
        for workers in (2, 4, 16):
            least = 8 * 60_000 // (workers * entry)  # k·b·N = 8·n
            for k, dense in ((least, False), (least + 1, True)):
                packet_format = of_leaves((60_000,), (min(k, 60_000),), value_dtype)
                ramp = Ramp(options=None, sizes=(60_000,), row_updates=False, workers=workers)
                assert ramp.is_sent_dense(packet_format) == (dense and k <= 60_000)


def test_params_without_a_leaf_to_compress():
    """All leaves are below min_size: nothing is packed, and the step is that of momentum."""
    params = {"w": jnp.arange(4.0)}
    tx = optfn.dgc_momentum(0.5, 0.9, rampup_begin_step=0)
    grads = {"w": np.stack([np.ones(4), 3 * np.ones(4)]).astype(np.float32)}
    update = jax.vmap(
        lambda g: tx.update(g, tx.init(params), params)[0], axis_name="data", out_axes=None
    )
    assert jax.jit(update)(grads)["w"].tolist() == [-1.0] * 4


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("value_dtype", "entry", "check_vma"), [("bfloat16", 4, True), nightly("float32", 8, False)]
)
def test_bytes_on_the_network(value_dtype, entry, check_vma):
    """The compiled sparse step gathers (N − 1)·k·b bytes within 5 %, and nothing dense."""
    params = {"w": jnp.zeros(400_000), "v": jnp.zeros((300, 100)), "b": jnp.zeros(10)}
    tx = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, wire=value_dtype)
    mesh, k = data_mesh(N), 400 + 30

    def body(params, x):
        varying = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        g = jax.grad(lambda p: jnp.sum(p["w"] * x) + jnp.sum(p["v"]) * x[0] + jnp.sum(p["b"]))(
            varying
        )
        return optfn.apply_updates(params, tx.update(g, tx.init(params), params)[0])

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    text = jax.jit(run).lower(params, jnp.zeros(N * 400_000)).compile().as_text()
    found = collectives(text)
    assert set(found) == {"all-gather", "all-reduce"}
    assert len(found["all-gather"]) == 1
    per_worker = (N - 1) * found["all-gather"][0] / N
    assert (N - 1) * k * entry <= per_worker <= 1.05 * (N - 1) * k * entry
    assert sum(found["all-reduce"]) <= 100  # the flags, and the small leaf
