"""Exact selection of the k entries of largest magnitude in each segment, without a sort.

A segment is a whole flat array or a chunk of one. All segments are searched together, each for its
k, so that a model of many leaves compiles as fast as one of a single leaf:

1. A summary of each segment gives a bound that |x| of at least k entries reaches, and of few more.
2. One pass over each array packs "reaches the bound" into the bits of 32-bit words. The entries
   with a set bit are the candidates.
3. Population counts and their cumulative sum locate the candidates.
4. Bisection on the bits of |x| finds the k-th largest of the candidates exactly.

If the summary misleads, an exact mask replaces the mask of step 2; it is slower but never wrong.
Many equal entries cost a few more passes, clustered ones a bisection over whole arrays. Magnitudes
are compared as integers, the bits of |x|: they have the order of the numbers, with NaN above
infinity, and subnormal numbers are not flushed to zero.

There are two kinds of summary, since segments differ in length by orders of magnitude. For whole
arrays it is a strided sample, which costs a fraction of a pass, for any k. In a chunk of a few
thousand entries a sample would be too coarse, so there it consists of the maxima of blocks of
entries. These bound the k-th largest with certainty, at the cost of a pass.
"""

import abc
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression import bits
from optfn.compression.segments import Chunks, Segments
from optfn.core import checks
from optfn.mesh.collectives.axes import mark_varying
from optfn.mesh.compilers import groups, xla


class Counts(NamedTuple):
    """Counts of entries for each segment, int32 (segments,).

    k: how many entries are selected, ≥ 1.
    rank: the bound is the rank-th largest magnitude of the summary.
    room: how many candidates there may be; with more, the bound is rejected.
    """

    k: jax.Array | np.ndarray
    rank: jax.Array | np.ndarray
    room: jax.Array | np.ndarray


def magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as int32: integers ≥ 0 in the order of |x|, with NaN the largest."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def magnitudes(arrays: Sequence[jax.Array], segments: Segments) -> jax.Array:
    """Return the bits of |x| of arrays as rows, int32 (rows, row), with −1 for padding."""
    valid = jnp.arange(segments.row)[None] < jnp.asarray(segments.row_lengths)[:, None]
    return jnp.where(valid, magnitude(segments.pad_arrays(arrays)), -1)


def kth_largest(m: jax.Array, k: jax.Array | np.ndarray, segments: Segments) -> jax.Array:
    """Return the k-th largest magnitude of each segment, int32 (segments,), by bisection: one pass
    for each of 31 bits.

    Args:
      m: magnitudes as rows, (rows, …), with −1 for padding.
      k: int32, one per segment, ≥ 1.
      segments: the segments that the rows belong to.
    """

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (1 << (30 - i))
        reached = jnp.sum(m >= segments.broadcast_to_rows(trial), axis=1, dtype=jnp.int32)
        return jnp.where(segments.sum_segments(reached) >= k, trial, found)

    start = mark_varying(jnp.zeros(segments.num_rows.size, jnp.int32), groups.varying_axes(m))
    return lax.fori_loop(0, 31, set_bit, start)


def largest_mask(m: jax.Array, k: jax.Array | np.ndarray, segments: Segments) -> jax.Array:
    """Return the packed mask of the k largest magnitudes of each segment. Where several equal the
    k-th, the first of them are taken.

    The arguments are the same as of `kth_largest`.
    """
    kth = segments.broadcast_to_rows(kth_largest(m, k, segments))
    above, equal = xla.pack_mask(m > kth).reshape(-1), xla.pack_mask(m == kth).reshape(-1)
    return fill_up(above, equal, k, segments)


def fill_up(
    above: jax.Array, equal: jax.Array, k: jax.Array | np.ndarray, segments: Segments
) -> jax.Array:
    """Return the packed mask `above`, filled up to k entries per segment with the first of `equal`,
    and unchanged where a segment has k entries or more."""
    before = _accumulate_counts(equal) - bits.count_ones(equal)
    last = before[segments.first_word] + k - count_set_bits(above, segments)
    wanted = segments.broadcast_to_words(last) - before
    return above | bits.first_bits(equal, jnp.maximum(wanted, 0))


def _accumulate_counts(words: jax.Array) -> jax.Array:
    """Return the number of set bits up to the end of each word, int32."""
    return jnp.cumsum(bits.count_ones(words))


def _find_set_bits(words: jax.Array, k: np.ndarray, segments: Segments) -> jax.Array:
    """Return the positions of the k[i] set bits of each segment i, in one flat array."""
    number = jnp.arange(k.sum(), dtype=jnp.int32)
    first, most = jnp.zeros(1, jnp.int32), segments.words * segments.owner.size
    if segments.chunk is not None:
        first, most = segments.broadcast_to_entries(segments.first_word, k), segments.words
    return bits.find_positions(words, _accumulate_counts(words), number, first, most)


