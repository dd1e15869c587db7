"""Rules on arrays, applied to the leaves of trees; and trees of arrays that are like others.

The one place where a rule meets a leaf: a dense one, one that is row-sparse, or a hole.
"""

import collections
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import numerics
from optfn.leaves import rows, tree
from optfn.leaves.layout import Part, by_runs
from optfn.leaves.rows import Rows


class ByRun(NamedTuple):
    """What differs between the leaves of a buffer: for each run of it an array (count,)."""

    values: Sequence[Any]


class PerLeaf(NamedTuple):
    """A scalar that differs between leaves: one per leaf, in the order of `tree.flatten`.

    For a buffer of a Packed it is a ByRun, or one scalar for all leaves in it.
    """

    values: Sequence[Any]

    def every(self) -> list[Any]:
        """Return all scalars that are there, those of runs as arrays (count,)."""
        lists = [v.values if isinstance(v, ByRun) else [v] for v in self.values]
        return [v for values in lists for v in values if v is not None]


def per_leaf(fn: Callable[[jax.Array], Any], updates: Any) -> PerLeaf:
    """Return fn of each leaf, of the values of a row-sparse one, None for a hole."""
    values: list[Any] = []
    for g, part in zip(tree.flatten(updates)[0], tree.parts(updates), strict=True):
        if tree.is_hole(g):
            values.append(None)
        elif part is not None:
            values.append(ByRun([jax.vmap(fn)(view) for view in part.views(g)]))
        else:
            values.append(fn(_values(g)))
    return PerLeaf(values)


def choose(of: Callable[[Any], Any], kinds: Sequence[Any], like: Any) -> PerLeaf:
    """Return of(kind) for each leaf of `like`.

    Args:
      of: gives a scalar.
      kinds: one for each leaf, a tuple of them for a buffer, as `tree.select` gives flags.
      like: the tree.
    """
    values: list[Any] = []
    for kind, part in zip(kinds, tree.parts(like), strict=True):
        if part is None:
            values.append(of(kind))
        elif len(set(kind)) == 1:
            values.append(of(kind[0]))
        else:
            numbers = {k: i for i, k in enumerate(dict.fromkeys(kind))}
            table = jnp.stack([jnp.asarray(of(k)) for k in numbers])
            split = part.split([numbers[k] for k in kind])
            values.append(ByRun([table[np.array(own)] for own in split]))
    return PerLeaf(values)


def merge_rows(updates: Any) -> Any:
    """Return `updates` with each row of a row-sparse leaf once, as norms want it."""
    return _map_rows(rows.merged, updates)


def densify(updates: Any, warning: str = "") -> Any:
    """Return `updates` with row-sparse leaves dense; `warning` is given if there are any."""

    def dense(g: Rows) -> jax.Array:
        if warning:
            warnings.warn(f"{warning}; it costs the whole table", stacklevel=2)
        return rows.dense(g)

    return _map_rows(dense, updates)


def _map_rows(fn: Callable[[Rows], Any], updates: Any) -> Any:
    leaves, structure = tree.flatten(updates)
    return structure.unflatten([fn(g) if isinstance(g, Rows) else g for g in leaves])


def apply(
    rule: Callable[..., Any],
    updates: Any,
    *state: Any,
    params: Any = None,
    shapes: Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]] | None = None,
    touched: bool = False,
    linear: bool = False,
    whole: bool = False,
    **scalars: Any,
) -> Any:
    """Apply a rule on arrays to every leaf.

    Args:
      rule: (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays; the update
        alone where there are no accumulators. An accumulator keeps its dtype.
      updates: the gradients.
      *state: trees of accumulators, structured as `updates`.
      params: the parameters, where the rule reads them.
      shapes: the shapes of the accumulators of a gradient of the shape that it is given; without
        it they are shaped like the gradient.
      touched: whether a row-sparse gradient concerns only the rows that it touches: the rule is
        then applied to these rows, each once, of gradient, accumulators and parameter. Else it
        becomes dense.
      linear: whether the rule is linear in g, and reads nothing else: it is then applied to the
        rows of a row-sparse gradient as they come, repeated or not.
      whole: whether the rule looks at a tensor as a whole, its norm: in a buffer of a Packed, each
        leaf is then one.
      **scalars: hyper-parameters and 0-d arrays, the same for all leaves, or a PerLeaf.

    Returns:
      The tree of updates, or where there is state, (updates, *state).

    Raises:
      ValueError: the state has another structure than `updates`, or a leaf of another shape: it
        belongs to other params.
    """
    gradients, structure = tree.flatten(updates)
    for accumulators in state:
        tree.check_same_structure("update", "the state", accumulators, "updates", updates)
    columns = [tree.flatten(accumulators)[0] for accumulators in state]
    parameters = None if params is None else tree.flatten(params)[0]
    hole = (optax.MaskedNode(),) * (1 + len(state))
    run = _shared(rule, gradients, touched, linear)
    results = []
    for i, (g, part) in enumerate(zip(gradients, tree.parts(updates), strict=True)):
        if tree.is_hole(g):
            results.append(hole)
            continue
        kept = [column[i] for column in columns]
        expected = [g.shape] * len(kept) if shapes is None else shapes(g.shape)
        for x, shape in zip(kept, expected, strict=True):
            if tree.is_hole(x) or jnp.shape(x) != shape:
                raise ValueError(
                    f"update: the state of leaf {tree.paths(updates)[i]!r} has shape "
                    f"{getattr(x, 'shape', None)}, its gradient {g.shape}: "
                    "it was made for other params"
                )
        p = [] if parameters is None else [parameters[i]]
        own = {k: v.values[i] if isinstance(v, PerLeaf) else v for k, v in scalars.items()}
        if part is not None and (whole or any(isinstance(v, ByRun) for v in own.values())):
            results.append(_apply_by_runs(rule, part, g, kept, p, own))
        else:
            results.append(run(g, kept, p, own))
    trees = tuple(structure.unflatten([row[k] for row in results]) for k in range(len(hole)))
    return trees if state else trees[0]


