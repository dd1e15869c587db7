"""Ids hashed into rows: MurmurHash3, whatever the dtype, spread evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly

from optfn.sparse import hash_ids

IDS = [0, 1, -1, 7, -123, 2**31 - 1, -(2**31), 2**40 + 5, -(2**62), 2**63 - 1, -(2**63)]
SEED = 2**31 + 12345
# MurmurHash3_x86_32 of their eight bytes, little-endian, by sklearn.utils.murmurhash3_32.
HASHES = [
    363789214, 3901253060, 3194875643, 1274669532, 4220941031, 2194203874, 3992878455, 61926412,
    151213762, 2046098334, 4150015535,
]  # fmt: skip


def test_rows_are_murmur3_of_eight_bytes():
    for num_rows in (1, 1000, 2**20, 2**31 - 1):
        found = hash_ids(np.array(IDS), num_rows, seed=SEED)
        assert found.dtype == np.int32 and found.tolist() == [x % num_rows for x in HASHES]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_a_row_depends_on_the_value_alone(dtype):
    values = np.array([0, 1, 5, 100] if dtype[0] == "u" else [0, 1, -5, -128])
    want = hash_ids(values, 1000)
    ids = values.astype(dtype)
    np.testing.assert_array_equal(hash_ids(ids, 1000), want)
    with jax.enable_x64(True):
        found = hash_ids(jnp.asarray(ids), 1000)
    np.testing.assert_array_equal(found, want)


def test_shapes_and_kinds_of_arrays():
    ids = np.arange(-6, 6).reshape(2, 3, 2)
    host = hash_ids(ids, 50, seed=3)
    device = jax.jit(lambda x: hash_ids(x, 50, seed=3))(jnp.asarray(ids))
    assert type(host) is np.ndarray and isinstance(device, jax.Array)
    assert host.shape == device.shape == ids.shape and device.dtype == jnp.int32
    np.testing.assert_array_equal(device, host)
    assert hash_ids(-6, 50, seed=3) == host[0, 0, 0]
    assert hash_ids(np.zeros((0, 2), int), 50).shape == (0, 2)


@pytest.mark.parametrize("num_rows", [nightly(1000), 1024])
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(100_000),
        -np.arange(100_000),
        np.arange(100_000) * 1024,
        np.arange(100_000) << 32,
        np.random.default_rng(0).integers(-(2**63), 2**63, 100_000),
    ],
    ids=["rising", "negative", "multiples", "high bits", "random"],
)
def test_rows_are_uniform(ids, num_rows):
    """χ² over the rows, within five deviations; two seeds are independent of each other."""
    first, second = (hash_ids(ids, num_rows, seed=seed) for seed in (0, 1))
    both = (first.astype(np.int64) * 31 + second) % num_rows  # uniform if they are independent
    for rows in (first, second, both):
        expected = len(ids) / num_rows
        statistic = np.sum((np.bincount(rows, minlength=num_rows) - expected) ** 2 / expected)
        freedom = num_rows - 1
        assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
    assert np.mean(first == second) < 3 / num_rows


@pytest.mark.parametrize(
    ("ids", "num_rows", "seed", "error", "words"),
    [
        ([1.5], 10, 0, TypeError, "ids must be integers; got dtype float64"),
        ([True], 10, 0, TypeError, "ids must be integers; got dtype bool"),
        (["a"], 10, 0, TypeError, "ids must be integers; got dtype <U1"),
        ([2**64], 10, 0, TypeError, "ids must be integers; got dtype object"),
        ([1], 0, 0, ValueError, "num_rows must be >= 1; got 0"),
        ([1], 2**31, 0, ValueError, r"num_rows must be < 2\*\*31"),
        ([1], 10.0, 0, TypeError, "num_rows must be a Python integer"),
        ([1], 10, -1, ValueError, "seed must be >= 0"),
        ([1], 10, 2**32, ValueError, r"seed must be < 2\*\*32"),
    ],
)
def test_bad_arguments(ids, num_rows, seed, error, words):
    with pytest.raises(error, match=words):
        hash_ids(ids, num_rows, seed=seed)
