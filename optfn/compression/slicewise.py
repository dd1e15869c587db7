"""The mean over workers of decoded packets, slice by slice: each worker averages one slice.

A worker owns a slice of each leaf. It keeps the residual of the mean of this slice, which its
packets do not send, and sends it later, as every worker does with the residual of its updates.
"""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.compression.feedback import add_feedback
from optfn.compression.gathering import encode_all
from optfn.core.checks import Number
from optfn.core.types import PyTree
from optfn.mesh.collectives.axes import Axes, axis_size
from optfn.mesh.collectives.packets import all_gather_slices, mean_scatter_slices


def slicewise_mean(
    compressors: Sequence[BaseCompressor],
    leaves: Sequence[LeafInExchange],
    axis_name: Axes,
    error_feedback: Number,
) -> list[LeafInExchange]:
    """Send each slice as a packet to its owner, which sends the mean over workers back as a packet,
    and return leaves with these means, residuals and next states.

    Args:
      compressors: the compressor of each leaf.
      leaves: the leaves of one worker. `published` is the residual of the mean of the slice that it
        owns, or an array of all slices.
      axis_name: the mesh axis, or axes, of the workers; it must be bound.
      error_feedback: the factor of that residual.
    """
    workers, worker = axis_size(axis_name), lax.axis_index(axis_name)
    shapes = [slice_shape(leaf.residual.shape, workers) for leaf in leaves]
    states = [leaf.state for leaf in leaves]

    def decode(packets: PyTree) -> list[jax.Array]:
        return list(map(lambda c, *packet: c.decode(*packet), compressors, packets, shapes))

    def subtract_sent(xs: Sequence[jax.Array], packets: PyTree) -> list[jax.Array]:
        return list(map(lambda c, x, packet: c.add_to(x, packet, -1.0), compressors, xs, packets))

    def encode_slices(xs: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        return _unzip(map(lambda c, x, s: c.encode_slices(x, s), compressors, xs, states))

    def encode(xs: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        return _unzip(encode_all(compressors, xs, states))

    # 1. Every worker cuts its accumulated updates into N slices, (N, …).
    slices = [_cut_slices(leaf.residual, workers) for leaf in leaves]
    # 2. Slice i goes to worker i as a packet. The owner has the mean of N decoded slices; the
    #    sender has its N packets.
    means, packets, _ = mean_scatter_slices(slices, encode_slices, decode, axis_name)
    # 3. The sender keeps the difference between its slices and their packets, (N, …).
    residuals = jax.vmap(subtract_sent)(slices, packets)
    # 4. The owner adds the rest of earlier means, which its packets lacked, to this mean.
    published = [_slice_of_owner(leaf, workers, worker) for leaf in leaves]
    totals = [add_feedback(*pair, error_feedback) for pair in zip(means, published, strict=True)]
    # 5. This total goes to all workers as a packet. Each has all N slices decoded, (N, …), the same
    #    bits everywhere; the owner decodes its slice too.
    directions, packets, next_states = all_gather_slices(totals, encode, decode, axis_name)
    # 6. The owner keeps the difference between the total and its packet.
    published = subtract_sent(totals, packets)

    def rebuild(
        leaf: LeafInExchange, direction: jax.Array, residual: jax.Array, state: PyTree, x: jax.Array
    ) -> LeafInExchange:
        direction = _join_slices(direction, leaf.direction.shape)
        x = _replace_slice_of_owner(leaf, x.reshape(-1), worker)
        return LeafInExchange(direction, _join_slices(residual, leaf.residual.shape), state, x)

    return list(map(rebuild, leaves, directions, residuals, next_states, published))


def _unzip(encoded: Iterable[tuple[PyTree, PyTree]]) -> tuple[PyTree, PyTree]:
    """Split pairs of packet and next state into a tuple of packets and a tuple of states."""
    packets, states = zip(*encoded, strict=True)
    return packets, states


def slice_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of one of `count` slices, (rows/count, columns) with leading axes merged if
    count divides the rows, else flat with the size rounded up."""
    rows = math.prod(shape[:-1])
    is_flat = len(shape) < 2 or rows % count
    return (-(-math.prod(shape) // count),) if is_flat else (rows // count, shape[-1])


def _cut_slices(x: jax.Array, count: int) -> jax.Array:
    """Return an array cut into `count` slices, (count, …), with zeros at the end of the last slice
    if count does not divide the size."""
    shape = slice_shape(x.shape, count)
    if x.size % count:
        x = jnp.pad(x.reshape(-1), (0, -x.size % count))
    return x.reshape(count, *shape)


def _join_slices(slices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Join slices to an array of this shape, without the padding: the inverse of `_cut_slices`."""
    size = math.prod(shape)
    return (slices if slices.size == size else slices.reshape(-1)[:size]).reshape(shape)


def _has_all_slices(leaf: LeafInExchange, length: int) -> bool:
    """Tell whether `published` is there and has all slices of a leaf, as from `init` without a
    mesh, and not only one of this length."""
    return leaf.published is not None and leaf.published.size != length


def _slice_of_owner(leaf: LeafInExchange, count: int, worker: jax.Array) -> jax.Array:
    """Return the worker's residual of the mean in the shape of a slice, cut out of `published` if
    that has all slices, else the whole of it."""
    assert leaf.published is not None
    x, shape = leaf.published, slice_shape(leaf.residual.shape, count)
    if _has_all_slices(leaf, math.prod(shape)):
        x = lax.dynamic_index_in_dim(_cut_slices(x, count), worker, keepdims=False)
    return x.reshape(shape)


def _replace_slice_of_owner(leaf: LeafInExchange, x: jax.Array, worker: jax.Array) -> jax.Array:
    """Return `published` with the flat slice x in the worker's place, or x alone if `published` has
    one slice, in both cases with 0 in padding."""
    assert leaf.published is not None
    # Padding would collect the rounding of zeros by stochastic codes, and be published.
    x = jnp.where(worker * x.size + jnp.arange(x.size) < leaf.residual.size, x, 0.0)
    if not _has_all_slices(leaf, x.size):
        return x
    slices = _cut_slices(leaf.published, -(-leaf.published.size // x.size))
    return _join_slices(lax.dynamic_update_index_in_dim(slices, x, worker, 0), leaf.published.shape)
