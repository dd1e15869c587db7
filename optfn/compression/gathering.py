"""The mean over workers of what they send of several leaves, by one all-gather of packets."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compression.compressors import Compressor, add_decoded, encode_all
from optfn.leaves import numerics
from optfn.leaves.types import PyTree
from optfn.mesh import AxisName


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


def mean_by_all_gather(
    leaves: Sequence[PendingLeaf], axis_name: AxisName, peer_clip: bool
) -> list[SentLeaf]:
    """Encode the leaves, gather the packets of all workers, and decode them.

    The sum goes over workers in their order, so that all replicas get the same bits.

    Args:
      leaves: the leaves of one worker.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
      peer_clip: whether what a worker sent of a leaf is scaled to the median norm over workers,
        where it is longer.
    """
    compressors = [leaf.compressor for leaf in leaves]
    encoded = encode_all(compressors, [leaf.x for leaf in leaves], [leaf.state for leaf in leaves])
    packets, states = [packet for packet, _ in encoded], [state for _, state in encoded]
    residuals = [
        add_decoded(c, leaf.x, packet, -1.0)
        for c, leaf, packet in zip(compressors, leaves, packets, strict=True)
    ]
    workers = mesh.axis_size(axis_name)
    weights = jnp.full((workers, len(leaves)), 1 / workers, jnp.float32)
    if peer_clip:
        pairs = zip(leaves, packets, strict=True)
        sent = [leaf.compressor.decode(packet, leaf.x.shape) for leaf, packet in pairs]
        weights *= clip_factors([numerics.norm(x) for x in sent], axis_name)
    arrays, structure = jax.tree.flatten(packets)
    gathered = mesh.gather_in_one(arrays, axis_name)

    def add_worker(worker: jax.Array, means: Sequence[jax.Array]) -> list[jax.Array]:
        packets = jax.tree.unflatten(structure, [x[worker] for x in gathered])
        columns = compressors, means, packets, weights[worker]
        return [add_decoded(*column) for column in zip(*columns, strict=True)]

    varying = [mesh.varying_axes(x) for x in gathered]
    zeros = [mesh.vary(leaf.zeros, frozenset().union(*varying)) for leaf in leaves]
    means = lax.fori_loop(0, workers, add_worker, zeros)
    return list(map(SentLeaf, means, residuals, states))


def clip_factors(norms: Sequence[jax.Array], axis_name: AxisName) -> jax.Array:
    """Return min(1, median over workers of the norm / its norm), (workers, leaves).

    Args:
      norms: those of one worker, a scalar per leaf.
      axis_name: the mesh axis, or axes, of the workers.
    """
    of_all = mesh.all_gather(jnp.stack(norms), axis_name)
    median = jnp.median(of_all, axis=0)
    return jnp.where(of_all > median, median / of_all, 1.0)
