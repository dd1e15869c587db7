"""The exchange of compressed updates, against NumPy, and what it promises beyond numbers."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
import reference_exchange as reference
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from simulation import N, pipelined, stacked, unpipelined
from simulation import simulated_update as simulated

import optfn
from optfn.compression import bits as packing
from optfn.compression.exchange import ExchangeState
from optfn.compression.power_sgd import orthonormal
from optfn.compression.segments import Chunks, RowChunks, Segments, chunks_of
from optfn.distributed import (
    data_mesh,
    exchange,
    init_state,
    power_sgd,
    quantize,
    rescale_residuals,
    stack_stages,
    state_specs,
    top_k,
    unstack_stages,
)
from optfn.sparse import Rows

EPS = np.finfo(np.float32).eps


def normal(shape, seed, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def first(tree, worker=0):
    return jax.tree.map(lambda x: np.asarray(x)[worker], tree)


# The bits of a packet


@pytest.mark.parametrize(
    "widths", [[12, 32], nightly([7, 2]), nightly([0, 16]), [1], nightly([32]), nightly([11, 8])]
)
def test_fields_come_out_as_they_went_in(widths):
    """Without gaps: the words are those of one stream of bits, the lowest first."""
    counts = [37 + 5 * i for i in range(len(widths))]
    rng = np.random.default_rng(0)
    fields = [
        rng.integers(0, 2**w, n, np.uint64).astype(np.uint32)
        for w, n in zip(widths, counts, strict=True)
    ]
    words = jax.jit(lambda fields: packing.pack_fields(fields, widths))(fields)
    assert words.size == packing.num_words(widths, counts)
    stream = sum(
        int(x) << (w * i + sum(w2 * n2 for w2, n2 in zip(widths[:j], counts, strict=False)))
        for j, (field, w) in enumerate(zip(fields, widths, strict=True))
        for i, x in enumerate(field)
    )
    got = sum(int(x) << (32 * i) for i, x in enumerate(np.asarray(words)))
    assert got == stream
    for field, out in zip(fields, packing.unpack_fields(words, widths, counts), strict=True):
        np.testing.assert_array_equal(out, field)


# Compressors

COMPRESSORS = {
    name: (getattr(optfn.distributed, send.func.__name__)(**send.keywords), send)
    for name, send in reference.CASES.items()
}


def with_ties(x):
    """Return x with many equal entries, and many zeros."""
    return np.where(np.abs(x) > 1, np.rint(2 * x), 0).astype(np.float32)


SHAPES = [pytest.param(shape, id=str(shape)) for shape in [(5000,), (64, 64), (7,)]]


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("shape", suite(SHAPES, "(64, 64)"))
def test_what_is_sent(name, shape):
    """Values and bytes, also with ties, zeros, a last chunk that is shorter, clustered entries."""
    compressor, send = COMPRESSORS[name]
    options = send.keywords
    run = jax.jit(
        lambda x: (packet := compressor.encode(x, ())[0], compressor.decode(packet, shape))
    )
    near = np.where(np.arange(math.prod(shape)) < 300, 100, 0.01).reshape(shape)
    clustered = (normal(shape, 2) * near).astype(np.float32)
    nothing = np.zeros(shape, np.float32)
    for x in (normal(shape, 0), with_ties(normal(shape, 1)), clustered, nothing):
        packet, got = run(x)
        np.testing.assert_allclose(got, send(x), rtol=4 * EPS, atol=0)
        count = getattr(reference, f"{send.func.__name__}_bytes")
        sent = sum(x.nbytes for x in jax.tree.leaves(packet))
        assert compressor.num_bytes(shape) == sent == count(shape, **options)
        assert compressor.init(shape) == ()


# The distance of the values that s times a code stands for; s is max|x| over this.
GRIDS = {8: 127, 4: 7, 2: 1.5, 1: 0.5}


@pytest.mark.parametrize("bits", GRIDS)
def test_stochastic_rounding_is_right_in_the_mean(bits):
    """Each value is one of the two next to x on the grid, and over 4,000 steps their mean is x."""
    compressor, steps = quantize(bits, chunk=16, stochastic=True), 4000
    x = normal((6, 8), 0)
    x[0, :4] = (0, 0, 0.5, -0.5)

    def step(state, _):
        packet, state = compressor.encode(x, state)
        return state, compressor.decode(packet, x.shape)

    state, sent = jax.jit(lambda s: jax.lax.scan(step, s, length=steps))(compressor.init(x.shape))
    assert state == steps
    sent = np.asarray(sent, np.float64).reshape(steps, 3, 16)
    largest = np.abs(x).reshape(3, 16).max(axis=1, keepdims=True).astype(np.float64)
    gap, chunks = largest / GRIDS[bits], x.reshape(3, 16).astype(np.float64)
    offset = largest if bits <= 2 else 0  # 1 and 2 bits have no value at 0
    number = (sent + offset) / gap
    np.testing.assert_allclose(number, np.rint(number), atol=1e-4)
    assert np.all(np.abs(sent - chunks) < gap * (1 + 1e-5))
    assert np.all(np.abs(sent).max(axis=(0, 2)) <= largest[:, 0] * (1 + 1e-6))
    below = np.floor((chunks + offset) / gap + 1e-9)
    p = (chunks + offset) / gap - below
    sigma = gap * np.sqrt(np.maximum(p * (1 - p), 0) / steps)
    assert np.all(np.abs(sent.mean(axis=0) - chunks) <= 5 * sigma + 1e-5 * gap)
    # Steps, and entries of one chunk, are independent of each other.
    noise = (sent - chunks)[:, 0, :4]
    for a, b in ((noise[1:, 2], noise[:-1, 2]), (noise[:, 2], noise[:, 3])):
        if np.std(a) > 0 and np.std(b) > 0:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(steps)


def test_stochastic_rounding_differs_between_workers_and_repeats():
    compressor = quantize(4, stochastic=True)
    state = compressor.init((1000,))
    x = np.full(1000, 0.3, np.float32)
    x[0] = 1
    encode = jax.jit(compressor.encode)
    packets = [np.asarray(encode(a, state)[0]) for a in (x, x, x + 1e-6)]
    np.testing.assert_array_equal(packets[0], packets[1])
    assert np.any(packets[0] != packets[2])


def test_stochastic_rounding_trains_without_residuals():
    """With the rate 1/t params are a mean over the steps: what is right in the mean converges."""
    targets, errors = normal((N, 400), 3), {}
    for stochastic in (True, False):
        compressor = quantize(2, chunk=100, stochastic=stochastic)
        tx = optfn.chain(
            exchange(compressor, error_feedback=0.0, min_size=1),
            optfn.sgd(lambda t: 1 / (1 + t)),
        )
        step = optfn.make_train_step(
            lambda p, target: 200 * jnp.mean((p["w"] - target) ** 2), tx, mesh=data_mesh(N)
        )
        state = step.init({"w": jnp.zeros(400)})
        for _ in range(300):
            state, _ = step(state, targets)
        away = np.asarray(state.params["w"]) - targets.mean(axis=0)
        errors[stochastic] = np.sqrt(np.mean(away**2))
    # A worker's rounding has a standard deviation of about 1, half as much in the mean of four.
    assert errors[True] < 1.5 * 0.5 / np.sqrt(300)
    assert errors[False] > 4 * errors[True]


def test_the_formulas_of_the_bytes():
    """By hand: 4,096 entries in a chunk, 12 bits an index; and whole words a leaf."""
    assert top_k(1 / 64, values="int2").num_bytes((4096,)) == 64 * 14 // 8 + 4
    assert top_k(0.05).num_bytes((4096, 10)) == math.ceil(10 * 205 * 44 / 32) * 4
    assert top_k(0.001, chunk=None).num_bytes((10**6,)) == 1000 * 52 // 8
    assert quantize(1).num_bytes((1000, 1000)) == 10**6 // 8 + 4 * 250  # four rows in a chunk
    assert quantize(1).num_bytes((10, 5000)) == 6252 + 4 * 13  # a row has several
    assert quantize(8, chunk=None).num_bytes((3,)) == 8
    assert power_sgd(4).num_bytes((100, 20)) == 4 * 4 * 120
    assert power_sgd(4).num_bytes((2, 50)) == 4 * 2 * 52
    assert power_sgd(4).num_bytes((7,)) == 28
    # Axes before the last two are a batch: of stacked layers, and of the places of a kernel.
    assert power_sgd(4).num_bytes((4, 512, 2048)) == 4 * 4 * 4 * 2560
    assert power_sgd(4).num_bytes((3, 3, 64, 128)) == 9 * 4 * 4 * 192
    assert power_sgd(4).num_bytes((100, 20, 3)) == 100 * 4 * 3 * 23


@pytest.mark.nightly  # test_k_largest.py has smaller ones
def test_the_selection_at_large_sizes():
    """With blocks of several entries, candidates, and the fallback where there are too many."""
    x = normal(40_000, 0)
    many = x.copy()
    many[::256] += 100  # all in one block of each chunk's strided blocks, or next to it
    many[1::256] += 90
    for data in (x, many, np.where(np.arange(40_000) % 2, 1, -1).astype(np.float32)):
        for compressor, options in (
            (top_k(0.002), {"density": 0.002}),
            (top_k(0.01, chunk=None), {"density": 0.01, "chunk": None}),
        ):
            packet, _ = jax.jit(compressor.encode)(data, ())
            got = compressor.decode(packet, data.shape)
            np.testing.assert_array_equal(got, reference.top_k(data, **options))


@pytest.mark.nightly
def test_leaves_are_searched_together():
    """Shorter leaves, shorter last chunks and ties beside each other do not change a packet."""
    xs = [normal((50, 50), 0), normal(7, 1), with_ties(normal(4000, 2)), normal(1000, 3)]
    for compressor in (top_k(0.05, chunk=1000, values="int8"), top_k(0.2, chunk=None)):
        together = jax.jit(lambda xs, c=compressor: c.encode_all(xs, [()] * 4))(xs)
        for x, (packet, _) in zip(xs, together, strict=True):
            alone = jax.jit(lambda x, c=compressor: c.encode(x, ())[0])(x)
            np.testing.assert_array_equal(packet, alone)


def test_a_third_of_each_chunk():
    """Dense selections have no summary; ties, short chunks and other leaves do not matter."""
    compressor = top_k(0.3, chunk=1000)
    xs = [with_ties(normal(4300, 1)), normal(70, 2), normal(2000, 3)]
    together = jax.jit(lambda xs: compressor.encode_all(xs, [()] * 3))(xs)
    for x, (packet, _) in zip(xs, together, strict=True):
        expected = reference.top_k(x, density=0.3, chunk=1000)
        np.testing.assert_array_equal(compressor.decode(packet, x.shape), expected)


@pytest.mark.parametrize("chunk", [4096, None])
def test_a_program_has_no_constant_of_the_size_of_a_packet(chunk):
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    program = jax.jit(lambda x: top_k(0.3, chunk=chunk).encode(x, ())[0]).lower(x)
    assert len(program.as_text()) < x.size


def test_the_rows_of_chunks(expressions):
    chunks = Chunks(10, 4)
    assert (chunks.count, chunks.last_length) == (3, 2)
    rows = chunks.map(lambda rows: rows, jnp.arange(10), fill=-1)
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    assert chunks.broadcast(jnp.arange(3)).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [chunks_of(10, chunk) for chunk in (None, 4096, 4)] == [
        *(Chunks(10, 10), Chunks(10, 10), Chunks(10, 4))
    ]
    # Whole rows if one fits; else the consecutive entries of several chunks in a row.
    lengths = [RowChunks((10, 7), chunk).flat.length for chunk in (None, 20, 7, 6)]
    assert lengths == [70, 14, 7, 6]
    assert RowChunks((10, 7), 20).sum(jnp.ones((10, 7))).tolist() == [14] * 5
    assert RowChunks((3, 7), 20).max(jnp.arange(21.0).reshape(3, 7)).tolist() == [13, 20]
    # `map` gives the same of all views: several rows, one, or a piece of one.
    for chunk, largest in ((20, [13, 20]), (7, [6, 13, 20]), (5, [4, 9, 14, 19, 20])):
        chunks = RowChunks((3, 7), chunk)
        found = chunks.map(lambda x, chunks: chunks.max(x), jnp.arange(21.0).reshape(3, 7))
        assert found.tolist() == largest
    assert Segments((10, 30), 4096).arrays == [Chunks(10, 30), Chunks(30, 30)]
    assert Segments((10, 30)).num_per_array == [1, 1] and Segments((10, 30), 4).num_per_array == [
        3,
        8,
    ]
    widths = [top_k(0.1).format(n).index_bits for n in (1, 2, 1000, 4096, 9999)]
    assert widths == [0, 1, 10, 12, 12]


EMPTY = [c for c, _ in COMPRESSORS.values()] + [
    *(quantize(bits, stochastic=True) for bits in (4, 1)),
    power_sgd(2),
]


@pytest.mark.parametrize("compressor", EMPTY, ids=repr)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 4)])
def test_an_empty_leaf(compressor, shape):
    """Has an empty packet of no bytes, and comes back empty."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    packet, _ = jax.eval_shape(compressor.encode, x, compressor.init(shape))
    assert [a.size for a in jax.tree.leaves(packet)] == [0]
    assert compressor.num_bytes(shape) == 0 and not compressor.num_entries(0)
    assert jax.eval_shape(lambda p: compressor.decode(p, shape), packet) == x


