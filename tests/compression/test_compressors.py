"""Compressors alone: what their packets hold, and how many bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_exchange as reference
from arrays import normal
from exchanges import COMPRESSORS, EPS
from grids import nightly, suite

from optfn.compression import bits as packing
from optfn.compression import planes
from optfn.compression.segments import Chunks, RowChunks, Segments, chunks_of
from optfn.distributed import power_sgd, quantize, top_k


@pytest.mark.parametrize("widths", [[12, 32], [1], nightly([0, 16]), nightly([11, 8])])
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


def words_of_planes(codes, bits):
    """Return the words of codes, one after the other: the p codes of a word lie one row apart."""
    rows, p = codes.reshape(-1, codes.shape[-1]), 32 // bits
    height = max(1, min(8, len(rows) // p))
    words, start = [], 0
    while start + p * height <= len(rows):
        for i in range(start, start + height):
            for j in range(rows.shape[1]):
                words.append(sum(int(rows[i + k * height, j]) << (bits * k) for k in range(p)))
        start += p * height
    last = rows[start:].reshape(-1)
    length = -(-last.size // p)
    last = np.pad(last, (0, length * p - last.size)).reshape(p, -1)
    words += [sum(int(last[k, j]) << (bits * k) for k in range(p)) for j in range(length)]
    return words


@pytest.mark.parametrize("bits", [8, 2, 1])
@pytest.mark.parametrize("shape", [(7,), (1500,), (2, 33, 4), (640, 3)])
def test_codes_in_planes_of_words(shape, bits):
    """Blocks of whole rows, and then the last rows; no more words than the bits fill."""
    codes = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint32)
    words = jax.jit(lambda codes: planes.pack_codes(codes, bits))(codes)
    assert words.tolist() == words_of_planes(codes, bits)
    assert words.size == planes.num_code_words(codes.size, bits) == -(-codes.size * bits // 32)
    found = jax.jit(lambda words: planes.unpack_codes(words, shape, bits))(words)
    np.testing.assert_array_equal(found, codes)


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
    clustered = (normal(2, *shape) * near).astype(np.float32)
    nothing = np.zeros(shape, np.float32)
    for x in (normal(0, *shape), with_ties(normal(1, *shape)), clustered, nothing):
        packet, got = run(x)
        np.testing.assert_allclose(got, send(x), rtol=4 * EPS, atol=0)
        count = getattr(reference, f"{send.func.__name__}_bytes")
        sent = sum(x.nbytes for x in jax.tree.leaves(packet))
        assert compressor.num_bytes(shape) == sent == count(shape, **options)
        assert compressor.init(shape) == ()


# The distance of the values that s times a code stands for; s is max|x| over this.
GRIDS = {8: 127, 4: 7, 2: 1.5, 1: 0.5}


@pytest.mark.parametrize("bits", suite(GRIDS, 4, 1))
def test_stochastic_rounding_is_right_in_the_mean(bits):
    """Each value is one of the two next to x on the grid, and over 4,000 steps their mean is x."""
    compressor, steps = quantize(bits, chunk=16, stochastic=True), 4000
    x = normal(0, 6, 8)
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


def test_the_formulas_of_the_bytes():
    """By hand, beside those of the reference: 4,096 entries in a chunk, 12 bits an index."""
    assert top_k(1 / 64, values="int2").num_bytes((4096,)) == 64 * 14 // 8 + 4
    assert quantize(1).num_bytes((1000, 1000)) == 10**6 // 8 + 4 * 250  # four rows in a chunk
    assert quantize(1).num_bytes((10, 5000)) == 6252 + 4 * 13  # a row has several
    assert power_sgd(4).num_bytes((100, 20)) == 4 * 4 * 120
    assert power_sgd(4).num_bytes((2, 50)) == 4 * 2 * 52
    assert power_sgd(4).num_bytes((7,)) == 28
    # Axes before the last two are a batch: of stacked layers, and of the places of a kernel.
    assert power_sgd(4).num_bytes((4, 512, 2048)) == 4 * 4 * 4 * 2560
    assert power_sgd(4).num_bytes((3, 3, 64, 128)) == 9 * 4 * 4 * 192
    assert power_sgd(4).num_bytes((100, 20, 3)) == 100 * 4 * 3 * 23


def test_a_third_of_each_chunk():
    """Dense selections have no summary; ties, short chunks and other leaves do not matter."""
    compressor = top_k(0.3, chunk=1000)
    xs = [with_ties(normal(1, 4300)), normal(2, 70), normal(3, 2000)]
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
    compressor, x = top_k(0.1), normal(0, 64, 64)
    empty, full = jax.jit(compressor.encode_all)([jnp.zeros((0, 3)), x], [(), ()])
    assert empty[0].size == 0
    np.testing.assert_array_equal(full[0], jax.jit(compressor.encode)(x, ())[0])
