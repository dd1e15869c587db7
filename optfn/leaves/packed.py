"""pack and unpack: a tree of arrays as one flat buffer per dtype, and back."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef

from optfn.leaves import slices, tree
from optfn.leaves.layout import BufferLayout, PackedLayout, Run
from optfn.leaves.nodes import Packed, Stacked, is_packed
from optfn.leaves.tree import Flags
from optfn.leaves.types import Leaf, LeafKind, Params, PyTree

T = TypeVar("T")

# What a tree is made of where a Packed counts as one node: a Packed, Rows, a masked leaf, an array.
Node: TypeAlias = Any


def layout_of(params: Params) -> PackedLayout:
    """Return how `pack` lays out a tree: by dtype, then shape, then the order of the leaves."""
    leaves, structure = tree.flatten(params)
    groups: dict[str, dict[tuple[Any, ...], list[int]]] = {}
    frozen = []
    for i, (x, stacked) in enumerate(zip(leaves, tree.stacked_axes(params), strict=True)):
        if not tree.is_inexact(x) or not x.size:
            frozen.append(i)
        else:
            dtype = str(jax.dtypes.canonicalize_dtype(x.dtype))
            groups.setdefault(dtype, {}).setdefault((x.shape, stacked), []).append(i)
    buffers = []
    for dtype, shapes in sorted(groups.items()):
        runs: list[Run] = []
        for (shape, stacked), numbers in shapes.items():
            start = runs[-1].stop if runs else 0
            runs.append(Run(shape, tuple(numbers), start, stacked))
        buffers.append(BufferLayout(dtype, tuple(runs)))
    return PackedLayout(structure, tuple(tree.paths(params)), tuple(buffers), tuple(frozen))


def pack(params: Params) -> Packed:
    """Return the leaves of a tree in one flat buffer per dtype.

    A step over thousands of small leaves spends most of its time passing them as arguments; a step
    over one buffer does not. Optimizers take the result as they take the tree: patterns of paths,
    attributes and norms per tensor refer to the original leaves. Blocks of 8-bit moments and the
    selection of Deep Gradient Compression range over the whole buffer.

    Args:
      params: a tree of arrays. Leaves that are not floating point, and those without elements, are
        kept beside the buffers. Sharded arrays are gathered. Works inside and outside `jit`.

    Returns:
      A Packed, which is a pytree; `unpack` returns the tree.

    Raises:
      TypeError: a leaf is not an array, or is row-sparse; or params are packed already.

    >>> import jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3), "n": jnp.int32(7)})
    >>> packed
    Packed(float32[9] of 2 leaves, 1 frozen)
    >>> optfn.unpack(packed)["w"].shape
    (2, 3)
    """
    if any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed))):
        raise TypeError("pack: params are packed already")
    leaves, structure = tree.flatten(params)
    leaves = [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in leaves]
    for path, x in zip(tree.paths(params), leaves, strict=True):
        if isinstance(x, LeafKind):
            raise TypeError(
                f"pack: leaf {path!r} is row-sparse; a leaf of a buffer must be a dense array"
            )
        if not tree.is_masked(x) and not hasattr(x, "dtype"):
            raise TypeError(f"pack: leaf {path!r} must be an array; got {x!r}")
    params = structure.unflatten(leaves)
    return pack_like(layout_of(params), params)


def pack_like(layout: PackedLayout, values: PyTree, lead: int = 0) -> Packed:
    """Return a tree, such as a gradient, packed in the layout of a tree that was packed before.

    Args:
      layout: the layout of the tree that was packed.
      values: a tree of the same structure and shapes.
      lead: how many additional leading axes the leaves of `values` have.

    Raises:
      ValueError: structures or shapes differ, or a leaf is missing.
    """
    leaves, structure = tree.flatten(values)
    if structure != layout.structure:
        tree.check_same_structure("pack", "the tree", values, "the packed tree", _skeleton(layout))
    for buffer in layout.buffers:
        _check_buffer(buffer, leaves, layout.paths, lead)
    parts = tuple(tuple(leaves[i] for i in buffer.leaves) for buffer in layout.buffers)
    if any(isinstance(x, jax.core.Tracer) for x in itertools.chain(*parts)):
        buffers = _join(lead, parts)
    else:
        buffers = _compiled_join(lead, parts)
    return Packed(buffers, [leaves[i] for i in layout.frozen], layout)


def _skeleton(layout: PackedLayout) -> PyTree:
    """Return a tree of numbers in the structure that was packed, for the paths in an error."""
    return layout.structure.unflatten([0] * len(layout.paths))


def _all_masked(leaves: Sequence[Leaf]) -> bool:
    return all(isinstance(x, optax.MaskedNode) for x in leaves)


def _check_buffer(
    buffer: BufferLayout, leaves: list[Leaf], paths: Sequence[str], lead: int
) -> None:
    """Raise unless the leaves of a buffer have the shapes of its layout, or are all masked."""
    if _all_masked([leaves[i] for i in buffer.leaves]):
        return
    for run in buffer.runs:
        for i in run.leaves:
            missing = tree.is_masked(leaves[i])
            if missing or jnp.shape(leaves[i])[lead:] != run.shape:
                came = "is missing" if missing else f"has shape {jnp.shape(leaves[i])}"
                raise ValueError(
                    f"pack: leaf {paths[i]!r} {came}; in the packed tree it has shape {run.shape}"
                )


def _join(lead: int, parts: Sequence[Sequence[Leaf]]) -> tuple[Leaf, ...]:
    """Return one buffer for each group of leaves, joined after `lead` leading axes."""
    return tuple(
        optax.MaskedNode()
        if _all_masked(leaves)
        else jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)
        for leaves in parts
    )


_compiled_join = jax.jit(_join, static_argnums=0)


def unpack(packed: PyTree) -> PyTree:
    """Return the tree that was packed.

    In a tree that contains Packed, such as the state of an optimizer, each Packed becomes its tree.
    The gradient of a loss of the unpacked tree is a Packed; each of its buffers is joined once.

    Args:
      packed: a Packed, or a tree that contains some. Works inside and outside `jit`.

    >>> import jax, jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)})
    >>> jax.grad(lambda p: jnp.sum(optfn.unpack(p)["w"]))(packed).buffers[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    return jax.tree.map(lambda x: _unpack(x) if fits(x) else x, packed, is_leaf=is_packed)


def fits(x: object) -> bool:
    """Tell whether `x` is a Packed whose buffers have one number for each element of the leaves.

    The scales of 8-bit moments have one number per block, so they cannot be unpacked.
    """
    return is_packed(x) and all(
        tree.is_masked(b) or getattr(b, "shape", ())[-1:] == (buffer.size,)
        for b, buffer in zip(x.buffers, x.layout.buffers, strict=True)
    )


def _unpack(packed: Packed) -> PyTree:
    layout = packed.layout
    leaves: list[Leaf] = [optax.MaskedNode()] * len(layout.paths)
    for i, x in zip(layout.frozen, packed.frozen, strict=True):
        leaves[i] = x
    for buffer, x in zip(layout.buffers, packed.buffers, strict=True):
        if tree.is_masked(x):
            continue
        if isinstance(x, np.ndarray):
            split: Callable[[BufferLayout, Any], list[Leaf]] = _host_pieces
        else:
            split = _pieces if isinstance(x, jax.core.Tracer) else _compiled_pieces
        for i, piece in zip(buffer.leaves, split(buffer, x), strict=True):
            leaves[i] = piece
    return layout.structure.unflatten(leaves)


def _host_pieces(buffer: BufferLayout, x: np.ndarray) -> list[np.ndarray]:
    return [
        x[..., start : start + run.size].reshape((*x.shape[:-1], *run.shape))
        for run in buffer.runs
        for start in range(run.start, run.stop, run.size)
    ]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(buffer: BufferLayout, x: jax.Array) -> list[jax.Array]:
    """Return the leaves of a buffer; the derivative joins their cotangents in one step."""
    runs = [run for run in buffer.runs for _ in run.leaves]
    starts = [start for run in buffer.runs for start in range(run.start, run.stop, run.size)]
    flat = slices.pieces(x, starts, [run.size for run in runs])
    return [y.reshape(*x.shape[:-1], *run.shape) for y, run in zip(flat, runs, strict=True)]


def _forward(buffer: BufferLayout, x: jax.Array) -> tuple[list[jax.Array], None]:
    return _pieces(buffer, x), None


def _backward(buffer: BufferLayout, residual: None, pieces: list[jax.Array]) -> tuple[jax.Array]:
    del residual
    (x,) = _join(pieces[0].ndim - len(buffer.runs[0].shape), [pieces])
    return (x,)


_pieces.defvjp(_forward, _backward)
_compiled_pieces = jax.jit(_pieces, static_argnums=0)


def _nodes(x: PyTree) -> tuple[list[Node], PyTreeDef]:
    """Return the nodes of a tree, where a Packed counts as one, and the structure."""
    return jax.tree.flatten(x, is_leaf=lambda node: is_packed(node) or tree.is_leaf(node))


def _arrays(node: Node) -> list[Leaf]:
    """Return the leaves of one node."""
    return [*node.buffers, *node.frozen] if is_packed(node) else [node]


def _by_node(nodes: Sequence[Node], per_leaf: Sequence[T]) -> list[list[T]]:
    """Split per-leaf values by node."""
    values = iter(per_leaf)
    return [list(itertools.islice(values, len(_arrays(node)))) for node in nodes]


def keep(values: PyTree, flags: Flags) -> PyTree:
    """Mask the leaves whose flag is False; see `tree.select`.

    A Packed becomes a Packed of the selected leaves alone.
    """
    nodes, structure = _nodes(values)
    pairs = zip(nodes, _by_node(nodes, flags), strict=True)
    return structure.unflatten([_keep(node, of_node) for node, of_node in pairs])


def _keep(node: Node, flags: Flags) -> Node:
    if not is_packed(node):
        return node if flags[0][0] else optax.MaskedNode()
    layout = node.layout.only(tuple(flags))
    triples = zip(_layouts(node), _arrays(node), flags, strict=True)
    chosen = [_select(buffer, selected, x) for buffer, x, selected in triples if any(selected)]
    return Packed(chosen[: len(layout.buffers)], chosen[len(layout.buffers) :], layout)


def _layouts(node: Packed) -> list[BufferLayout | None]:
    """Return the layout of each buffer of a Packed, and None for each frozen leaf."""
    return [*node.layout.buffers, *[None] * len(node.frozen)]


def _spans(buffer: BufferLayout, flags: Sequence[bool]) -> Iterator[tuple[bool, int]]:
    """Yield (flag, number of elements) for each run of neighbouring leaves with the same flag."""
    sizes = [run.size for run in buffer.runs for _ in run.leaves]
    pairs = zip(flags, sizes, strict=True)
    for flag, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield flag, sum(size for _, size in group)


def _select(buffer: BufferLayout | None, flags: tuple[bool, ...], x: Leaf) -> Leaf:
    """Return the elements of an array that belong to flagged leaves."""
    if buffer is None or all(flags) or tree.is_masked(x):
        return x
    pieces, start = [], 0
    for flag, size in _spans(buffer, flags):
        if flag:
            pieces.append(x[start : start + size])
        start += size
    return jnp.concatenate(pieces)


def filter_per_leaf(
    per_leaf: Sequence[tuple[T, ...]], flags: Flags, values: PyTree
) -> list[tuple[T, ...]]:
    """Filter per-leaf values to the leaves that `keep(values, flags)` retains."""
    nodes = _nodes(values)[0]
    filtered: list[tuple[T, ...]] = []
    triples = zip(nodes, _by_node(nodes, per_leaf), _by_node(nodes, flags), strict=True)
    for node, of_node, selected in triples:
        if not is_packed(node):
            filtered += of_node
        else:
            pairs = zip(of_node, selected, strict=True)
            filtered += [tuple(itertools.compress(v, flag)) for v, flag in pairs if any(flag)]
    return filtered


def mark_stacked(values: PyTree, axes: Sequence[tuple[int, ...]]) -> PyTree:
    """Return the tree in which `axes` says how many leading axes of each leaf count tensors.

    See `Stacked`; the axes that the tree already marks are included in the numbers.
    """
    nodes, structure = _nodes(values)
    marked = []
    marked_before = _by_node(nodes, tree.stacked_axes(values))
    for node, counts, before in zip(nodes, _by_node(nodes, axes), marked_before, strict=True):
        if is_packed(node):
            layout = node.layout.stacked(tuple(counts))
            marked.append(Packed(node.buffers, node.frozen, layout))
        else:
            for _ in range(counts[0][0] - before[0]):
                node = Stacked(node) if tree.is_inexact(node) else node
            marked.append(node)
    return structure.unflatten(marked)


def fill(selected: PyTree, flags: Flags, full: PyTree) -> PyTree:
    """Undo `keep`: return `full` with its flagged leaves replaced by those of `selected`."""
    nodes, structure = _nodes(full)
    triples = zip(_nodes(selected)[0], nodes, _by_node(nodes, flags), strict=True)
    return structure.unflatten([_fill(part, node, of_node) for part, node, of_node in triples])


def _fill(selected: Node, full: Node, flags: Flags) -> Node:
    if not is_packed(full):
        return selected if flags[0][0] else full
    parts = iter(_arrays(selected))
    arrays = [
        _merge(buffer, of_buffer, next(parts) if any(of_buffer) else x, x)
        for buffer, x, of_buffer in zip(_layouts(full), _arrays(full), flags, strict=True)
    ]
    count = len(full.layout.buffers)
    return Packed(arrays[:count], arrays[count:], full.layout)


def _merge(
    buffer: BufferLayout | None, flags: tuple[bool, ...], selected: Leaf, full: Leaf
) -> Leaf:
    """Return the array `full` with its flagged leaves replaced by `selected`."""
    if buffer is None or all(flags) or not any(flags):
        return selected
    pieces, start, start_selected = [], 0, 0
    for flag, size in _spans(buffer, flags):
        array, at = (selected, start_selected) if flag else (full, start)
        pieces.append(array[at : at + size])
        start, start_selected = start + size, start_selected + size * flag
    return jnp.concatenate(pieces)


def unpacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` for packed params: (packed, *args) -> (value, packed gradients).

    Args:
      fn: (params, *args) -> (value, gradients), a function of the tree.
    """

    def packed_fn(packed: Packed, *args: Any) -> tuple[Any, Packed]:
        value, grads = fn(unpack(packed), *args)
        return value, pack_like(packed.layout, grads)

    return packed_fn
