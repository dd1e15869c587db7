"""The application of rules on arrays to the leaves of trees.

Rules are elementwise; numbers of a whole tensor, such as its norm, are computed before them
(`optfn.leaves.tensors`). A leaf is an array, or a `LeafKind`, whose method `apply` does it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn.core import checks, errors, numerics, tree
from optfn.core.checks import Scalar
from optfn.core.numerics import cast as cast
from optfn.core.types import DType, Leaf, LeafKind, Params, PyTree, Updates

# (g, *accumulators, [p], **scalars) -> (update, *accumulators), on arrays
ArrayRule = Callable[..., Any]


class PerLeaf(NamedTuple):
    """A scalar that differs between leaves: one per leaf, in the order of `tree.flatten`.

    `optfn.leaves.tensors.tensor_norms` returns one, for example. For an array of several tensors it
    is a `tensors.PerTensor`, or one scalar for all of them.
    """

    values: Sequence[Any]


def apply(
    rule: ArrayRule,
    updates: Updates,
    *state: PyTree,
    params: Params | None = None,
    shapes: Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]] | None = None,
    rows: str = "dense",
    **scalars: Any,
) -> Any:
    """Apply an elementwise rule to the array of every leaf, and return the updates, with the new
    accumulators if there are any, masked where leaves are.

    The array that a rule gets is a leaf, the stacked layers of a `Stacked`, or a buffer of many
    leaves of packed params: a norm or a mean that the rule takes of it would differ between them.
    Compute a number of each tensor before, as `optfn.leaves.tensors.tensor_norms` does, and pass it
    in `scalars`.

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
      **scalars: hyper-parameters and 0-d arrays, the same for all leaves, or a
        `leafwise.PerLeaf(values)`: one for each leaf, in order. If it differs between the tensors
        in one array, the rule gets an array with one number per element.

    Returns:
      The tree of updates; with state, (updates, *state).

    Raises:
      ValueError: the state has another structure than `updates`, or a leaf of another shape,
        because it belongs to different params.
      TypeError: the indices of a row-sparse gradient are not int32.
    """
    # Python numbers stay outside the jitted program's arguments: 1 − 0.999 is taken in float64.
    numbers = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
    arrays = {k: v for k, v in scalars.items() if k not in numbers}
    leaves, columns, structure = _align_trees(updates, state, params)
    is_traced = checks.has_tracer(map(numbers_of, leaves))
    program = jit_if_traced(partial(_apply_to_leaf, partial(rule, **numbers), rows), is_traced)

    def apply_at(i: int, g: Leaf, *row: Leaf) -> Any:
        if tree.is_masked(g):
            return (optax.MaskedNode(),) * (1 + len(state))
        accumulators, p = row[: len(state)], row[len(state) :]
        expected = [g.shape] * len(state) if shapes is None else shapes(g.shape)
        if any(not tree.has_shape(x, s) for x, s in zip(accumulators, expected, strict=True)):
            raise errors.shape_error(i, updates, accumulators, expected)
        try:
            return program(g, accumulators, p, {k: scalar_at(v, i) for k, v in arrays.items()})
        except Exception as error:
            raise errors.name_rule(error, rule, i, updates, p) from error.__cause__

    results = list(map(apply_at, range(len(leaves)), leaves, *columns))
    trees = [structure.unflatten(r[k] for r in results) for k in range(1 + len(state))]
    return tuple(trees) if state else trees[0]


def _align_trees(
    updates: Updates, state: Sequence[PyTree], params: Params | None
) -> tuple[list[Leaf], list[list[Leaf]], Any]:
    """Return the leaves of `updates`, a list of leaves for each further tree, and the structure, or
    raise a ValueError if structures differ.

    A list has the subtree of its tree in the place of each leaf of `updates`.
    """
    leaves, structure = tree.flatten(updates)
    if any(isinstance(g, LeafKind) for g in leaves):
        _map_row_sparse(lambda place, g: g, updates)  # for its check
    trees = state if params is None else (*state, params)
    try:
        return leaves, list(map(structure.flatten_up_to, trees)), structure
    except ValueError as error:
        raise errors.structure_error(updates, trees, error) from None


def _apply_to_leaf(
    rule: partial[Any], rows: str, g: Leaf, accumulators: Any, p: Any, scalars: dict[str, Any]
) -> tuple[Any, ...]:
    """Call a rule on one leaf, through `g.apply` if it is a LeafKind, and return its results, with
    accumulators in their dtypes. Raise a ValueError if their shapes changed."""
    scalars = {k: _broadcast(v, g.shape) for k, v in scalars.items()}
    if isinstance(g, LeafKind):
        result = g.apply(rule, rows, accumulators, p, scalars)
    else:
        result = rule(g, *accumulators, *p, **scalars)
    u, *new = result if isinstance(result, tuple | list) else (result,)
    if [jnp.shape(x) for x in new] != [x.shape for x in accumulators]:
        raise errors.result_error(result, accumulators)
    return u, *(cast(x, old.dtype) for x, old in zip(new, accumulators, strict=True))


def jit_if_traced(program: Callable[..., Any], is_traced: bool) -> Callable[..., Any]:
    """Return `program`, jitted if its arguments are traced, and unchanged otherwise.

    JAX then traces and lowers it once for all leaves of one shape. Otherwise a model of many small
    leaves spends most of the time before its first step on that.
    """
    return jax.jit(program) if is_traced else program


def numbers_of(g: Leaf) -> Any:
    """Return the array of a leaf, or the values of a row-sparse leaf."""
    return g.values if isinstance(g, LeafKind) else g


def scalar_at(scalar: Any, i: int) -> Any:
    """Return the scalar of leaf i, a number or a PerTensor, if scalars differ between leaves, and
    otherwise the scalar unchanged."""
    return scalar.values[i] if isinstance(scalar, PerLeaf) else scalar


def _broadcast(scalar: Any, shape: tuple[int, ...]) -> Any:
    """Return a scalar unchanged, and a PerTensor as an array of `shape`."""
    is_scalar = tree.is_array(scalar) or isinstance(scalar, int | float)
    return scalar if is_scalar else scalar.broadcast(shape)


def scale(updates: Updates, factor: Scalar | PerLeaf) -> Updates:
    """Return factor·updates in the dtypes of the updates, where the factor is one scalar or a
    PerLeaf, and masked leaves are returned masked."""

    def multiply(g: jax.Array, *, factor: Scalar) -> jax.Array:
        return numerics.scalar(factor, g) * g

    return apply(multiply, updates, rows="touched", factor=factor)


def keep_if(counts: jax.Array | None, grads: Updates) -> Updates:
    """Replace gradients by zeros where `counts` is false, but return integers, and all gradients if
    `counts` is None, unchanged."""
    if counts is None:
        return grads

    def keep(g: Leaf) -> Leaf:
        if isinstance(g, LeafKind):
            return g.map(keep)
        return jnp.where(counts, g, jnp.zeros_like(g)) if tree.is_inexact(g) else g

    return tree.map_arrays(keep, grads)


def zeros_like(
    params: Params,
    *,
    real: bool = False,
    fill: Any = 0.0,
    leading: tuple[int, ...] = (),
    dtype: DType | None = None,
) -> PyTree:
    """Return a tree of accumulators for `params` filled with `fill`, in float32 or wider unless a
    `dtype` is given.

    `real` keeps a complex leaf's accumulator real; `leading` prepends axes to each shape. With a
    `dtype`, the accumulators have this floating-point dtype: `apply` rounds the results of a rule
    to its nearest number, so that in bfloat16 a moment loses changes below some 1/256 of its value.
    The moments of optfn's optimizers have `moment_dtype=`, which rounds at random to keep their
    mean.

    Raises:
      TypeError: `dtype` is not floating point. Integers would cut off the results of a rule; the
        moment_dtype="int8" of an optimizer keeps scales beside them.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"dtype must be floating point, such as bfloat16; got {jnp.dtype(dtype)}")

    def zeros(p: jax.Array) -> jax.Array:
        wide = numerics.accumulator_dtype(jnp.finfo(p.dtype).dtype if real else p.dtype)
        # full_like and a broadcast: the accumulator then gets the sharding of p.
        filled = jnp.full_like(p, fill, dtype=wide if dtype is None else dtype)
        return jnp.broadcast_to(filled, (*leading, *p.shape)) if leading else filled

    return jax.tree.map(zeros, params)


