"""pack and unpack: a tree of arrays as one flat buffer per dtype, and back."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.leaves import leafwise, slices, tree
from optfn.leaves.layout import Layout, Packed, Part, Run, is_packed
from optfn.leaves.rows import Rows


def layout_of(params: Any) -> Layout:
    """Return how `pack` lays out a tree: by dtype, then shape, then the order of the leaves."""
    leaves, structure = tree.flatten(params)
    groups: dict[str, dict[tuple[int, ...], list[int]]] = {}
    held = []
    for i, x in enumerate(leaves):
        if leafwise.is_absent(x) or not x.size:
            held.append(i)
        else:
            dtype = str(jax.dtypes.canonicalize_dtype(x.dtype))
            groups.setdefault(dtype, {}).setdefault(x.shape, []).append(i)
    parts = []
    for dtype, shapes in sorted(groups.items()):
        runs: list[Run] = []
        for shape, numbers in shapes.items():
            runs.append(Run(shape, tuple(numbers), runs[-1].stop if runs else 0))
        parts.append(Part(dtype, tuple(runs)))
    return Layout(structure, tuple(tree.paths(params)), tuple(parts), tuple(held))


def pack(params: Any) -> Packed:
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
    Packed(float32[9] of 2 leaves, 1 held)
    >>> optfn.unpack(packed)["w"].shape
    (2, 3)
    """
    leaves, structure = tree.flatten(params)
    leaves = [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in leaves]
    for path, x in zip(tree.paths(params), leaves, strict=True):
        if isinstance(x, Rows):
            raise TypeError(f"pack: leaf {path!r} is row-sparse, which has no place in a buffer")
        if not tree.is_hole(x) and not hasattr(x, "dtype"):
            raise TypeError(f"pack: leaf {path!r} must be an array; got {x!r}")
    params = structure.unflatten(leaves)
    return pack_like(layout_of(params), params)


def pack_like(layout: Layout, values: Any, lead: int = 0) -> Packed:
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
    for part in layout.parts:
        _check_part(part, leaves, layout.paths, lead)
    parts = tuple(tuple(leaves[i] for i in part.leaves) for part in layout.parts)
    if any(isinstance(x, jax.core.Tracer) for x in itertools.chain(*parts)):
        buffers = _join(lead, parts)
    else:
        buffers = _compiled_join(lead, parts)
    return Packed(buffers, [leaves[i] for i in layout.held], layout)


def _skeleton(layout: Layout) -> Any:
    return layout.structure.unflatten([0] * len(layout.paths))


def _is_masked(leaves: Sequence[Any]) -> bool:
    return all(isinstance(x, optax.MaskedNode) for x in leaves)


def _check_part(part: Part, leaves: list[Any], paths: Sequence[str], lead: int) -> None:
    """Raise unless the leaves of a buffer have the shapes that they had, or are all masked."""
    if _is_masked([leaves[i] for i in part.leaves]):
        return
    for run in part.runs:
        for i in run.leaves:
            missing = tree.is_hole(leaves[i])
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
        tree.is_hole(b) or jnp.shape(b)[-1:] == (part.size,)
        for b, part in zip(x.buffers, x.layout.parts, strict=True)
    )


def _unpack(packed: Packed) -> Any:
    layout = packed.layout
    leaves: list[Any] = [optax.MaskedNode()] * len(layout.paths)
    for i, x in zip(layout.held, packed.held, strict=True):
        leaves[i] = x
    for part, x in zip(layout.parts, packed.buffers, strict=True):
        if tree.is_hole(x):
            continue
        if isinstance(x, np.ndarray):
            split: Callable[[Part, Any], list[Any]] = _host_pieces
        else:
            split = _pieces if isinstance(x, jax.core.Tracer) else _compiled_pieces
        for i, piece in zip(part.leaves, split(part, x), strict=True):
            leaves[i] = piece
    return layout.structure.unflatten(leaves)


def _host_pieces(part: Part, x: np.ndarray) -> list[np.ndarray]:
    return [
        x[..., start : start + run.size].reshape((*x.shape[:-1], *run.shape))
        for run in part.runs
        for start in range(run.start, run.stop, run.size)
    ]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(part: Part, x: jax.Array) -> list[jax.Array]:
    """Return the leaves of a buffer. What is differentiated is put together once, not padded."""
    runs = [run for run in part.runs for _ in run.leaves]
    starts = [start for run in part.runs for start in range(run.start, run.stop, run.size)]
    flat = slices.pieces(x, starts, [run.size for run in runs])
    return [y.reshape(*x.shape[:-1], *run.shape) for y, run in zip(flat, runs, strict=True)]


def _forward(part: Part, x: jax.Array) -> tuple[list[jax.Array], None]:
    return _pieces(part, x), None


def _backward(part: Part, residual: None, pieces: list[jax.Array]) -> tuple[jax.Array]:
    del residual
    (x,) = _join(pieces[0].ndim - len(part.runs[0].shape), [pieces])
    return (x,)