def test_an_empty_leaf_beside_another():
    compressor, x = top_k(0.1), normal((64, 64), 0)
    empty, full = jax.jit(compressor.encode_all)([jnp.zeros((0, 3)), x], [(), ()])
    assert empty[0].size == 0
    np.testing.assert_array_equal(full[0], jax.jit(compressor.encode)(x, ())[0])


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
    found = np.asarray(jax.jit(orthonormal)(x.astype(np.float32)), np.float64)
    for rows, basis in zip(x, found, strict=True):
        np.testing.assert_allclose(basis @ basis.T, np.eye(rank), atol=1e-6)
        rows = rows / max(np.abs(rows).max(), 1e-300)
        np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-5)


def test_power_sgd_of_one_worker():
    """Its packet is the two factors: their product is the projection of the matrix."""
    compressor, x = power_sgd(3), normal((40, 30), 0)
    q = compressor.init(x.shape)
    assert q.shape == (3, 30)
    packet, q_next = jax.jit(compressor.encode)(x, q)
    assert sum(a.nbytes for a in packet) == compressor.num_bytes(x.shape)
    sent, want_q, _ = reference.power_sgd(x[None].astype(np.float64), np.asarray(q))
    np.testing.assert_allclose(compressor.decode(packet, x.shape), sent[0], atol=1e-5)
    np.testing.assert_allclose(q_next, want_q, atol=1e-5)
    chex.assert_trees_all_equal(q, compressor.init(x.shape))


