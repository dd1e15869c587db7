"""pack and unpack: a tree of arrays as one flat buffer per dtype, and back."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optfn.core import checks, tree
from optfn.core.types import Leaf, LeafKind, Params, PyTree
from optfn.leaves import contents
from optfn.leaves.foreign import check_arrays
from optfn.leaves.layout import (
    BufferLayout,
    PackedLayout,
    make_buffer_layout,
    mark_layout,
    select_leaves,
)
from optfn.leaves.nodes import Packed, Stacked, is_packed
from optfn.mesh.collectives.mesh import explicit_sharding
from optfn.mesh.compilers import xla

# Where the elements of {"b": f32[3], "n": an integer, "w": f32[2, 3]} lie; leaves 0, 1, 2:
#   1. make_packed_layout: the float32 buffer has the runs (3,): leaf 0 from element 0, and
#                     (2, 3): leaf 2 from element 3; leaf 1 is frozen. Leaves of one shape share a
#                     run, so that one reshape gives all of their tensors.
#   2. pack_like      buffers[0] is b | w, flat, (9,), or (…, 9) below `lead` axes; frozen is [n].
#   3. unpack         [0:3] and [3:9] of the last axis, in the order of the runs, go back to leaves
#                     0 and 2. The derivative joins their cotangents, as step 2 does.
#   4. take_subset {2}: the buffer is w alone, (6,), and its run starts at 0. Leaf 2 keeps its
#                     number and path, so that patterns find it.
#   5. fill           from left to right, [0:3] of the whole buffer, then [0:6] of the subset's,
#                     which consists of the chosen spans alone.


def make_packed_layout(params: Params) -> PackedLayout:
    """Return how `pack` lays out a tree, by dtype, shape and order, with leaves that are empty or
    not floating point outside the buffers."""
    leaves, structure = tree.flatten(params)
    groups: dict[str, dict[Any, list[tuple[tuple[int, ...], int, int]]]] = {}
    frozen = []
    for i, (x, stacked) in enumerate(zip(leaves, contents.count_stacked_axes(params), strict=True)):
        # An empty leaf has no elements to place in a buffer.
        if not tree.is_inexact(x) or not x.size:
            frozen.append(i)
        else:
            dtype, kind = str(jax.dtypes.canonicalize_dtype(x.dtype)), (x.shape, stacked)
            groups.setdefault(dtype, {}).setdefault(kind, []).append((*kind, i))
    buffers = []
    # Sorted, so that the order of the buffers does not depend on the order of the leaves.
    for dtype, by_kind in sorted(groups.items()):
        buffers.append(make_buffer_layout(dtype, list(itertools.chain(*by_kind.values()))))
    return PackedLayout(structure, tuple(tree.paths(params)), tuple(buffers), tuple(frozen))


def pack(params: Params) -> Packed:
    """Return a Packed of the leaves of a tree, with one flat buffer per floating-point dtype, and
    integer and empty leaves beside them.

    Use it for models with thousands of small leaves: a step spends most of its time passing them as
    arguments, which a few buffers avoid. Optimizers of optfn take the result like the tree:
    patterns of paths, attributes and norms per tensor refer to the original leaves. However, 8-bit
    moments have one scale for the whole buffer, and Deep Gradient Compression selects from all of
    it. Optimizers of optax, and rules that you write, see buffers. A rule on elements alone gives
    the updates that it gives with the tree. A step with `packed=True` tries two updates of such
    rules on the tree and on its buffers, and refuses a rule whose updates differ: norms and means
    of an array, masks and labels by its axes, size or path.

    Args:
      params: a tree of arrays. Leaves that are not floating point, and those without elements, are
        kept beside the buffers. Sharded arrays are gathered, except along explicit mesh axes, which
        are an error. Works inside and outside `jit`.

    Returns:
      A Packed, which is a pytree; `unpack` returns the tree.

    Raises:
      TypeError: a leaf is not an array, or is row-sparse; or params are already packed.
      ValueError: explicit mesh axes divide a leaf.

    >>> import jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3), "n": jnp.int32(7)})
    >>> packed
    Packed(float32[9] of 2 leaves, 1 frozen)
    >>> optfn.unpack(packed)["w"].shape
    (2, 3)
    """
    check_arrays("pack: parameter", params)
    if any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed))):
        raise TypeError("pack: params are already packed")

    def array(place: tree.Place, x: Leaf) -> Leaf:
        if isinstance(x, LeafKind):
            raise TypeError(
                f"pack: leaf {place!r} is row-sparse; only dense arrays can be put into a buffer"
            )
        if isinstance(x, int | float | complex):
            return jnp.asarray(x)
        if not tree.is_masked(x) and not tree.is_array(x):
            raise TypeError(f"pack: leaf {place!r} must be an array; got {x!r}")
        placement = None if tree.is_masked(x) else explicit_sharding(x)
        if placement is not None:
            raise ValueError(
                f"pack: leaf {place!r} is divided by {placement.spec} over explicit mesh axes, but "
                "a buffer of several leaves has one sharding. Leave pack (packed=True) out, or "
                "make the mesh with axes of AxisType.Auto"
            )
        return x

    params = tree.map_named(array, params)
    return pack_like(make_packed_layout(params), params)


def pack_like(layout: PackedLayout, values: PyTree, lead: int = 0) -> Packed:
    """Return a tree, such as a gradient, packed in the layout of a tree that was packed before, or
    raise a ValueError if structures or shapes differ.

    Args:
      layout: the layout of the tree that was packed.
      values: a tree of the same structure and shapes.
      lead: how many additional leading axes the leaves of `values` have.

    Raises:
      ValueError: structures or shapes differ, or a leaf is missing.
    """
    leaves, structure = tree.flatten(values)
    if structure != layout.structure:
        packed = layout.structure.unflatten([0] * len(layout.paths))
        tree.check_same_structure("pack", "the tree", values, "the packed tree", packed)
    for buffer in layout.buffers:
        _check_buffer(buffer, leaves, layout.paths, lead)
    groups = tuple(tuple(leaves[i] for i in buffer.leaves) for buffer in layout.buffers)
    # Outside of jit one compiled program, or each leaf would cost a dispatch.
    join = _join_leaves if checks.is_traced(groups) else _compiled_join
    buffers = join(lead, groups)
    return Packed(buffers, [leaves[i] for i in layout.frozen], layout)


def _all_masked(leaves: Sequence[Leaf]) -> bool:
    """Tell whether all leaves are a MaskedNode."""
    return all(isinstance(x, optax.MaskedNode) for x in leaves)


def _check_buffer(
    buffer: BufferLayout, leaves: list[Leaf], paths: Sequence[str], lead: int
) -> None:
    """Raise a ValueError unless the leaves of a buffer have the shapes of its layout, or are all
    masked."""
    if _all_masked([leaves[i] for i in buffer.leaves]):
        return
    for i, run in buffer.run_of_leaves.items():
        missing = tree.is_masked(leaves[i])
        if missing or jnp.shape(leaves[i])[lead:] != run.shape:
            came = "is missing" if missing else f"has shape {jnp.shape(leaves[i])}"
            raise ValueError(
                f"pack: leaf {paths[i]!r} {came}; in the packed tree it has shape {run.shape}"
            )


def _join_leaves(lead: int, groups: Sequence[Sequence[Leaf]]) -> tuple[Leaf, ...]:
    """Return one buffer for each group of leaves, joined after `lead` leading axes, or a masked one
    if all leaves of a group are masked."""
    buffers: list[Leaf] = []
    for leaves in groups:
        if _all_masked(leaves):
            buffers.append(optax.MaskedNode())
        else:
            flat = [x.reshape(*x.shape[:lead], -1) for x in leaves]
            buffers.append(jnp.concatenate(flat, axis=-1))
    return tuple(buffers)


_compiled_join = jax.jit(_join_leaves, static_argnums=0)


def unpack(packed: PyTree) -> PyTree:
    """Return the tree that was packed, or a tree with each Packed in it unpacked, but for those
    without a value for each element.

    If a tree contains Packed, as the state of an optimizer does, each of them becomes its tree. If
    you unpack params inside a loss, its gradient is a Packed, and each of its buffers is put
    together only once.

    Args:
      packed: a Packed, or a tree that contains some. Works inside and outside `jit`.

    >>> import jax, jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)})
    >>> jax.grad(lambda p: jnp.sum(optfn.unpack(p)["w"]))(packed).buffers[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    return jax.tree.map(lambda x: _unpack(x) if is_unpackable(x) else x, packed, is_leaf=is_packed)


def repack(like: PyTree, whole: PyTree) -> PyTree:
    """Return `whole` with the leaves that lie in a Packed in `like` packed like it."""

    def pack_node(node: PyTree, below: PyTree) -> PyTree:
        return pack_like(node.layout, below) if is_packed(node) else below

    return jax.tree.map(pack_node, like, whole, is_leaf=lambda x: is_packed(x) or tree.is_leaf(x))


def is_unpackable(x: object) -> bool:
    """Tell whether `x` is a Packed each of whose buffers is masked or has one value for each
    element of its leaves.

    The scale of 8-bit moments is one number, so it cannot be unpacked.
    """
    return is_packed(x) and all(
        tree.is_masked(b) or (tree.is_array(b) and b.shape[-1:] == (buffer.size,))
        for buffer, b in x.buffer_items()
    )


def _unpack(packed: Packed) -> PyTree:
    """Return the tree in a Packed, with masked leaves in the place of a masked buffer."""
    layout = packed.layout
    leaves = dict.fromkeys(range(len(layout.paths)), optax.MaskedNode()) | packed.frozen_leaves()
    for buffer, x in packed.buffer_items():
        if tree.is_masked(x):
            continue
        on_device = _split_buffer if checks.is_traced(x) else _compiled_pieces
        split = _split_leaves if isinstance(x, np.ndarray) else on_device
        leaves |= dict(zip(buffer.leaves, split(buffer, x), strict=True))
    return layout.structure.unflatten(leaves.values())


def _split_leaves(buffer: BufferLayout, x: Leaf) -> list[Leaf]:
    """Return the leaves of a buffer in their shapes, behind the buffer's leading axes. The buffer
    may be on the host or traced."""
    runs = buffer.run_of_leaves.values()
    flat = xla.split(x, [run.size for run in runs])
    return [y.reshape((*x.shape[:-1], *run.shape)) for y, run in zip(flat, runs, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split_buffer(buffer: BufferLayout, x: jax.Array) -> list[jax.Array]:
    """Return the leaves of a buffer, with a derivative that joins their cotangents in one step."""
    return _split_leaves(buffer, x)


def _backward(buffer: BufferLayout, residual: None, pieces: list[jax.Array]) -> tuple[jax.Array]:
    """Return the cotangent of a buffer: the cotangents of its leaves, joined."""
    del residual
    (x,) = _join_leaves(pieces[0].ndim - len(buffer.runs[0].shape), [pieces])
    return (x,)


# Without residuals: the derivative is linear.
_split_buffer.defvjp(lambda buffer, x: (_split_buffer(buffer, x), None), _backward)
_compiled_pieces = jax.jit(_split_buffer, static_argnums=0)


def map_nodes(fn: Callable[..., PyTree], values: PyTree, *trees: PyTree) -> PyTree:
    """Map fn(path, node, *nodes of `trees`) over all leaves, where a Packed counts as one node.

    One of the trees may have a `Stacked` where another has none.
    """

    def is_node(x: PyTree) -> bool:
        return is_packed(x) or tree.is_leaf(x)

    columns = (jax.tree.leaves(x, is_leaf=is_node) for x in (values, *trees))
    structure = jax.tree.structure(values, is_leaf=is_node)
    return jax.tree.unflatten(structure, map(fn, tree.paths(values, is_node), *columns))


def mark_stacked(values: PyTree, axes: Callable[[str], int]) -> PyTree:
    """Put each floating-point leaf into as many `Stacked` as make axes(path) of its leading axes
    count tensors, and in a Packed change the layout instead.

    Axes that the tree already marks are included in the numbers.
    """
    runs = contents.runs_by_name(values)

    def mark(path: str, node: PyTree) -> PyTree:
        if is_packed(node):
            counts = tuple(axes(tree.join(path, name)) for name in node.layout.paths)
            return Packed(node.buffers, node.frozen, mark_layout(node.layout, counts))
        for _ in range(axes(path) - runs[path].stacked):
            node = Stacked(node) if tree.is_inexact(node) else node
        return node

    return map_nodes(mark, values)


def take_subset(whole: Packed, chosen: frozenset[int]) -> Packed:
    """Return a Packed of the chosen leaves, by their indices, in the order of `whole`."""
    layout = select_leaves(whole.layout, chosen)
    pairs = (x for x in whole.buffer_items() if not chosen.isdisjoint(x[0].leaves))
    buffers = [_select_elements(buffer, chosen, x) for buffer, x in pairs]
    frozen = whole.frozen_leaves()
    return Packed(buffers, [frozen[i] for i in layout.frozen], layout)


def fill(whole: Packed, new: Packed, chosen: frozenset[int]) -> Packed:
    """Return `whole` with its chosen leaves replaced by the leaves of `new`, a `take_subset` of
    these."""
    arrays = {buffer.dtype: x for buffer, x in new.buffer_items()}
    buffers = [
        _fill_elements(buffer, chosen, arrays.get(buffer.dtype), x)
        for buffer, x in whole.buffer_items()
    ]
    frozen = whole.frozen_leaves() | new.frozen_leaves()
    return Packed(buffers, list(frozen.values()), whole.layout)


def _find_spans(buffer: BufferLayout, chosen: frozenset[int]) -> tuple[list[bool], list[int]]:
    """Return for each group of neighbours that are all chosen, or all not, whether they are, and
    their number of elements."""
    runs = buffer.run_of_leaves
    groups = [(k, [*group]) for k, group in itertools.groupby(runs, chosen.__contains__)]
    return [k for k, _ in groups], [sum(runs[i].size for i in group) for _, group in groups]


def _select_elements(buffer: BufferLayout, chosen: frozenset[int], x: Leaf) -> Leaf:
    """Return the elements of the chosen leaves of a buffer, joined, or the buffer unchanged if it
    is masked or all are chosen."""
    if chosen.issuperset(buffer.leaves) or tree.is_masked(x):
        return x
    are_chosen, sizes = _find_spans(buffer, chosen)
    return jnp.concatenate([*itertools.compress(lax.split(x, sizes), are_chosen)])


def _fill_elements(buffer: BufferLayout, chosen: frozenset[int], new: Leaf, whole: Leaf) -> Leaf:
    """Replace the elements of the chosen leaves in the buffer `whole` by `new`, in order."""
    if chosen.isdisjoint(buffer.leaves):
        return whole
    if chosen.issuperset(buffer.leaves):
        return new
    are_chosen, sizes = _find_spans(buffer, chosen)
    new_pieces = iter(lax.split(new, [*itertools.compress(sizes, are_chosen)]))
    pieces = zip(are_chosen, lax.split(whole, sizes), strict=True)
    return jnp.concatenate([next(new_pieces) if is_chosen else x for is_chosen, x in pieces])
