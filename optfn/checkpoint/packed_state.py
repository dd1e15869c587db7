"""Conversion between the state of packed params and the state of the tree, for checkpoints.

On a mesh a per-worker buffer has the shape (N·size,): a slice for each of N workers, with the
elements of all leaves. In the state of the tree each leaf has a slice for each worker instead,
(N·d₀, …), and each scalar leaf is (N,). A Packed may be inside a `PerWorker`, as the residuals of
an exchange are, or have `PerWorker`s as its buffers, as the moments of local steps are.

8-bit moments have one scale for a whole buffer. The type of their state has the trait
`spans_buffers`, and its per-worker buffers are not converted.

The padding that lets devices divide an array is removed, and added again on the way back.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from optfn.core import tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState, PyTree
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.packed import is_unpackable, pack_like, unpack
from optfn.mesh.collectives.axes import join_axes
from optfn.mesh.compilers import memories
from optfn.mesh.state.padded import is_padded, map_padded, pad_like, unwrap_padded
from optfn.mesh.state.per_worker import PerWorker, mark_per_worker
from optfn.mesh.state.placement import count_workers


def is_packed_or_padded(x: object) -> bool:
    """Tell whether `x` is a Packed or a Padded, whose arrays are not leaves of the tree."""
    return is_packed(x) or is_padded(x)


def make_placeholders(state: OptState) -> OptState:
    """Replace the arrays of a state by host arrays of their shapes that take no memory, and return
    typed keys unchanged."""

    def placeholder(x: Leaf) -> Leaf:
        return x if tree.is_key(x) else np.broadcast_to(np.zeros((), x.dtype), x.shape)

    return jax.tree.map(placeholder, state)


def unpack_state(state: OptState) -> OptState:
    """Return a state with an array per leaf instead of buffers, and without padding, except for
    buffers that do not have a value for each element."""
    state = map_padded(unwrap_padded, state)
    workers = count_workers(state)

    def convert(node: PyTree) -> PyTree:
        # Without a count, as in `init`, buffers are one worker's, and `unpack` splits them.
        if workers and isinstance(node, PerWorker):
            return jax.tree.map(partial(_unpack_buffers, workers), node, is_leaf=is_packed)
        if workers and _has_local_buffers(node):
            names = join_axes(*(x.axes for x in node.buffers if isinstance(x, PerWorker)))
            return _unpack_buffers(workers, node, lambda x: mark_per_worker(x, names))
        return unpack(node)

    return jax.tree.map(convert, state, is_leaf=_is_converted_whole)


def pack_state(like: OptState, state: OptState) -> OptState:
    """Pack and pad the leaves of a state where `like` has buffers or padding, unless they are so
    already, as the inverse of `unpack_state`.

    Args:
      like: a state with buffers or padding.
      state: a state of the tree. If it has a Packed or a Padded, that is kept.
    """
    workers = count_workers(like)

    def convert(node: PyTree, leaves: PyTree) -> PyTree:
        is_local = isinstance(node, PerWorker) or _has_local_buffers(node)
        stored = partial(_convert_leaves, workers if is_local else 0)
        return jax.tree.map(stored, node, leaves, is_leaf=is_packed_or_padded)

    return jax.tree.map(convert, like, state, is_leaf=_is_converted_whole)


def _is_converted_whole(x: object) -> bool:
    """Tell whether a node is converted as a whole, because it is packed, padded or per-worker, or
    has scales that span buffers."""
    return is_packed_or_padded(x) or isinstance(x, PerWorker) or traits_of(x).spans_buffers


def _has_local_buffers(x: object) -> bool:
    """Tell whether `x` is a Packed with per-worker buffers."""
    return is_packed(x) and any(isinstance(buffer, PerWorker) for buffer in x.buffers)


def _unwrap(arrays: Sequence[Leaf]) -> list[Leaf]:
    """Take arrays out of their PerWorkers."""
    return [x.value if isinstance(x, PerWorker) else x for x in arrays]


def _convert_leaves(workers: int, like: PyTree, leaves: PyTree) -> PyTree:
    """Pad or pack leaves like `like`, or return them unchanged if they are so already, or if `like`
    is neither or cannot be unpacked.

    Args:
      workers: the number of workers if the arrays of `like` are per-worker, else 0.
      like: a node of a state.
      leaves: the leaves of the tree in its place.
    """
    if not is_packed_or_padded(like) or is_packed_or_padded(leaves):
        return leaves
    # Leaves of a template may lie on the host; leaves of a checkpoint lie on the devices.
    leaves = tree.map_arrays(memories.to_device, leaves)
    if is_padded(like):
        return pad_like(like, leaves)
    if workers:
        arrays = jax.tree.leaves(_pack_buffers(workers, like, leaves))
        # The structure of `like` has the PerWorkers around its buffers.
        return jax.tree.unflatten(jax.tree.structure(like), arrays)
    if not is_unpackable(like):
        return leaves
    # Further leading axes of a buffer, such as the gradients of all batches that asgd keeps.
    lead = max((x.ndim - 1 for x in like.buffers if not tree.is_masked(x)), default=0)
    return pack_like(like.layout, leaves, lead)


def _unpack_buffers(
    workers: int, node: PyTree, of_leaf: Callable[[jax.Array], PyTree] = lambda x: x
) -> PyTree:
    """Unpack a Packed of per-worker buffers, each (workers·size,), or (workers·d₀, size) with
    d₀ values of an element, as the gradients of asgd, or return the node unchanged if it is none,
    or has no value for each element.

    Args:
      workers: the number of workers.
      node: the Packed.
      of_leaf: makes the leaf of the tree from its array, (workers·d₀, …).
    """
    if not is_packed(node):
        return node
    # The buffers of local steps are PerWorkers themselves.
    layout, buffers = node.layout, _unwrap(node.buffers)
    # A worker's elements are together: split by worker first, then by leaf.
    rows = [tree.map_arrays(partial(_split_workers, workers), x) for x in buffers]
    split = Packed(rows, node.frozen, layout)
    if not is_unpackable(split):
        return node
    leaves = layout.structure.flatten_up_to(unpack(split))
    for i in itertools.chain.from_iterable(buffer.leaves for buffer in layout.buffers):
        leaves[i] = tree.map_arrays(lambda x: of_leaf(x.reshape(-1, *x.shape[2:])), leaves[i])
    return layout.structure.unflatten(leaves)


def _split_workers(workers: int, x: jax.Array) -> jax.Array:
    """Return a per-worker array with the worker as its leading axis."""
    return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])


def _pack_buffers(workers: int, like: Packed, leaves: PyTree) -> Packed:
    """Pack a tree of per-worker arrays into buffers like those of `like`, as the inverse of
    `_unpack_buffers`."""
    layout, buffers = like.layout, [x for x in _unwrap(like.buffers) if not tree.is_masked(x)]
    lead = next((_split_workers(workers, x).shape[:-1] for x in buffers), (workers,))
    arrays = _unwrap(layout.structure.flatten_up_to(leaves))
    rows = list(arrays)
    for run in itertools.chain.from_iterable(buffer.runs for buffer in layout.buffers):
        shape = *lead, *run.shape
        for i in run.leaves:
            rows[i] = rows[i] if tree.is_masked(rows[i]) else rows[i].reshape(shape)
    packed = pack_like(layout, layout.structure.unflatten(rows), len(lead))
    buffers = [tree.map_arrays(lambda x: x.reshape(-1, *x.shape[2:]), x) for x in packed.buffers]
    return Packed(buffers, [arrays[i] for i in layout.frozen], layout)
