"""Hashing of arbitrary ids into the rows of a table."""

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks
from optfn.core.types import Leaf

# The constants of MurmurHash3_x86_32.
_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_FIVE, _ADDED = np.uint32(5), np.uint32(0xE6546B64)
_FINAL_1, _FINAL_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_NUM_BYTES = np.uint32(8)


def hash_ids(ids: Leaf, num_rows: int, *, seed: int = 0) -> Leaf:
    """Hash each integer id to a row in [0, num_rows), or raise a TypeError unless ids are integers
    and a ValueError if `num_rows` or `seed` is out of range.

    The row is a hash of the id, so a table of fixed size takes any ids, which need not be known in
    advance. Different ids may share a row: with n ids in R rows, an id shares its row with another
    with probability 1 − (1 − 1/R)ⁿ⁻¹ ≈ n/R.

        h = MurmurHash3_x86_32(the id as 8 little-endian bytes, seed)
        row = h mod num_rows

    The row depends on the value of the id, not on its dtype, and is the same on every machine and
    in every version, so checkpoints keep their meaning. The probabilities of rows differ by at most
    num_rows/2³². Give fields that share a table different seeds. To turn a string into an id, use
    for example `int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little",
    signed=True)`.

    Args:
      ids: integers of any width and shape; they may be negative. Without `jax_enable_x64` JAX cuts
        integers of 64 bits to 32, so hash such ids as NumPy arrays, when you make the batches.
      num_rows: the number of rows of the table, from 1 to 2³¹ − 1.
      seed: from 0 to 2³² − 1.

    Returns:
      The rows, int32 in [0, num_rows), in the shape of `ids`: a JAX array if `ids` is one,
      otherwise a NumPy array.

    Raises:
      TypeError: ids are not integers, or num_rows or seed is not a Python integer.
      ValueError: num_rows or seed is out of range.

    Source: Appleby, MurmurHash3 (2011, public domain); Weinberger et al. 2009, arXiv 0902.2206 (the
    hashing of features).

    >>> import numpy as np
    >>> hash_ids(np.array([7, -7, 2**62]), 1000).tolist()
    [267, 733, 138]
    """
    num_rows = checks.count("hash_ids: num_rows", num_rows)
    seed = checks.count("hash_ids: seed", seed, low=0)
    if num_rows >= 2**31:
        raise ValueError(f"hash_ids: num_rows must be < 2**31; got {num_rows}")
    if seed >= 2**32:
        raise ValueError(f"hash_ids: seed must be < 2**32; got {seed}")
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"hash_ids: ids must be integers; got dtype {ids.dtype}")
    # NumPy warns if a scalar overflows, but not if an element does.
    rows = _murmur3(*_split_words(ids.reshape(-1)), np.uint32(seed)) % np.uint32(num_rows)
    return rows.astype(np.int32).reshape(ids.shape)


def _split_words(ids: Leaf) -> tuple[Leaf, Leaf]:
    """Split integers into their low and high 32 bits, uint32, as if narrower ones were first
    sign-extended to 64 bits."""
    if ids.dtype.itemsize == 8:
        return ids.astype(np.uint32), (ids >> 32).astype(np.uint32)
    return ids.astype(np.uint32), np.uint32(0) - (ids < 0).astype(np.uint32)


def _murmur3(low: Leaf, high: Leaf, seed: np.uint32) -> Leaf:
    """Return MurmurHash3_x86_32, with a seed, of the eight bytes of a low and a high word."""
    h: Leaf = seed
    for word in (low, high):
        h = _rotate_left(h ^ (_rotate_left(word * _C1, 15) * _C2), 13) * _FIVE + _ADDED
    h = h ^ _NUM_BYTES
    h = (h ^ (h >> 16)) * _FINAL_1
    h = (h ^ (h >> 13)) * _FINAL_2
    return h ^ (h >> 16)


def _rotate_left(x: Leaf, bits: int) -> Leaf:
    """Rotate words to the left by `bits`."""
    return (x << bits) | (x >> (32 - bits))