def test_power_sgd_of_a_batch_of_matrices_is_that_of_each():
    """Packet and factor of a leaf (2, 3, m, n) are those of its six matrices, one by one."""
    compressor, x = power_sgd(3), normal((2, 3, 20, 15), 0)
    q = compressor.init(x.shape)
    assert q.shape == (2, 3, 3, 15)
    packet, q_next = jax.jit(compressor.encode)(x, q)
    assert sum(a.nbytes for a in packet) == compressor.num_bytes(x.shape)
    decoded = compressor.decode(packet, x.shape)
    for i in np.ndindex(2, 3):
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
        g = normal((N, layers, *shape), t) * np.float32([1, 10, 0.1])[:, None, None]
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


# The exchange against its equations

PARAMS = {"w": (50, 40), "v": (1500,), "b": (6,)}


def gradients(seed, params=PARAMS):
    return {k: normal((N, *shape), 100 * seed + i) for i, (k, shape) in enumerate(params.items())}


def zeros(params=PARAMS):
    return {k: np.zeros(shape, np.float32) for k, shape in params.items()}


FOLLOWED = [(name, 1.0) for name in COMPRESSORS if name != "top_k_one_entry"]
FOLLOWED += [(name, beta) for name in ("top_k", "quantize_1") for beta in (0.5, 0.0)]


