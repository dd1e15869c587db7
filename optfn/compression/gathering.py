"""The mean over workers of what packets stand for, by one all-gather."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax

from optfn.compression.compressors import Compressor, add_decoded, encode_all
from optfn.leaves.types import PyTree
from optfn.parallel import mesh
from optfn.parallel.mesh import AxisName

# (totals, packet, scale) -> totals, to which scale times the decoded packet is added.
Adder = Callable[[list[jax.Array], PyTree, float], list[jax.Array]]


class PendingLeaf(NamedTuple):
    """A leaf to be sent: its compressor, what has accumulated, and the compressor's state.

    zeros: zeros like x, to which the mean may be added in place.
    """

    compressor: Compressor
    x: jax.Array
    state: PyTree
    zeros: jax.Array


class SentLeaf(NamedTuple):
    """A leaf after the exchange: the mean over workers, what stays on this one, and the state."""

    mean: jax.Array
    residual: jax.Array
    state: PyTree


def mean_by_all_gather(leaves: Sequence[PendingLeaf], axis_name: AxisName) -> list[SentLeaf]:
    """Encode the leaves, gather the packets of all workers, and decode them.

    Args:
      leaves: the leaves of one worker.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    compressors = [leaf.compressor for leaf in leaves]
    encoded = encode_all(compressors, [leaf.x for leaf in leaves], [leaf.state for leaf in leaves])
    packets, states = [packet for packet, _ in encoded], [state for _, state in encoded]

    def add(totals: list[jax.Array], packets: PyTree, scale: float) -> list[jax.Array]:
        columns = zip(compressors, totals, packets, strict=True)
        return [add_decoded(c, total, packet, scale) for c, total, packet in columns]

    residuals = add([leaf.x for leaf in leaves], packets, -1.0)
    means = mean_of_packets(packets, [leaf.zeros for leaf in leaves], add, axis_name)
    return list(map(SentLeaf, means, residuals, states))


def mean_of_packets(
    packet: PyTree, zeros: list[jax.Array], add: Adder, axis_name: AxisName
) -> list[jax.Array]:
    """Return the mean over workers of the arrays that their packets stand for.

    The sum goes over workers in their order, so that all replicas get the same bits.

    Args:
      packet: what one worker sends, a tree of arrays.
      zeros: zeros of the shapes of the arrays, to which the mean may be added in place.
      add: adds a multiple of a decoded packet to arrays.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
    """
    workers = mesh.axis_size(axis_name)
    arrays, structure = jax.tree.flatten(packet)
    gathered = mesh.gather_in_one(arrays, axis_name)

    def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
        return add(means, jax.tree.unflatten(structure, [x[worker] for x in gathered]), 1 / workers)

    varying = frozenset().union(*map(mesh.varying_axes, gathered))
    return lax.fori_loop(0, workers, add_worker, [mesh.vary(x, varying) for x in zeros])
