"""Numbers of each tensor, such as norms, and functions of each: an array may hold several."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks, leafwise, numerics, tree
from optfn.core.leafwise import PerLeaf, numbers_of, scalar_at, shared
from optfn.core.types import Leaf, LeafKind, PyTree, Updates
from optfn.leaves import xla
from optfn.leaves.layout import BufferLayout


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PerTensor:
    """A scalar that differs between the tensors in one array.

    layout: the positions of the tensors.
    values: an array (num_tensors,) for each run of tensors.
    """

    layout: BufferLayout
    values: Sequence[jax.Array]

    def only(self, layout: BufferLayout) -> "PerTensor":
        """Restrict the scalars to the leaves of `layout`."""
        by_leaf = {
            leaf: values[i * run.tensors_per_leaf : (i + 1) * run.tensors_per_leaf]
            for run, values in zip(self.layout.runs, self.values, strict=True)
            for i, leaf in enumerate(run.leaves)
        }
        runs = layout.runs
        return PerTensor(layout, [jnp.concatenate([by_leaf[i] for i in r.leaves]) for r in runs])

    def spread(self, shape: tuple[int, ...]) -> jax.Array:
        """Return an array of `shape` with the scalar of its tensor at each element."""
        return self.layout.spread(self.values, shape)


def all_numbers(per_leaf: PerLeaf) -> list[jax.Array]:
    """Return the scalars of all leaves that are not masked, those of tensors as arrays."""
    lists = [v.values if isinstance(v, PerTensor) else [v] for v in per_leaf.values]
    return [v for values in lists for v in values if v is not None]


def tensor_norms(
    updates: Updates,
    *trees: PyTree,
    of: Callable[..., jax.Array] = lambda g: g,
    **scalars: Any,
) -> PerLeaf:
    """Return the L2 norm of each tensor of of(g, *trees, **scalars); None for a masked leaf.

    Args:
      updates: the gradients; of a row-sparse leaf, the norm is that of its values.
      *trees: trees of arrays, structured as `updates`.
      of: an elementwise function of arrays, the gradient itself by default.
      **scalars: numbers and 0-d arrays, the same for all leaves, or a PerLeaf.
    """
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    of = partial(of, **numbers)
    norm = shared(lambda arrays, kw: numerics.norm(of(*arrays, **kw)), checks.is_traced(updates))
    layouts = tree.layouts(updates)

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
    common = {k: v for k, v in scalars.items() if not isinstance(v, PerTensor)}
    varying = {k: v.values for k, v in scalars.items() if isinstance(v, PerTensor)}

    def tensor_value(tensors: Sequence[jax.Array], numbers: dict[str, jax.Array]) -> jax.Array:
        return of(*tensors, **common, **numbers)

    runs = zip(*map(layout.rows, arrays), strict=True)
    return [
        xla.row_norms(jax.vmap(tensor_value)(tensors, {k: v[i] for k, v in varying.items()}))
        for i, tensors in enumerate(runs)
    ]


def combine(fn: Callable[..., jax.Array], *numbers: PerLeaf, **scalars: Any) -> PerLeaf:
    """Return fn of the numbers of each tensor.

    Args:
      fn: an elementwise function of scalars or arrays.
      *numbers: one per leaf or tensor, such as norms.
      **scalars: the same for all leaves, or a PerLeaf.
    """
    fixed = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    fn = shared(partial(fn, **fixed), checks.is_traced(numbers))
    scalars = {k: v for k, v in scalars.items() if k not in fixed}

    def leaf_value(i: int) -> Any:
        args = [scalar_at(x, i) for x in numbers]
        named = {k: scalar_at(v, i) for k, v in scalars.items()}
        layouts = [x.layout for x in (*args, *named.values()) if isinstance(x, PerTensor)]
        if any(x is None for x in args):
            return None
        if not layouts:
            return fn(*args, **named)
        runs = range(len(layouts[0].runs))
        return PerTensor(layouts[0], [_run_value(fn, k, args, named) for k in runs])

    return PerLeaf(list(map(leaf_value, range(len(numbers[0].values)))))


def _run_value(
    fn: Callable[..., jax.Array], k: int, args: list[Any], named: dict[str, Any]
) -> jax.Array:
    """Return `fn` of the numbers of the tensors in run k."""

    def value(x: Any) -> Any:
        return x.values[k] if isinstance(x, PerTensor) else x

    return fn(*map(value, args), **{name: value(x) for name, x in named.items()})


def per_leaf(of: Callable[[str], Any], like: PyTree) -> PerLeaf:
    """Return the scalar of(path) for each leaf of `like`, also of those that lie in one array."""

    def leaf_scalar(names: Sequence[str], layout: BufferLayout) -> Any:
        scalars = [of(name) for name in names]
        distinct = {id(x): x for x in scalars}
        if len(distinct) == 1:
            return scalars[0]
        table = jnp.stack([jnp.asarray(x) for x in distinct.values()])
        numbers = {key: i for i, key in enumerate(distinct)}
        runs = layout.split_by_run([numbers[id(x)] for x in scalars])
        return PerTensor(layout, [table[np.array(run)] for run in runs])

    return PerLeaf(list(map(leaf_scalar, tree.names(like), tree.layouts(like))))


def map_tensors(fn: Callable[[jax.Array], jax.Array], updates: Updates) -> Updates:
    """Map a function over the tensors of each leaf.

    Args:
      fn: (num_tensors, *shape) -> the same, of tensors of one shape, each by itself.
      updates: a tree of dense leaves, masked ones among them.
    """
    layouts, program = tree.layouts(updates), shared(fn, checks.is_traced(updates))

    def map_leaf(place: tree.Place, g: Leaf) -> Leaf:
        if tree.is_masked(g) or not g.size:
            return g
        layout = layouts[place.number]
        return layout.joined([program(x) for x in layout.tensors(g)], g.shape)

    return tree.map_named(map_leaf, updates)


def all_finite(updates: Updates) -> jax.Array:
    """Tell whether all floating-point leaves are finite, a bool scalar."""
    finite = [jnp.all(jnp.isfinite(numbers_of(g))) for g in tree.arrays(leafwise.inexact(updates))]
    return xla.computed_once(jnp.all(jnp.stack(finite))) if finite else jnp.asarray(True)
