"""Chunks of a leaf: consecutive entries in C order, and the k largest of each.

The selection is exact and sorts nothing. Every chunk is cut into many blocks of few entries, and
the k-th largest of their maxima is a bound that at least k entries reach, and few more: these are
the candidates. Bisection on the bits of |x| finds the k-th largest of the maxima, then that of the
candidates. Where the largest entries lie so that there are many candidates, bisection over whole
chunks replaces the bound: slower, never wrong.
"""

import dataclasses
import math
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression.selection import first_bits, magnitude, nth_bit, pack_bits
from optfn.parallel.mesh import vary, varying_axes

_MAX_BLOCK = 32
# How many blocks there are for each entry to be selected, at least.
_BLOCKS_PER_ENTRY = 4
# The number of candidates beyond k for which there is room: what is expected of entries in random
# order, so many standard deviations more, and an addend for where that is close to none.
_TOLERANCE, _TOLERANCE_MIN = 6, 8


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a leaf of `size` elements; static.

    Args:
      size: the number of elements, ≥ 1.
      chunk: the number of elements of a chunk; None for one chunk. The last one may be shorter.
    """

    size: int
    chunk: int | None

    @property
    def length(self) -> int:
        """The number of elements of a chunk, without the last."""
        return self.size if self.chunk is None else min(self.chunk, self.size)

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.size // self.length)

    @property
    def last_length(self) -> int:
        """The number of elements of the last chunk."""
        return self.size - (self.count - 1) * self.length

    @property
    def index_bits(self) -> int:
        """The bits of an index within a chunk."""
        return (self.length - 1).bit_length()

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of elements of each chunk, (count, 1)."""
        lengths = np.full((self.count, 1), self.length, np.int32)
        lengths[-1] = self.last_length
        return lengths

    def rows(self, x: jax.Array) -> jax.Array:
        """Return the chunks of a flat array as rows, (count, length), padded with zeros."""
        padding = self.length - self.last_length
        x = jnp.pad(x, (0, padding)) if padding else x
        return x.reshape(self.count, self.length)

    def num_selected(self, density: float) -> np.ndarray:
        """Return k = max(1, round(density·m)) for each chunk of m elements, (count,)."""
        k = np.full(self.count, max(1, round(density * self.length)), np.int32)
        k[-1] = max(1, round(density * self.last_length))
        return k


def top_k(rows: jax.Array, lengths: np.ndarray, k: np.ndarray) -> jax.Array:
    """Return the indices of the k entries of largest magnitude of each row, the lower at ties.

    Args:
      rows: float32 (count, length).
      lengths: int32 (count, 1), the number of entries of each row that are not padding.
      k: int32 (count,), 1 ≤ k ≤ lengths; static.

    Returns:
      int32 (count, max(k)), increasing in each row. Where k is less than its maximum, what is
      beyond it has no meaning.
    """
    m = magnitude(rows)
    if (lengths < rows.shape[1]).any():
        m = jnp.where(np.arange(rows.shape[1]) < lengths, m, -1)
    if m.shape[1] % 32:
        m = jnp.pad(m, ((0, 0), (0, -m.shape[1] % 32)), constant_values=-1)
    most = int(k.max())
    block = _block_size(m.shape[1], most)
    room = _max_candidates(m.shape[1], most, block)
    # Blocks of entries that are far apart: what is large is often close together.
    maxima = jnp.max(m.reshape(m.shape[0], block, -1), axis=1)
    words = top_k_mask(m, kth_largest(maxima, k), k)
    if block > 1:
        enough = jnp.all(_totals(words) <= room)
        words = lax.cond(enough, lambda m, w: w, lambda m, w: _exact_mask(m, k), m, words)
    index = positions(words, room)
    if room == most:
        return index
    valid = np.arange(room) < _totals(words)[:, None]
    candidates = jnp.where(valid, jnp.take_along_axis(m, index, axis=1), -1)
    candidates = jnp.pad(candidates, ((0, 0), (0, -room % 32)), constant_values=-1)
    chosen = positions(_exact_mask(candidates, k), most)
    return jnp.take_along_axis(index, chosen, axis=1)


def _block_size(length: int, k: int) -> int:
    """Return the number of entries of a block, a power of two."""
    most = max(1, length // (_BLOCKS_PER_ENTRY * k))
    return min(_MAX_BLOCK, 1 << (most.bit_length() - 1))


def _max_candidates(length: int, k: int, block: int) -> int:
    """Return for how many candidates of a row there is room."""
    if block == 1:
        return k
    # The fraction of entries above a bound that the maximum of this fraction of blocks reaches.
    reached = 1 - (1 - k * block / length) ** (1 / block)
    others = max(0.0, reached * length - k)
    return min(length, math.ceil(k + others + _TOLERANCE * math.sqrt(others) + _TOLERANCE_MIN))


def _exact_mask(m: jax.Array, k: np.ndarray) -> jax.Array:
    return top_k_mask(m, kth_largest(m, k), k)


def kth_largest(m: jax.Array, k: np.ndarray) -> jax.Array:
    """Return the k-th largest magnitude of each row, found bit by bit from the highest, (rows,)."""

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (1 << (30 - i))
        reached = jnp.sum(m >= trial[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(reached >= k, trial, found)

    start = vary(jnp.zeros(m.shape[0], jnp.int32), varying_axes(m))
    return lax.fori_loop(0, 31, set_bit, start)


def top_k_mask(m: jax.Array, bound: jax.Array, k: np.ndarray) -> jax.Array:
    """Return a packed mask of each row: what is above the bound, and what of its equals k leaves.

    Args:
      m: magnitudes, (rows, length), length a multiple of 32, padding −1.
      bound: for each row at most the k-th largest. Where it is that, k entries are selected, the
        first among equals; where it is smaller, k or more.
      k: for each row, ≥ 1.

    Returns:
      uint32 (rows, length/32).
    """

    def packed(mask: jax.Array) -> jax.Array:
        return pack_bits(mask.reshape(-1)).reshape(m.shape[0], -1)

    above, equal = packed(m > bound[:, None]), packed(m == bound[:, None])
    count = lax.population_count(equal).astype(jnp.int32)
    before = jnp.cumsum(count, axis=1) - count
    wanted = (k - _totals(above))[:, None] - before
    return above | first_bits(equal, jnp.maximum(wanted, 0))


def _totals(words: jax.Array) -> jax.Array:
    """Return the number of set bits of each row."""
    return jnp.sum(lax.population_count(words).astype(jnp.int32), axis=1)


def positions(words: jax.Array, count: int) -> jax.Array:
    """Return the positions of the first `count` set bits of each row, int32 (rows, count).

    What is beyond the bits of a row has no meaning, but lies within the row.
    """
    bits = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(bits, axis=1)
    rank = np.arange(count, dtype=np.int32)
    word = jax.vmap(lambda e: jnp.searchsorted(e, rank, side="right"))(ends)
    word = jnp.minimum(word, words.shape[1] - 1).astype(jnp.int32)
    first = jnp.take_along_axis(ends - bits, word, axis=1)
    found = jnp.take_along_axis(words, word, axis=1)
    return word * 32 + jnp.minimum(nth_bit(found, rank - first), 31)