@pytest.mark.parametrize(
    ("name", "beta"), suite(FOLLOWED, ("top_k", 1.0), ("quantize_8", 1.0), ("top_k", 0.5))
)
def test_follows_the_equations(name, beta):
    """Residual and direction of each step, from the residuals before; and nothing is lost."""
    compressor, send = COMPRESSORS[name]
    tx = exchange(compressor, error_feedback=beta, min_size=100)
    state, update = stacked(tx.init(zeros())), simulated(tx)
    for t in range(4):
        g, before = gradients(t), jax.device_get(state.residual.value)
        direction, state = jax.device_get(update(g, state))
        for k in ("w", "v"):
            total = np.float32(beta) * before[k] + g[k]
            sent = np.stack([send(x) for x in total])
            kept = state.residual.value[k]
            atol = 8 * EPS * np.abs(total).max()
            np.testing.assert_allclose(kept, total - sent, rtol=0, atol=atol)
            mean = sent.mean(axis=0, dtype=np.float64)
            for worker in range(N):
                own = direction[k][worker]
                np.testing.assert_allclose(own, mean, rtol=0, atol=atol)
                np.testing.assert_array_equal(own, direction[k][0])
            conserved = direction[k][0] + kept.mean(axis=0, dtype=np.float64)
            came = total.mean(axis=0, dtype=np.float64)
            np.testing.assert_allclose(conserved, came, rtol=0, atol=atol)
            assert sent.any() and kept.any()
        np.testing.assert_allclose(direction["b"][1], g["b"].mean(axis=0), atol=1e-6)
    assert isinstance(state.residual.value["b"], optax.MaskedNode)
    assert state.num_workers.tolist() == [N] * N and state.step.tolist() == [4] * N


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "compressor", [top_k(0.05, values="int8"), nightly(quantize(1)), nightly(power_sgd(2))]
)
def test_where_jax_has_wider_floats(compressor):
    """A float32 leaf is exchanged and kept in float32 then too."""
    tx, results = exchange(compressor), []
    for is_wide in (False, True):
        with jax.enable_x64(is_wide):
            state = stacked(tx.init({"w": jnp.zeros((50, 40), jnp.float32)}))
            results.append(jax.device_get(simulated(tx)({"w": gradients(0)["w"]}, state)))
    chex.assert_trees_all_equal_dtypes(*results)
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-6)


def test_power_sgd_after_a_gradient_of_zeros():
    """Q̄ becomes zero, and recovers."""
    tx = exchange(power_sgd(2), min_size=1)
    state, update = stacked(tx.init({"w": np.zeros((5, 4))}), 2), simulated(tx)
    for g in (np.zeros((2, 5, 4), np.float32), normal((2, 5, 4), 0)):
        direction, state = update({"w": g}, state)
        chex.assert_tree_all_finite((direction, state))
    assert np.abs(direction["w"]).max() > 0.01


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Signs of what exceeds a multiple of the mean magnitude; counts its calls in its state."""

    multiple: float

    def init(self, shape):
        return {"calls": jnp.zeros((), jnp.int32)}

    def encode(self, x, state):
        size = jnp.mean(jnp.abs(x))
        code = jnp.where(jnp.abs(x) > self.multiple * size, jnp.sign(x), 0).astype(jnp.int8)
        return (code, 2 * size), {"calls": state["calls"] + 1}

    def decode(self, packet, shape):
        code, size = packet
        return (code * size).reshape(shape)

    def num_bytes(self, shape):
        return math.prod(shape) + 4


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
    g = {k: normal((N, *shape), i) for i, (k, shape) in enumerate(shapes.items())}
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


# Leaves of other kinds


def test_a_mapping_of_patterns():
    """The first match counts; None and no match are dense; wide leaves are too."""
    choice = {"table": None, r".*e": quantize(1), "w|x": top_k(0.1)}
    params = {k: np.zeros((30, 50), np.float32) for k in ("table", "we", "w", "rest", "x")}
    tx = exchange(choice)
    state = tx.init(params)
    kept = {k for k, x in state.residual.value.items() if hasattr(x, "shape")}
    assert kept == {"we", "w", "x"}
    g = {k: normal((N, 30, 50), i) for i, k in enumerate(params)}
    direction, _ = simulated(tx)(g, stacked(state))
    for k in ("table", "rest"):
        np.testing.assert_allclose(direction[k][0], g[k].mean(axis=0), atol=1e-6)
    signs = functools.partial(reference.quantize, bits=1)
    for k, send in (("we", signs), ("w", functools.partial(reference.top_k, density=0.1))):
        want = np.mean([send(x) for x in g[k]], axis=0)
        np.testing.assert_allclose(direction[k][0], want, atol=1e-6)
    with pytest.raises(ValueError, match=r"compressor: the pattern 'q' matches no leaf.*'rest'"):
        exchange({"q": top_k(0.1)}).init(params)
    with jax.enable_x64(True):
        state = exchange(top_k(0.1), min_size=1).init({"wide": jnp.zeros(9, jnp.float64)})
    assert not jax.tree.leaves(state.residual)


def test_frozen_leaves_are_not_sent():
    """They get −0.0 and keep no residual, and a bad gradient of theirs does not matter."""
    attrs = {
        "w": optfn.ParamAttr(trainable=False),
        "b": optfn.ParamAttr(learning_rate=0.0),
        "v": optfn.ParamAttr(learning_rate=0.5),
    }
    g = gradients(0)
    g["w"][2, 0, 0] = np.nan
    for compressor in (quantize(1), None):
        tx = exchange(compressor, param_attrs=attrs)
        state = tx.init(zeros())
        program = jax.make_jaxpr(lambda g, s, tx=tx: tx.update(g, s), axis_env=[("data", N)])
        text = str(program(first(g), state))
        assert text.count("2000") <= 3  # what goes in, and no collective
        direction, state = simulated(tx)(g, stacked(state))
        for k in ("w", "b"):
            assert (direction[k] == 0).all() and np.signbit(direction[k]).all()
        assert (direction["v"] != 0).any()
        assert not [k for k in optfn.state_dict(state) if k.endswith("/w")]


def test_frozen_leaves_in_a_training_step():
    """No collective has their size, although the step averages what no transform exchanges."""
    attrs = {"w": optfn.ParamAttr(trainable=False)}
    tx = optfn.chain(exchange(quantize(1), param_attrs=attrs), optfn.adam(0.1, param_attrs=attrs))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), donate=False)
    state = step.init(MODEL)
    found = lowered_collectives(step.compiled.lower(state, BATCH).as_text())
    assert max(x for sizes in found.values() for x in sizes) < MODEL["w"].nbytes
    after, _ = step(state, BATCH)
    np.testing.assert_array_equal(after.params["w"], MODEL["w"])


def test_rows_are_exchanged_as_rows():
    tx = exchange(quantize(1), min_size=1)
    params = {"t": np.zeros((8, 3), np.float32), "w": np.zeros(40, np.float32)}
    state, g = tx.init(params), normal((2, 40), 0)

    def update(index, values, g, state):
        return tx.update({"t": Rows(index, values, 8), "w": g}, state, params)

    index, values = np.array([[1, 5], [5, 8]], np.int32), normal((2, 2, 3), 1)
    values[1, 1] = 0
    run = jax.jit(jax.vmap(update, axis_name="data"))
    direction, state = run(index, values, g, stacked(state, 2))
    rows = first(direction)["t"]
    assert isinstance(rows, Rows) and rows.values.shape == (4, 3)
    want = np.zeros((8, 3), np.float32)
    want[1], want[5] = values[0, 0] / 2, (values[0, 1] + values[1, 0]) / 2
    np.testing.assert_allclose(rows.dense(), want, atol=1e-6)
    assert not state.residual.value["t"].any() and state.residual.value["w"].any()
    values[0, 0, 0] = np.inf
    direction, after = run(index, values, g, state)
    assert not direction["t"].values.any() and not direction["w"].any()
    chex.assert_trees_all_equal(after.residual, state.residual)


@pytest.mark.parametrize("compressor", [top_k(0.1), quantize(1), power_sgd(2)], ids=repr)
@pytest.mark.parametrize(("bad", "leaf"), [nightly(np.nan, "w"), (np.inf, "b")])
def test_an_update_that_is_not_finite(compressor, bad, leaf):
    """Of one worker: zeros on all, residuals and compressors' states stay, the next one goes on."""
    tx = exchange(compressor)
    update, state = simulated(tx), stacked(tx.init(zeros()))
    _, state = update(gradients(0), state)
    g = gradients(1)
    g[leaf][2].flat[3] = bad
    direction, after = update(g, state)
    assert all((x == 0).all() for x in jax.tree.leaves(direction))
    chex.assert_trees_all_equal(after, state)
    direction, _ = update(gradients(2), after)
    assert all(x.any() for x in jax.tree.leaves(direction))


