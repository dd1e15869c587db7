"""Packets: the entries that a worker sends, in one array of 32-bit words.

A packet consists, without gaps, of the scales of the values, 32 bits each; the lower bits of each
index within its segment; the code of each value; and the ends of blocks, 32 bits each. A block is a
range of 2^bits consecutive elements of a segment. If a segment has several blocks, the packet says
for each but the last how many of its entries come before the end of the block. Since indices
increase within a segment, this determines their upper bits.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression import bits
from optfn.compression.segments import RowChunks, Segments
from optfn.compression.values import ValueFormat


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: `k`, an array, cannot be hashed
class PacketFormat:
    """The encoding of the entries of several segments. All of its fields are static.

    Args:
      segments: the segments whose entries are sent: several whole arrays, or the chunks of one.
      k: the number of entries of each segment, int32 (segments,). All chunks but the last have the
        same number, and the last has at most that.
      values: the encoding of a value. An encoding with scales needs chunks.
      index_bits: the number of lower bits of an index, 0 to 32.
    """

    segments: Segments
    k: np.ndarray
    values: ValueFormat
    index_bits: int

    @cached_property
    def count(self) -> int:
        """The number of entries in a packet, over all segments."""
        return int(self.k.sum())

    @property
    def num_bytes(self) -> int:
        """The size of a packet in bytes."""
        return 4 * (self._num_scales + bits.num_words(*self._fields))

    @property
    def _num_scales(self) -> int:
        """The number of scales, one per segment, or 0 for a format without scales."""
        return self.k.size if self.values.has_scale else 0

    @property
    def _fields(self) -> tuple[list[int], list[int]]:
        """The bits per entry and the number of entries of each field after the scales, which are
        the indices, the codes and, if any are sent, the ends of blocks."""
        widths, counts = [self.index_bits, self.values.bits], [self.count, self.count]
        # Mostly there are none: a field of no entries would still widen the digits.
        num_ends = int(self._end_is_sent.sum())
        return ([*widths, 32], [*counts, num_ends]) if num_ends else (widths, counts)

    @cached_property
    def _num_blocks(self) -> np.ndarray:
        """The number of blocks of 2^index_bits elements in each segment; the last may be
        shorter."""
        return -(-self.segments.lengths.astype(np.int64) // (1 << self.index_bits))

    @cached_property
    def _end_is_sent(self) -> np.ndarray:
        """For each block, whether the packet gives its end. The end of a segment's last block is
        known."""
        sent = np.ones(self._num_blocks.sum(), bool)
        sent[np.cumsum(self._num_blocks) - 1] = False
        return sent

    @property
    def _first_block(self) -> np.ndarray:
        """For each entry, the index of the first block of its segment."""
        first = np.cumsum(self._num_blocks) - self._num_blocks
        return np.repeat(first, self.k).astype(np.int32)

    def _scales(self, values: jax.Array) -> jax.Array:
        """Return the float32 scale of each chunk, computed from its values, or an array of shape
        (0,) if the format has no scales."""
        return self.values.scales(values, RowChunks((self.count,), int(self.k[0])))

    def _repeat_scales(self, scales: jax.Array) -> jax.Array:
        """Return the scale of each entry, (count,), or the empty array unchanged if the format has
        no scales."""
        return (
            self.segments.broadcast_to_entries(scales, self.k) if self.values.has_scale else scales
        )

    def round_values(self, values: jax.Array) -> jax.Array:
        """Return the values that a packet of these float32 values decodes to, (count,), without
        making the packet."""
        scales = self._repeat_scales(self._scales(values))
        return self.values.decode(self.values.encode(values, scales), scales)

    def encode(self, values: jax.Array, index: jax.Array) -> jax.Array:
        """Return the packet, uint32 (num_bytes/4,), of entries that are given segment by segment in
        the order of their indices.

        Args:
          values: float32 (count,).
          index: int32 (count,), within the segment, increasing.
        """
        scales = self._scales(values)
        codes = self.values.encode(values, self._repeat_scales(scales))
        fields = [index.astype(jnp.uint32), codes]
        if self._end_is_sent.any():
            block = self._first_block + (index >> self.index_bits)
            # The upper bits of an index follow from the block, so they are cut off here.
            sent = np.flatnonzero(self._end_is_sent).astype(np.int32)
            fields[0] &= np.uint32((1 << self.index_bits) - 1)
            fields.append(jnp.searchsorted(block, sent, side="right").astype(jnp.uint32))
        words = bits.pack_fields(fields, self._fields[0])
        return jnp.concatenate([lax.bitcast_convert_type(scales, jnp.uint32), words])

    def decode(self, packet: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the values of a packet's entries, float32 (count,), and their indices in their
        whole arrays, uint32 (count,)."""
        scales = lax.bitcast_convert_type(packet[: self._num_scales], jnp.float32)
        index, codes, *ends = bits.unpack_fields(packet[self._num_scales :], *self._fields)
        values = self.values.decode(codes, self._repeat_scales(scales))
        if ends:
            # The end of a segment's last block is not sent: k tells it.
            of_segments = np.repeat(np.cumsum(self.k), self._num_blocks).astype(np.int32)
            sent = np.flatnonzero(self._end_is_sent)
            of_blocks = jnp.asarray(of_segments).at[sent].set(ends[0].astype(jnp.int32))
            number = jnp.arange(self.count, dtype=jnp.int32)
            block = jnp.searchsorted(of_blocks, number, side="right").astype(jnp.int32)
            index += (block - self._first_block).astype(jnp.uint32) << np.uint32(self.index_bits)
        if self.segments.chunk is not None:
            starts = self.segments.row_starts.astype(np.uint32)
            index += self.segments.broadcast_to_entries(starts, self.k)
        return values, index

    def split(self, entries: jax.Array) -> list[jax.Array]:
        """Split an array with a value per entry, (count,), into one array for each leaf."""
        return self.segments.split(entries, self.k)

    def add_to(
        self, totals: Sequence[jax.Array], packet: jax.Array, scale: float | jax.Array
    ) -> list[jax.Array]:
        """Return flat arrays with scale times the decoded entries of a packet added at their
        places."""
        values, index = self.decode(packet)

        def add(total: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
            return total.at[index].add(values, indices_are_sorted=True, unique_indices=True)

        return list(map(add, totals, self.split(scale * values), self.split(index)))
