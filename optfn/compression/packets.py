"""The wire of Deep Gradient Compression: the sent entries of all leaves in one packet of words.

    float32:   the bits of each value, then each index: 8 bytes per entry
    bfloat16:  value·2¹⁶ + index mod 2¹⁶ in one word, and where each block of 65,536 indices ends in
               the packet, but for the last of a leaf: 4 bytes per entry, and 4 per full block

Indices count within a leaf. They must increase in it: that is what lets 16 bits tell them.
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
from optfn.parallel.mesh import AxisName, all_gather, vary, varying_axes

FORMATS = ("float32", "bfloat16")
_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a packet looks like: static.

    Args:
      sizes: elements of each leaf.
      k: entries sent of each leaf.
      format: "float32" or "bfloat16", of the values.
    """

    sizes: tuple[int, ...]
    k: tuple[int, ...]
    format: str = "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes of a worker's packet."""
        if self.format == "float32":
            return 8 * sum(self.k)
        return 4 * (sum(self.k) + int(self._told.sum()))

    def exceeds_all_reduce(self, num_workers: int) -> bool:
        """Tell whether gathering packets moves more than a ring all-reduce of whole leaves.

        (N − 1)·num_bytes > 2·(N − 1)/N·4·n for each worker.
        """
        return self.num_bytes * num_workers > 8 * sum(self.sizes)

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Blocks of each leaf."""
        return -(-np.asarray(self.sizes) // _BLOCK)

    @cached_property
    def _first_block(self) -> np.ndarray:
        """The number of the first block of the leaf of each entry."""
        first = np.cumsum(self._blocks) - self._blocks
        return np.repeat(first, self.k).astype(np.int32)

    @cached_property
    def _told(self) -> np.ndarray:
        """For each block, whether the packet says where it ends; known are the ends of leaves."""
        told = np.ones(self._blocks.sum(), bool)
        told[np.cumsum(self._blocks) - 1] = False
        return told

    def rounded(self, values: jax.Array) -> jax.Array:
        """Return the values, float32, as they arrive."""
        if self.format == "float32":
            return values
        # By the bits: XLA may drop a rounding to bfloat16 and back.
        return _from_upper(_upper(values))

    def encode(self, values: jax.Array, indices: jax.Array) -> jax.Array:
        """Return the packet of entries, leaf by leaf: float32 (K,), int32 (K,) -> uint32 (P,)."""
        index = indices.astype(jnp.uint32)
        if self.format == "float32":
            return jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint32), index])
        words = _upper(values) | (index & np.uint32(_BLOCK - 1))
        block = self._first_block + indices // _BLOCK
        told = np.flatnonzero(self._told).astype(np.int32)
        ends = jnp.searchsorted(block, told, side="right").astype(jnp.uint32)
        return jnp.concatenate([words, ends])

    def decode(self, packet: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return values and indices of a packet: uint32 (P,) -> float32 (K,), uint32 (K,)."""
        total = sum(self.k)
        if self.format == "float32":
            values = lax.bitcast_convert_type(packet[:total], jnp.float32)
            return values, packet[total:]
        words = packet[:total]
        leaf_ends = np.repeat(np.cumsum(self.k), self._blocks).astype(np.int32)
        told = np.flatnonzero(self._told)
        ends = jnp.asarray(leaf_ends).at[told].set(packet[total:].astype(jnp.int32))
        block = jnp.searchsorted(ends, np.arange(total, dtype=np.int32), side="right")
        block = (block.astype(jnp.int32) - self._first_block).astype(jnp.uint32)
        return _from_upper(words), block * np.uint32(_BLOCK) + (words & np.uint32(_BLOCK - 1))

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Return the part of each leaf of what has one number per entry, on the last axis."""
        return slices.split(x, self.k)


def _upper(values: jax.Array) -> jax.Array:
    """Return the words whose upper half is the value rounded to bfloat16, ties to even."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # A finite value stays finite: beyond the largest bfloat16 it is cut, not rounded up.
    finite = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F7F8000)
    return jnp.where(finite, bits + rounding, bits) & np.uint32(0xFFFF0000)


def _from_upper(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words & np.uint32(0xFFFF0000), jnp.float32)


def mean_of_sent(
    values: jax.Array, indices: jax.Array, wire: Wire, axis_name: AxisName
) -> list[jax.Array]:
    """Return for each leaf the mean over workers of what they sent, float32, flat.

    One all-gather. Workers are added in their order, so that all replicas get the same bits.

    Args:
      values: float32 (K,), as `Wire.rounded` gives them.
      indices: int32 (K,), increasing within each leaf.
      wire: what a packet looks like.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    packets = all_gather(wire.encode(values, indices), axis_name)
    workers = packets.shape[0]

    def add(worker: jax.Array, means: Sequence[jax.Array]) -> list[jax.Array]:
        values, indices = wire.decode(packets[worker])
        return [
            mean.at[i].add(v, indices_are_sorted=True, unique_indices=True)
            for mean, v, i in zip(
                means, wire.split(values / workers), wire.split(indices), strict=True
            )
        ]

    zeros = [vary(jnp.zeros(n, jnp.float32), varying_axes(packets)) for n in wire.sizes]
    return lax.fori_loop(0, workers, add, zeros)


def rows_of_sent(
    values: jax.Array, indices: jax.Array, wire: Wire, axis_name: AxisName
) -> list[Rows]:
    """Return the same means as Rows of one entry, a part for each worker: nothing is made dense."""
    packets = all_gather(wire.encode(values, indices), axis_name)
    workers = packets.shape[0]
    values, indices = jax.vmap(wire.decode)(packets)
    parts = (wire.split(x) for x in (indices.astype(jnp.int32), values / workers))
    return [
        Rows(i.reshape(-1), v.reshape(-1), n, parts=workers)
        for n, i, v in zip(wire.sizes, *parts, strict=True)
    ]


def no_rows(wire: Wire, workers: int) -> list[Rows]:
    """Return Rows as `rows_of_sent` gives them that add nothing."""
    return [
        Rows(jnp.full(workers * k, n, jnp.int32), jnp.zeros(workers * k), n, parts=workers)
        for n, k in zip(wire.sizes, wire.k, strict=True)
    ]