def test_what_has_accumulated_beyond_float32():
    """A residual is never infinite, so that it does not become NaN."""
    tx = exchange(top_k(0.5), min_size=1)
    state, update = stacked(tx.init(np.zeros(2)), 2), simulated(tx)
    for g in (3e38, 3e38, 3e38, 1.0, 1.0):
        _, state = update(jnp.full((2, 2), g), state)
        chex.assert_tree_all_finite(state)


# Warm-up


def test_warm_up():
    """Dense at first, without residual; then as if it were the first step."""
    warm, cold = (exchange(quantize(1), warmup_steps=k) for k in (2, 0))
    state = stacked(warm.init(zeros()))
    for t in range(2):
        g = gradients(t)
        direction, state = simulated(warm)(g, state)
        for k in PARAMS:
            np.testing.assert_allclose(direction[k][1], g[k].mean(axis=0), atol=1e-6)
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    got = simulated(warm)(gradients(2), state)
    want = simulated(cold)(gradients(2), stacked(cold.init(zeros())))
    chex.assert_trees_all_equal(got[0], want[0])
    chex.assert_trees_all_equal(got[1].residual, want[1].residual)


# The plain mean


def test_the_plain_mean_is_the_step_of_today():
    """Bit for bit, in the dtype of the gradient, without any state."""
    model = jax.tree.map(jnp.asarray, MODEL | {"h": np.zeros(8, jnp.bfloat16)})

    def loss(params, batch):
        return loss_fn(params, batch) + jnp.sum(params["h"] * batch[0][:, :8].mean(0))

    results = []
    for tx in (optfn.chain(exchange(None), optfn.adamw(0.01)), optfn.chain(optfn.adamw(0.01))):
        step = optfn.make_train_step(loss, tx, mesh=data_mesh(N))
        state = step.init(model)
        for _ in range(3):
            state, _ = step(state, BATCH)
        results.append(jax.device_get(state.params))
    chex.assert_trees_all_equal(*results)
    tx = exchange()
    assert not jax.tree.leaves(tx.init(model))
    g = jax.tree.map(lambda p: jnp.ones((N, *p.shape), p.dtype), model)
    text = str(jax.make_jaxpr(jax.vmap(tx.update, axis_name="data"))(g, tx.init(model)))
    # Nothing but the conditions of branches, behind which small leaves are taken apart again.
    assert set(re.findall(r"convert_element_type\[new_dtype=(\w+)", text)) <= {"int32"}
    direction, _ = simulated(tx)(g, tx.init(model))
    assert direction["h"].dtype == jnp.bfloat16


# Where it runs

