"""The compressor that sends the largest entries of each chunk of a leaf."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from optfn.compression.compressors import ShownAsCall, show_call
from optfn.compression.k_largest import make_search, num_selected
from optfn.compression.packet_format import PacketFormat
from optfn.compression.segments import Segments
from optfn.compression.values import BFLOAT16, FLOAT32, ValueFormat
from optfn.core import checks
from optfn.core.types import PyTree

VALUES = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "int8": ValueFormat(8, True),
    "int2": ValueFormat(2, True),
}


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(ShownAsCall):
    """See `top_k`."""

    density: float
    chunk: int | None
    values: str

    bias = 1.0  # an entry that is never among the largest is never sent

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the empty tuple, because the compressor keeps no state."""
        return ()

    def encode(self, x: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the packet of the k largest |x| of each chunk, uint32 (words,), which is empty for
        an empty leaf, and the state unchanged.

        `packet_format` describes the format.
        """
        return self.encode_all([x], [state])[0]

    def encode_all(
        self, xs: Sequence[jax.Array], states: Sequence[PyTree]
    ) -> list[tuple[jax.Array, PyTree]]:
        """Return the packet and the unchanged state of each leaf, found by one search of all leaves
        together, where an empty leaf has an empty packet."""
        flat = [jnp.asarray(x).reshape(-1) for x in xs]
        # An empty array has no chunk to search.
        found = iter(self._packets([x for x in flat if x.size]))
        packets = [next(found) if x.size else jnp.zeros(0, jnp.uint32) for x in flat]
        return list(zip(packets, states, strict=True))

    def _packets(self, flat: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the packet of each flat leaf, not empty, from one search of all leaves, or [] if
        there are none."""
        # One search for all leaves: to compile it once per leaf would take a minute.
        if not flat:
            return []
        segments = Segments(tuple(x.size for x in flat), self.chunk)
        k = num_selected(self.density, segments.lengths)
        values, index = make_search(segments, k).largest(flat, k)
        sizes = [x.size for x in flat]
        return list(map(self._packet, sizes, segments.split(values, k), segments.split(index, k)))

    def encode_slices(self, xs: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the packets (N, words) of the N slices of a leaf, (N, n), encoded in a loop, and
        the state unchanged.

        With vmap, the search would run its slow branch for each slice.
        """
        return jax.lax.map(lambda x: self.encode(x, state)[0], xs), state

    @partial(jax.jit, static_argnums=(0, 1))
    def _packet(self, size: int, values: jax.Array, index: jax.Array) -> jax.Array:
        """Return the packet of one leaf's selected values and their indices, by a program that is
        compiled once for all leaves of one size."""
        return self.format(size).encode(values, index)

    def format(self, size: int) -> PacketFormat:
        """Return the packet format of a leaf with `size` ≥ 1 elements, which has its chunks, the k
        of each, and as few bits of an index as the longest chunk needs."""
        segments = Segments((size,), self.chunk)
        k = num_selected(self.density, segments.lengths)
        index_bits = (int(segments.lengths.max()) - 1).bit_length()
        return PacketFormat(segments, k, VALUES[self.values], index_bits)

    def decode(self, packet: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 leaf of this shape that has the values of a packet at their places and
        zero elsewhere."""
        return self.add_to(jnp.zeros(shape, jnp.float32), packet, 1.0)

    @partial(jax.jit, static_argnums=0)
    def add_to(self, total: jax.Array, packet: jax.Array, scale: float | jax.Array) -> jax.Array:
        """Return total + scale·decode(packet), computed only at the entries that were sent, or
        `total` unchanged if it is empty."""
        if not total.size:
            return total
        (added,) = self.format(total.size).add_to([total.reshape(-1)], packet, scale)
        return added.reshape(total.shape)

    def num_entries(self, size: int) -> int:
        """Return how many entries a packet of a leaf of this size has, 0 for an empty leaf."""
        return self.format(size).count if size else 0

    def entries(self, packet: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Return the increasing indices in the flat leaf, uint32, and the float32 values of the
        entries in a packet."""
        values, index = self.format(size).decode(packet)
        return index, values

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the packet's bytes for a leaf of this shape, 0 for an empty leaf."""
        size = math.prod(shape)
        return self.format(size).num_bytes if size else 0


@show_call
def top_k(density: float, *, chunk: int | None = 4096, values: str = "float32") -> TopK:
    """Return a compressor for `exchange` that sends of each chunk the fraction `density` of largest
    magnitude, at least one entry, and decodes the rest as 0.

        of each chunk of m entries the k = max(1, round(density·m)) of largest |x|, the lower
        index at ties

    A packet has for each entry its index within the chunk, in ⌈log₂ min(chunk, n)⌉ bits, and its
    value, without gaps between them.

    Args:
      density: the fraction of entries that is sent, in (0, 1].
      chunk: the number of consecutive entries in a chunk, ≥ 1; None: the whole leaf. The last chunk
        of a leaf may be shorter.
      values: how values are encoded. "float32", exactly; "bfloat16"; "int8", as x/s rounded, ties
        to even, s = max|x|/127; or "int2", as the nearest of ±s/3 and ±s, with s as in
        `quantize(2)`. The last two have a float32 scale s per chunk, computed from the entries
        sent.

    Bytes of a leaf: ∑k·(index bits + value bits) bits in whole 4-byte words, and 4 bytes per chunk
    for "int8" and "int2". No state.

    Source: SparseLoCo, arXiv 2508.15706, which sends 64 entries of each 4,096 in 2 bits.

    >>> top_k(1 / 64, values="int2").num_bytes((4096,))
    116
    """
    if not checks.is_host_number(density):
        raise TypeError(
            "density must be a Python number, because it decides the shapes of packets; "
            f"got {density!r}"
        )
    return TopK(
        float(checks.number("density", density, checks.SHARE)),
        None if chunk is None else checks.count("chunk", chunk),
        checks.choice("values", values, tuple(VALUES)),
    )
