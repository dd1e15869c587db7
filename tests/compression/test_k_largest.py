"""select_top_k: exact for any data; equal to a stable sort by magnitude."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from reference_compression import largest

from optfn.compression import bits
from optfn.compression.k_largest import SampleSearch
from optfn.compression.segments import Segments
from optfn.distributed import select_top_k

SELECT = jax.jit(select_top_k, static_argnums=1)


def check(x, k):
    values, indices = map(np.asarray, SELECT(jnp.asarray(x), k))
    with np.errstate(invalid="ignore"):
        expected = np.flatnonzero(largest(np.asarray(x, np.float64), k))
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.asarray(x)[indices])


@functools.cache
def kinds(n):
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    single, infinite, head, strided = (normal.copy() for _ in range(4))
    single[:] = 0
    single[n // 2] = -3
    infinite[::7] = np.inf
    infinite[-1] = -np.inf
    head[: n // 50 + 1] *= 100
    strided[::37] *= 100
    return {
        "normal": normal,
        "zeros": np.zeros(n, np.float32),
        "negative zeros": np.full(n, -0.0, np.float32),
        "constant": np.full(n, -2.5, np.float32),
        "ties": np.round(normal),
        "single": single,
        "infinite": infinite,
        "clustered": head,
        "strided": strided,
        "subnormal": normal * np.float32(1e-42),
        "ramp": np.arange(n, dtype=np.float32),
    }


@pytest.mark.parametrize("kind", kinds(1))
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (33, 32), nightly(256, 256), (70001, 70), nightly(70001, 30000)]
)
def test_exact(n, k, kind):
    check(kinds(n)[kind], k)


@pytest.mark.nightly
def test_a_million():
    """Large enough that the sample is one entry in 256."""
    x = np.random.default_rng(0).standard_normal(1_200_007).astype(np.float32)
    check(x, 1200)
    x[: x.size // 2] = 0
    check(x, 700_000)  # more than there are that are not 0


@pytest.mark.parametrize("columns", [nightly(255), 256])
def test_one_large_column_of_a_matrix(columns):
    """A stride that stays in one column would take the sample for the whole."""
    x = np.random.default_rng(1).standard_normal((400, columns)).astype(np.float32)
    x[:, 0] *= 1000
    check(x.reshape(-1), x.size // 500)


def test_not_a_number_is_the_largest():
    x = np.array([1.0, np.nan, -np.inf, 3.0], np.float32)
    assert SELECT(x, 2)[1].tolist() == [1, 2]


def test_narrow_dtypes():
    x = jnp.asarray(np.random.default_rng(2).standard_normal(3000), jnp.bfloat16)
    check(x, 30)
    assert SELECT(x, 30)[0].dtype == x.dtype


@pytest.mark.parametrize(("kind", "size"), [("normal", 9000), ("ties", 1024)])
def test_every_worker_of_a_vmap(kind, size):
    """In a small array the counts of one segment, of which XLA's CPU compiler once took one."""
    x = np.stack([n * kinds(size)[kind] for n in range(4)])
    values, indices = jax.jit(jax.vmap(lambda row: select_top_k(row, 10)))(x)
    for row, v, i in zip(x, values, indices, strict=True):
        np.testing.assert_array_equal(i, np.flatnonzero(largest(row.astype(np.float64), 10)))
        np.testing.assert_array_equal(v, row[i])


def test_many_arrays_at_once():
    """Each array gets its own k, also where one of them needs the exact path."""
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (20000, 3, 256, 70000, 513)]
    k = (20, 3, 1, 700, 500)
    search = SampleSearch(Segments(tuple(x.size for x in arrays)))
    run = jax.jit(lambda arrays: search.largest(arrays, np.array(k, np.int32)))
    for fourth in (arrays[3], np.ones(70000, np.float32)):
        arrays[3] = fourth
        values, indices = (np.split(x, np.cumsum(k)[:-1]) for x in run(arrays))
        for x, n, v, i in zip(arrays, k, values, indices, strict=True):
            np.testing.assert_array_equal(i, np.flatnonzero(largest(x.astype(np.float64), n)))
            np.testing.assert_array_equal(v, x[i])


def test_the_sample_decides_on_ordinary_data():
    """The bounds are tight enough to exclude nearly everything, and rarely wrong."""
    rng = np.random.default_rng(5)
    search, k = SampleSearch(Segments((300_000,))), np.array([300], np.int32)
    counts = search.counts(k)
    assert counts.room[0] < 20 * k[0]
    run = jax.jit(lambda x: search.candidates([x], counts))
    for _ in range(5):
        x = rng.standard_normal(300_000).astype(np.float32)
        count = np.sum(np.bitwise_count(np.asarray(run(x))))
        assert k[0] < count <= counts.room[0]  # the exact path would give k


def test_the_nth_bit_of_a_word():
    words = np.random.default_rng(6).integers(0, 2**32, 20, dtype=np.uint32)
    for word, mask in zip(words, (words[:, None] >> np.arange(32)) & 1 == 1, strict=True):
        places = np.flatnonzero(mask)
        found = jax.jit(bits.nth_bit)(np.full(32, word), np.arange(32))
        np.testing.assert_array_equal(found[: places.size], places)


@pytest.mark.parametrize(
    ("x", "k", "error", "match"),
    [
        (np.ones(3, np.float32), 4, ValueError, "k must be at most the size of x, 3; got 4"),
        (np.ones(3, np.float32), 0, ValueError, "k must be >= 1"),
        (np.ones(3, np.float32), 1.0, TypeError, "k must be a Python integer"),
        (np.ones((3, 1), np.float32), 1, ValueError, r"flat; got shape \(3, 1\)"),
        (np.ones(3, np.int32), 1, TypeError, "got int32"),
    ],
)
def test_bad_arguments(x, k, error, match):
    with pytest.raises(error, match=match):
        select_top_k(x, k)
