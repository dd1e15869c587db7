"""Conversion between the state of packed params and the state of the tree, for checkpoints.

On a mesh a per-worker buffer has the shape (N·size,): a slice for each of N workers, with the
elements of all leaves. In the state of the tree each leaf has a slice for each worker instead:

* If a Packed is inside a `PerWorker`, leaves are flat, (N·n,), as `accumulate` keeps them.
* If `PerWorker`s are inside a Packed, leaves are (N·d₀, …) and scalars (N,), as local steps keep
  them.

Some transforms compute over the elements of a whole buffer, such as the scale of 8-bit moments.
The type of their state has the trait `spans_buffers`, and its per-worker buffers are not converted.

The padding that lets devices divide an array is removed, and added again on the way back.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from optfn.core import tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState, PyTree
from optfn.leaves.layout import BufferLayout, PackedLayout
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.packed import fits, pack_like, unpack
from optfn.mesh import joined
from optfn.state.padded import cut, is_padded, map_padded, pad_like
from optfn.state.per_worker import PerWorker, per_worker
from optfn.state.placement import workers_of


def is_stored(x: object) -> bool:
    """Tell whether the arrays of `x` have another form than the leaves of the tree."""
    return is_packed(x) or is_padded(x)


def unpack_state(state: OptState) -> OptState:
    """Return a state with leaves of the tree instead of buffers, and without padding."""
    state = map_padded(cut, state)
    workers = workers_of(state)

    def flat(node: PyTree) -> PyTree:
        if not is_packed(node):
            return node
        return _leaves_of_buffers(node, node.buffers, workers, lambda x: x.reshape(-1))

    def convert(node: PyTree) -> PyTree:
        if workers and isinstance(node, PerWorker):
            return jax.tree.map(flat, node, is_leaf=is_packed)
        if workers and _has_local_buffers(node):
            names = joined(*(x.axes for x in node.buffers if isinstance(x, PerWorker)))
            return _leaves_of_buffers(
                node, _bare(node.buffers), workers,
                lambda x: per_worker(x.reshape(-1, *x.shape[2:]), names),
            )  # fmt: skip
        return unpack(node)

    return jax.tree.map(convert, state, is_leaf=_is_unit)


def pack_state(like: OptState, state: OptState) -> OptState:
    """Return a state with buffers where `like` has them: the inverse of `unpack_state`.

    Args:
      like: a state with buffers or padding.
      state: a state of the tree. If it has a Packed or a Padded, that is kept.
    """
    workers = workers_of(like)

    def pack_local(node: PyTree, leaves: PyTree) -> PyTree:
        if not is_packed(node) or is_packed(leaves):
            return leaves
        arrays = jax.tree.leaves(_buffers_of_leaves(node.layout, leaves, workers))
        return jax.tree.unflatten(jax.tree.structure(node), arrays)

    def convert(node: PyTree, leaves: PyTree) -> PyTree:
        is_local = isinstance(node, PerWorker) or _has_local_buffers(node)
        pack = pack_local if workers and is_local else _pack_one

        def stored(node: PyTree, leaves: PyTree) -> PyTree:
            if is_padded(node):
                return leaves if is_padded(leaves) else pad_like(node, leaves)
            return pack(node, leaves)

        return jax.tree.map(stored, node, leaves, is_leaf=is_stored)

    return jax.tree.map(convert, like, state, is_leaf=_is_unit)


def _is_unit(x: object) -> bool:
    """Tell whether a node of a state is converted as a whole."""
    return is_stored(x) or isinstance(x, PerWorker) or traits_of(x).spans_buffers


def _has_local_buffers(x: object) -> bool:
    return is_packed(x) and any(isinstance(buffer, PerWorker) for buffer in x.buffers)


def _bare(arrays: Sequence[Leaf]) -> list[Leaf]:
    """Return the arrays, taken out of their PerWorkers."""
    return [x.value if isinstance(x, PerWorker) else x for x in arrays]


def _pack_one(like: PyTree, leaves: PyTree) -> PyTree:
    """Return leaves packed like `like`, if that is a Packed whose buffers can be unpacked."""
    if not fits(like) or is_packed(leaves):
        return leaves
    lead = max((x.ndim - 1 for x in like.buffers if not tree.is_masked(x)), default=0)
    return pack_like(like.layout, leaves, lead)


def _leaves_of_buffers(
    packed: Packed,
    buffers: Sequence[Leaf],
    workers: int,
    made: Callable[[jax.Array], PyTree],
) -> PyTree:
    """Return the tree of a Packed, or the Packed itself if it lacks a number for each element.

    Args:
      packed: a Packed of buffers with the slices of all workers.
      buffers: the arrays in it, (workers·size,).
      workers: the number of workers.
      made: makes the leaf of the tree from the slices of all workers, (workers, *shape).
    """

    def is_whole(x: Leaf, buffer: BufferLayout) -> bool:
        return tree.is_masked(x) or np.shape(x) == (workers * buffer.size,)

    layout = packed.layout
    if not all(map(is_whole, buffers, layout.buffers)):
        return packed
    rows = [tree.map_arrays(lambda x: x.reshape(workers, -1), x) for x in buffers]
    frozen = [optax.MaskedNode()] * len(layout.frozen)
    leaves = unpack(Packed(rows, frozen, layout))
    leaves = layout.structure.flatten_up_to(tree.map_arrays(made, leaves))
    for number, x in enumerate(packed.frozen):
        leaves[layout.frozen[number]] = x
    return layout.structure.unflatten(leaves)


def _buffers_of_leaves(layout: PackedLayout, whole: PyTree, workers: int) -> Packed:
    """Return the Packed of arrays of a tree: the inverse of `_leaves_of_buffers`.

    Args:
      layout: the layout of the Packed.
      whole: the tree, of arrays or PerWorkers.
      workers: the number of workers.
    """
    leaves = _bare(layout.structure.flatten_up_to(whole))
    rows = list(leaves)
    for run in itertools.chain.from_iterable(buffer.runs for buffer in layout.buffers):
        for i in run.leaves:
            if not tree.is_masked(rows[i]):
                rows[i] = rows[i].reshape(workers, *run.shape)
    packed = pack_like(layout, layout.structure.unflatten(rows), lead=1)
    buffers = [tree.map_arrays(lambda x: x.reshape(-1), x) for x in packed.buffers]
    return Packed(buffers, [leaves[i] for i in layout.frozen], layout)