def _shared(
    rule: Callable[..., Any], gradients: Sequence[Any], touched: bool, linear: bool
) -> Callable[..., tuple[Any, ...]]:
    """Return the function (g, kept, p, scalars) -> (update, *accumulators) of one leaf.

    While tracing, leaves that are alike share it, traced and lowered once: that is most of what a
    model of many small leaves waits for before its first step.
    """
    kinds = collections.Counter(map(_kind, gradients))
    programs: dict[Any, Callable[..., tuple[Any, ...]]] = {}

    def run(g: Any, kept: Any, p: Any, scalars: dict[str, Any]) -> tuple[Any, ...]:
        if kinds[_kind(g)] < 2 or not isinstance(_values(g), jax.core.Tracer):
            return _apply_to_leaf(rule, touched, linear, {}, g, kept, p, scalars)
        # Python numbers stay what they are: 1 − 0.999 is taken in float64.
        static = {k: v for k, v in scalars.items() if isinstance(v, int | float | bool)}
        key = tuple(sorted(static.items()))
        if key not in programs:
            programs[key] = jax.jit(partial(_apply_to_leaf, rule, touched, linear, static))
        rest = {k: v for k, v in scalars.items() if k not in static}
        return programs[key](g, kept, p, rest)

    return run


def _values(g: Any) -> Any:
    return g.values if isinstance(g, Rows) else g


def _kind(g: Any) -> Any:
    return (type(g), getattr(g, "shape", None), str(getattr(g, "dtype", "")))


def _apply_to_leaf(
    rule: Callable[..., Any],
    touched: bool,
    linear: bool,
    static: dict[str, Any],
    g: Any,
    kept: list[Any],
    p: list[Any],
    scalars: dict[str, Any],
) -> tuple[Any, ...]:
    rule = partial(rule, **static, **scalars)
    if isinstance(g, Rows) and linear:
        return (g.map(rule),)
    if isinstance(g, Rows) and touched:
        g = rows.merged(g)
        result = rule(g.values, *(rows.take(x, g) for x in (*kept, *p)))
        u, *new = result if kept else (result,)
        return g.map(lambda values: u), *(
            rows.put(x, g, rows_of_x) for x, rows_of_x in zip(kept, new, strict=True)
        )
    result = rule(rows.dense(g) if isinstance(g, Rows) else g, *kept, *p)
    u, *new = result if kept else (result,)
    return u, *(cast(x, old.dtype) for x, old in zip(new, kept, strict=True))


def _apply_by_runs(
    rule: Callable[..., Any],
    part: Part,
    g: jax.Array,
    kept: list[Any],
    p: list[Any],
    scalars: dict[str, Any],
) -> tuple[Any, ...]:
    common = {k: v for k, v in scalars.items() if not isinstance(v, ByRun)}
    own = {k: v.values for k, v in scalars.items() if isinstance(v, ByRun)}

    def one(arrays: tuple[jax.Array, ...], own: dict[str, Any]) -> Any:
        return rule(*arrays, **common, **own)

    result = by_runs(one, part, (g, *kept, *p), own)
    u, *new = result if kept else (result,)
    return u, *(cast(x, old.dtype) for x, old in zip(new, kept, strict=True))


def cast(x: Any, dtype: Any) -> Any:
    """Return x.astype(dtype), x itself where it has that dtype: the question costs less."""
    return x if x.dtype == dtype else x.astype(dtype)


def zeros_like(
    params: Any,
    *,
    real: bool = False,
    fill: Any = 0.0,
    leading: tuple[int, ...] = (),
    dtype: Any = None,
) -> Any:
    """Return a tree of accumulators for `params`, float32 or wider, filled with `fill`.

    `real` keeps a complex leaf's accumulator real; `leading` prepends axes to each shape; `dtype`
    is used as it is.
    """

    def zeros(p: Any) -> jax.Array:
        own = numerics.accumulator_dtype(p.dtype)
        own = numerics.real_dtype(own) if real else own
        # Made like p and then broadcast, so that it is sharded as p is.
        filled = jnp.full_like(p, fill, dtype=own if dtype is None else dtype)
        return jnp.broadcast_to(filled, (*leading, *p.shape)) if leading else filled

    return tree.map_arrays(zeros, params)


def inexact(params: Any) -> Any:
    """Return a tree with holes for the leaves that are not floating point."""

    leaves, structure = tree.flatten(params)
    return structure.unflatten([optax.MaskedNode() if is_absent(x) else x for x in leaves])


def is_absent(x: Any) -> bool:
    """Tell whether a leaf is a hole or not floating point (an integer, a float0)."""
    if not hasattr(x, "dtype"):
        return not isinstance(x, float | complex)
    return not jnp.issubdtype(x.dtype, jnp.inexact)
