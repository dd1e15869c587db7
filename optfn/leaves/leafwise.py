"""Rules on arrays, applied to the leaves of trees; and trees of arrays that are like others.

The one place where a rule meets a leaf: dense, row-sparse, or several tensors in one array. Rules
are elementwise; what they need to know of a tensor, such as its norm, is computed before them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef

from optfn import checks
from optfn.leaves import mismatch, numerics, tree
from optfn.leaves.layout import BufferLayout
from optfn.leaves.types import DType, Leaf, LeafKind, Params, PyTree, Updates

# (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays
Rule = Callable[..., Any]


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PerTensor:
    """A scalar that differs between the tensors in one array.

    layout: where the tensors lie.
    values: for each run of them an array (num_tensors,).
    """

    layout: BufferLayout
    values: Sequence[jax.Array]


class PerLeaf(NamedTuple):
    """A scalar that differs between leaves: one per leaf, in the order of `tree.flatten`.

    For an array of several tensors it is a PerTensor, or one scalar for all of them.
    """

    values: Sequence[Any]

    def all(self) -> list[jax.Array]:
        """Return the scalars of all leaves that are not masked, those of tensors as arrays."""
        lists = [v.values if isinstance(v, PerTensor) else [v] for v in self.values]
        return [v for values in lists for v in values if v is not None]


def norms(
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
    values: list[Any] = []
    columns = [tree.flatten(x)[0] for x in (updates, *others)]
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    of = partial(of, **numbers)
    norm = _shared(lambda arrays, own: numerics.norm(of(*arrays, **own)), columns[0])
    for i, (layout, *arrays) in enumerate(zip(tree.layouts(updates), *columns, strict=True)):
        own = {k: _of_leaf(v, i) for k, v in scalars.items() if k not in numbers}
        if tree.is_masked(arrays[0]):
            values.append(None)
        elif layout.is_one_tensor or isinstance(arrays[0], LeafKind):
            values.append(norm(list(map(_values, arrays)), own))
        else:
            values.append(PerTensor(layout, _norms_of_runs(of, layout, arrays, own)))
    return PerLeaf(values)


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
        numerics.norms(jax.vmap(of_tensor)(tensors, {k: v[i] for k, v in own.items()}))
        for i, tensors in enumerate(runs)
    ]


def combine(fn: Callable[..., jax.Array], *numbers: PerLeaf, **scalars: Any) -> PerLeaf:
    """Return fn of the numbers of each tensor.

    Args:
      fn: an elementwise function of scalars or arrays.
      *numbers: one per leaf or tensor, such as norms.
      **scalars: the same for all leaves, or a PerLeaf.
    """
    values: list[Any] = []
    fixed = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    fn = _shared(partial(fn, **fixed), numbers[0].all())
    scalars = {k: v for k, v in scalars.items() if k not in fixed}
    for i, own in enumerate(zip(*(x.values for x in numbers), strict=True)):
        named = {k: _of_leaf(v, i) for k, v in scalars.items()}
        layouts = [x.layout for x in (*own, *named.values()) if isinstance(x, PerTensor)]
        if None in own:
            values.append(None)
        elif not layouts:
            values.append(fn(*own, **named))
        else:
            of_runs = [
                fn(*(_of_run(x, k) for x in own), **{n: _of_run(x, k) for n, x in named.items()})
                for k in range(len(layouts[0].runs))
            ]
            values.append(PerTensor(layouts[0], of_runs))
    return PerLeaf(values)


def _of_run(x: Any, k: int) -> Any:
    return x.values[k] if isinstance(x, PerTensor) else x


def per_leaf(of: Callable[[Any], Any], kinds: Sequence[tuple[Any, ...]], like: PyTree) -> PerLeaf:
    """Return the scalar of(kind) for each leaf of `like`.

    Args:
      of: gives a scalar.
      kinds: for each leaf a tuple, with the kind of each leaf that lies in it, as `tree.select`
        gives flags.
      like: the tree.
    """
    values: list[Any] = []
    for group, layout in zip(kinds, tree.layouts(like), strict=True):
        if len(set(group)) == 1:
            values.append(of(group[0]))
        else:
            numbers = {kind: i for i, kind in enumerate(dict.fromkeys(group))}
            table = jnp.stack([jnp.asarray(of(kind)) for kind in numbers])
            runs = layout.by_run([numbers[kind] for kind in group])
            values.append(PerTensor(layout, [table[np.array(run)] for run in runs]))
    return PerLeaf(values)


def merge_rows(updates: Updates) -> Updates:
    """Return `updates` with each row of a row-sparse leaf once, as norms want it."""
    return _map_kinds(lambda g: g.merged(), updates)


def densify(updates: Updates, warning: str = "") -> Updates:
    """Return `updates` with row-sparse leaves dense; `warning` is given if there are any."""

    def dense(g: LeafKind) -> jax.Array:
        if warning:
            checks.warn(f"{warning}; it costs the whole table")
        return g.dense()

    return _map_kinds(dense, updates)


def _map_kinds(fn: Callable[[LeafKind], Leaf], updates: Updates) -> Updates:
    leaves, structure = _checked(updates)
    return structure.unflatten([fn(g) if isinstance(g, LeafKind) else g for g in leaves])


def _checked(updates: Updates) -> tuple[list[Leaf], PyTreeDef]:
    """Return `tree.flatten(updates)`, whose row-sparse leaves must be well formed.

    A third-party transform before this one in a chain may have changed their indices.
    """
    leaves, structure = tree.flatten(updates)
    for i, g in enumerate(leaves):
        if isinstance(g, LeafKind):
            g.check(f"update: the gradient of {tree.paths(updates)[i]!r}")
    return leaves, structure


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
      rule: (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays; the update
        alone where there are no accumulators. An accumulator keeps its dtype.
      updates: the gradients.
      *state: trees of accumulators, structured as `updates`.
      params: the parameters, where the rule reads them.
      shapes: the shapes of the accumulators of a gradient of the shape that it is given; without
        it they are shaped like the gradient.
      rows: what becomes of a row-sparse gradient. "dense": the array that it stands for; "touched":
        the rule is applied to the rows that it touches, each once, of gradient, accumulators and
        parameter; "linear": to its rows as they come, repeated or not, for a rule that is linear in
        g and reads nothing else.
      **scalars: hyper-parameters and 0-d arrays, the same for all leaves, or a PerLeaf. Where it
        differs between the tensors in one array, the rule takes an array with one number per
        element.

    Returns:
      The tree of updates, or where there is state, (updates, *state).

    Raises:
      ValueError: the state has another structure than `updates`, or a leaf of another shape: it
        belongs to other params.
      TypeError: a row-sparse gradient whose indices are not int32.
    """
    gradients, structure = _checked(updates)
    for accumulators in state:
        tree.check_same_structure("update", "the state", accumulators, "updates", updates)
    columns = [tree.flatten(accumulators)[0] for accumulators in state]
    parameters = None if params is None else tree.flatten(params)[0]
    masked = (optax.MaskedNode(),) * (1 + len(state))
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    program = _program(rule, rows, gradients, numbers)
    results = []
    for i, g in enumerate(gradients):
        if tree.is_masked(g):
            results.append(masked)
            continue
        accumulators = [column[i] for column in columns]
        expected = [g.shape] * len(accumulators) if shapes is None else shapes(g.shape)
        if [getattr(x, "shape", None) for x in accumulators] != list(expected):
            raise mismatch.state_error(accumulators, expected, updates, i)
        p = [] if parameters is None else [parameters[i]]
        arrays = {k: _of_leaf(v, i) for k, v in scalars.items() if k not in numbers}
        results.append(program(g, accumulators, p, arrays))
    trees = tuple(structure.unflatten([row[k] for row in results]) for k in range(len(masked)))
    return trees if state else trees[0]


