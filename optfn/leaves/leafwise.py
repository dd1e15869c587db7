"""The application of rules on arrays to the leaves of trees.

Only this module knows the kinds of leaves: dense, row-sparse, or several tensors in one array.
Rules are elementwise; numbers of a whole tensor, such as its norm, are computed before them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import checks
from optfn.checks import Scalar
from optfn.leaves import mismatch, numerics, tree
from optfn.leaves.layout import BufferLayout
from optfn.leaves.types import DType, Leaf, LeafKind, Params, PyTree, Updates

# (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays
Rule = Callable[..., Any]


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
        """Return the scalars of the leaves of `layout`, which are some of those here."""
        of_leaf = {
            leaf: values[i * run.per_leaf : (i + 1) * run.per_leaf]
            for run, values in zip(self.layout.runs, self.values, strict=True)
            for i, leaf in enumerate(run.leaves)
        }
        runs = layout.runs
        return PerTensor(layout, [jnp.concatenate([of_leaf[i] for i in r.leaves]) for r in runs])


class PerLeaf(NamedTuple):
    """A scalar that differs between leaves: one per leaf, in the order of `tree.flatten`.

    For an array of several tensors it is a PerTensor, or one scalar for all of them.
    """

    values: Sequence[Any]

    def all(self) -> list[jax.Array]:
        """Return the scalars of all leaves that are not masked, those of tensors as arrays."""
        lists = [v.values if isinstance(v, PerTensor) else [v] for v in self.values]
        return [v for values in lists for v in values if v is not None]


def tensor_norms(
    updates: Updates,
    *others: PyTree,
    of: Callable[..., jax.Array] = lambda g: g,
    **scalars: Any,
) -> PerLeaf:
    """Return the L2 norm of each tensor of of(g, *others, **scalars); None for a masked leaf.

    Args:
      updates: the gradients; of a row-sparse leaf, the norm is that of its values.
      *others: trees of arrays, structured as `updates`.
      of: an elementwise function of arrays, the gradient itself by default.
      **scalars: numbers and 0-d arrays, the same for all leaves, or a PerLeaf.
    """
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    of = partial(of, **numbers)
    norm = _shared(lambda arrays, own: numerics.norm(of(*arrays, **own)), updates)
    layouts = tree.layouts(updates)

    def of_leaf(place: tree.Place, *arrays: Leaf) -> Any:
        layout = layouts[place.number]
        own = {k: _scalar_at(v, place.number) for k, v in scalars.items() if k not in numbers}
        if tree.is_masked(arrays[0]):
            return None
        if layout.is_one_tensor or isinstance(arrays[0], LeafKind):
            return norm([_numbers(x) for x in arrays], own)
        return PerTensor(layout, _norms_of_runs(of, layout, arrays, own))

    return PerLeaf([of_leaf(*row) for row in tree.items(updates, *others)])


def _norms_of_runs(
    of: Callable[..., jax.Array],
    layout: BufferLayout,
    arrays: Sequence[jax.Array],
    scalars: dict[str, Any],
) -> list[jax.Array]:
    """Return the norms of the tensors of each run in some arrays, shape (num_tensors,)."""
    common = {k: v for k, v in scalars.items() if not isinstance(v, PerTensor)}
    own = {k: v.values for k, v in scalars.items() if isinstance(v, PerTensor)}

    def of_tensor(tensors: Sequence[jax.Array], numbers: dict[str, jax.Array]) -> jax.Array:
        return of(*tensors, **common, **numbers)

    runs = zip(*map(layout.tensors, arrays), strict=True)
    return [
        numerics.row_norms(jax.vmap(of_tensor)(tensors, {k: v[i] for k, v in own.items()}))
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
    fn = _shared(partial(fn, **fixed), numbers)
    scalars = {k: v for k, v in scalars.items() if k not in fixed}

    def of_leaf(i: int) -> Any:
        own = [_scalar_at(x, i) for x in numbers]
        named = {k: _scalar_at(v, i) for k, v in scalars.items()}
        layouts = [x.layout for x in (*own, *named.values()) if isinstance(x, PerTensor)]
        if any(x is None for x in own):
            return None
        if not layouts:
            return fn(*own, **named)
        runs = range(len(layouts[0].runs))
        return PerTensor(layouts[0], [_call_of_run(fn, k, own, named) for k in runs])

    return PerLeaf([of_leaf(i) for i in range(len(numbers[0].values))])


def _call_of_run(
    fn: Callable[..., jax.Array], k: int, own: list[Any], named: dict[str, Any]
) -> jax.Array:
    """Return `fn` of the numbers of the tensors in run k."""

    def of_run(x: Any) -> Any:
        return x.values[k] if isinstance(x, PerTensor) else x

    return fn(*(of_run(x) for x in own), **{name: of_run(x) for name, x in named.items()})


def per_leaf(of: Callable[[str], Any], like: PyTree) -> PerLeaf:
    """Return the scalar of(path) for each leaf of `like`, also of those that lie in one array."""

    def of_leaf(names: Sequence[str], layout: BufferLayout) -> Any:
        scalars = [of(name) for name in names]
        distinct = {id(x): x for x in scalars}
        if len(distinct) == 1:
            return scalars[0]
        table = jnp.stack([jnp.asarray(x) for x in distinct.values()])
        numbers = {key: i for i, key in enumerate(distinct)}
        runs = layout.by_run([numbers[id(x)] for x in scalars])
        return PerTensor(layout, [table[np.array(run)] for run in runs])

    return PerLeaf(list(map(of_leaf, tree.names(like), tree.layouts(like))))


def merge_rows(updates: Updates) -> Updates:
    """Return `updates` with repeated rows of row-sparse leaves added up, as norms need it."""
    return _map_kinds(lambda place, g: g.merged(), updates)


def to_dense(updates: Updates, warning: str = "") -> Updates:
    """Return `updates` with row-sparse leaves dense; `warning` is given if there are any."""

    def dense(place: tree.Place, g: LeafKind) -> jax.Array:
        if warning:
            checks.warn(f"{warning}; it costs the whole table {place!r}")
        return g.dense()

    return _map_kinds(dense, updates)


def _map_kinds(fn: Callable[[tree.Place, LeafKind], Leaf], updates: Updates) -> Updates:
    def convert(place: tree.Place, g: Leaf) -> Leaf:
        return fn(place, _checked(place, g)) if isinstance(g, LeafKind) else g

    return tree.map_named(convert, updates)


def _checked(place: tree.Place, g: LeafKind) -> LeafKind:
    """Return a row-sparse gradient, which must be well formed.

    A third-party transform before this one in a chain may have changed its indices.
    """
    g.check(f"update: the gradient of {place!r}")
    return g


def apply(
    rule: Rule,
    updates: Updates,
    *state: PyTree,
    params: Params | None = None,
    shapes: Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]] | None = None,
    rows: str = "dense",
    **scalars: Any,
) -> Any:
    """Apply an elementwise rule on arrays to every leaf.

    Args:
      rule: (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays; without
        accumulators only the update. An accumulator keeps its dtype.
      updates: the gradients.
      *state: trees of accumulators, structured like `updates`.
      params: the parameters, if the rule reads them.
      shapes: a function from the shape of a gradient to the shapes of its accumulators. Without it,
        they have the shape of the gradient.
      rows: how a row-sparse gradient is treated. "dense": it is converted to an array. "touched":
        the rule is applied to the touched rows of gradient, accumulators and parameter, to each
        once. "linear": the rule is applied to the rows of the gradient as they are, repeated or
        not; it must be linear in g and read nothing else.
      **scalars: hyper-parameters and 0-d arrays, the same for all leaves, or a PerLeaf. If it
        differs between the tensors in one array, the rule gets an array with one number per
        element.

    Returns:
      The tree of updates; with state, (updates, *state).

    Raises:
      ValueError: the state has another structure than `updates`, or a leaf of another shape,
        because it belongs to other params.
      TypeError: the indices of a row-sparse gradient are not int32.
    """
    for accumulators in state:
        tree.check_same_structure("update", "the state", accumulators, "updates", updates)
    # Python numbers are no arguments of the program: 1 − 0.999 is taken in float64.
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    arrays = {k: v for k, v in scalars.items() if k not in numbers}
    program = _shared(partial(_apply_to_leaf, partial(rule, **numbers), rows), updates)

    def on_leaf(place: tree.Place, g: Leaf, *others: Leaf) -> tuple[Any, ...]:
        if tree.is_masked(g):
            return (optax.MaskedNode(),) * (1 + len(state))
        if isinstance(g, LeafKind):
            _checked(place, g)
        accumulators, p = others[: len(state)], others[len(state) :]
        mismatch.check_accumulators(place, g, accumulators, shapes)
        own = {k: _scalar_at(v, place.number) for k, v in arrays.items()}
        results: tuple[Any, ...] = program(g, accumulators, p, own)
        return results

    others = state if params is None else (*state, params)
    trees = tree.map_to(1 + len(state), on_leaf, updates, *others)
    return trees if state else trees[0]


def map_tensors(fn: Callable[[jax.Array], jax.Array], updates: Updates) -> Updates:
    """Map a function over the tensors of each leaf.

    Args:
      fn: (num_tensors, *shape) -> the same, of tensors of one shape, each by itself.
      updates: a tree of dense leaves, masked ones among them.
    """
    layouts, program = tree.layouts(updates), _shared(fn, updates)

    def of_leaf(place: tree.Place, g: Leaf) -> Leaf:
        if tree.is_masked(g) or not g.size:
            return g
        layout = layouts[place.number]
        return layout.joined([program(x) for x in layout.tensors(g)], g.shape)

    return tree.map_named(of_leaf, updates)


def scale(updates: Updates, factor: Scalar | PerLeaf) -> Updates:
    """Return factor·updates, in the dtypes of the updates."""

    def scaled(g: jax.Array, *, factor: Scalar) -> jax.Array:
        return numerics.scalar(factor, g) * g

    return apply(scaled, updates, rows="touched", factor=factor)


def _shared(program: Callable[..., Any], values: PyTree) -> Callable[..., Any]:
    """Return the program of one leaf, jitted while tracing.

    Leaves of one shape are then traced and lowered once. A model of many small leaves would
    otherwise spend most of the time before its first step on that.
    """
    return jax.jit(program) if checks.is_traced(values) else program


def _numbers(g: Leaf) -> Any:
    return g.values if isinstance(g, LeafKind) else g


def _scalar_at(scalar: Any, i: int) -> Any:
    """Return the scalar of leaf i: a number, or a PerTensor."""
    return scalar.values[i] if isinstance(scalar, PerLeaf) else scalar


def _apply_to_leaf(
    rule: Rule,
    rows: str,
    g: Leaf,
    accumulators: Sequence[jax.Array],
    p: Sequence[jax.Array],
    scalars: dict[str, Any],
) -> tuple[Any, ...]:
    scalars = {k: _spread(v, g.shape) for k, v in scalars.items()}
    if isinstance(g, LeafKind):
        return _in_own_dtypes(g.apply(rule, rows, accumulators, p, scalars), accumulators)
    return _in_own_dtypes(rule(g, *accumulators, *p, **scalars), accumulators)


def _spread(scalar: Any, shape: tuple[int, ...]) -> Any:
    return scalar.layout.spread(scalar.values, shape) if isinstance(scalar, PerTensor) else scalar


def _in_own_dtypes(result: Any, accumulators: Sequence[jax.Array]) -> tuple[Any, ...]:
    u, *new = result if accumulators else (result,)
    return u, *(cast(x, old.dtype) for x, old in zip(new, accumulators, strict=True))


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """Return x.astype(dtype); x itself where it has that dtype, since a no-op cast costs a call."""
    return x if x.dtype == dtype else x.astype(dtype)


def zeros_like(
    params: Params,
    *,
    real: bool = False,
    fill: Any = 0.0,
    leading: tuple[int, ...] = (),
    dtype: DType | None = None,
) -> PyTree:
    """Return a tree of accumulators for `params`, float32 or wider, filled with `fill`.

    `real` keeps a complex leaf's accumulator real; `leading` prepends axes to each shape; `dtype`
    is used as it is.
    """

    def zeros(p: jax.Array) -> jax.Array:
        own = numerics.accumulator_dtype(p.dtype)
        own = numerics.real_dtype(own) if real else own
        # Made like p and then broadcast, so that it is sharded as p is.
        filled = jnp.full_like(p, fill, dtype=own if dtype is None else dtype)
        return jnp.broadcast_to(filled, (*leading, *p.shape)) if leading else filled

    return tree.map_arrays(zeros, params)


def frozen_update(g: Leaf, p: Leaf) -> Leaf:
    """Return the update of a frozen leaf: −0.0, an integer zero, or a masked leaf.

    −0.0 is the only number that leaves p + u = p bit for bit.
    """
    p = np.asarray(p, jnp.result_type(p)) if isinstance(p, int | float | complex) else p
    if tree.is_array(p) and not mismatch.is_float0(p):
        if jnp.issubdtype(p.dtype, jnp.inexact):
            return jnp.full(p.shape, -0.0, p.dtype)
        return numerics.integer_zeros(jnp.shape(p), p.dtype)
    # Without params the dtype is unknown; int8 is the one that promotes no integer.
    return numerics.integer_zeros(g.shape, np.int8) if mismatch.is_float0(g) else g


def inexact(params: Params) -> Params:
    """Return a tree in which the leaves that are not floating point are masked."""
    return tree.map(lambda x: x if tree.is_inexact(x) else optax.MaskedNode(), params)


def all_finite(updates: Updates) -> jax.Array:
    """Tell whether all floating-point leaves are finite, a bool scalar."""
    finite = [jnp.all(jnp.isfinite(_numbers(g))) for g in tree.arrays(inexact(updates))]
    return numerics.computed_once(jnp.all(jnp.stack(finite))) if finite else jnp.asarray(True)


def global_norm(updates: Updates) -> jax.Array:
    """Return the L2 norm of all leaves together, √∑‖g‖², a scalar of float32 or wider.

    Squares are taken in float32 or wider. Repeated rows of a row-sparse leaf are added up before.
    """

    def square(g: Leaf) -> jax.Array:
        x = jnp.asarray(_numbers(g))
        return numerics.sum_of_squares(cast(x, numerics.accumulator_dtype(x.dtype)))

    squares = [square(g) for g in tree.arrays(merge_rows(updates))]
    if not squares:
        return jnp.zeros((), jnp.float32)
    widest = max((s.dtype for s in squares), key=lambda dtype: jnp.finfo(dtype).bits)
    return jnp.sqrt(jnp.stack([s.astype(widest) for s in squares]).sum())
