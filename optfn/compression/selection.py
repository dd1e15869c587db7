"""Selection of the k entries of largest magnitude, exactly, without a sort.

One program searches several flat arrays together, each for its own k, so that a model of many
leaves compiles as fast as one of a single leaf:

1. a strided sample of each array gives a bound on |x| that slightly more than k entries reach;
2. one pass over each array packs "reaches the bound" into the bits of 32-bit words: these entries
   are the candidates;
3. population counts and their cumulative sum locate the candidates;
4. bisection on the bits of |x| finds the k-th largest of the candidates exactly.

Where the sample misleads, an exact mask replaces that of step 2: slower, never wrong. Many equal
entries cost a few more passes, clustered ones a bisection over whole arrays. Magnitudes are
compared as integers, the bits of |x|: they have the order of the numbers, with NaN above infinity,
and subnormal numbers are not flushed to zero.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn import checks
from optfn.leaves import slices
from optfn.parallel.mesh import vary, varying_axes

Array = jax.Array | np.ndarray

# Arrays are searched in rows of this many entries; a row belongs to one array.
_ROW = 256
_LANES = np.arange(32, dtype=np.uint32)

# The sample has one entry in 256, and 4096 or more; smaller arrays are their own sample.
_SAMPLE_STRIDE = 256
_MIN_SAMPLE = 4096
# By how many standard deviations the bound is loosened, so that at least k entries reach it, and by
# how many more the number of candidates may exceed what is expected before the sample is rejected.
# The addends serve small k, where the count is not close to normal.
_LOOSENING, _LOOSENING_MIN = 3.5, 3
_TOLERANCE, _TOLERANCE_MIN = 4, 4


def magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as int32: integers ≥ 0 in the order of |x|, NaN last."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def pack_bits(mask: jax.Array, multiple: int = 32) -> jax.Array:
    """Return a flat mask as uint32 words: entry 32·i + j is bit j of word i.

    Args:
      mask: shape (n,), bool.
      multiple: n is padded with False to a multiple of this, itself a multiple of 32.
    """
    unpadded = mask.size // multiple * multiple
    if unpadded < mask.size:
        # The tail separately: XLA does not vectorize a reduction that it has fused with a padding.
        tail = jnp.pad(mask[unpadded:], (0, unpadded + multiple - mask.size))
        return jnp.concatenate([pack_bits(mask[:unpadded]), pack_bits(tail)])
    bits = mask.reshape(-1, 32).astype(jnp.uint32) << _LANES
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def nth_bit(word: jax.Array, n: Array) -> jax.Array:
    """Return the position of the n-th set bit of each word, n from 0, by five halvings."""
    at = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        low = _count(word & np.uint32((1 << width) - 1))
        above = n >= low
        n = jnp.where(above, n - low, n)
        word = jnp.where(above, word >> np.uint32(width), word)
        at += jnp.where(above, width, 0)
    return at


def _count(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def positions(words: jax.Array, ends: jax.Array, rank: Array) -> jax.Array:
    """Return the position of the set bit of each rank, from 0, where ends = cumsum(bit counts)."""
    at = jnp.minimum(jnp.searchsorted(ends, rank, side="right"), words.size - 1)
    word = words[at]
    return at * 32 + nth_bit(word, rank - (ends[at] - _count(word)))


@dataclasses.dataclass(frozen=True)
class PaddedRows:
    """The layout of several arrays, each padded to a whole number of rows, one after the other."""

    sizes: tuple[int, ...]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each array."""
        return -(-np.asarray(self.sizes) // _ROW)

    @cached_property
    def owner(self) -> np.ndarray:
        """The array to which each row belongs."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.counts)

    @cached_property
    def starts(self) -> np.ndarray:
        """The position of the first entry of each array."""
        return np.concatenate([[0], np.cumsum(self.counts * _ROW)[:-1]]).astype(np.int32)

    @cached_property
    def valid(self) -> np.ndarray:
        """The number of entries of each row that are not padding, (rows, 1)."""
        row = np.arange(self.owner.size) - (self.starts // _ROW)[self.owner]
        remaining = np.asarray(self.sizes)[self.owner] - _ROW * row
        return np.minimum(remaining, _ROW).astype(np.int32)[:, None]

    def magnitudes(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the magnitudes of the arrays as rows, (rows, 256), with −1 for padding."""
        m = magnitude(_join(arrays, self.counts * _ROW)).reshape(-1, _ROW)
        return jnp.where(np.arange(_ROW) < self.valid, m, -1)

    def totals(self, per_row: jax.Array) -> jax.Array:
        """Sum a row-wise array, (rows, …), per owning array."""
        per_row = jnp.sum(per_row, axis=1, dtype=jnp.int32)
        return jnp.zeros(len(self.sizes), jnp.int32).at[self.owner].add(per_row)

    def num_set(self, words: jax.Array) -> jax.Array:
        """Return the number of entries of each array that a packed mask has."""
        return self.totals(_count(words).reshape(-1, _ROW // 32))


def _join(arrays: Sequence[jax.Array], sizes: np.ndarray) -> jax.Array:
    """Concatenate the arrays, each padded with zeros to its size."""
    parts = []
    for x, size in zip(arrays, sizes, strict=True):
        parts.append(x)
        if size > x.size:
            parts.append(jnp.zeros(size - x.size, x.dtype))
    return jnp.concatenate(parts)


def kth_largest(m: jax.Array, k: Array, rows: PaddedRows) -> jax.Array:
    """Return the k-th largest magnitude of each array, found bit by bit from the highest.

    Args:
      m: magnitudes as rows, padding −1.
      k: int32, one per array, ≥ 1.
      rows: the layout of the arrays.
    """

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (1 << (30 - i))
        enough = rows.totals(m >= trial[rows.owner][:, None]) >= k
        return jnp.where(enough, trial, found)

    start = vary(jnp.zeros_like(k), varying_axes(m))
    return lax.fori_loop(0, 31, set_bit, start)


def first_bits(words: jax.Array, n: jax.Array) -> jax.Array:
    """Return each word with only its first n set bits, or all of them where it has fewer."""
    below = (np.uint32(1) << nth_bit(words, n).astype(jnp.uint32)) - np.uint32(1)
    return jnp.where(n < _count(words), words & below, words)


def top_k_mask(m: jax.Array, kth: jax.Array, k: jax.Array, rows: PaddedRows) -> jax.Array:
    """Return the packed mask of the entries above the k-th largest, and the first that equal it.

    Args:
      m: magnitudes as rows, padding −1.
      kth: the k-th largest of each array.
      k: int32, one per array, ≥ 1.
      rows: the layout of the arrays.
    """
    kth = kth[rows.owner][:, None]
    above, equal = pack_bits((m > kth).reshape(-1)), pack_bits((m == kth).reshape(-1))
    return filled_up(above, equal, k, rows)


def filled_up(above: jax.Array, equal: jax.Array, k: jax.Array, rows: PaddedRows) -> jax.Array:
    """Return the packed mask `above` with the first of `equal`, up to k entries of each array.

    Where `above` alone has more than k, all of these are selected.
    """
    count = _count(equal)
    ends = jnp.cumsum(count)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[rows.starts[1:] // 32 - 1]])
    last = before + k - rows.num_set(above)
    wanted = jnp.repeat(last[rows.owner], _ROW // 32) - (ends - count)
    return above | first_bits(equal, jnp.maximum(wanted, 0))


@dataclasses.dataclass(frozen=True)
class Search:
    """The sizes of the arrays to search and of their samples; static.

    Args:
      sizes: the number of entries of each array.
    """

    sizes: tuple[int, ...]

    @cached_property
    def rows(self) -> PaddedRows:
        """The layout of the arrays."""
        return PaddedRows(self.sizes)

    @cached_property
    def strides(self) -> np.ndarray:
        """The stride of each sample: odd, so that it does not stay in one column of a matrix."""
        n = np.asarray(self.sizes)
        return np.maximum(n // np.clip(n // _SAMPLE_STRIDE, _MIN_SAMPLE, None), 1) - 1 | 1

    @cached_property
    def samples(self) -> PaddedRows:
        """The layout of the samples."""
        return PaddedRows(tuple(-(-np.asarray(self.sizes) // self.strides)))

    def rank(self, k: Sequence[int]) -> np.ndarray:
        """Return the rank in the sample of the bound, a magnitude that at least k entries reach."""
        expected = np.asarray(k) / self.strides
        rank = np.ceil(expected + _LOOSENING * np.sqrt(expected) + _LOOSENING_MIN)
        complete = self.strides == 1  # the sample is the array, and the rank is k
        return np.where(complete, k, np.minimum(rank, self.samples.sizes)).astype(np.int32)

    def max_candidates(self, k: Sequence[int]) -> np.ndarray:
        """Return how many entries may reach the bound before the sample is rejected."""
        rank = self.rank(k)
        most = (rank + _TOLERANCE * np.sqrt(rank) + _TOLERANCE_MIN) * self.strides
        return np.clip(np.ceil(most), k, self.sizes).astype(np.int32)


def candidates(
    arrays: Sequence[jax.Array],
    k: jax.Array,
    rank: Array,
    max_candidates: Array,
    search: Search,
) -> jax.Array:
    """Return the packed mask of between k and `max_candidates` entries, the k largest among them.

    k, rank and max_candidates, int32 with one entry per array, may be traced, so that all steps of
    a sparsity ramp share this program.

    Returns:
      The masks of all arrays, each padded to whole rows of 256 entries, 8 words.
    """
    samples = [
        lax.slice(x, (0,), x.shape, (int(stride),))
        for x, stride in zip(arrays, search.strides, strict=True)
    ]
    sampled = search.samples.magnitudes(samples)
    bounds = kth_largest(sampled, rank, search.samples)
    rows = search.rows
    words = _packed_where(jnp.greater_equal, arrays, bounds)
    count = rows.num_set(words)

    def bisected(arrays: Sequence[jax.Array], words: jax.Array, above: jax.Array) -> jax.Array:
        m = rows.magnitudes(arrays)
        return top_k_mask(m, kth_largest(m, k, rows), k, rows)

    def exact(arrays: Sequence[jax.Array], words: jax.Array) -> jax.Array:
        above = _packed_where(jnp.greater, arrays, bounds)
        # Where many entries equal the bound and fewer than k exceed it, it is the k-th largest.
        known = (count >= k) & ((count <= max_candidates) | (rows.num_set(above) < k))
        return lax.cond(
            jnp.all(known),
            lambda arrays, words, above: filled_up(above, words & ~above, k, rows),
            bisected,
            arrays,
            words,
            above,
        )

    accepted = jnp.all((count >= k) & (count <= max_candidates))
    return lax.cond(accepted, lambda arrays, words: words, exact, list(arrays), words)


def _packed_where(
    compare: Callable[[jax.Array, jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    bounds: jax.Array,
) -> jax.Array:
    """Return the packed mask of the magnitudes that compare so with the bound of their array."""
    bound_of = slices.split(bounds, [1] * len(arrays))
    masks = [compare(magnitude(x), bound) for x, bound in zip(arrays, bound_of, strict=True)]
    return jnp.concatenate([pack_bits(mask, _ROW) for mask in masks])


def extract(
    arrays: Sequence[jax.Array],
    words: jax.Array,
    k: Sequence[int],
    max_candidates: Sequence[int] | np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Return values and indices of the k largest of each array, one array after the other.

    Within an array the indices increase.

    Args:
      arrays: the flat arrays.
      words: the packed masks that `candidates` gives.
      k: static, as is `max_candidates`.
      max_candidates: the largest number of candidates of each array.
    """
    rows = PaddedRows(tuple(x.size for x in arrays))
    slots = PaddedRows(tuple(int(n) for n in max_candidates))
    ends, first = _cumulative_counts(words, rows)

    # Candidate j of an array is set bit number first[array] + j of all words.
    owner = np.repeat(slots.owner, _ROW)
    rank = first[owner] + (np.arange(owner.size, dtype=np.int32) - slots.starts[owner])
    valid = rank < first[owner + 1]
    index = jnp.where(valid, positions(words, ends, rank) - rows.starts[owner], 0)
    # Unsigned, so that JAX adds no code per array that tests for negative indices.
    index = index.astype(jnp.uint32)
    parts = slices.split(index, [int(n) for n in slots.counts * _ROW])
    values = jnp.concatenate([x[i] for x, i in zip(arrays, parts, strict=True)])
    m = jnp.where(valid, magnitude(values), -1).reshape(-1, _ROW)
    num_selected = jnp.asarray(k, jnp.int32)
    selected = top_k_mask(m, kth_largest(m, num_selected, slots), num_selected, slots)
    at = positions(selected, jnp.cumsum(_count(selected)), np.arange(sum(k), dtype=np.int32))
    return values[at], index[at].astype(jnp.int32)


def _cumulative_counts(words: jax.Array, rows: PaddedRows) -> tuple[jax.Array, jax.Array]:
    """Return the number of set bits up to each word; and before each array, then their total."""
    ends = jnp.cumsum(_count(words))
    zero = jnp.zeros(1, jnp.int32)
    return ends, jnp.concatenate([zero, ends[rows.starts[1:] // 32 - 1], ends[-1:]])


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k entries of largest |x| of a flat array, exactly.

        indices = the k with largest |x|, the first among equals;  values = x[indices]

    Like `lax.top_k` of |x|, for any k and any data (ties, zeros, infinities; NaN counts as larger
    than infinity), but ordered by index and without a sort: at n = 10⁷, k = n/1000 on CPU it is
    several times faster (`benchmarks/selection.py`).

    Args:
      x: shape (n,), float32, float16 or bfloat16.
      k: static, 1 ≤ k ≤ n.

    Returns:
      values, shape (k,), dtype of x; indices, shape (k,), int32, increasing.

    Raises:
      TypeError: x is not such an array, or k not a Python integer.
      ValueError: x is not flat, or k not in its range.

    Source: Floyd & Rivest 1975, "Expected time bounds for selection": a sample bounds the k-th.

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
    wide = x.astype(jnp.float32)
    search = Search((x.size,))
    rank, max_candidates = search.rank([k]), search.max_candidates([k])
    words = candidates([wide], jnp.asarray([k], jnp.int32), rank, max_candidates, search)
    values, indices = extract([wide], words, [k], max_candidates)
    return values.astype(x.dtype), indices