def count_set_bits(words: jax.Array, segments: Segments) -> jax.Array:
    """Return the number of set bits of a packed mask in each segment."""
    per_row = jnp.sum(bits.count_ones(words).reshape(-1, segments.words), axis=1, dtype=jnp.int32)
    return segments.sum_segments(per_row)


@dataclasses.dataclass(frozen=True)
class Search(abc.ABC):
    """A search for the k entries of largest magnitude in each segment. All of its fields are
    static."""

    segments: Segments

    @abc.abstractmethod
    def counts(self, k: np.ndarray) -> Counts:
        """Return the static counts that a search for the k[i] largest of each segment i needs,
        which are k, the rank of the bound, and the room for candidates."""

    @abc.abstractmethod
    def summary(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Segments]:
        """Return the magnitudes that the bounds are taken from, as rows, and their segments."""

    def largest(self, arrays: Sequence[jax.Array], k: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Return the values and the increasing indices of the k[i] entries of largest magnitude in
        each segment i, in the order of segments."""
        counts = self.counts(k)
        return self.extract(arrays, self.candidates(arrays, counts), counts)

    def candidates(self, arrays: Sequence[jax.Array], counts: Counts) -> jax.Array:
        """Return a packed mask of k to `room` entries of each segment that include the k largest,
        by a bound or, if the bound misleads, by a slower exact search.

        Args:
          arrays: float32, flat.
          counts: the counts. They may be traced, so that all steps of a sparsity ramp share this
            program.

        Returns:
          The mask, uint32, flat, with whole words for each row.
        """
        segments, (k, rank, room) = self.segments, counts
        summary, of_summary = self.summary(arrays)
        bound = kth_largest(summary, rank, of_summary)
        words = self._pack_where(jnp.greater_equal, arrays, bound)
        count = count_set_bits(words, segments)

        def bisect(arrays: Sequence[jax.Array], words: jax.Array, above: jax.Array) -> jax.Array:
            return largest_mask(magnitudes(arrays, segments), k, segments)

        def search_exactly(arrays: Sequence[jax.Array], words: jax.Array) -> jax.Array:
            above = self._pack_where(jnp.greater, arrays, bound)
            # If many entries equal the bound and fewer than k exceed it, it is the k-th largest.
            is_kth = count_set_bits(above, segments) < k
            return lax.cond(
                jnp.all((count >= k) & ((count <= room) | is_kth)),
                lambda arrays, words, above: fill_up(above, words & ~above, k, segments),
                bisect,
                arrays,
                words,
                above,
            )

        accepted = jnp.all((count >= k) & (count <= room))
        return lax.cond(accepted, lambda arrays, words: words, search_exactly, list(arrays), words)

    def _pack_where(
        self,
        compare: Callable[[jax.Array, jax.Array], jax.Array],
        arrays: Sequence[jax.Array],
        bound: jax.Array,
    ) -> jax.Array:
        """Return the packed mask of the entries whose |x|, as an integer, compares with the bound
        of their segment as `compare` says."""

        def pack(m: jax.Array, bound: jax.Array) -> jax.Array:
            return xla.pack_mask(compare(m, bound[:, None])).reshape(-1)

        def pack_array(rows: Chunks, x: jax.Array, bound: jax.Array) -> jax.Array:
            return rows.map(pack, magnitude(x), jnp.broadcast_to(bound, rows.count), fill=-1)

        bounds = xla.split(bound, self.segments.num_per_array)
        return jnp.concatenate(list(map(pack_array, self.segments.arrays, arrays, bounds)))

    def extract(
        self, arrays: Sequence[jax.Array], words: jax.Array, counts: Counts
    ) -> tuple[jax.Array, jax.Array]:
        """Return the values and the indices of the k largest of each segment, in the order of
        segments, chosen among the candidates of a packed mask.

        Args:
          arrays: the flat arrays.
          words: the packed mask that `candidates` returns.
          counts: the counts, static.

        Returns:
          values, float32 (∑k,), and increasing indices in the segment, int32 (∑k,).
        """
        segments, slots = self.segments, self._slots(counts.room)
        k, ends = np.asarray(counts.k), _accumulate_counts(words)
        # Candidate j of a segment is the set bit number first + j, counted over all words.
        of_segment = np.arange(slots.owner.size, dtype=np.int32) - slots.first_row[slots.owner]
        place = slots.row * of_segment[:, None] + jnp.arange(slots.row, dtype=jnp.int32)[None]
        before = ends - bits.count_ones(words)
        number = slots.broadcast_to_rows(before[segments.first_word]) + place
        first = jnp.repeat(segments.first_word[slots.owner], slots.row)
        most = int(segments.num_rows.max()) * segments.words
        at = bits.find_positions(words, ends, number.reshape(-1), first, most)
        room = slots.num_rows.astype(np.int32) * np.int32(slots.row)
        values, index = self._entries(arrays, at, room)
        valid = place < slots.broadcast_to_rows(count_set_bits(words, segments))
        m = jnp.where(valid, magnitude(values).reshape(valid.shape), -1)
        largest = _find_set_bits(largest_mask(m, k, slots), k, slots)
        return values[largest], index[largest]

    def _entries(
        self, arrays: Sequence[jax.Array], bit: jax.Array, k: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """Return the values of the entries at these positions of a packed mask, and their indices
        in their segments.

        Args:
          arrays: float32, flat.
          bit: the positions of the entries in a packed mask, k[i] for segment i, in one flat array.
          k: the number of entries of each segment.
        """
        width = 32 * self.segments.words
        row, inside = bit // width, bit % width
        in_array = inside + jnp.asarray(self.segments.row_starts)[row]
        # With unsigned indices JAX adds no code per array that tests for negative ones.
        index = self.segments.split(in_array.astype(jnp.uint32), k)
        values = jnp.concatenate(list(map(operator.getitem, arrays, index)))
        return values, in_array if self.segments.chunk is None else inside

    def _slots(self, room: jax.Array | np.ndarray) -> Segments:
        """Return segments with room for the candidates, `room` entries of each whole array, or for
        each chunk the largest `room` in whole words of 32."""
        if self.segments.chunk is None:
            return Segments(tuple(int(n) for n in room))
        width = -(-int(room.max()) // 32) * 32
        return Segments(tuple(width * n for n in self.segments.num_per_array), width)


# A sample has one entry in 256, but at least 4096: all entries of a smaller array.
_SAMPLE_STRIDE = 256
_MIN_SAMPLE = 4096
# The bound is loosened by this many standard deviations, so that at least k entries reach it. The
# number of candidates may exceed its mean by as many more before the sample is rejected. The
# minimum is for small k, where the count is not close to normal.
_LOOSENING, _LOOSENING_MIN = 3.5, 3
_TOLERANCE, _TOLERANCE_MIN = 4, 4


class SampleSearch(Search):
    """The search of whole arrays, with a strided sample as the summary."""

    @cached_property
    def strides(self) -> np.ndarray:
        """The stride of each array's sample, which takes about one entry in 256, but at least 4,096
        or all, and is odd so that samples visit all columns of a matrix."""
        n = self.segments.lengths
        return np.maximum(n // np.clip(n // _SAMPLE_STRIDE, _MIN_SAMPLE, None), 1) - 1 | 1

    @cached_property
    def samples(self) -> Segments:
        """The segments of the samples."""
        return Segments(tuple(int(n) for n in -(-self.segments.lengths // self.strides)))

    def summary(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Segments]:
        """Return the bits of |x| of every stride-th entry of each array, as rows of int32, and the
        segments of these samples."""
        samples = map(lambda x, n: lax.slice(x, (0,), x.shape, (int(n),)), arrays, self.strides)
        return magnitudes(list(samples), self.samples), self.samples

    def counts(self, k: np.ndarray) -> Counts:
        """Return which entry of the sample is the bound, by its rank, and how many entries have
        room. The bound is so low that almost surely at least k entries reach it."""
        expected = k / self.strides
        rank = np.ceil(expected + _LOOSENING * np.sqrt(expected) + _LOOSENING_MIN)
        complete = self.strides == 1  # the sample is the whole array, so the rank is k
        rank = np.where(complete, k, np.minimum(rank, self.samples.lengths)).astype(np.int32)
        most = (rank + _TOLERANCE * np.sqrt(rank) + _TOLERANCE_MIN) * self.strides
        room = np.clip(np.ceil(most), k, self.segments.lengths)
        return Counts(k, rank, room.astype(np.int32))


_MAX_BLOCK = 32
# There are at least this many blocks for each entry to be selected.
_BLOCKS_PER_ENTRY = 4
# The number of candidates beyond k may exceed its mean, for entries in random order, by this many
# standard deviations. The minimum is for means close to 0.
_BLOCK_TOLERANCE, _BLOCK_TOLERANCE_MIN = 6, 8


@dataclasses.dataclass(frozen=True)
class BlockSearch(Search):
    """The search of chunks, with the maxima of blocks of their entries as the summary.

    Args:
      most: the largest k.
    """

    most: int

    @property
    def block(self) -> int:
        """The number of entries of a block, the largest power of two up to 32 that leaves a chunk
        four blocks for each entry to be selected, else 1."""
        blocks = max(1, self.segments.row // (_BLOCKS_PER_ENTRY * self.most))
        return min(_MAX_BLOCK, 1 << (blocks.bit_length() - 1))

    def largest(self, arrays: Sequence[jax.Array], k: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Return the values and indices of the k largest of each segment, as `extract` does, from
        maxima of blocks, or by bisecting all entries if blocks have one entry."""
        if self.block > 1:
            return super().largest(arrays, k)
        # Blocks of a single entry are no summary. Bisect over all entries, which compiles faster.
        words = largest_mask(magnitudes(arrays, self.segments), k, self.segments)
        return self._entries(arrays, _find_set_bits(words, k, self.segments), k)

    def summary(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Segments]:
        """Return the largest magnitude of each block of entries, as rows of int32, and the segments
        that these rows belong to.

        A block has distant entries, because large ones are often adjacent and would share a block.
        """
        block, missing = self.block, -self.segments.row % self.block

        def maxima(m: jax.Array) -> jax.Array:
            m = jnp.pad(m, ((0, 0), (0, missing)), constant_values=-1) if missing else m
            return jnp.max(m.reshape(m.shape[0], block, -1), axis=1)

        found = map(
            lambda rows, x: rows.map(maxima, magnitude(x), fill=-1), self.segments.arrays, arrays
        )
        return jnp.concatenate(list(found)), self.segments

    def counts(self, k: np.ndarray) -> Counts:
        """Return the counts with k as the rank, because at least k entries reach the k-th largest
        maximum, and with room for the entries beyond k."""
        length, block, most = self.segments.row, self.block, self.most
        # If a fraction of the blocks have a maximum above the bound, this fraction of the entries
        # is.
        reached = 1 - (1 - most * block / length) ** (1 / block)
        excess = max(0.0, reached * length - most)
        room = most + excess + _BLOCK_TOLERANCE * math.sqrt(excess) + _BLOCK_TOLERANCE_MIN
        return Counts(k, k, np.full(k.shape, min(length, math.ceil(room)), np.int32))


def num_selected(density: float, lengths: np.ndarray) -> np.ndarray:
    """Return k = max(1, round(density·m)) for segments of m elements, ties to even, int32."""
    return np.maximum(1, np.rint(density * lengths)).astype(np.int32)


def make_search(segments: Segments, k: np.ndarray) -> Search:
    """Return a SampleSearch if segments are whole arrays (chunk None), else a BlockSearch."""
    return SampleSearch(segments) if segments.chunk is None else BlockSearch(segments, int(k.max()))


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the values and the increasing indices of the k entries of largest |x| in a flat array,
    with NaN as the largest and the first among equals.

        indices = the k with largest |x|, the first among equals;  values = x[indices]

    It selects the same entries as `lax.top_k` of |x|, for any k and any data: ties, zeros,
    infinities, and NaN, which counts as larger than infinity. The result is ordered by index. Since
    it does not sort, it is several times faster at n = 10⁷, k = n/1000 on CPU
    (`benchmarks/selection.py`).

    Args:
      x: shape (n,), float32, float16 or bfloat16.
      k: static, 1 ≤ k ≤ n.

    Returns:
      values, shape (k,), dtype of x; indices, shape (k,), int32, increasing.

    Raises:
      TypeError: x is not such an array, or k is not a Python integer.
      ValueError: x is not flat, or k is out of range.

    Source: Floyd & Rivest 1975, "Expected time bounds for selection": a sample gives the bound.

    >>> import jax.numpy as jnp
    >>> values, indices = select_top_k(jnp.array([1.0, -5.0, 0.0, 3.0]), 2)
    >>> values.tolist(), indices.tolist()
    ([-5.0, 3.0], [1, 3])
    """
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise TypeError(f"select_top_k: x must be float32, float16 or bfloat16; got {x.dtype}")
    if x.ndim != 1:
        raise ValueError(f"select_top_k: x must be flat; got shape {x.shape}")
    if checks.count("k", k) > x.size:
        raise ValueError(f"select_top_k: k must be at most the size of x, {x.size}; got {k}")
    search = SampleSearch(Segments((x.size,)))
    values, indices = search.largest([x.astype(jnp.float32)], np.array([k], np.int32))
    return values.astype(x.dtype), indices
