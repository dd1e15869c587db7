"""Segments of flat arrays: whole arrays, or chunks of consecutive entries in C order."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from optfn.mesh.compilers import xla

# Segments that are whole arrays consist of rows of this many entries.
_ROW = 256


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a flat array. All of its fields are static.

    Args:
      size: the number of elements of the array; an empty array has no chunks.
      length: the number of elements of a chunk. The last one may be shorter, even if it is the only
        one.
    """

    size: int
    length: int

    @property
    def count(self) -> int:
        """The number of chunks, 0 for an empty array."""
        return -(-self.size // self.length)

    @property
    def last_length(self) -> int:
        """The number of elements of the last chunk."""
        return self.size - (self.count - 1) * self.length

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of elements of each chunk, (count,)."""
        lengths = np.full(self.count, self.length, np.int32)
        # A slice, because an empty array has no last chunk.
        lengths[-1:] = self.last_length
        return lengths

    def map(
        self,
        fn: Callable[..., jax.Array],
        x: jax.Array,
        *per_chunk: jax.Array | np.ndarray,
        fill: float = 0,
    ) -> jax.Array:
        """Return fn(rows, *per_chunk), with an entry per chunk along its first axis, for a flat
        array cut into rows (chunks, length), the last one padded with `fill`.

        A shorter last chunk has a separate call of `fn`, because padding the whole array would copy
        it.
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

    def broadcast(self, per_chunk: jax.Array) -> jax.Array:
        """Repeat the value of each chunk, (count,), for each of its elements, (size,)."""
        rows = jnp.broadcast_to(per_chunk[:, None], (self.count, self.length))
        return rows.reshape(-1)[: self.size]


def chunks_of(size: int, chunk: int | None) -> Chunks:
    """Return the chunks of an array of this size, each at most `chunk` long, or one chunk of the
    whole array if `chunk` is None."""
    # At least 1: an empty array then has no chunks, and their number is no division by 0.
    return Chunks(size, max(1, size if chunk is None else min(chunk, size)))


@dataclasses.dataclass(frozen=True)
class RowChunks:
    """The chunks of a leaf in whole rows of its last axis, if a chunk is no shorter than a row.
    Otherwise rows are cut, as in the flat array.

    Whole rows are reduced and scaled where they lie, so that no compiler lays the leaf out anew.

    Args:
      shape: the shape of the leaf.
      chunk: the most elements of a chunk; None: the whole leaf is one.
    """

    shape: tuple[int, ...]
    chunk: int | None

    @cached_property
    def flat(self) -> Chunks:
        """The chunks of the flat array, each of as many whole rows as fit in `chunk`, or of `chunk`
        entries of a longer row."""
        chunks = chunks_of(math.prod(self.shape), self.chunk)
        if not self.rows:
            return chunks
        return dataclasses.replace(chunks, length=self.rows * self.shape[-1])

    @cached_property
    def rows(self) -> int:
        """The number of whole rows in a chunk, or 0 if a row has several chunks, the leaf is empty
        or it is a scalar."""
        size = math.prod(self.shape)
        return chunks_of(size, self.chunk).length // self.shape[-1] if size and self.shape else 0

    def map(self, fn: Callable[[jax.Array, "RowChunks"], jax.Array], x: jax.Array) -> jax.Array:
        """Reduce x by `fn` to one value for each chunk, (count,), or an empty array for an empty
        leaf.

        `fn` gets x whole, with its chunks. On a CPU, where all views of x are one array, or if no
        chunk has several rows, it gets one row per chunk, and a shorter last chunk by itself.
        """

        def reduce_each(x: jax.Array) -> jax.Array:
            flat, length = x.reshape(-1), self.flat.length
            end = flat.size // length * length
            views = flat[:end].reshape(-1, length), flat[end:].reshape(1, -1)
            found = [fn(view, RowChunks(view.shape, length)) for view in views if view.size]
            return jnp.concatenate(found) if len(found) > 1 else found[0]

        if self.rows < 2:
            return reduce_each(x) if x.size else jnp.zeros(0, jnp.float32)
        return xla.call_for_platform(reduce_each, lambda x: fn(x, self), x)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of each chunk, (count,), in the dtype of x, which must hold whole chunks,
        as `map` passes it."""
        return self._reduce_rows(x, partial(jnp.sum, dtype=x.dtype))

    def max(self, x: jax.Array) -> jax.Array:
        """Return the largest entry of each chunk, (count,), of entries that must be ≥ 0, because
        padding counts as 0."""
        return self._reduce_rows(x, jnp.max)

    def _reduce_rows(self, x: jax.Array, of_axis: Callable[..., jax.Array]) -> jax.Array:
        """Return each chunk reduced by `of_axis`, first within its rows and then over them, with
        zeros in place of the missing rows of a shorter last chunk."""
        of_rows = xla.reduce_rows(x, of_axis).reshape(-1)
        if self.rows == 1:
            return of_rows
        of_rows = jnp.pad(of_rows, (0, -of_rows.size % self.rows))
        return of_axis(of_rows.reshape(-1, self.rows), axis=1)

    def broadcast(self, per_chunk: jax.Array) -> jax.Array:
        """Return the value of each chunk, (count,), repeated for each row of the leaf, (…, 1), or
        for each element if a row has several chunks."""
        if not self.rows:
            return self.flat.broadcast(per_chunk).reshape(self.shape)
        rows = math.prod(self.shape[:-1])
        return Chunks(rows, self.rows).broadcast(per_chunk).reshape(*self.shape[:-1], 1)


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of several flat arrays, as rows, in the order of the arrays. All of its fields
    are static.

    Each row belongs to one segment. The last row of a segment is padded.

    Args:
      sizes: the number of elements of each array.
      chunk: the length of a segment, which is then one row; None: each array is one segment.
    """

    sizes: tuple[int, ...]
    chunk: int | None = None

    @cached_property
    def arrays(self) -> list[Chunks]:
        """For each array, the `Chunks` that cut it into rows of one length for all arrays; the last
        row of an array may be shorter."""
        longest = max(self.sizes, default=1)
        row = _ROW if self.chunk is None else min(self.chunk, longest)
        return [Chunks(size, row) for size in self.sizes]

    @property
    def row(self) -> int:
        """The length of a row."""
        return self.arrays[0].length

    @property
    def words(self) -> int:
        """The number of 32-bit words that one row takes in a packed mask."""
        return -(-self.row // 32)

    @property
    def first_word(self) -> np.ndarray:
        """The first word of each segment in a packed mask, int32 (segments,)."""
        return self.first_row * np.int32(self.words)

    @property
    def num_per_array(self) -> list[int]:
        """The number of segments of each array, 1 if `chunk` is None, else its number of chunks."""
        return [1 if self.chunk is None else rows.count for rows in self.arrays]

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """The number of entries of each row that are not padding, (rows,)."""
        return np.concatenate([rows.lengths for rows in self.arrays])

    @property
    def first_segment(self) -> np.ndarray:
        """The first segment of each array, (arrays,)."""
        return np.cumsum(self.num_per_array) - self.num_per_array

    @cached_property
    def num_rows(self) -> np.ndarray:
        """The number of rows of each segment, (segments,), which is 1 for each if segments are
        chunks."""
        counts = [rows.count for rows in self.arrays]
        return np.array(counts) if self.chunk is None else np.ones(sum(counts), np.int64)

    @cached_property
    def owner(self) -> np.ndarray:
        """The segment that each row belongs to, (rows,)."""
        return np.repeat(np.arange(self.num_rows.size, dtype=np.int32), self.num_rows)

    @cached_property
    def first_row(self) -> np.ndarray:
        """The first row of each segment, (segments,)."""
        return (np.cumsum(self.num_rows) - self.num_rows).astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of entries of each segment, (segments,)."""
        return np.asarray(self.sizes, np.int64) if self.chunk is None else self.row_lengths

    @cached_property
    def row_starts(self) -> np.ndarray:
        """The index of the first entry of each row in its array, (rows,)."""
        starts = [np.arange(rows.count, dtype=np.int32) * rows.length for rows in self.arrays]
        return np.concatenate(starts)

    def broadcast_to_rows(self, per_segment: jax.Array) -> jax.Array:
        """Repeat the value of each segment, (segments,), for each of its rows, (rows, 1)."""
        return (per_segment if self.chunk is not None else per_segment[self.owner])[:, None]

    def broadcast_to_words(self, per_segment: jax.Array) -> jax.Array:
        """Repeat the value of each segment, (segments,), for each word of a packed mask, flat."""

        def repeat(per_segment: jax.Array) -> jax.Array:
            return jnp.repeat(self.broadcast_to_rows(per_segment), self.words)

        def spread(per_segment: jax.Array) -> jax.Array:
            # To lay out rows of 8 words anew takes the compiler of a TPU seconds.
            counts = (self.num_rows * self.words).tolist()
            return jnp.concatenate(list(map(jnp.broadcast_to, per_segment, counts)))

        if self.chunk is not None:
            return repeat(per_segment)
        return xla.call_for_platform(repeat, spread, per_segment)

    def broadcast_to_entries(self, per_segment: jax.Array | np.ndarray, k: np.ndarray) -> jax.Array:
        """Repeat the value of each segment for each of its k entries, (∑k,).

        It is broadcast, because a constant of this size would take seconds to compile.

        Args:
          per_segment: (segments,).
          k: (segments,). All chunks of an array but the last have the same k, and the last has at
            most that.
        """
        counts = np.split(k, self.first_segment[1:])
        numbers = xla.split(jnp.asarray(per_segment), self.num_per_array)
        spread = map(lambda k, x: Chunks(int(k.sum()), int(k[0])).broadcast(x), counts, numbers)
        return jnp.concatenate(list(spread))

    def split(self, entries: jax.Array, k: np.ndarray) -> list[jax.Array]:
        """Return an array of the k entries of each segment, (∑k,), split into one array for each
        original array."""
        return xla.split(entries, np.add.reduceat(k, self.first_segment).tolist())

    def sum_segments(self, per_row: jax.Array) -> jax.Array:
        """Return the sum over each segment of the values of its rows, int32 (segments,), or the
        values unchanged if segments are chunks, which are one row each."""
        if self.chunk is not None:
            return per_row
        if len(self.sizes) == 1:
            # Under vmap, XLA's CPU compiler counts one number alone in a scatter to a single
            # element, where the indices are constants (openxla/xla issue 48716).
            return jnp.sum(per_row, dtype=jnp.int32, keepdims=True)
        return jnp.zeros(len(self.sizes), jnp.int32).at[self.owner].add(per_row)

    def pad_arrays(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the arrays joined as rows, (rows, row), with zeros at the end of the last row of
        each array."""
        pieces = []
        for x, rows in zip(arrays, self.arrays, strict=True):
            pieces.append(x)
            if missing := rows.length - rows.last_length:
                pieces.append(jnp.zeros(missing, x.dtype))
        # One concatenation of all pieces: a pad per array would copy each array twice.
        return jnp.concatenate(pieces).reshape(-1, self.row)
