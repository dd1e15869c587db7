"""The state of packed params as that of the tree, and back: so it is named, saved and loaded.

On a mesh a buffer that is a worker's own has the parts of N workers, each with the elements of all
leaves, (N·size,). In the state of the tree each leaf has the parts of N workers:

* of a Packed inside a `PerWorker` they are flat, (N·n,), as `accumulate` keeps them;
* of a Packed of `PerWorker`s they are (N·d₀, …), of scalars (N,), as local steps keep them.

Some transforms make something of the elements of a whole buffer, such as blocks with a scale. The
type of their state declares `spans_buffers=True`, and workers' own buffers in it stay as they are.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from optfn.leaves import tree
from optfn.leaves.layout import PackedLayout
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.packed import fits, pack_like, unpack
from optfn.leaves.types import Leaf, OptState, PyTree
from optfn.parallel.per_worker import PerWorker
from optfn.parallel.placement import workers_of


def holds_packed(x: PyTree) -> bool:
    """Tell whether there is a Packed in a tree."""
    return any(map(is_packed, jax.tree.leaves(x, is_leaf=is_packed)))


def unpack_state(state: OptState) -> OptState:
    """Return a state with the leaves of the tree in the place of buffers."""
    workers = workers_of(state)

    def flat(node: PyTree) -> PyTree:
        return _leaves_of_buffers(node, node.buffers, workers, _flat) if is_packed(node) else node

    def convert(node: PyTree) -> PyTree:
        if workers and isinstance(node, PerWorker):
            return jax.tree.map(flat, node, is_leaf=is_packed)
        if workers and _is_of_own_buffers(node):
            return _leaves_of_buffers(node, _bare(node.buffers), workers, _along_first_axis)
        return unpack(node)

    return jax.tree.map(convert, state, is_leaf=_is_unit)


def pack_state(like: OptState, state: OptState) -> OptState:
    """Return a state with buffers where the state `like` has them: the inverse of `unpack_state`.

    Args:
      like: a state with buffers.
      state: a state of the tree; where it has a Packed itself, that is taken as it is.
    """
    workers = workers_of(like)

    def flat(node: PyTree, leaves: PyTree) -> PyTree:
        if not is_packed(node) or is_packed(leaves):
            return leaves
        return _buffers_of_leaves(node.layout, leaves, workers, lambda x: x)

    def convert(node: PyTree, below: PyTree) -> PyTree:
        if workers and isinstance(node, PerWorker):
            return jax.tree.map(flat, node, below, is_leaf=is_packed)
        if workers and _is_of_own_buffers(node) and not is_packed(below):
            return _buffers_of_leaves(node.layout, below, workers, PerWorker)
        return jax.tree.map(_pack_one, node, below, is_leaf=is_packed)

    return jax.tree.map(convert, like, state, is_leaf=_is_unit)


def _is_unit(x: object) -> bool:
    """Tell whether a node of a state is converted as one."""
    return is_packed(x) or isinstance(x, PerWorker) or _spans_buffers(x)


def _spans_buffers(x: object) -> bool:
    return getattr(type(x), "spans_buffers", False) is True


def _is_of_own_buffers(x: object) -> bool:
    return is_packed(x) and any(isinstance(buffer, PerWorker) for buffer in x.buffers)


def _bare(arrays: Sequence[Leaf]) -> list[Leaf]:
    """Return the arrays in PerWorkers."""
    return [x.value if isinstance(x, PerWorker) else x for x in arrays]


def _flat(x: jax.Array) -> jax.Array:
    """Return the parts of all workers, (workers, *shape), one after the other."""
    return x.reshape(-1)


def _along_first_axis(x: jax.Array) -> PerWorker:
    """Return the parts of all workers, (workers, *shape), along the first axis."""
    return PerWorker(x.reshape(-1, *x.shape[2:]))


def _pack_one(like: PyTree, leaves: PyTree) -> PyTree:
    """Return leaves packed as `like` is, if it is and its buffers can be unpacked."""
    if not fits(like) or is_packed(leaves):
        return leaves
    lead = max((x.ndim - 1 for x in like.buffers if not tree.is_masked(x)), default=0)
    return pack_like(like.layout, leaves, lead)


def _leaves_of_buffers(
    packed: Packed, buffers: Sequence[Leaf], workers: int, made: Callable[[Leaf], PyTree]
) -> PyTree:
    """Return the tree of a Packed, or the Packed itself if it has no number for each element.

    Args:
      packed: a Packed of buffers with the parts of all workers.
      buffers: the arrays in it, (workers·size,).
      workers: the number of workers.
      made: turns the parts of a leaf, (workers, *shape), into the leaf of the tree.
    """
    layout = packed.layout
    if not all(
        tree.is_masked(x) or np.shape(x) == (workers * buffer.size,)
        for x, buffer in zip(buffers, layout.buffers, strict=True)
    ):
        return packed
    rows = [tree.map_arrays(lambda x: x.reshape(workers, -1), x) for x in buffers]
    frozen = [optax.MaskedNode()] * len(layout.frozen)
    leaves = unpack(Packed(rows, frozen, layout))
    leaves = layout.structure.flatten_up_to(tree.map_arrays(made, leaves))
    for i, x in zip(layout.frozen, packed.frozen, strict=True):
        leaves[i] = x
    return layout.structure.unflatten(leaves)


def _buffers_of_leaves(
    layout: PackedLayout, whole: PyTree, workers: int, made: Callable[[Leaf], PyTree]
) -> Packed:
    """Return the Packed of a tree: the inverse of `_leaves_of_buffers`.

    Args:
      layout: that of the Packed.
      whole: the tree, of arrays or PerWorkers.
      workers: the number of workers.
      made: turns an array (workers·size,) into the buffer.
    """
    leaves = layout.structure.flatten_up_to(whole)
    rows = _bare(leaves)
    for run in itertools.chain.from_iterable(buffer.runs for buffer in layout.buffers):
        for i in run.leaves:
            if not tree.is_masked(rows[i]):
                rows[i] = rows[i].reshape(workers, *run.shape)
    packed = pack_like(layout, layout.structure.unflatten(rows), lead=1)
    buffers = [tree.map_arrays(lambda x: made(x.reshape(-1)), x) for x in packed.buffers]
    return Packed(buffers, [leaves[i] for i in layout.frozen], layout)
