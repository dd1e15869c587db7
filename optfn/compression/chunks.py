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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression.selection import first_bits, magnitude, nth_bit, pack_bits
from optfn.leaves import slices
from optfn.mesh import vary, varying_axes

_MAX_BLOCK = 32
# How many blocks there are for each entry to be selected, at least.
_BLOCKS_PER_ENTRY = 4
# The number of candidates beyond k for which there is room: what is expected of entries in random
# order, so many standard deviations more, and an addend for where that is close to none.
_TOLERANCE, _TOLERANCE_MIN = 6, 8


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a leaf; static.

    Args:
      size: the number of elements of the leaf, ≥ 1.
      length: the number of elements of a chunk. The last one may be shorter, also the only one.
    """

    size: int
    length: int

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
        return (min(self.length, self.size) - 1).bit_length()

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of elements of each chunk, (count,)."""
        lengths = np.full(self.count, self.length, np.int32)
        lengths[-1] = self.last_length
        return lengths

    @property
    def starts(self) -> np.ndarray:
        """The index of the first element of each chunk, (count, 1)."""
        return np.arange(self.count, dtype=np.int32)[:, None] * np.int32(self.length)

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
        missing = self.length - self.last_length
        if not missing:
            return fn(x.reshape(self.count, self.length), *per_chunk)
        start = self.size - self.last_length
        last = jnp.pad(x[start:], (0, missing), constant_values=fill)[None]
        of_last = fn(last, *(y[-1:] for y in per_chunk))
        if not start:
            return of_last
        whole = fn(x[:start].reshape(-1, self.length), *(y[:-1] for y in per_chunk))
        return jnp.concatenate([whole, of_last])

    def spread(self, per_chunk: jax.Array) -> jax.Array:
        """Return a number per chunk for each of its elements, (size,)."""
        rows = jnp.broadcast_to(per_chunk[:, None], (self.count, self.length))
        return rows.reshape(-1)[: self.size]

    def num_selected(self, density: float) -> np.ndarray:
        """Return k = max(1, round(density·m)) for each chunk of m elements, (count,)."""
        k = np.full(self.count, max(1, round(density * self.length)), np.int32)
        k[-1] = max(1, round(density * self.last_length))
        return k


def chunks_of(sizes: Sequence[int], chunk: int | None) -> list[Chunks]:
    """Return the chunks of several leaves, of one length; without `chunk`, that of each leaf."""
    if chunk is None:
        return [Chunks(size, size) for size in sizes]
    length = min(chunk, max(sizes, default=1))
    return [Chunks(size, length) for size in sizes]


