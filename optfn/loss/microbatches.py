"""Microbatches: equal slices of a batch, run one after another.

Only the activations of one microbatch are kept at a time, which saves memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optfn.core import leafwise, numerics, tree
from optfn.core.types import Batch, Leaf, LeafKind, PyTree, Updates
from optfn.loss.jaxprs.equations import Equations
from optfn.loss.keys import fold_in
from optfn.loss.loss_form import Inputs, Values
from optfn.loss.mean import average_by_weight, nonzero
from optfn.loss.objective import Objective
from optfn.mesh.collectives.means import sum_dtype
from optfn.mesh.collectives.mesh import count_devices, explicit_sharding, make_zeros

Carry = TypeVar("Carry")
# (the arrays of a batch, the number of slices) -> the slices of each, along a new leading axis
SplitExamples: TypeAlias = Callable[[list[jax.Array], int], list[jax.Array]]


def split_in_order(arrays: list[jax.Array], count: int) -> list[jax.Array]:
    """Split each array by `split_array`."""
    return [split_array(x, count) for x in arrays]


def split_array(x: jax.Array, count: int) -> jax.Array:
    """Reshape an array to `count` equal slices of consecutive examples along a new leading axis,
    and divide each along the explicit axes that divide the array.

    Without explicit axes the compiler chooses.
    """
    shape = (count, jnp.shape(x)[0] // count, *jnp.shape(x)[1:])
    placement = explicit_sharding(x)
    if placement is None:
        return jnp.reshape(x, shape)
    spec = PartitionSpec(None, *placement.spec)
    return lax.reshape(x, shape, out_sharding=NamedSharding(placement.mesh, spec))


def scan_batch(
    fn: Callable[[Carry, Batch, jax.Array], tuple[Carry, PyTree]],
    carry: Carry,
    batch: Batch,
    count: int,
    argument: str,
    split: SplitExamples = split_in_order,
) -> tuple[Carry, PyTree]:
    """Scan fn(carry, microbatch, number) over `count` equal slices of a batch, with scalars whole
    in each, and raise a ValueError if a leading axis does not split evenly.

    Args:
      fn: returns the next carry, and results that are stacked.
      carry: the first carry.
      batch: the arrays to slice.
      count: the number of slices.
      argument: the name of the user's argument that gives `count`, for errors.
      split: returns the slices of arrays along a new leading axis; the default takes them in order.

    Returns:
      The last carry and the stacked results, as `lax.scan` returns them.

    Raises:
      ValueError: a leading axis cannot be split evenly; the error names the leaf and `argument`.
    """
    slices, join = _slice_batch(batch, count, argument, split)

    def body(carry: Carry, numbered: tuple[jax.Array, list[jax.Array]]) -> tuple[Carry, PyTree]:
        number, arrays = numbered
        return fn(carry, join(arrays), number)

    return lax.scan(body, carry, (jnp.arange(count), slices))


def _slice_batch(
    batch: Batch, count: int, argument: str, split: SplitExamples
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Batch]]:
    """Return the stacked slices of the arrays of a batch, and the function from the arrays of a
    slice to a batch, whose scalars are the scalars of the whole batch."""
    check_slices(batch, count, argument)
    leaves, structure = jax.tree.flatten(batch)
    slices = split([x for x in leaves if jnp.ndim(x)], count)

    def join(arrays: list[jax.Array]) -> Batch:
        remaining = iter(arrays)
        own = [next(remaining) if jnp.ndim(x) else x for x in leaves]
        return jax.tree.unflatten(structure, own)

    return slices, join


def check_slices(batch: Batch, count: int, argument: str) -> None:
    """Raise a ValueError unless each array but a scalar splits into `count` slices of equal size,
    which the explicit axes along it divide too."""
    for path, x in tree.arrays_with_paths(batch):
        if not jnp.ndim(x):
            continue
        leaf, size = f"leaf {path!r}" if path else "it", jnp.shape(x)[0]
        if size % count:
            raise ValueError(
                f"{argument}={count} must divide the leading axis of a worker's part of the batch; "
                f"{leaf} has length {size}"
            )
        placement = explicit_sharding(x)
        if placement is None:
            continue
        along = placement.spec[0]
        devices = count_devices(cast("Mesh", placement.mesh), along)  # only its sizes are read
        if size // count % devices:
            raise ValueError(
                f"{argument}={count}: the {devices} devices along {along!r} must divide each of "
                f"the {count} slices of the batch; {leaf} has length {size}"
            )


def average_microbatches(
    objective: Objective, count: int, split: SplitExamples = split_in_order
) -> Objective:
    """Wrap an objective so that it runs on `count` microbatches in turn, and averages its results,
    by weight for a `Mean`, or return it unchanged for a count of 1.

    Loss, gradients and floating-point aux are means over the microbatches; integers in aux are
    summed. Each microbatch passes the model state to the next, and has a separate key and step.
    Dense gradients are added up in float32 or wider; rows are joined. `split` is the argument of
    `scan_batch`.
    """
    if count == 1:
        return objective

    def run(inputs: Inputs) -> tuple[Values, Updates]:
        batch = inputs.batch
        slices, join = _slice_batch(batch, count, "microbatches", split)
        first = join([x[0] for x in slices])
        first = _select_microbatch(inputs, inputs.model_state, first, jnp.arange(count)[0], count)
        # The sums need the structure and dtypes of the gradients of a microbatch. One trace serves
        # for all of them.
        traced = Equations(objective, first, inline=False)
        _, like = traced.shapes

        def body(carry: Any, microbatch: Batch, number: jax.Array) -> tuple[Any, PyTree]:
            state, totals = carry
            own = _select_microbatch(inputs, state, microbatch, number, count)
            values, grads = traced.evaluate(jax.tree.leaves(own))
            rows = tree.map(lambda g: g if isinstance(g, LeafKind) else None, grads)
            totals = tree.map(partial(_add_gradient, values.weight), totals, grads)
            return (values.model_state, totals), (values._replace(model_state=None), rows)

        start = inputs.model_state, tree.map(_make_total, like)
        carry, (values, rows) = scan_batch(body, start, batch, count, "microbatches", split)
        state, totals = carry
        divisor: int | jax.Array = count
        if values.weight is not None:
            divisor = nonzero(jnp.sum(values.weight))
            rows = _scale_rows(rows, values.weight * (count / divisor))
        grads = tree.map(partial(_divide_total, count, divisor), like, totals, rows)
        return _combine_values(values, state), grads

    return run


def _combine_values(values: Values, model_state: PyTree) -> Values:
    """Return the mean loss and the combined aux of stacked microbatches, by weight and with the sum
    of weights if they have weights, and the last model state."""
    loss, weight, aux = values.loss, values.weight, combine_microbatches(values.aux)
    if weight is None:
        return Values(jnp.mean(loss), model_state, aux)
    return Values(average_by_weight(loss, weight), model_state, aux, jnp.sum(weight))


def _scale_rows(rows: PyTree, factors: jax.Array) -> PyTree:
    """Multiply the rows of each microbatch, stacked, by its factor."""

    def scale(x: jax.Array) -> jax.Array:
        along = factors.reshape(-1, *[1] * (x.ndim - 1))
        return (x.astype(numerics.accumulator_dtype(x.dtype)) * along).astype(x.dtype)

    return tree.map(lambda r: r.map(scale) if isinstance(r, LeafKind) else r, rows)


def _select_microbatch(
    inputs: Inputs, model_state: PyTree, microbatch: Batch, number: jax.Array, count: int
) -> Inputs:
    """Return the inputs of one of `count` microbatches, with its number folded into the key, if
    there is one, and the count of microbatches since step 0 as the number of its packets."""
    key = None if inputs.key is None else fold_in(inputs.key, number)
    packet = inputs.packet * count + number
    return inputs._replace(model_state=model_state, batch=microbatch, key=key, packet=packet)


def _make_total(g: Leaf) -> Leaf:
    """Return zeros of the shape of g in float32 or wider, or None if g has rows or is an integer's
    gradient."""
    if isinstance(g, LeafKind) or not tree.is_inexact(g):
        return None
    return make_zeros(g.shape, numerics.accumulator_dtype(g.dtype), g)


def _add_gradient(weight: jax.Array | None, total: Leaf, g: Leaf) -> Leaf:
    """Return total + weight·g in the dtype of the total, or total + g without a weight, or None
    without a total."""
    if total is None:
        return None
    g = leafwise.cast(g, total.dtype)
    return total + (g if weight is None else g * numerics.scalar(weight, g))


def _divide_total(count: int, divisor: int | jax.Array, g: Leaf, total: Leaf, rows: Leaf) -> Leaf:
    """Return the mean gradient of a leaf from its total or its rows, and without both g itself if
    it is masked, else zeros of float0.

    Args:
      count: the number of microbatches.
      divisor: the divisor of the sum, the number or the weight of all microbatches.
      g: a gradient of one microbatch, which has the dtype of the mean.
      total: the sum of dense gradients, or None.
      rows: the rows of all microbatches, stacked, or None.
    """
    if total is not None:
        by = divisor if isinstance(divisor, int) else numerics.scalar(divisor, total)
        return leafwise.cast(total / by, g.dtype)
    if isinstance(rows, LeafKind):
        return rows.sum_leading().map(lambda x: x / count)
    return g if tree.is_masked(g) else numerics.float0_zeros(jnp.shape(g))


def combine_microbatches(values: PyTree) -> PyTree:
    """Combine stacked values along their leading axis, by the mean of floats, the sum of integers
    and booleans, and the first of random keys."""

    def combine(x: jax.Array) -> jax.Array:
        if tree.is_key(x):
            return x[0]
        return jnp.mean(x, 0) if tree.is_inexact(x) else jnp.sum(x, 0, dtype=sum_dtype(x))

    return jax.tree.map(combine, values)