def build_gradients(params: Params, gradients: Iterable[jax.Array]) -> Updates:
    """Put the gradients of inexact leaves, and float0 for integer leaves, into a tree like
    `params`."""
    remaining = iter(gradients)

    def gradient(p: Leaf) -> Leaf:
        return next(remaining) if tree.is_inexact(p) else numerics.float0_zeros(p.shape)

    return jax.tree.map(gradient, params)


def keep_inexact(params: Params) -> Params:
    """Return floating-point leaves as arrays, and a masked leaf in place of each leaf of another
    dtype."""
    return tree.map(
        lambda x: tree.as_array(x) if tree.is_inexact(x) else optax.MaskedNode(), params
    )


def merge_rows(updates: Updates) -> Updates:
    """Add up the repeated rows of row-sparse leaves, as norms need it."""
    if not any(isinstance(g, LeafKind) for g in tree.leaves(updates)):
        return updates
    return _map_row_sparse(lambda place, g: g.merge(), updates)


def densify_rows(updates: Updates, warning: str = "") -> Updates:
    """Convert row-sparse leaves to arrays, with a `warning`, if any, for each."""

    def densify(place: tree.Place, g: LeafKind) -> jax.Array:
        if warning:
            checks.warn(f"{warning}; it costs the whole table {place!r}")
        return g.dense()

    return _map_row_sparse(densify, updates)


