"""Scalars of each tensor, such as norms, and functions of each: an array may hold several."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks, leafwise, numerics, tree
from optfn.core.leafwise import PerLeaf, jit_if_traced, numbers_of, scalar_at
from optfn.core.types import Leaf, LeafKind, PyTree, Updates
from optfn.leaves import contents
from optfn.leaves.layout import BufferLayout
from optfn.mesh.compilers import xla


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PerTensor:
    """A scalar that differs between the tensors in one array.

    layout: the positions of the tensors.
    values: an array (num_tensors,) for each run of tensors.
    """

    layout: BufferLayout
    values: Sequence[jax.Array]

    def broadcast(self, shape: tuple[int, ...]) -> jax.Array:
        """Return an array of `shape` with each tensor's scalar at all of its elements."""
        layout, values = self.layout, list(self.values)
        in_units = partial(_broadcast_units, layout, shape)
        in_tensors = partial(_broadcast_tensors, layout, shape)
        return xla.call_for_platform(in_units, in_tensors, values)


def _broadcast_units(
    layout: BufferLayout, shape: tuple[int, ...], values: Sequence[jax.Array]
) -> jax.Array:
    """Return an array of `shape` with each tensor's scalar at all of its elements, by units that
    all tensors are multiples of, as XLA on CPU wants it."""
    # XLA on CPU keeps a joined array in memory, so join units, which are as long as the greatest
    # common divisor of all tensors, and broadcast after that.
    unit = max(1, math.gcd(*(run.tensor_size for run in layout.runs)))
    units = []
    for of_run, run in zip(values, layout.runs, strict=True):
        counted = (run.num_tensors, run.tensor_size // unit)
        units.append(jnp.broadcast_to(of_run[:, None], counted).reshape(-1))
    joined = units[0] if len(units) == 1 else jnp.concatenate(units)
    return jnp.broadcast_to(joined[:, None], (joined.size, unit)).reshape(shape)


def _broadcast_tensors(
    layout: BufferLayout, shape: tuple[int, ...], values: Sequence[jax.Array]
) -> jax.Array:
    """Return an array of `shape` with each tensor's scalar at all of its elements: for a leaf by a
    broadcast along its stacked axes, for a flat buffer tensor by tensor."""
    # Units of a few elements would be padded to the 128 lanes of a TPU, so broadcast each tensor.
    if len(shape) > 1:
        stacked = layout.runs[0].shape[: layout.runs[0].stacked]
        ones = (1,) * (len(shape) - len(stacked))
        return jnp.broadcast_to(values[0].reshape(*stacked, *ones), shape)
    pieces = []
    for of_run, run in zip(values, layout.runs, strict=True):
        pieces += [jnp.broadcast_to(number, (run.tensor_size,)) for number in of_run]
    return jnp.concatenate(pieces).reshape(shape)


def tensor_norms(
    updates: Updates, *trees: PyTree, of: Callable[..., jax.Array] = lambda g: g, **scalars: Any
) -> PerLeaf:
    """Return the L2 norm of each tensor of of(g, *trees, **scalars), with None for a masked leaf.

    Args:
      updates: the gradients; a row-sparse leaf gives the norm of its values.
      *trees: trees of arrays, structured as `updates`.
      of: an elementwise function of arrays, the gradient itself by default.
      **scalars: numbers and 0-d arrays, the same for all leaves, or a PerLeaf.
    """
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    of = partial(of, **numbers)
    norm = jit_if_traced(
        lambda arrays, kw: numerics.norm(of(*arrays, **kw)), checks.is_traced(updates)
    )
    layouts = contents.leaf_layouts(updates)

    def leaf_norms(place: tree.Place, *arrays: Leaf) -> Any:
        layout = layouts[place.number]
        at_leaf = {k: scalar_at(v, place.number) for k, v in scalars.items() if k not in numbers}
        if tree.is_masked(arrays[0]):
            return None
        if layout.is_one_tensor or isinstance(arrays[0], LeafKind):
            return norm(list(map(numbers_of, arrays)), at_leaf)
        return PerTensor(layout, _norms_of_runs(of, layout, arrays, at_leaf))

    return PerLeaf([leaf_norms(*row) for row in tree.items(updates, *trees)])


def _norms_of_runs(
    of: Callable[..., jax.Array],
    layout: BufferLayout,
    arrays: Sequence[jax.Array],
    scalars: dict[str, Any],
) -> list[jax.Array]:
    """Return the norms of the tensors of each run in some arrays, shape (num_tensors,)."""
    # A PerTensor has a number for each tensor of the run; a plain scalar serves all of them.
    axes = {k: 0 if isinstance(v, PerTensor) else None for k, v in scalars.items()}
    value = jax.vmap(lambda tensors, numbers: of(*tensors, **numbers), in_axes=(0, axes))
    runs = enumerate(zip(*map(layout.rows, arrays), strict=True))
    return [xla.row_norms(value(tensors, _scalars_of_run(k, scalars))) for k, tensors in runs]


def combine(fn: Callable[..., jax.Array], *numbers: PerLeaf, **scalars: Any) -> PerLeaf:
    """Return fn(*numbers, **scalars) of each leaf or tensor, as a PerLeaf, with None where one of
    `numbers` is None.

    Args:
      fn: an elementwise function of scalars or arrays.
      *numbers: one per leaf or tensor, such as norms.
      **scalars: the same for all leaves, or a PerLeaf.
    """
    fixed = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    fn = jit_if_traced(partial(fn, **fixed), checks.is_traced(numbers))
    scalars = {k: v for k, v in scalars.items() if k not in fixed}

    def leaf_value(i: int) -> Any:
        args = [scalar_at(x, i) for x in numbers]
        named = {k: scalar_at(v, i) for k, v in scalars.items()}
        layouts = [x.layout for x in (*args, *named.values()) if isinstance(x, PerTensor)]
        if any(x is None for x in args):
            return None
        if not layouts:
            return fn(*args, **named)
        runs = (_scalars_of_run(k, (args, named)) for k in range(len(layouts[0].runs)))
        return PerTensor(layouts[0], [fn(*args, **named) for args, named in runs])

    return PerLeaf(list(map(leaf_value, range(len(numbers[0].values)))))


def _scalars_of_run(k: int, scalars: PyTree) -> PyTree:
    """Replace each PerTensor in a tree by its values of run k."""

    def is_split(x: object) -> bool:
        return isinstance(x, PerTensor)

    return jax.tree.map(lambda x: x.values[k] if is_split(x) else x, scalars, is_leaf=is_split)


def scalars_of_leaves(of: Callable[[str], Any], like: PyTree) -> PerLeaf:
    """Return of(name) for each leaf: one scalar, or a PerTensor if leaves of a buffer differ."""

    def leaf_scalar(names: Sequence[str], layout: BufferLayout) -> Any:
        scalars = [of(name) for name in names]
        # By identity: the scalars may be traced, and then cannot be compared.
        distinct = {id(x): x for x in scalars}
        if len(distinct) == 1:
            return scalars[0]
        table = jnp.stack([jnp.asarray(x) for x in distinct.values()])
        rows = dict(zip(layout.leaves, map([*distinct].index, map(id, scalars)), strict=True))
        values = (np.repeat([rows[i] for i in r.leaves], r.tensors_per_leaf) for r in layout.runs)
        return PerTensor(layout, [table[of_run] for of_run in values])

    return PerLeaf(list(map(leaf_scalar, contents.leaf_names(like), contents.leaf_layouts(like))))


def map_tensors(fn: Callable[[jax.Array], jax.Array], updates: Updates) -> Updates:
    """Map a function over the tensors of each leaf, all of a shape at once, and return empty and
    masked leaves unchanged.

    Args:
      fn: (num_tensors, *shape) -> the same, of tensors of one shape, each by itself.
      updates: a tree of dense leaves, masked ones among them.
    """
    layouts, program = contents.leaf_layouts(updates), jit_if_traced(fn, checks.is_traced(updates))

    def map_leaf(place: tree.Place, g: Leaf) -> Leaf:
        if tree.is_masked(g) or not g.size:
            return g
        layout = layouts[place.number]
        return layout.join([program(x) for x in layout.split_tensors(g)], g.shape)

    return tree.map_named(map_leaf, updates)


def all_finite(updates: Updates, *, squared: bool = False) -> jax.Array:
    """Tell whether all floating-point leaves are finite, or with `squared` their squares in float32
    or wider, as a bool scalar, which is True without such leaves."""

    def is_finite(x: jax.Array) -> jax.Array:
        if not squared:
            return jnp.isfinite(x)
        # Not the square itself: XLA squares total/every, a mean, as total²/every².
        wide = x.astype(numerics.accumulator_dtype(x.dtype))
        return jnp.abs(wide) <= np.sqrt(jnp.finfo(wide.dtype).max)

    leaves = tree.arrays(leafwise.keep_inexact(updates))
    finite = [jnp.all(is_finite(numbers_of(g))) for g in leaves]
    return xla.compute_once(jnp.all(jnp.stack(finite))) if finite else jnp.asarray(True)