_pieces.defvjp(_forward, _backward)
_compiled_pieces = jax.jit(_pieces, static_argnums=0)


def _spans(part: Part, flags: tuple[bool, ...]) -> Iterator[tuple[bool, int]]:
    """Yield (flag, elements) of the stretches of a buffer whose leaves have one flag."""
    sizes = [run.size for run in part.runs for _ in run.leaves]
    pairs = zip(flags, sizes, strict=True)
    for flag, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield flag, sum(size for _, size in group)


def _nodes(x: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, where a Packed is one, and its structure."""
    return jax.tree.flatten(x, is_leaf=tree.is_node)


def _flags_of(nodes: Sequence[Any], flags: Sequence[Any]) -> Iterator[Any]:
    """Yield for each of `_nodes` its flag, for a Packed those of its buffers and held leaves."""
    rest = iter(flags)
    for node in nodes:
        if is_packed(node):
            yield tuple(itertools.islice(rest, len(node.layout.parts) + len(node.layout.held)))
        else:
            yield next(rest)


def keep(values: Any, flags: Sequence[Any]) -> Any:
    """Return a tree with holes for the leaves whose flag is False; see `tree.select`.

    A Packed becomes one of the leaves that are selected.
    """
    nodes, structure = _nodes(values)
    kept = []
    for node, own in zip(nodes, _flags_of(nodes, flags), strict=True):
        if not is_packed(node):
            kept.append(node if own else optax.MaskedNode())
        else:
            kept.append(_keep_packed(node, own))
    return structure.unflatten(kept)


def _keep_packed(packed: Packed, flags: tuple[Any, ...]) -> Packed:
    layout = packed.layout.only(flags)
    buffers = []
    for part, x, own in zip(packed.layout.parts, packed.buffers, flags, strict=False):
        if any(own):
            buffers.append(_select(part, own, x))
    rest = flags[len(packed.layout.parts) :]
    held = [x for x, flag in zip(packed.held, rest, strict=True) if flag]
    return Packed(buffers, held, layout)


def _select(part: Part, flags: tuple[bool, ...], x: Any) -> Any:
    if all(flags) or tree.is_hole(x):
        return x
    starts = itertools.accumulate((size for _, size in _spans(part, flags)), initial=0)
    return jnp.concatenate(
        [
            x[start : start + size]
            for start, (flag, size) in zip(starts, _spans(part, flags), strict=False)
            if flag
        ]
    )


def kept_of(kinds: Sequence[Any], flags: Sequence[Any], values: Any) -> list[Any]:
    """Return what is said of the leaves of `values` for those of `keep(values, flags)`."""
    nodes = _nodes(values)[0]
    kept: list[Any] = []
    pairs = zip(nodes, _flags_of(nodes, flags), _flags_of(nodes, kinds), strict=True)
    for node, own, said in pairs:
        if not is_packed(node):
            kept.append(said)
            continue
        for flag, kind in zip(own, said, strict=True):
            if isinstance(flag, tuple) and any(flag):
                kept.append(tuple(itertools.compress(kind, flag)))
            elif flag is True:
                kept.append(kind)
    return kept


def fill(kept: Any, flags: Sequence[Any], rest: Any) -> Any:
    """Return the whole tree: what `keep` left, and for the other leaves those of `rest`."""
    nodes, structure = _nodes(rest)
    chosen = _nodes(kept)[0]
    whole = []
    for new, old, own in zip(chosen, nodes, _flags_of(nodes, flags), strict=True):
        if not is_packed(old):
            whole.append(new if own else old)
        else:
            whole.append(_fill_packed(new, old, own))
    return structure.unflatten(whole)


def _fill_packed(kept: Packed, rest: Packed, flags: tuple[Any, ...]) -> Packed:
    parts, new, buffers = rest.layout.parts, iter(kept.buffers), []
    for part, x, own in zip(parts, rest.buffers, flags, strict=False):
        buffers.append(_merge(part, own, next(new) if any(own) else x, x))
    held_new = iter(kept.held)
    pairs = zip(rest.held, flags[len(parts) :], strict=True)
    return Packed(buffers, [next(held_new) if flag else x for x, flag in pairs], rest.layout)


def _merge(part: Part, flags: tuple[bool, ...], new: Any, old: Any) -> Any:
    if all(flags) or not any(flags):
        return new
    pieces, at, here = [], 0, 0
    for flag, size in _spans(part, flags):
        pieces.append(new[at : at + size] if flag else old[here : here + size])
        at, here = at + size * flag, here + size
    return jnp.concatenate(pieces)


def unpacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return (packed, *args) -> (value, packed gradients) from a function of the tree."""

    def packed_fn(packed: Packed, *args: Any) -> tuple[Any, Packed]:
        value, grads = fn(unpack(packed), *args)
        return value, pack_like(packed.layout, grads)

    return packed_fn