MODEL = {
    "w": normal((48, 30), 0, 0.1),
    "v": normal((30, 40), 1, 0.1),
    "b": np.zeros(40, np.float32),
    "n": np.arange(3),
}
MODEL_IS_FLOAT = {k: k != "n" for k in MODEL}
BATCH = normal((16, 48), 2), normal((16, 40), 3)
CHOICE = {"w": top_k(0.1, values="int2"), "v": power_sgd(2)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def one_step(tx, params, state, part):
    grads = jax.grad(loss_fn, allow_int=True)(params, part)
    grads = {k: None if k == "n" else g for k, g in grads.items()}
    updates, state = tx.update(grads, state, params)
    return optfn.apply_updates(params, updates), state


def parts(batch=BATCH):
    return jax.tree.map(lambda x: x.reshape(N, -1, x.shape[1]), batch)


@functools.cache
def simulated_run(tx, steps=4):
    """Return params of one worker and the states of all after so many steps under vmap."""
    step = jax.jit(jax.vmap(functools.partial(one_step, tx), axis_name="data"))
    p, s = stacked(MODEL), stacked(tx.init(MODEL))
    for _ in range(steps):
        p, s = step(p, s, parts())
    return first(p), jax.device_get(s)


OPTIMIZERS = {
    "adamw": optfn.chain(exchange(CHOICE, min_size=1200), optfn.adamw(0.01)),
    "momentum": optfn.chain(exchange(quantize(1), error_feedback=0.5), optfn.momentum(0.1, 0.9)),
    "lamb": optfn.chain(exchange(top_k(0.05), warmup_steps=2), optfn.lamb(0.01)),
    "optax": optfn.chain(exchange(quantize(8)), optax.masked(optax.adam(0.01), MODEL_IS_FLOAT)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", suite(OPTIMIZERS, "adamw"))
def test_training_on_a_mesh(name):
    """make_train_step follows the simulation; all devices have the same bits; the loss falls."""
    tx = OPTIMIZERS[name]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state, losses = step.init(MODEL), []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    want, simulated_state = simulated_run(tx)
    chex.assert_trees_all_close(jax.device_get(state.params), want, rtol=1e-4, atol=1e-5)
    got = {
        k: np.asarray(x).reshape(N, *MODEL[k].shape)
        for k, x in state.opt_state[0].residual.value.items()
        if hasattr(x, "shape")
    }
    chex.assert_trees_all_close(got, simulated_state[0].residual.value, rtol=1e-4, atol=1e-4)
    assert all(x.any() for x in jax.tree.leaves(got))
    for x in jax.tree.leaves(state.params):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x))


def test_all_ways_to_run_agree():
    """pmap, shard_map with and without check_vma."""
    tx = OPTIMIZERS["adamw"]
    want, _ = simulated_run(tx)
    p, s = stacked(MODEL), stacked(tx.init(MODEL))
    step = jax.pmap(functools.partial(one_step, tx), axis_name="data")
    for _ in range(4):
        p, s = step(p, s, parts())
    for worker in range(N):
        chex.assert_trees_all_equal(first(p, worker), first(p))
    chex.assert_trees_all_close(first(p), want, rtol=1e-4, atol=1e-5)
    mesh, specs = data_mesh(N), state_specs(tx, MODEL)
    for check_vma in (True, False):

        def body(params, state, part, check_vma=check_vma):
            own = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            grads = jax.grad(loss_fn, allow_int=True)(own if check_vma else params, part)
            grads = {k: None if k == "n" else g for k, g in grads.items()}
            updates, state = tx.update(grads, state, params)
            return optfn.apply_updates(params, updates), state

        run = jax.jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )
        params, state = MODEL, init_state(tx, MODEL, mesh)
        for _ in range(4):
            params, state = run(params, state, BATCH)
        chex.assert_trees_all_close(jax.device_get(params), want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", [top_k(0.1), nightly(power_sgd(2))], ids=repr)
def test_several_axes(compressor):
    """Workers along two axes, with all that has collectives of its own, where JAX tracks axes."""
    axes, params = ("host", "device"), {"w": np.zeros((50, 40), np.float32)}
    mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), axes)
    tx, flat = (exchange(compressor, axis_name=name, warmup_steps=1) for name in (axes, "data"))
    specs = state_specs(tx, params, axis_name=axes)
    run = jax.jit(
        jax.shard_map(
            lambda g, s: tx.update({"w": g[0]}, s),
            mesh=mesh,
            in_specs=(P(axes), specs),
            out_specs=(P(), specs),
        )
    )
    state, want = init_state(tx, params, mesh, axis_name=axes), stacked(flat.init(params))
    for t in range(3):
        g = gradients(t)["w"]
        direction, state = run(g, state)
        expected, want = simulated(flat)({"w": g}, want)
        np.testing.assert_allclose(direction["w"], expected["w"][0], atol=1e-5)
    kept = np.asarray(state.residual["w"]).reshape(N, 50, 40)
    np.testing.assert_allclose(kept, want.residual["w"], atol=1e-5)
    assert np.abs(kept).max() > 0.1 and int(state.num_workers) == N


def test_averaged_updates_and_axes_that_are_not_bound():
    tx, g = exchange(quantize(1)), {"w": jnp.ones(2000)}
    for made in (tx, exchange()):
        with pytest.raises(ValueError, match=r"exchange: the axis 'data' is not bound"):
            made.update(g, made.init(g))

    def body(x):
        return tx.update({"w": jax.lax.psum(x, "data")}, tx.init(g))[0]

    words = "exchange: the gradient of 'w' is already summed or averaged"
    with pytest.raises(ValueError, match=words):
        jax.shard_map(body, mesh=data_mesh(N), in_specs=P("data"), out_specs=P())(jnp.ones(8000))


def test_the_residual_of_other_params():
    tx = exchange(quantize(1))
    state = stacked(tx.init({"w": jnp.zeros(2000)}))
    words = r"exchange: .*'w' must have shape \(2001,\); got \(2000,\)"
    with pytest.raises(ValueError, match=words):
        simulated(tx)({"w": jnp.zeros((N, 2001))}, state)


