"""The k entries of largest magnitude, exactly, without a sort.

Several flat arrays are searched together, each for its own k, by one piece of code, so that a model
of many leaves compiles as fast as one:

1. a strided sample of each array, and in it a magnitude that a little more than k entries reach;
2. one pass over each array packs "reaches it" into the bits of 32-bit words;
3. population counts and their running sum say where the candidates are;
4. among the candidates, bisection on the bits of |x| finds the k-th largest exactly.

Where the sample misleads, step 2 takes the exact mask instead: slower, never wrong. Mass ties need
a few passes more, clusters a bisection over everything. Magnitudes are compared as integers, the
bits of |x|, which have the order of the numbers, with NaN above infinity and nothing flushed.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn import checks
from optfn.leaves import slices
from optfn.parallel.mesh import vary, varying_axes

# Arrays are searched in rows of this many entries; a row belongs to one array.
_ROW = 256
_LANES = np.arange(32, dtype=np.uint32)


def magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as int32: integers ≥ 0 in the order of |x|, NaN last."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def pack(mask: jax.Array, multiple: int = 32) -> jax.Array:
    """Return a flat mask as uint32 words: entry 32·i + j is bit j of word i, missing ones 0.

    Args:
      mask: shape (n,), bool.
      multiple: to which n is filled up, itself one of 32.
    """
    whole = mask.size // multiple * multiple
    if whole < mask.size:
        # The end apart: XLA does not vectorize a reduction that it has fused with a padding.
        end = jnp.pad(mask[whole:], (0, whole + multiple - mask.size))
        return jnp.concatenate([pack(mask[:whole]), pack(end)])
    bits = mask.reshape(-1, 32).astype(jnp.uint32) << _LANES
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
    """Return where the n-th set bit of each word is, n from 0, by halving the word five times."""
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


def positions(words: jax.Array, ends: jax.Array, rank: Any) -> jax.Array:
    """Return where the set bit of each rank is, ranks from 0, given `ends` = cumsum(counts)."""
    at = jnp.minimum(jnp.searchsorted(ends, rank, side="right"), words.size - 1)
    word = words[at]
    return at * 32 + nth_bit(word, rank - (ends[at] - _count(word)))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where arrays of these sizes lie when each is padded to whole rows, one after the other."""

    sizes: tuple[int, ...]

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each array."""
        return -(-np.asarray(self.sizes) // _ROW)

    @cached_property
    def owner(self) -> np.ndarray:
        """The array to which each row belongs."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.counts)

    @cached_property
    def starts(self) -> np.ndarray:
        """The slot at which each array starts."""
        return np.concatenate([[0], np.cumsum(self.counts * _ROW)[:-1]]).astype(np.int32)

    @cached_property
    def there(self) -> np.ndarray:
        """How many entries of each row are not padding, (rows, 1)."""
        row = np.arange(self.owner.size) - (self.starts // _ROW)[self.owner]
        left = np.asarray(self.sizes)[self.owner] - _ROW * row
        return np.minimum(left, _ROW).astype(np.int32)[:, None]

    def magnitudes(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the magnitudes of the arrays as rows, (rows, 256), with −1 for padding."""
        m = magnitude(_join(arrays, self.counts * _ROW)).reshape(-1, _ROW)
        return jnp.where(np.arange(_ROW) < self.there, m, -1)

    def totals(self, mask: jax.Array) -> jax.Array:
        """Return the sum over each array of what has one row of numbers for each of its rows."""
        per_row = jnp.sum(mask, axis=1, dtype=jnp.int32)
        return jnp.zeros(len(self.sizes), jnp.int32).at[self.owner].add(per_row)


def _join(arrays: Sequence[jax.Array], sizes: np.ndarray) -> jax.Array:
    """Return the arrays one after the other, each padded with zeros to its size."""
    parts = []
    for x, size in zip(arrays, sizes, strict=True):
        parts.append(x)
        if size > x.size:
            parts.append(jnp.zeros(size - x.size, x.dtype))
    return jnp.concatenate(parts)


def kth_largest(m: jax.Array, k: jax.Array, rows: Rows) -> jax.Array:
    """Return the k-th largest magnitude of each array, bit by bit from the top.

    Args:
      m: magnitudes as rows, padding −1.
      k: int32, one per array, ≥ 1.
      rows: where the arrays lie.
    """

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (1 << (30 - i))
        enough = rows.totals(m >= trial[rows.owner][:, None]) >= k
        return jnp.where(enough, trial, found)

    start = vary(jnp.zeros_like(k), varying_axes(m))
    return lax.fori_loop(0, 31, set_bit, start)


def first_bits(words: jax.Array, n: jax.Array) -> jax.Array:
    """Return each word with its first n set bits only; all of them where it has no more."""
    below = (np.uint32(1) << nth_bit(words, n).astype(jnp.uint32)) - np.uint32(1)
    return jnp.where(n < _count(words), words & below, words)


def top_k_mask(m: jax.Array, kth: jax.Array, k: jax.Array, rows: Rows) -> jax.Array:
    """Return the packed mask of what is above the k-th largest, and of the first that equal it.

    Args:
      m: magnitudes as rows, padding −1.
      kth: the k-th largest of each array. A smaller number that more than k exceed selects those.
      k: int32, one per array, ≥ 1.
      rows: where the arrays lie.
    """
    kth = kth[rows.owner][:, None]
    above, equal = pack((m > kth).reshape(-1)), pack((m == kth).reshape(-1))
    count = _count(equal)
    ends = jnp.cumsum(count)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[rows.starts[1:] // 32 - 1]])
    last = before + k - rows.totals(_count(above).reshape(-1, _ROW // 32))
    wanted = jnp.repeat(last[rows.owner], _ROW // 32) - (ends - count)
    return above | first_bits(equal, jnp.maximum(wanted, 0))


@dataclasses.dataclass(frozen=True)
class Search:
    """The plan of a search: sizes of the arrays and of their samples, all static.

    Args:
      sizes: n of each array.
    """

    sizes: tuple[int, ...]

    @cached_property
    def rows(self) -> Rows:
        """Where the arrays lie."""
        return Rows(self.sizes)

    @cached_property
    def strides(self) -> np.ndarray:
        """The distance of samples: odd, so that they do not stay in one column of a matrix."""
        n = np.asarray(self.sizes)
        return np.maximum(n // np.clip(n // 256, 4096, None), 1) - 1 | 1

    @cached_property
    def samples(self) -> Rows:
        """Where the samples lie."""
        return Rows(tuple(-(-np.asarray(self.sizes) // self.strides)))

    def rank(self, k: Sequence[int]) -> Any:
        """Return the rank in the sample whose magnitude at least k entries reach, by 3.5 sigma."""
        expected = np.asarray(k) / self.strides
        rank = np.ceil(expected + 3.5 * np.sqrt(expected) + 3)
        whole = self.strides == 1  # the sample is everything, the rank is k
        return np.where(whole, k, np.minimum(rank, self.samples.sizes)).astype(np.int32)

    def room(self, k: Sequence[int]) -> Any:
        """Return how many entries may reach that magnitude before the sample counts as bad."""
        rank = self.rank(k)
        most = (rank + 4 * np.sqrt(rank) + 4) * self.strides
        return np.clip(np.ceil(most), k, self.sizes).astype(np.int32)


def candidates(
    arrays: Sequence[jax.Array], k: jax.Array, rank: Any, room: Any, search: Search
) -> jax.Array:
    """Return the packed mask of at least k and at most `room` entries, with the k largest in it.

    k, rank and room, int32 with one entry per array, may be traced: the stages of a ramp share this
    code.

    Returns:
      The masks of all arrays, each padded to whole rows of 256 entries, 8 words.
    """
    samples = [
        lax.slice(x, (0,), x.shape, (int(stride),))
        for x, stride in zip(arrays, search.strides, strict=True)
    ]
    sampled = search.samples.magnitudes(samples)
    low = kth_largest(sampled, rank, search.samples)
    bounds = slices.split(low, [1] * len(arrays))
    reached = [magnitude(x) >= bound for x, bound in zip(arrays, bounds, strict=True)]
    words = jnp.concatenate([pack(mask, _ROW) for mask in reached])
    count = search.rows.totals(_count(words).reshape(-1, _ROW // 32))

    def exact(arrays: Sequence[jax.Array], words: jax.Array) -> jax.Array:
        del words
        m, rows = search.rows.magnitudes(arrays), search.rows
        above = rows.totals(m > low[rows.owner][:, None])
        # Where many are equal to the bound and fewer than k exceed it, it is the k-th largest.
        known = (count >= k) & ((count <= room) | (above < k))
        kth = lax.cond(jnp.all(known), lambda m: low, lambda m: kth_largest(m, k, rows), m)
        return top_k_mask(m, kth, k, rows)

    good = jnp.all((count >= k) & (count <= room))
    return lax.cond(good, lambda arrays, words: words, exact, list(arrays), words)


def extract(
    arrays: Sequence[jax.Array], words: jax.Array, k: Sequence[int], room: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Return values and indices of the k largest of each array, one array after the other.

    Within an array the order is that of the indices.

    Args:
      arrays: the flat arrays.
      words: the packed masks of `candidates`: at least k and at most `room` entries of each array.
      k: static, as is `room`.
      room: how many candidates there may be.
    """
    rows = Rows(tuple(x.size for x in arrays))
    slots = Rows(tuple(int(r) for r in room))
    ends, bounds = _ends(words, rows)

    # Candidate j of an array is bit number bounds[array] + j of all words.
    owner = np.repeat(slots.owner, _ROW)
    rank = bounds[owner] + (np.arange(owner.size, dtype=np.int32) - slots.starts[owner])
    there = rank < bounds[owner + 1]
    index = jnp.where(there, positions(words, ends, rank) - rows.starts[owner], 0)
    # Unsigned, so that JAX need not ask which are negative, in code for each array.
    index = index.astype(jnp.uint32)
    parts = slices.split(index, [int(n) for n in slots.counts * _ROW])
    found = jnp.concatenate([x[i] for x, i in zip(arrays, parts, strict=True)])
    m = jnp.where(there, magnitude(found), -1).reshape(-1, _ROW)
    wanted = jnp.asarray(k, jnp.int32)
    chosen = top_k_mask(m, kth_largest(m, wanted, slots), wanted, slots)
    at = positions(chosen, jnp.cumsum(_count(chosen)), np.arange(sum(k), dtype=np.int32))
    return found[at], index[at].astype(jnp.int32)


def _ends(words: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Return how many candidates there are up to each word, and before each array and in all."""
    ends = jnp.cumsum(_count(words))
    first = jnp.zeros(1, jnp.int32)
    return ends, jnp.concatenate([first, ends[rows.starts[1:] // 32 - 1], ends[-1:]])


def some(
    arrays: Sequence[jax.Array], words: jax.Array, k: Sequence[int], shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return values and indices of k candidates of each array that follow each other, in a circle.

    In the order of `extract`, without a look at which are the largest.

    Args:
      arrays: the flat arrays.
      words: the packed masks of `candidates`.
      k: static.
      shift: int32, ≥ 0, tells with which one to begin: another in each step, or the same entries
        would wait for ever.
    """
    rows = Rows(tuple(x.size for x in arrays))
    ends, bounds = _ends(words, rows)
    wanted, count = np.asarray(k, np.int32), bounds[1:] - bounds[:-1]
    first = shift % count
    again = jnp.maximum(first + wanted - count, 0)  # how many come after the end, at the start

    owner = np.repeat(np.arange(len(k)), wanted)
    place = np.concatenate([np.arange(n, dtype=np.int32) for n in k])
    over = again[owner]
    rank = bounds[owner] + jnp.where(place < over, place, first[owner] + place - over)
    index = positions(words, ends, rank) - rows.starts[owner]
    parts = slices.split(index.astype(jnp.uint32), k)
    found = jnp.concatenate([x[i] for x, i in zip(arrays, parts, strict=True)])
    return found, index


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k entries of largest |x| of a flat array, exactly.

        indices = the k with largest |x|, the first among equals;  values = x[indices]

    Like `lax.top_k` of |x|, for any k and any data (ties, zeros, infinities; NaN counts as larger
    than infinity), but in the order of the indices, and without a sort: at n = 10⁷, k = n/1000 on
    CPU, several times faster (`benchmarks/selection.py`).

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
    rank, room = search.rank([k]), search.room([k])
    words = candidates([wide], jnp.asarray([k], jnp.int32), rank, room, search)
    values, indices = extract([wide], words, [k], room)
    return values.astype(x.dtype), indices
