"""Packets: the entries that a worker sends of all leaves, in one array of 32-bit words.

    float32:   the bits of each value, then each index: 8 bytes per entry
    bfloat16:  value·2¹⁶ + index mod 2¹⁶ in one word, then for each block of 65,536 indices where it
               ends in the packet, except for the last block of a leaf: 4 bytes per entry, and 4 per
               full block

Indices count within a leaf and increase, which is why 16 bits suffice for them.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.leaves import slices
from optfn.leaves.rows import Rows
from optfn.mesh import AxisName, all_gather, vary, varying_axes

VALUE_DTYPES = ("float32", "bfloat16")
_BLOCK = 1 << 16  # indices that the lower half of a word can tell apart
_UPPER_HALF = np.uint32(0xFFFF0000)
_LOWER_HALF = np.uint32(0x0000FFFF)


@dataclasses.dataclass(frozen=True)
class PacketFormat:
    """The encoding of a packet; static.

    Args:
      sizes: the number of elements of each leaf.
      k: the number of entries sent of each leaf.
      value_dtype: "float32" or "bfloat16".
    """

    sizes: tuple[int, ...]
    k: tuple[int, ...]
    value_dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        """Size of one worker's packet in bytes."""
        if self.value_dtype == "float32":
            return 8 * sum(self.k)
        return 4 * (sum(self.k) + int(self._end_is_sent.sum()))

    def exceeds_all_reduce(self, num_workers: int) -> bool:
        """Tell whether gathering packets moves more bytes than a ring all-reduce of the leaves.

        Per worker: (N − 1)·num_bytes > 2·(N − 1)/N·4·n.
        """
        return self.num_bytes * num_workers > 8 * sum(self.sizes)

    @cached_property
    def _num_blocks(self) -> np.ndarray:
        """The number of blocks of each leaf."""
        return -(-np.asarray(self.sizes, np.int64) // _BLOCK)

    @cached_property
    def _first_block(self) -> np.ndarray:
        """For each entry, the number of the first block of its leaf."""
        first = np.cumsum(self._num_blocks) - self._num_blocks
        return np.repeat(first, self.k).astype(np.int32)

    @cached_property
    def _end_is_sent(self) -> np.ndarray:
        """For each block, whether the packet says where it ends; the ends of leaves are known."""
        sent = np.ones(self._num_blocks.sum(), bool)
        sent[np.cumsum(self._num_blocks) - 1] = False
        return sent

    def rounded(self, values: jax.Array) -> jax.Array:
        """Return float32 values as the receiver decodes them."""
        if self.value_dtype == "float32":
            return values
        # On the bits: XLA may remove a cast to bfloat16 and back.
        return from_upper_half(to_upper_half(values))

    def encode(self, values: jax.Array, indices: jax.Array) -> jax.Array:
        """Return the packet of entries, leaf by leaf: float32 (K,), int32 (K,) -> uint32 (P,)."""
        index = indices.astype(jnp.uint32)
        if self.value_dtype == "float32":
            return jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint32), index])
        words = to_upper_half(values) | (index & _LOWER_HALF)
        block = self._first_block + indices // _BLOCK
        blocks = np.flatnonzero(self._end_is_sent).astype(np.int32)
        ends = jnp.searchsorted(block, blocks, side="right").astype(jnp.uint32)
        return jnp.concatenate([words, ends])

    def decode(self, packet: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return values and indices of a packet: uint32 (P,) -> float32 (K,), uint32 (K,)."""
        total = sum(self.k)
        if self.value_dtype == "float32":
            values = lax.bitcast_convert_type(packet[:total], jnp.float32)
            return values, packet[total:]
        words = packet[:total]
        leaf_ends = np.repeat(np.cumsum(self.k), self._num_blocks).astype(np.int32)
        blocks = np.flatnonzero(self._end_is_sent)
        ends = jnp.asarray(leaf_ends).at[blocks].set(packet[total:].astype(jnp.int32))
        block = jnp.searchsorted(ends, np.arange(total, dtype=np.int32), side="right")
        block = (block.astype(jnp.int32) - self._first_block).astype(jnp.uint32)
        return from_upper_half(words), block * np.uint32(_BLOCK) + (words & _LOWER_HALF)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Split per-entry values, which lie on the last axis, by leaf."""
        return slices.split(x, self.k)


def to_upper_half(values: jax.Array) -> jax.Array:
    """Return words whose upper half is the value rounded to bfloat16, ties to even."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # A finite value stays finite: one above the largest bfloat16 is truncated, not rounded up.
    finite = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F7F8000)
    return jnp.where(finite, bits + rounding, bits) & _UPPER_HALF


def from_upper_half(words: jax.Array) -> jax.Array:
    """Return the bfloat16 values in the upper halves of words, as float32."""
    return lax.bitcast_convert_type(words & _UPPER_HALF, jnp.float32)


def mean_of_sent(
    values: jax.Array, indices: jax.Array, packet_format: PacketFormat, axis_name: AxisName
) -> list[jax.Array]:
    """Return for each leaf the mean over workers of what they sent, a flat float32 array.

    One all-gather. The sum goes over workers in their order, so that all replicas get the same
    bits.

    Args:
      values: float32 (K,), as `PacketFormat.rounded` gives them.
      indices: int32 (K,), increasing within each leaf.
      packet_format: the encoding of a packet.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    packets = all_gather(packet_format.encode(values, indices), axis_name)
    workers = packets.shape[0]

    def add(worker: jax.Array, means: Sequence[jax.Array]) -> list[jax.Array]:
        values, indices = packet_format.decode(packets[worker])
        parts = packet_format.split(values / workers), packet_format.split(indices)
        return [
            mean.at[i].add(v, indices_are_sorted=True, unique_indices=True)
            for mean, v, i in zip(means, *parts, strict=True)
        ]

    varying = varying_axes(packets)
    zeros = [vary(jnp.zeros(n, jnp.float32), varying) for n in packet_format.sizes]
    return lax.fori_loop(0, workers, add, zeros)


def rows_of_sent(
    values: jax.Array, indices: jax.Array, packet_format: PacketFormat, axis_name: AxisName
) -> list[Rows]:
    """Return the means of `mean_of_sent` as Rows of one entry each, one part per worker.

    No array of the size of a leaf is made.
    """
    packets = all_gather(packet_format.encode(values, indices), axis_name)
    workers = packets.shape[0]
    values, indices = jax.vmap(packet_format.decode)(packets)
    parts = (packet_format.split(x) for x in (indices.astype(jnp.int32), values / workers))
    return [
        Rows(i.reshape(-1), v.reshape(-1), n, parts=workers)
        for n, i, v in zip(packet_format.sizes, *parts, strict=True)
    ]


def empty_rows(packet_format: PacketFormat, workers: int) -> list[Rows]:
    """Return Rows of the shapes that `rows_of_sent` gives, with padding only."""
    return [
        Rows(jnp.full(workers * k, n, jnp.int32), jnp.zeros(workers * k), n, parts=workers)
        for n, k in zip(packet_format.sizes, packet_format.k, strict=True)
    ]