def _program(
    rule: Rule, rows: str, gradients: Sequence[Leaf], scalars: dict[str, Any]
) -> Callable[..., tuple[Any, ...]]:
    """Return the function (g, accumulators, p, arrays) -> (update, *accumulators) of one leaf.

    Python numbers stay what they are: 1 − 0.999 is taken in float64.
    """
    return _shared(partial(_apply_to_leaf, rule, rows, scalars), gradients)


def _shared(program: Callable[..., Any], gradients: Sequence[Leaf]) -> Callable[..., Any]:
    """Return the program of one leaf, jitted while tracing.

    So leaves of one shape are traced and lowered once: that is most of what a model of many small
    leaves waits for before its first step.
    """
    traced = any(isinstance(_values(g), jax.core.Tracer) for g in gradients)
    return jax.jit(program) if traced else program


def _values(g: Leaf) -> Any:
    return g.values if isinstance(g, LeafKind) else g


def _of_leaf(scalar: Any, i: int) -> Any:
    """Return what stands for a scalar at leaf i: a number, or a PerTensor."""
    return scalar.values[i] if isinstance(scalar, PerLeaf) else scalar


def _apply_to_leaf(
    rule: Rule,
    rows: str,
    static: dict[str, Any],
    g: Leaf,
    accumulators: list[jax.Array],
    p: list[jax.Array],
    scalars: dict[str, Any],
) -> tuple[Any, ...]:
    spread = {k: _spread(v, g.shape) for k, v in scalars.items()}
    rule = partial(rule, **static, **spread)
    if isinstance(g, LeafKind):
        return _in_own_dtypes(g.apply(rule, rows, accumulators, p), accumulators)
    return _in_own_dtypes(rule(g, *accumulators, *p), accumulators)


def _spread(scalar: Any, shape: tuple[int, ...]) -> Any:
    return scalar.layout.spread(scalar.values, shape) if isinstance(scalar, PerTensor) else scalar


def _in_own_dtypes(result: Any, accumulators: list[jax.Array]) -> tuple[Any, ...]:
    u, *new = result if accumulators else (result,)
    return u, *(cast(x, old.dtype) for x, old in zip(new, accumulators, strict=True))


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """Return x.astype(dtype), x itself where it has that dtype: the question costs less."""
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


def inexact(params: Params) -> Params:
    """Return a tree in which the leaves that are not floating point are masked."""
    leaves, structure = tree.flatten(params)
    return structure.unflatten([x if tree.is_inexact(x) else optax.MaskedNode() for x in leaves])


def all_finite(updates: Updates) -> jax.Array:
    """Tell whether all floating-point leaves are finite, a bool scalar."""
    finite = jnp.asarray(True)
    for g in tree.flatten(inexact(updates))[0]:
        if not tree.is_masked(g):
            finite = finite & jnp.all(jnp.isfinite(_values(g)))
    return finite


def global_norm(updates: Updates) -> jax.Array:
    """Return the L2 norm of all leaves together, √∑‖g‖², a scalar of float32 or wider.

    Squares are taken in float32 or wider. Repeated rows of a row-sparse leaf are added up before.
    """

    leaves = tree.flatten(merge_rows(updates))[0]
    arrays = [jnp.asarray(_values(g)) for g in leaves if not tree.is_masked(g)]
    wide = [cast(x, numerics.accumulator_dtype(x.dtype)) for x in arrays]
    squares = [numerics.sum_of_squares(x) for x in wide]
    if not squares:
        return jnp.zeros((), jnp.float32)
    widest = max((s.dtype for s in squares), key=lambda dtype: jnp.finfo(dtype).bits)
    return jnp.sqrt(jnp.stack([s.astype(widest) for s in squares]).sum())