# The bytes of the program


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


def lowered_collectives(text):
    """Return the bytes of the operands of each kind of collective in a lowered program."""
    size = {"f32": 4, "ui32": 4, "i32": 4, "i8": 1}
    found = {}
    pattern = r'"stablehlo\.(all_gather|all_reduce)".*?[>)] : \(tensor<([\dx]*?)x?([a-z]+\d+)>\)'
    for kind, shape, dtype in re.findall(pattern, text, re.DOTALL):
        entries = math.prod(int(n) for n in shape.split("x") if n)
        found.setdefault(kind, []).append(entries * size[dtype])
    return found


# What stands around it


def test_packed_params():
    """The same updates and the same keys as without packing: chunks are those of the leaves."""
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), packed=True)
    state = step.init(MODEL)
    for _ in range(4):
        state, _ = step(state, BATCH)
    want, _ = simulated_run(tx)
    chex.assert_trees_all_close(
        jax.device_get(optfn.unpack(state.params)), want, rtol=1e-4, atol=1e-5
    )
    plain = init_state(tx, MODEL, data_mesh(N))
    assert set(optfn.state_dict(state.opt_state)) == set(optfn.state_dict(plain))


@pytest.mark.nightly
def test_accumulate_keeps_each_workers_own_sum():
    """Two half batches are one step of the whole one, and the residuals are the same."""
    tx = optfn.chain(exchange(top_k(0.1)), optfn.sgd(0.1))
    halves = [
        jax.tree.map(lambda x, i=i: np.concatenate([part[i::2] for part in x]), parts())
        for i in (0, 1)
    ]
    step = optfn.make_train_step(loss_fn, optfn.accumulate(tx, 2), mesh=data_mesh(N))
    state = step.init(MODEL)
    for half in halves:
        state, _ = step(state, half)
    once = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    want, _ = once(once.init(MODEL), BATCH)
    chex.assert_trees_all_close(state.params, want.params, atol=1e-6)
    inner = state.opt_state.inner_state
    chex.assert_trees_all_close(inner[0].residual, want.opt_state[0].residual, atol=1e-6)


def test_skip_nonfinite_stops_what_follows_too():
    tx = optfn.skip_nonfinite(optfn.record_metrics(OPTIMIZERS["adamw"]))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), donate=False)
    state, _ = step(step.init(MODEL), BATCH)
    spoiled = BATCH[0].copy(), BATCH[1]
    spoiled[0][-1, 0] = np.nan
    after, _ = step(state, spoiled)
    assert int(after.opt_state.skipped) == 1
    chex.assert_trees_all_equal(after.opt_state.inner_state, state.opt_state.inner_state)
    chex.assert_trees_all_equal(after.params, state.params)


@pytest.mark.nightly  # test_pipeline_compression.py has DGC there
@pytest.mark.parametrize("route", ["gather", "parts"])
def test_beside_a_pipeline(route):
    """Each stage exchanges with the same stage of the other workers."""
    choice = {".*in": top_k(0.2), ".*out": quantize(1)}
    tx = optfn.chain(exchange(choice, min_size=20, route=route), optfn.momentum(0.05, 0.9))
    mesh, batches = problems.mesh_of(False), [problems.batch(k) for k in range(3)]
    params = stack_stages(problems.blocks(), mesh=mesh)
    losses, state = pipelined(tx, problems.block, params, batches, mesh, P("stage"))
    want, want_params, want_state = unpipelined(tx, problems.blocks(), batches)
    np.testing.assert_allclose(losses, want, atol=1e-5)
    chex.assert_trees_all_close(unstack_stages(state.params), want_params, atol=1e-5)
    got, expected = state.opt_state[0].residual.value, want_state[0].residual.value
    for k in ("in", "out"):
        stages = np.stack([x[k] for x in expected], axis=1)
        np.testing.assert_allclose(got[k].reshape(stages.shape), stages, atol=1e-5)
        assert np.abs(stages).max() > 1e-3


def test_row_updates_are_those_of_arrays_bit_for_bit():
    """Entries that several workers send are added in the order of the workers; few are sent."""
    params = {"w": normal((64, 128), 0), "v": normal((1100,), 1), "b": normal((5,), 2)}
    tx = optfn.chain(exchange({"w": top_k(0.001), ".*": quantize(8)}), optfn.sgd(0.1))
    series = [{k: normal((N, *x.shape), 10 + t) for k, x in params.items()} for t in range(4)]
    for g in series:
        g["w"][:, 3, 5:8] += 20  # all workers send it
    series[2]["v"][1, 0] = np.nan
    found, kinds = {}, set()
    for row_updates in (False, True):

        def update(g, state, p, row_updates=row_updates):
            updates, state = tx.update(g, state, p, row_updates=row_updates)
            kinds.add((row_updates, type(updates["w"]), type(updates["v"])))
            return optfn.apply_updates(p, updates), state

        run = jax.jit(jax.vmap(update, axis_name="data"))
        p, state = stacked(params), stacked(tx.init(params))
        for g in series:
            p, state = run(g, state, p)
        found[row_updates] = jax.device_get((p, state))
    assert {kind[1] for kind in kinds if kind[0]} == {Rows}
    assert all(kind[2] is not Rows and (kind[0] or kind[1] is not Rows) for kind in kinds)
    chex.assert_trees_all_equal(found[True], found[False])
    moved = np.flatnonzero(found[True][0]["w"][0] != params["w"])
    assert 3 <= moved.size <= 3 * N * 8 and int(found[True][1][0].step[0]) == 3


# State seen from outside


