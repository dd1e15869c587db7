"""The mean over workers of decoded packets, by one all-gather."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compilers.groups import map_groups, varying_axes
from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.core.types import PyTree
from optfn.mesh import Axes
from optfn.sparse.rows import Rows

# (totals, packet, scale) -> totals + scale times the decoded packet.
Adder = Callable[[list[jax.Array], PyTree, float], list[jax.Array]]


class Gathered(NamedTuple):
    """The packets of all workers, as one all-gather per dtype brings them.

    buckets: arrays (N, size), of all packets side by side.
    restored: the function from buckets to packets, with a leading axis.
    """

    buckets: list[jax.Array]
    restored: Callable[[Sequence[jax.Array]], PyTree]

    @classmethod
    def of(cls, packet: PyTree, axis_name: Axes) -> "Gathered":
        """Gather the packet of each worker, a tree of arrays."""
        buckets, restored = mesh.buckets_of(jax.tree.map(lambda x: x[None], packet))
        return cls([mesh.all_gather(x[0], axis_name) for x in buckets], restored)

    @property
    def packets(self) -> PyTree:
        """The packets, each array with a leading axis of workers."""
        return self.restored(self.buckets)

    def mean(self, zeros: list[jax.Array], add: Adder) -> list[jax.Array]:
        """Return the mean over workers of the arrays that are encoded in their packets.

        Packets are added in the order of the workers, so that all replicas get the same bits. Each
        is taken out of the buckets when it is added, so that there are no copies of all.

        Args:
          zeros: zeros in the shapes of the arrays, to which the mean may be added in place.
          add: adds a multiple of a decoded packet to arrays.
        """
        workers = len(self.buckets[0]) if self.buckets else 0
        # Flat, a bucket has no padding between workers. Places beyond 2³¹ are no int32.
        buckets = [x if x.size >= 2**31 else x.reshape(-1) for x in self.buckets]

        def row(x: jax.Array, worker: jax.Array) -> jax.Array:
            if x.ndim > 1:
                return lax.dynamic_index_in_dim(x, worker)
            size = x.size // workers
            return lax.dynamic_slice_in_dim(x, worker * size, size)[None]

        def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
            rows = [row(x, worker) for x in buckets]
            packet = jax.tree.map(lambda x: x[0], self.restored(rows))
            return add(means, packet, 1 / workers)

        varying = frozenset().union(*map(varying_axes, self.buckets))
        return lax.fori_loop(0, workers, add_worker, [mesh.vary(x, varying) for x in zeros])


def mean_by_all_gather(
    compressors: Sequence[BaseCompressor], leaves: Sequence[LeafInExchange], axis_name: Axes
) -> list[LeafInExchange]:
    """Encode the leaves, gather the packets of all workers, and decode them.

    Args:
      compressors: the compressor of each leaf.
      leaves: the leaves of one worker.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    xs = [leaf.residual for leaf in leaves]
    encoded = encode_all(compressors, xs, [leaf.state for leaf in leaves])
    packets = [packet for packet, _ in encoded]
    residuals = list(map(lambda c, x, packet: c.add_to(x, packet, -1.0), compressors, xs, packets))
    gathered = Gathered.of(packets, axis_name)
    zeros = {i: x.direction for i, x in enumerate(leaves) if not isinstance(x.direction, Rows)}

    def add(totals: list[jax.Array], packets: PyTree, scale: float) -> list[jax.Array]:
        columns = zip(zeros, totals, strict=True)
        return [compressors[i].add_to(total, packets[i], scale) for i, total in columns]

    means = gathered.mean(list(zeros.values()), add)
    directions: dict[int, jax.Array | Rows] = dict(zip(zeros, means, strict=True))
    if len(zeros) < len(leaves):
        packets_of_all = gathered.packets
        for i, leaf in enumerate(leaves):
            if isinstance(leaf.direction, Rows):
                directions[i] = _mean_of_entries(compressors[i], packets_of_all[i], leaf.direction)
    return [
        LeafInExchange(directions[i], residual, encoded[i][1])
        for i, residual in enumerate(residuals)
    ]


def empty_rows(compressor: BaseCompressor, shape: tuple[int, ...], axis_name: Axes) -> Rows | None:
    """Return Rows of zeros with a place for each entry of all workers' packets of a leaf.

    None where packets have no entries, or so many that an array costs less than to sort them.
    """
    size, number = math.prod(shape), compressor.num_entries(math.prod(shape))
    count = mesh.axis_size(axis_name) * (number or 0)
    if not count or count * _SORTED > size:
        return None
    return Rows(jnp.full(count, size, jnp.int32), jnp.zeros(count), size, unique=True, view=shape)


# To sort an entry takes as long as a pass of an update over so many elements.
_SORTED = 64


def _mean_of_entries(compressor: BaseCompressor, packets: PyTree, like: Rows) -> Rows:
    """Return the mean over workers as Rows, each entry once: the bits are those of the array."""
    indices, values = jax.vmap(lambda packet: compressor.entries(packet, like.num_rows))(packets)
    workers = indices.shape[0]
    indices, values = indices.reshape(-1).astype(jnp.int32), (1 / workers) * values.reshape(-1)
    return Rows(indices, values, like.num_rows, parts=workers, view=like.view).merged()


def encode_all(
    compressors: Sequence[BaseCompressor], xs: Sequence[jax.Array], states: Sequence[PyTree]
) -> list[tuple[PyTree, PyTree]]:
    """Return packet and next state of each leaf; equal compressors encode their leaves together."""

    def encode(group: list[int]) -> list[tuple[PyTree, PyTree]]:
        compressor = compressors[group[0]]
        return compressor.encode_all([xs[i] for i in group], [states[i] for i in group])

    return map_groups(encode, range(len(xs)), lambda i: compressors[i])
