"""pack and unpack: a tree of arrays as one flat buffer per dtype, and back."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import checks
from optfn.leaves import slices, tree
from optfn.leaves.layout import BufferLayout, PackedLayout, buffer_of
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.types import Leaf, LeafKind, Params, PyTree


def layout_of(params: Params) -> PackedLayout:
    """Return how `pack` lays out a tree: by dtype, then shape, then the order of the leaves."""
    leaves, structure = tree.flatten(params)
    groups: dict[str, dict[Any, list[tuple[tuple[int, ...], int, int]]]] = {}
    frozen = []
    for i, (x, stacked) in enumerate(zip(leaves, tree.stacked_axes(params), strict=True)):
        if not tree.is_inexact(x) or not x.size:
            frozen.append(i)
        else:
            dtype, kind = str(jax.dtypes.canonicalize_dtype(x.dtype)), (x.shape, stacked)
            groups.setdefault(dtype, {}).setdefault(kind, []).append((*kind, i))
    buffers = tuple(
        buffer_of(dtype, list(itertools.chain(*by_kind.values())))
        for dtype, by_kind in sorted(groups.items())
    )
    return PackedLayout(structure, tuple(tree.paths(params)), buffers, tuple(frozen))


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

    def array(place: tree.Place, x: Leaf) -> Leaf:
        if isinstance(x, LeafKind):
            raise TypeError(
                f"pack: leaf {place!r} is row-sparse; a leaf of a buffer must be a dense array"
            )
        if isinstance(x, int | float | complex):
            return jnp.asarray(x)
        if not tree.is_masked(x) and not tree.is_array(x):
            raise TypeError(f"pack: leaf {place!r} must be an array; got {x!r}")
        return x

    params = tree.map_named(array, params)
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
    buffers = _join(lead, parts) if checks.is_traced(parts) else _compiled_join(lead, parts)
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
            split = _pieces if checks.is_traced(x) else _compiled_pieces
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
    runs = buffer.run_of_leaves
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


def unpacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` for packed params: (packed, *args) -> (value, packed gradients).

    Args:
      fn: (params, *args) -> (value, gradients), a function of the tree.
    """

    def packed_fn(packed: Packed, *args: Any) -> tuple[Any, Packed]:
        value, grads = fn(unpack(packed), *args)
        return value, pack_like(packed.layout, grads)

    return packed_fn