def top_k(
    arrays: Sequence[jax.Array], chunks: Sequence[Chunks], k: Sequence[np.ndarray]
) -> list[jax.Array]:
    """Return the indices of the k entries of largest magnitude of each chunk, the lower at ties.

    The chunks of all arrays are searched together: a search compiled once per array would take
    minutes for a large model.

    Args:
      arrays: float32, flat.
      chunks: those of each array, all of one length.
      k: int32 (count,) for each array, 1 or more and at most the length of the chunk; static.

    Returns:
      For each array int32 (count, max(k)): indices in it, increasing in each row. Where k is less
      than its maximum over all arrays, what is beyond it has no meaning.
    """
    k_of, length, counts = np.concatenate(k), chunks[0].length, [c.count for c in chunks]
    starts = np.concatenate([c.starts for c in chunks])
    most = int(k_of.max())
    block = _block_size(length, most)
    room = _max_candidates(length, most, block)

    def of_all(
        fn: Callable[..., jax.Array], arrays: Sequence[jax.Array], *per_chunk: jax.Array
    ) -> jax.Array:
        parts = [slices.split(x, counts) for x in per_chunk]
        columns = zip(chunks, arrays, *parts, strict=True)
        return jnp.concatenate([c.map(fn, magnitude(x), *y, fill=-1) for c, x, *y in columns])

    def maxima(m: jax.Array) -> jax.Array:
        # Blocks of entries that are far apart: what is large is often close together.
        return jnp.max(_padded(m).reshape(m.shape[0], block, -1), axis=1)

    def mask_of(arrays: Sequence[jax.Array], bound: jax.Array) -> jax.Array:
        above, equal = of_all(_above, arrays, bound), of_all(_equal, arrays, bound)
        return _filled_up(above, equal, k_of)

    def exact(arrays: Sequence[jax.Array]) -> jax.Array:
        # Where many entries equal the bound and fewer than k exceed it, it is the k-th largest.
        words = mask_of(arrays, bound)
        enough = jnp.all(_totals(words) <= room)
        return lax.cond(enough, lambda arrays: words, bisected, arrays)

    def bisected(arrays: Sequence[jax.Array]) -> jax.Array:
        return mask_of(arrays, kth_largest(of_all(lambda m: m, arrays), k_of))

    bound = kth_largest(of_all(maxima, arrays), k_of)
    if block == 1:
        index = positions(mask_of(arrays, bound), most)
    else:
        words = of_all(_reached, arrays, bound)
        accepted = jnp.all(_totals(words) <= room)
        words = lax.cond(accepted, lambda arrays: words, exact, list(arrays))
        index = positions(words, room)
        valid = np.arange(room) < _totals(words)[:, None]
        values = _taken(arrays, (index + starts).astype(jnp.uint32), counts)
        candidates = _padded(jnp.where(valid, magnitude(values), -1))
        kth = kth_largest(candidates, k_of)
        chosen = _filled_up(_above(candidates, kth), _equal(candidates, kth), k_of)
        index = jnp.take_along_axis(index, positions(chosen, most), axis=1)
    parts = slices.split((index + starts).reshape(-1), [count * most for count in counts])
    return [part.reshape(-1, most) for part in parts]


def _taken(arrays: Sequence[jax.Array], index: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Return the entries of arrays at the indices of their rows; unsigned, not tested."""
    width = index.shape[1]
    parts = slices.split(index.reshape(-1), [count * width for count in counts])
    taken = [x[i] for x, i in zip(arrays, parts, strict=True)]
    return jnp.concatenate(taken).reshape(-1, width)


def reduced_magnitudes(op: Any, x: jax.Array) -> jax.Array:
    """Return each row of |x| reduced by `jnp.add` or `jnp.maximum`, (rows,).

    XLA on CPU does not vectorize a floating-point reduction along a row, hence by eighths at first.
    """
    for _ in range(2 if x.shape[1] % 64 == 0 else 0):
        x = functools.reduce(op, [jnp.abs(part) for part in jnp.split(x, 8, axis=1)])
    return op.reduce(jnp.abs(x), axis=1)


def _padded(m: jax.Array) -> jax.Array:
    """Return magnitudes with their rows padded to whole words, and so to whole blocks."""
    missing = -m.shape[1] % 32
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
    return _packed(_padded(m) >= bound[:, None])


def _above(m: jax.Array, bound: jax.Array) -> jax.Array:
    return _packed(_padded(m) > bound[:, None])


def _equal(m: jax.Array, bound: jax.Array) -> jax.Array:
    return _packed(_padded(m) == bound[:, None])


def _packed(mask: jax.Array) -> jax.Array:
    return pack_bits(mask.reshape(-1)).reshape(mask.shape[0], -1)


def _filled_up(above: jax.Array, equal: jax.Array, k: np.ndarray) -> jax.Array:
    """Return the mask of what is above a bound, and the first of its equals up to k in each row.

    Where the bound is the k-th largest these are k; where it is smaller, k or more.
    """
    count = lax.population_count(equal).astype(jnp.int32)
    before = jnp.cumsum(count, axis=1) - count
    wanted = (k - _totals(above))[:, None] - before
    return above | first_bits(equal, jnp.maximum(wanted, 0))


def _totals(words: jax.Array) -> jax.Array:
    """Return the number of set bits of each row."""
    return jnp.sum(lax.population_count(words), axis=1, dtype=jnp.int32)


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