@pytest.mark.parametrize("as_mapping", [nightly(False), True])
def test_another_number_of_workers(as_mapping):
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state, _ = step(step.init(MODEL), BATCH)
    before = jax.device_get(state.opt_state[0])
    scaled = rescale_residuals(optfn.state_dict(state) if as_mapping else state, 2)
    fewer = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(2))
    mapping = scaled if as_mapping else optfn.state_dict(scaled)
    resumed = optfn.load_state_dict(fewer.init(MODEL), mapping)
    part = resumed.opt_state[0]
    assert int(part.num_workers) == 2
    for k in ("w", "v"):
        each = before.residual.value[k].reshape(N, *MODEL[k].shape)
        want = np.tile(each.mean(axis=0, dtype=np.float64).astype(np.float32), (2, 1))
        np.testing.assert_array_equal(part.residual.value[k], want)
    np.testing.assert_array_equal(part.compressor["v"], before.compressor["v"])
    fewer(resumed, BATCH)


def test_names_in_a_checkpoint_that_goes_on_bit_for_bit(tmp_path):
    """The keys do not depend on what stands before or around the exchange."""
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state = step.init(MODEL)
    for _ in range(2):
        state, _ = step(state, BATCH)
    optfn.save_checkpoint(tmp_path, state)
    mapping = optfn.state_dict(state.opt_state)
    assert mapping["per_worker"].tolist() == ["exchange/residual/v", "exchange/residual/w"]
    assert mapping["exchange/residual/w"].shape == (N * 48, 30)
    assert mapping["exchange/residual/w"].dtype == np.float32
    assert int(mapping["exchange/num_workers"]) == N
    around = optfn.skip_nonfinite(optfn.chain(optfn.clip_by_global_norm(1.0), tx))
    assert set(mapping) <= set(optfn.state_dict(init_state(around, MODEL, data_mesh(N))))
    whole, _ = step(state, BATCH)
    restored, _ = optfn.restore_checkpoint(tmp_path, step.init(MODEL))
    resumed, _ = step(restored, BATCH)
    chex.assert_trees_all_equal(jax.device_get(whole), jax.device_get(resumed))


def test_the_state_has_no_step_for_a_dense_mean():
    state = exchange({".*": None}).init(zeros())
    assert isinstance(state, ExchangeState) and not jax.tree.leaves(state.residual)


# What is printed and refused

CALLS = [
    "exchange()",
    "exchange(top_k(0.05), error_feedback=0.95)",
    "exchange(top_k(0.015625, chunk=None, values='int2'), min_size=1)",
    "exchange({'table': None, '.*': quantize(1, chunk=512)})",
    "exchange(quantize(4, stochastic=True), error_feedback=0.0)",
    "chain(exchange(power_sgd(4), warmup_steps=100), adamw(0.001))",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call(call):
    assert repr(eval(call, vars(optfn.distributed) | vars(optfn))) == call


def test_compressors_are_values():
    assert top_k(0.1) == top_k(0.1, chunk=4096) != top_k(0.2)
    assert len({quantize(1), quantize(1), quantize(bits=1), quantize(2)}) == 2
    assert quantize(4) != quantize(4, stochastic=True) != quantize(2, stochastic=True)
    assert power_sgd(2) == power_sgd(rank=2)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: exchange(0.1), TypeError, r"compressor must be a compressor.*got 0\.1 of type fl"),
        (lambda: exchange(top_k), TypeError, "compressor must be a compressor such as top_k"),
        (lambda: exchange(Threshold), TypeError, "compressor must be a compressor"),
        (lambda: exchange({"w": 3}), TypeError, r"compressor\['w'\] must be a compressor"),
        (lambda: exchange({"(": None}), ValueError, r"compressor: '\(' is not a regular expr"),
        (lambda: exchange({3: None}), TypeError, "compressor: a pattern must be a regular"),
        (lambda: exchange(error_feedback=1.5), ValueError, r"error_feedback must be in \[0, 1\]"),
        (lambda: exchange(error_feedback="x"), TypeError, "error_feedback must be a number"),
        (lambda: exchange(axis_name=None), TypeError, "axis_name must be the name of a mesh axis"),
        (lambda: exchange(min_size=0), ValueError, "min_size must be >= 1; got 0"),
        (lambda: exchange(param_attrs=3), TypeError, "param_attrs must be a mapping"),
        (lambda: exchange(warmup_steps=-1), ValueError, "warmup_steps must be >= 0; got -1"),
        (lambda: top_k(0.0), ValueError, r"density must be in \(0, 1\]; got 0\.0"),
        (lambda: top_k(1.5), ValueError, "density"),
        (lambda: top_k("x"), TypeError, "density must be a Python number"),
        (lambda: top_k(jnp.float32(0.1)), TypeError, "density must be a Python number"),
        (lambda: top_k(0.1, chunk=0), ValueError, "chunk must be >= 1; got 0"),
        (lambda: top_k(0.1, values="int4"), ValueError, "values must be one of 'float32', 'bf"),
        (lambda: quantize(3), ValueError, "bits must be one of 8, 4, 2, 1; got 3"),
        (lambda: quantize(1.0), TypeError, "bits must be a Python integer"),
        (lambda: quantize(1, chunk=1.5), TypeError, "chunk must be a Python integer"),
        (lambda: quantize(1, stochastic=1), TypeError, "stochastic must be"),
        (lambda: power_sgd(0), ValueError, "rank must be >= 1; got 0"),
    ],
)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_complex_leaves_are_refused():
    with pytest.raises(TypeError, match="exchange is not defined for complex leaves"):
        exchange(top_k(0.1)).init({"z": jnp.zeros(3, jnp.complex64)})
