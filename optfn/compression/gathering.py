"""The mean over workers of decoded packets, by one all-gather."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from optfn import mesh
from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.leaves.types import PyTree
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
    xs, states = [leaf.accumulated for leaf in leaves], [leaf.state for leaf in leaves]
    encoded = encode_all(compressors, xs, states)
    packets = [packet for packet, _ in encoded]

    def add(totals: list[jax.Array], packets: PyTree, scale: float) -> list[jax.Array]:
        columns = zip(compressors, totals, packets, strict=True)
        return [compressor.add_to(total, packet, scale) for compressor, total, packet in columns]

    residuals = add(xs, packets, -1.0)
    means = mean_of_packets(packets, [leaf.direction for leaf in leaves], add, axis_name)
    return [
        LeafInExchange(mean, residual.reshape(-1), state)
        for mean, residual, (_, state) in zip(means, residuals, encoded, strict=True)
    ]


def encode_all(
    compressors: Sequence[BaseCompressor], xs: Sequence[jax.Array], states: Sequence[PyTree]
) -> list[tuple[PyTree, PyTree]]:
    """Return packet and next state of each leaf; equal compressors encode their leaves together."""
    encoded: dict[int, tuple[PyTree, PyTree]] = {}
    for i, compressor in enumerate(compressors):
        if i not in encoded:
            equal = [j for j, other in enumerate(compressors) if other == compressor]
            results = compressor.encode_all([xs[j] for j in equal], [states[j] for j in equal])
            encoded |= dict(zip(equal, results, strict=True))
    return [encoded[i] for i in range(len(xs))]


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
    workers = mesh.axis_size(axis_name)
    arrays, structure = jax.tree.flatten(packet)
    gathered = mesh.gather_in_one(arrays, axis_name)

    def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
        of_worker: Any = jax.tree.unflatten(structure, [x[worker] for x in gathered])
        return add(means, of_worker, 1 / workers)

    varying = frozenset().union(*map(mesh.varying_axes, gathered))
    return lax.fori_loop(0, workers, add_worker, [mesh.vary(x, varying) for x in zeros])
