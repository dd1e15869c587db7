"""Microbatches: equal parts of a batch, one after the other, to save memory for activations."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import leafwise, numerics, tree
from optfn.core.types import Batch, Leaf, LeafKind, Params, PyTree, Updates
from optfn.leaves import mismatch
from optfn.parallel.means import sum_dtype
from optfn.parallel.owners import encoding_microbatch
from optfn.train.loss_form import Values
from optfn.train.objective import Objective

Carry = TypeVar("Carry")


def scan_batch(
    fn: Callable[[Carry, Batch, jax.Array], tuple[Carry, PyTree]],
    carry: Carry,
    batch: Batch,
    count: int,
    argument: str,
) -> tuple[Carry, PyTree]:
    """Return `lax.scan` of fn(carry, part, number) over `count` equal parts of a batch, in order.

    Scalars of the batch are the same in each part.

    Raises:
      ValueError: a leading axis cannot be split evenly; the error names the leaf and `argument`.
    """
    for path, x in tree.arrays_with_paths(batch):
        if jnp.ndim(x) and jnp.shape(x)[0] % count:
            leaf = f"that of leaf {path!r}" if path else "it"
            raise ValueError(
                f"{argument}={count} must divide the leading axis of a worker's part of the batch; "
                f"{leaf} has length {jnp.shape(x)[0]}"
            )
    split = jax.tree.map(
        lambda x: jnp.reshape(x, (count, -1, *jnp.shape(x)[1:])) if jnp.ndim(x) else None, batch
    )

    def body(carry: Carry, numbered: tuple[jax.Array, PyTree]) -> tuple[Carry, PyTree]:
        number, arrays = numbered
        part = jax.tree.map(lambda x, own: x if own is None else own, batch, arrays)
        return fn(carry, part, number)

    result: tuple[Carry, PyTree] = lax.scan(body, carry, (jnp.arange(count), split))
    return result


def in_microbatches(objective: Objective, count: int) -> Objective:
    """Return the objective of a batch as the mean over `count` equal parts of it.

    Loss, gradients and floating-point aux are means over the parts; integers in aux are summed. The
    model state is passed from each part to the next, and the number of a part is folded into its
    key. Dense gradients are added up in float32 or wider; rows are joined.
    """
    if count == 1:
        return objective

    def keys_of(keys: tuple[jax.Array, ...], number: jax.Array) -> list[jax.Array]:
        return [jax.random.fold_in(key, number) for key in keys]

    def value(params: Params, model_state: PyTree, batch: Batch, *keys: jax.Array) -> Values:
        def of_part(state: PyTree, part: Batch, number: jax.Array) -> tuple[PyTree, PyTree]:
            with encoding_microbatch(number, count):
                values = objective.value(params, state, part, *keys_of(keys, number))
            return values.model_state, (values.loss, values.aux)

        state, results = scan_batch(of_part, model_state, batch, count, "microbatches")
        return _values_of_parts(state, results)

    def value_and_grad(
        params: Params, model_state: PyTree, batch: Batch, *keys: jax.Array
    ) -> tuple[Values, Updates]:
        def of_part(carry: Any, part: Batch, number: jax.Array) -> tuple[Any, PyTree]:
            state, totals = carry
            own = keys_of(keys, number)
            with encoding_microbatch(number, count):
                values, grads = objective.value_and_grad(params, state, part, *own)
            rows = tree.map(lambda g: g if isinstance(g, LeafKind) else None, grads)
            totals = tree.map(_with_part, totals, grads)
            return (values.model_state, totals), (values.loss, values.aux, rows)

        first = jax.tree.map(lambda x: x[: x.shape[0] // count] if jnp.ndim(x) else x, batch)
        _, like = jax.eval_shape(objective.value_and_grad, params, model_state, first, *keys)
        start = model_state, tree.map(_zeros, like)
        (state, totals), (*results, rows) = scan_batch(of_part, start, batch, count, "microbatches")
        grads = tree.map(
            lambda g, total, own: _mean_of_parts(g, total, own, count), like, totals, rows
        )
        return _values_of_parts(state, results), grads

    return Objective(value, value_and_grad)


def _zeros(g: Leaf) -> Leaf:
    """Return zeros to which gradients like g are added; None for rows, and without a gradient."""
    if isinstance(g, LeafKind) or not tree.is_inexact(g):
        return None
    return jnp.zeros(g.shape, numerics.accumulator_dtype(g.dtype))


def _with_part(total: Leaf, g: Leaf) -> Leaf:
    return None if total is None else total + leafwise.cast(g, total.dtype)


def _mean_of_parts(g: Leaf, total: Leaf, rows: Leaf, count: int) -> Leaf:
    if total is not None:
        return leafwise.cast(total / count, g.dtype)
    if isinstance(rows, LeafKind):
        return rows.joined().map(lambda x: x / count)
    return g if tree.is_masked(g) else mismatch.no_gradient(jnp.shape(g))


def _values_of_parts(model_state: PyTree, results: PyTree) -> Values:
    loss, aux = results
    return Values(jnp.mean(loss), model_state, jax.tree.map(of_parts, aux))


def of_parts(x: jax.Array) -> jax.Array:
    """Return the mean over parts of numbers, the sum of integers, the first of keys."""
    if tree.is_key(x):
        return x[0]
    return jnp.mean(x, 0) if tree.is_inexact(x) else jnp.sum(x, 0, dtype=sum_dtype(x))
