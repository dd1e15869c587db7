"""pack and unpack: a tree of arrays as one flat buffer per dtype, and back."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.leaves import slices, tree
from optfn.leaves.layout import BufferLayout, Packed, PackedLayout, Run, Stacked, is_packed
from optfn.leaves.rows import Rows
from optfn.leaves.tree import Flags
from optfn.leaves.types import Leaf, Params, PyTree


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

    A step over thousands of small leaves spends its time on handing them over; over one buffer it
    does not. Optimizers take the result as they take the tree: paths in patterns, attributes and
    the norms of tensors are those of the leaves. Blocks of 8-bit moments and the selection of Deep
    Gradient Compression go over the whole buffer.

    Args:
      params: a tree of arrays. Leaves that are not floating point, and those without elements, are
        kept beside the buffers. Inside `jit`, or outside; arrays that are sharded are gathered.

    Returns:
      A Packed: a pytree; `unpack` gives the tree.

    Raises:
      TypeError: a leaf is not an array, or is row-sparse.

    >>> import jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3), "n": jnp.int32(7)})
    >>> packed
    Packed(float32[9] of 2 leaves, 1 frozen)
    >>> optfn.unpack(packed)["w"].shape
    (2, 3)
    """
    leaves, structure = tree.flatten(params)
    leaves = [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in leaves]
    for path, x in zip(tree.paths(params), leaves, strict=True):
        if isinstance(x, Rows):
            raise TypeError(f"pack: leaf {path!r} is row-sparse, which has no place in a buffer")
        if not tree.is_masked(x) and not hasattr(x, "dtype"):
            raise TypeError(f"pack: leaf {path!r} must be an array; got {x!r}")
    params = structure.unflatten(leaves)
    return pack_like(layout_of(params), params)


def pack_like(layout: PackedLayout, values: PyTree, lead: int = 0) -> Packed:
    """Return a tree, such as the gradient of what was packed, in the same places.

    Args:
      layout: of what was packed.
      values: a tree of the same structure and shapes.
      lead: how many axes the leaves have before those of what was packed.

    Raises:
      ValueError: structures or shapes differ, or a leaf is missing.
    """
    leaves, structure = tree.flatten(values)
    if structure != layout.structure:
        tree.check_same_structure("pack", "the tree", values, "what was packed", _skeleton(layout))
    for buffer in layout.buffers:
        _check_buffer(buffer, leaves, layout.paths, lead)
    parts = tuple(tuple(leaves[i] for i in buffer.leaves) for buffer in layout.buffers)
    if any(isinstance(x, jax.core.Tracer) for x in itertools.chain(*parts)):
        buffers = _join(lead, parts)
    else:
        buffers = _compiled_join(lead, parts)
    return Packed(buffers, [leaves[i] for i in layout.frozen], layout)


def _skeleton(layout: PackedLayout) -> Any:
    return layout.structure.unflatten([0] * len(layout.paths))


def _is_masked(leaves: Sequence[Any]) -> bool:
    return all(isinstance(x, optax.MaskedNode) for x in leaves)


def _check_buffer(buffer: BufferLayout, leaves: list[Any], paths: Sequence[str], lead: int) -> None:
    """Raise unless the leaves of a buffer have the shapes that they had, or are all masked."""
    if _is_masked([leaves[i] for i in buffer.leaves]):
        return
    for run in buffer.runs:
        for i in run.leaves:
            missing = tree.is_masked(leaves[i])
            if missing or jnp.shape(leaves[i])[lead:] != run.shape:
                came = "is missing" if missing else f"has shape {jnp.shape(leaves[i])}"
                raise ValueError(
                    f"pack: leaf {paths[i]!r} {came}; what was packed has shape {run.shape}"
                )


def _join(lead: int, parts: Any) -> tuple[Any, ...]:
    return tuple(
        optax.MaskedNode()
        if _is_masked(leaves)
        else jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)
        for leaves in parts
    )


_compiled_join = jax.jit(_join, static_argnums=0)


def unpack(packed: Any) -> Any:
    """Return the tree that was packed.

    In a tree that holds Packed, such as the state of an optimizer, each becomes its tree. Gradients
    go through it: they come back packed, put together once.

    Args:
      packed: what `pack` gave, or a tree with such in it. Inside `jit`, or outside.

    >>> import jax, jax.numpy as jnp, optfn
    >>> packed = optfn.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)})
    >>> jax.grad(lambda p: jnp.sum(optfn.unpack(p)["w"]))(packed).buffers[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    return jax.tree.map(lambda x: _unpack(x) if fits(x) else x, packed, is_leaf=is_packed)


def fits(x: Any) -> bool:
    """Tell whether `x` is a Packed whose buffers have a number for each element of the leaves.

    The scales of 8-bit moments have not: they are packed, and are not a tree.
    """
    return is_packed(x) and all(
        tree.is_masked(b) or jnp.shape(b)[-1:] == (buffer.size,)
        for b, buffer in zip(x.buffers, x.layout.buffers, strict=True)
    )


def _unpack(packed: Packed) -> Any:
    layout = packed.layout
    leaves: list[Any] = [optax.MaskedNode()] * len(layout.paths)
    for i, x in zip(layout.frozen, packed.frozen, strict=True):
        leaves[i] = x
    for buffer, x in zip(layout.buffers, packed.buffers, strict=True):
        if tree.is_masked(x):
            continue
        if isinstance(x, np.ndarray):
            split: Callable[[BufferLayout, Any], list[Any]] = _host_pieces
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
    """Return the leaves of a buffer. What is differentiated is put together once, not padded."""
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


def _nodes(x: PyTree) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, where a Packed is one, and its structure."""
    return jax.tree.flatten(x, is_leaf=lambda node: is_packed(node) or tree.is_leaf(node))


