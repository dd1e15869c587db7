"""Chunks of a leaf: consecutive entries in C order, and the k largest of each.

The selection is exact and sorts nothing. Every chunk is cut into many blocks of few entries, and
the k-th largest of their maxima is a bound that at least k entries reach, and few more: these are
the candidates. Bisection on the bits of |x| finds the k-th largest of the maxima, then that of the
candidates. Where the largest entries lie so that there are many candidates, bisection over whole
chunks replaces the bound: slower, never wrong.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

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
        """The number of elements of each chunk, (count,)."""
        lengths = np.full(self.count, self.length, np.int32)
        lengths[-1] = self.last_length
        return lengths

    def map(
        self,
        fn: Callable[..., jax.Array],
        x: jax.Array,
        *per_chunk: jax.Array | np.ndarray,
        fill: float = 0,
    ) -> jax.Array:
        """Return fn(rows, *per_chunk) of a flat array, (count, …).

        A shorter last chunk is padded with `fill`, and goes through `fn` by itself: to pad the
        whole array would copy it.
        """
        if self.last_length == self.length:
            return fn(x.reshape(self.count, self.length), *per_chunk)
        start = self.size - self.last_length
        last = jnp.pad(x[start:], (0, self.length - self.last_length), constant_values=fill)
        rows = x[:start].reshape(-1, self.length), last[None]
        pairs = zip(rows, zip(*((y[:-1], y[-1:]) for y in per_chunk), strict=True), strict=True)
        columns = pairs if per_chunk else ((part, ()) for part in rows)
        return jnp.concatenate([fn(part, *of_part) for part, of_part in columns])

    def spread(self, per_chunk: jax.Array) -> jax.Array:
        """Return a number per chunk for each of its elements, (size,)."""
        rows = jnp.broadcast_to(per_chunk[:, None], (self.count, self.length))
        return rows.reshape(-1)[: self.size]

    @property
    def starts(self) -> np.ndarray:
        """The index of the first element of each chunk, (count, 1)."""
        return np.arange(self.count, dtype=np.int32)[:, None] * np.int32(self.length)

    def num_selected(self, density: float) -> np.ndarray:
        """Return k = max(1, round(density·m)) for each chunk of m elements, (count,)."""
        k = np.full(self.count, max(1, round(density * self.length)), np.int32)
        k[-1] = max(1, round(density * self.last_length))
        return k


def top_k(x: jax.Array, chunks: Chunks, k: np.ndarray) -> jax.Array:
    """Return the indices of the k entries of largest magnitude of each chunk, the lower at ties.

    Args:
      x: float32, flat.
      chunks: its chunks.
      k: int32 (count,), 1 or more and at most the length of the chunk; static.

    Returns:
      int32 (count, max(k)): indices in the leaf, increasing in each row. Where k is less than its
      maximum, what is beyond it has no meaning.
    """
    most = int(k.max())
    block = _block_size(chunks.length, most)
    room = _max_candidates(chunks.length, most, block)

    def maxima(m: jax.Array) -> jax.Array:
        # Blocks of entries that are far apart: what is large is often close together.
        return jnp.max(_padded(m, 32).reshape(m.shape[0], block, -1), axis=1)

    def mask_of(x: jax.Array, bound: jax.Array) -> jax.Array:
        return chunks.map(_mask, magnitude(x), bound, k, fill=-1)

    def kth_of_all(x: jax.Array) -> jax.Array:
        return kth_largest(chunks.map(lambda rows: rows, magnitude(x), fill=-1), k)

    bound = kth_largest(chunks.map(maxima, magnitude(x), fill=-1), k)
    if block == 1:
        return positions(mask_of(x, bound), most) + chunks.starts
    words = chunks.map(_reached, magnitude(x), bound, fill=-1)

    def exact(x: jax.Array) -> jax.Array:
        # Where many entries equal the bound and fewer than k exceed it, it is the k-th largest.
        words = mask_of(x, bound)
        enough = jnp.all(_totals(words) <= room)
        return lax.cond(enough, lambda x: words, lambda x: mask_of(x, kth_of_all(x)), x)

    accepted = jnp.all(_totals(words) <= room)
    words = lax.cond(accepted, lambda x: words, exact, x)
    index = positions(words, room)
    valid = np.arange(room) < _totals(words)[:, None]
    candidates = magnitude(x[(index + chunks.starts).astype(jnp.uint32)])
    candidates = _padded(jnp.where(valid, candidates, -1), 32)
    chosen = positions(_mask(candidates, kth_largest(candidates, k), k), most)
    return jnp.take_along_axis(index, chosen, axis=1) + chunks.starts


def reduced_magnitudes(op: Any, x: jax.Array) -> jax.Array:
    """Return each row of |x| reduced by `jnp.add` or `jnp.maximum`, (rows,).

    XLA on CPU does not vectorize a floating-point reduction along a row, hence by eighths at first.
    """
    for _ in range(2 if x.shape[1] % 64 == 0 else 0):
        x = functools.reduce(op, [jnp.abs(part) for part in jnp.split(x, 8, axis=1)])
    return op.reduce(jnp.abs(x), axis=1)


def _padded(m: jax.Array, multiple: int) -> jax.Array:
    """Return magnitudes with their rows padded to a multiple of this length."""
    missing = -m.shape[1] % multiple
    return jnp.pad(m, ((0, 0), (0, missing)), constant_values=-1) if missing else m


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


def kth_largest(m: jax.Array, k: np.ndarray) -> jax.Array:
    """Return the k-th largest magnitude of each row, found bit by bit from the highest, (rows,)."""

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (1 << (30 - i))
        reached = jnp.sum(m >= trial[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(reached >= k, trial, found)

    start = vary(jnp.zeros(m.shape[0], jnp.int32), varying_axes(m))
    return lax.fori_loop(0, 31, set_bit, start)


def _reached(m: jax.Array, bound: jax.Array) -> jax.Array:
    """Return the packed mask of what reaches the bound of each row, uint32 (rows, ⌈length/32⌉)."""
    return _packed(_padded(m, 32) >= bound[:, None])


def _mask(m: jax.Array, bound: jax.Array, k: np.ndarray) -> jax.Array:
    """Return the packed mask of what is above the bound, and of those of its equals that k leaves.

    Args:
      m: magnitudes, (rows, length), padding −1.
      bound: for each row at most the k-th largest. Where it is that, k entries are selected, the
        first among equals; where it is smaller, k or more.
      k: for each row, ≥ 1.
    """
    m = _padded(m, 32)
    above, equal = _packed(m > bound[:, None]), _packed(m == bound[:, None])
    count = lax.population_count(equal).astype(jnp.int32)
    before = jnp.cumsum(count, axis=1) - count
    wanted = (k - _totals(above))[:, None] - before
    return above | first_bits(equal, jnp.maximum(wanted, 0))


def _packed(mask: jax.Array) -> jax.Array:
    return pack_bits(mask.reshape(-1)).reshape(mask.shape[0], -1)


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
