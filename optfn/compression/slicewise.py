"""The mean over workers of decoded packets, by parts: each worker averages one slice.

A worker owns a slice of each leaf. It keeps the part of the mean that its packets do not send, and
sends that later, as every worker does with its residual.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.compression.feedback import add_feedback
from optfn.compression.gathering import encode_all
from optfn.core.checks import Number
from optfn.core.types import PyTree
from optfn.mesh import Axes
from optfn.parallel.owners import all_from_owners, mean_at_owners


def slicewise_mean(
    compressors: Sequence[BaseCompressor],
    leaves: Sequence[LeafInExchange],
    axis_name: Axes,
    error_feedback: Number,
) -> list[LeafInExchange]:
    """Send packets of slices to their owners, and packets of the means back.

    Args:
      compressors: the compressor of each leaf.
      leaves: the leaves of one worker. `published` is the rest that it keeps of the slice that it
        owns, or an array of all slices.
      axis_name: the mesh axis, or axes, over which to exchange; it must be bound.
      error_feedback: the factor of that rest.
    """
    workers, own = mesh.axis_size(axis_name), lax.axis_index(axis_name)
    lengths = [-(-leaf.residual.size // workers) for leaf in leaves]

    def decode(packets: PyTree) -> list[jax.Array]:
        columns = zip(compressors, packets, lengths, strict=True)
        return [compressor.decode(packet, (n,)) for compressor, packet, n in columns]

    def rest(xs: list[jax.Array], packets: PyTree) -> list[jax.Array]:
        columns = zip(compressors, xs, packets, strict=True)
        return [compressor.add_to(x, packet, -1.0) for compressor, x, packet in columns]

    def encode_slices(xs: list[jax.Array]) -> tuple[list[PyTree], list[PyTree]]:
        columns = zip(compressors, xs, leaves, strict=True)
        return _unzipped([c.encode_slices(x, leaf.state) for c, x, leaf in columns])

    def encode(xs: list[jax.Array]) -> tuple[list[PyTree], list[PyTree]]:
        return _unzipped(encode_all(compressors, xs, [leaf.state for leaf in leaves]))

    slices = [_slices(leaf.residual, workers) for leaf in leaves]
    means, packets, _ = mean_at_owners(slices, encode_slices, decode, axis_name)
    residuals = jax.vmap(rest)(slices, packets)

    kept = [_own_slice(leaf, workers, own) for leaf in leaves]
    totals = [add_feedback(*pair, error_feedback) for pair in zip(means, kept, strict=True)]
    wholes, packets, states = all_from_owners(totals, encode, decode, axis_name)
    kept = rest(totals, packets)
    columns = zip(leaves, wholes, residuals, states, kept, strict=True)
    return [
        LeafInExchange(
            _without_padding(whole, leaf).reshape(leaf.direction.shape),
            _without_padding(residual, leaf),
            state,
            _with_own_slice(leaf, x, own),
        )
        for leaf, whole, residual, state, x in columns
    ]


def _unzipped(encoded: list[tuple[PyTree, PyTree]]) -> tuple[list[PyTree], list[PyTree]]:
    """Return the packets, and the next states."""
    return [packet for packet, _ in encoded], [state for _, state in encoded]


def _slices(x: jax.Array, count: int) -> jax.Array:
    """Return a flat array as `count` slices, (count, n), padded with zeros."""
    return jnp.pad(x, (0, -x.size % count)).reshape(count, -1)


def _without_padding(slices: jax.Array, leaf: LeafInExchange) -> jax.Array:
    return slices.reshape(-1)[: leaf.residual.size]


def _is_whole(leaf: LeafInExchange, length: int) -> bool:
    """Tell whether a worker has an array for all slices of a leaf, as after `init` without a mesh.

    The worker then uses its own slice of this array.
    """
    return leaf.published is not None and leaf.published.size != length


def _own_slice(leaf: LeafInExchange, count: int, own: jax.Array) -> jax.Array:
    """Return the rest of the mean that a worker keeps for the slice that it owns."""
    assert leaf.published is not None
    if not _is_whole(leaf, -(-leaf.residual.size // count)):
        return leaf.published
    return lax.dynamic_index_in_dim(_slices(leaf.published, count), own, keepdims=False)


def _with_own_slice(leaf: LeafInExchange, x: jax.Array, own: jax.Array) -> jax.Array:
    """Return `published` of a leaf with x as the worker's own slice; padding is set to 0."""
    assert leaf.published is not None
    places = own * x.size + jnp.arange(x.size)
    x = jnp.where(places < leaf.residual.size, x, 0.0)
    if not _is_whole(leaf, x.size):
        return x
    slices = _slices(leaf.published, -(-leaf.published.size // x.size))
    return _without_padding(lax.dynamic_update_index_in_dim(slices, x, own, 0), leaf)