def _map_row_sparse(fn: Callable[[tree.Place, LeafKind], Leaf], updates: Updates) -> Updates:
    """Check row-sparse leaves and map fn(place, leaf) over them alone."""

    def convert(place: tree.Place, g: Leaf) -> Leaf:
        if not isinstance(g, LeafKind):
            return g
        # A third-party transform before this one in a chain may have changed its indices.
        g.check(f"update: the gradient of {place!r}")
        return fn(place, g)

    return tree.map_named(convert, updates)


def _square(x: jax.Array) -> jax.Array:
    """Return the sum of squares of an array, taken in float32 or wider."""
    return jnp.sum(numerics.abs_squared(cast(x, numerics.accumulator_dtype(x.dtype))))


def global_norm(updates: Updates) -> jax.Array:
    """Return the L2 norm of all leaves together, √∑‖g‖², as a scalar of float32 or wider, without
    masked leaves and 0 without any.

    Squares are taken in float32 or wider. Repeated rows of a row-sparse leaf must be added up
    before, see `merge_rows`.
    """

    arrays = [jnp.asarray(numbers_of(g)) for g in tree.arrays(updates)]
    square = jit_if_traced(_square, checks.has_tracer(arrays))
    return root_of_sum([square(x) for x in arrays])


def root_of_sum(squares: Sequence[jax.Array]) -> jax.Array:
    """Return the root of the sum of scalars in their widest dtype, or a float32 0 without
    scalars."""
    if not squares:
        return jnp.zeros((), jnp.float32)
    # Of float32 and float64 leaves, so that neither is rounded.
    widest = max((s.dtype for s in squares), key=lambda dtype: jnp.finfo(dtype).bits)
    return numerics.sqrt(jnp.stack([s.astype(widest) for s in squares]).sum())