def _arrays(node: Any) -> list[Leaf]:
    """Return the leaves in one of `_nodes`."""
    return [*node.buffers, *node.frozen] if is_packed(node) else [node]


def _by_node(nodes: Sequence[Any], per_leaf: Sequence[Any]) -> list[list[Any]]:
    """Split what has one entry per leaf by node."""
    rest = iter(per_leaf)
    return [list(itertools.islice(rest, len(_arrays(node)))) for node in nodes]


def keep(values: PyTree, flags: Flags) -> PyTree:
    """Mask the leaves whose flag is False; see `tree.select`.

    A Packed becomes one of the leaves that are selected.
    """
    nodes, structure = _nodes(values)
    pairs = zip(nodes, _by_node(nodes, flags), strict=True)
    return structure.unflatten([_keep(node, own) for node, own in pairs])


def _keep(node: Any, flags: list[tuple[bool, ...]]) -> Any:
    if not is_packed(node):
        return node if flags[0][0] else optax.MaskedNode()
    layout = node.layout.only(tuple(flags))
    triples = list(zip(_layouts(node), _arrays(node), flags, strict=True))
    chosen = [_select(buffer, own, x) for buffer, x, own in triples if any(own)]
    return Packed(chosen[: len(layout.buffers)], chosen[len(layout.buffers) :], layout)


def _layouts(node: Any) -> list[BufferLayout | None]:
    """Return the layout of each buffer of a Packed, None for a frozen leaf."""
    return [*node.layout.buffers, *[None] * len(node.frozen)]


def _spans(buffer: BufferLayout, flags: Sequence[bool]) -> Iterator[tuple[bool, int]]:
    """Yield (flag, elements) of the stretches of a buffer whose leaves have one flag."""
    sizes = [run.size for run in buffer.runs for _ in run.leaves]
    pairs = zip(flags, sizes, strict=True)
    for flag, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield flag, sum(size for _, size in group)


def _select(buffer: BufferLayout | None, flags: tuple[bool, ...], x: Leaf) -> Leaf:
    """Return the part of an array that lies in flagged leaves."""
    if buffer is None or all(flags) or tree.is_masked(x):
        return x
    pieces, start = [], 0
    for flag, size in _spans(buffer, flags):
        if flag:
            pieces.append(x[start : start + size])
        start += size
    return jnp.concatenate(pieces)


def kept_of(per_leaf: Sequence[tuple[Any, ...]], flags: Flags, values: PyTree) -> list[Any]:
    """Filter per-leaf values to the leaves that `keep(values, flags)` retains."""
    nodes = _nodes(values)[0]
    kept: list[Any] = []
    for node, own, chosen in zip(
        nodes, _by_node(nodes, per_leaf), _by_node(nodes, flags), strict=True
    ):
        if not is_packed(node):
            kept += own
        else:
            pairs = zip(own, chosen, strict=True)
            kept += [tuple(itertools.compress(v, flag)) for v, flag in pairs if any(flag)]
    return kept


def mark_stacked(values: PyTree, axes: Sequence[tuple[int, ...]]) -> PyTree:
    """Return the tree with so many leading axes of each leaf counting tensors; see `Stacked`."""
    nodes, structure = _nodes(values)
    marked = []
    known = _by_node(nodes, tree.stacked_axes(values))
    for node, counts, before in zip(nodes, _by_node(nodes, axes), known, strict=True):
        if is_packed(node):
            layout = node.layout.stacked(tuple(counts))
            marked.append(Packed(node.buffers, node.frozen, layout))
        else:
            for _ in range(counts[0][0] - before[0]):
                node = node if tree.is_masked(node) else Stacked(node)
            marked.append(node)
    return structure.unflatten(marked)


def fill(kept: PyTree, flags: Flags, rest: PyTree) -> PyTree:
    """Return the whole tree: what `keep` left, and for the other leaves those of `rest`."""
    nodes, structure = _nodes(rest)
    triples = zip(_nodes(kept)[0], nodes, _by_node(nodes, flags), strict=True)
    return structure.unflatten([_fill(new, old, own) for new, old, own in triples])


def _fill(new: Any, old: Any, flags: list[tuple[bool, ...]]) -> Any:
    if not is_packed(old):
        return new if flags[0][0] else old
    given = iter(_arrays(new))
    whole = [
        _merge(buffer, own, next(given) if any(own) else x, x)
        for buffer, x, own in zip(_layouts(old), _arrays(old), flags, strict=True)
    ]
    count = len(old.layout.buffers)
    return Packed(whole[:count], whole[count:], old.layout)


def _merge(buffer: BufferLayout | None, flags: tuple[bool, ...], new: Leaf, old: Leaf) -> Leaf:
    """Return the array with the flagged leaves from `new`, which has no others, in `old`."""
    if buffer is None or all(flags) or not any(flags):
        return new
    pieces, at_new, at_old = [], 0, 0
    for flag, size in _spans(buffer, flags):
        pieces.append(new[at_new : at_new + size] if flag else old[at_old : at_old + size])
        at_new, at_old = at_new + size * flag, at_old + size
    return jnp.concatenate(pieces)


def unpacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return (packed, *args) -> (value, packed gradients) from a function of the tree."""

    def packed_fn(packed: Packed, *args: Any) -> tuple[Any, Packed]:
        value, grads = fn(unpack(packed), *args)
        return value, pack_like(packed.layout, grads)

    return packed_fn
