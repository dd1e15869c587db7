"""The mean over workers of decoded packets, by one all-gather."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.core.types import PyTree
from optfn.leaves.groups import map_groups, varying_axes
from optfn.leaves.rows import Rows
from optfn.mesh import Axes

# (totals, packet, scale) -> totals + scale times the decoded packet.
Adder = Callable[[list[jax.Array], PyTree, float], list[jax.Array]]


def mean_by_all_gather(
    compressors: Sequence[BaseCompressor], leaves: Sequence[LeafInExchange], axis_name: Axes
) -> list[LeafInExchange]:
    """Encode the leaves, gather the packets of all workers, and decode them.

    Args:
      compressors: the compressor of each leaf.
      leaves: the leaves of one worker.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    xs = [leaf.accumulated for leaf in leaves]
    encoded = encode_all(compressors, xs, [leaf.state for leaf in leaves])
    packets = [packet for packet, _ in encoded]
    residuals = list(map(lambda c, x, packet: c.add_to(x, packet, -1.0), compressors, xs, packets))
    gathered = mesh.gather_in_one(packets, axis_name)
    zeros = {i: x.direction for i, x in enumerate(leaves) if not isinstance(x.direction, Rows)}

    def add(totals: list[jax.Array], packets: PyTree, scale: float) -> list[jax.Array]:
        columns = zip(zeros, totals, packets, strict=True)
        return [compressors[i].add_to(total, packet, scale) for i, total, packet in columns]

    means = _mean_of_gathered([gathered[i] for i in zeros], list(zeros.values()), add, axis_name)
    directions: dict[int, jax.Array | Rows] = dict(zip(zeros, means, strict=True))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.direction, Rows):
            directions[i] = _mean_of_entries(compressors[i], gathered[i], leaf.direction)
    return [
        LeafInExchange(directions[i], residual.reshape(-1), encoded[i][1])
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


def mean_of_packets(
    packet: PyTree, zeros: list[jax.Array], add: Adder, axis_name: Axes
) -> list[jax.Array]:
    """Return the mean over workers of the arrays that are encoded in their packets.

    Packets are added in the order of the workers, so that all replicas get the same bits.

    Args:
      packet: the packet of one worker, a tree of arrays.
      zeros: zeros in the shapes of the arrays, to which the mean may be added in place.
      add: adds a multiple of a decoded packet to arrays.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    return _mean_of_gathered(mesh.gather_in_one(packet, axis_name), zeros, add, axis_name)


def _mean_of_gathered(
    packets: PyTree, zeros: list[jax.Array], add: Adder, axis_name: Axes
) -> list[jax.Array]:
    workers = mesh.axis_size(axis_name)

    def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
        return add(means, jax.tree.map(lambda x: x[worker], packets), 1 / workers)

    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(packets)))
    return lax.fori_loop(0, workers, add_worker, [mesh.vary(x, varying) for x in zeros])
