"""The loss of a training step and its gradients, for all forms of loss functions."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn import mesh as meshes
from optfn import sparse
from optfn.autodiff.named_segments import recompute_function
from optfn.core import errors, leafwise, numerics, tree
from optfn.core.types import Batch, Leaf, LeafKind, LossFn, Params, PyTree, Updates
from optfn.leaves.packed import pack_like, unpack
from optfn.leaves.patterns import Pattern
from optfn.parallel.data_parallel import batch_spec
from optfn.parallel.layout import Layout
from optfn.parallel.means import mean_of_all, mean_or_first, mean_over_workers
from optfn.parallel.owners import current_step, encoding_at
from optfn.parallel.shards import mean_gradients, whole
from optfn.sparse.sharded_table import unwrap_tables, wrap_tables_like
from optfn.sparse.tables import Owners
from optfn.train.loss_form import Form, Values
from optfn.train.loss_scale import check_unscaled, current_factor, scaled_loss, scaling_losses
from optfn.workers import Workers


class Objective(NamedTuple):
    """The objective of a step: two functions of (params, model_state, batch, *keys).

    value: returns the Values.
    value_and_grad: returns the Values and the gradients.
    """

    value: Callable[..., Values]
    value_and_grad: Callable[..., tuple[Values, Updates]]


# A context manager from stored params to those that a function sees while it is traced.
Seen: TypeAlias = Callable[[Params], contextlib.AbstractContextManager[Params]]


def differentiated(
    loss_fn: LossFn,
    form: Form,
    seen: Seen = contextlib.nullcontext,
    *,
    tables: Pattern | None = None,
    owners: Owners | None = None,
    recompute: Sequence[str] | None = None,
) -> Objective:
    """Return the objective of a loss function; its gradients are those of `jax.value_and_grad`.

    Args:
      loss_fn: (params, batch) -> loss, or another form.
      form: its arguments and results besides params, batch and loss.
      seen: a context manager from the stored params to those that the loss sees; gradients are
        with respect to the stored ones.
      tables: leaves that are only looked up; see `sparse.value_and_grad`.
      owners: the workers that keep the rows of tables, if these are sharded.
      recompute: names of values that are kept for the backward pass.
    """

    def value(params: Params, model_state: PyTree, *batch_and_keys: Any) -> Values:
        with seen(params) as whole_params:
            returned = loss_fn(whole_params, *form.arguments(model_state, *batch_and_keys))
        return form.values("loss_fn", returned, model_state)

    def loss_and_rest(*arguments: Any) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        loss, *rest = value(*arguments)
        return scaled_loss(loss), tuple(rest)

    transform = None
    if recompute is not None:
        transform = functools.partial(recompute_function, names=recompute, argument="recompute")
    if tables is not None:
        transformed = sparse.value_and_grad(
            loss_and_rest, tables, has_aux=True, transform=transform, owners=owners
        )
    else:
        function = loss_and_rest if transform is None else transform(loss_and_rest)
        transformed = jax.value_and_grad(function, has_aux=True, allow_int=True)

    def value_and_grad(*arguments: Any) -> tuple[Values, Updates]:
        (loss, rest), grads = transformed(*arguments)
        return Values(loss, *rest), grads

    # loss_fn alone would look up ids in a worker's rows as if they were the whole table.
    if owners is not None:
        return Objective(lambda *arguments: value_and_grad(*arguments)[0], value_and_grad)
    return Objective(value, value_and_grad)


def user_objective(function: Callable[..., Any], form: Form, seen: Seen) -> Objective:
    """Return the objective of a user's function (params, batch) -> (loss, gradients)."""

    def value_and_grad(params: Params, model_state: PyTree, batch: Batch) -> tuple[Values, Updates]:
        check_unscaled("value_and_grad")
        result = function(params, *form.arguments(model_state, batch))
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise TypeError(
                f"value_and_grad must return a pair, ({form.result}, gradients); got a value of "
                f"type {type(result).__name__}"
            )
        returned, grads = result
        values = form.values("the value of value_and_grad", returned, model_state)
        errors.check_params("value_and_grad", grads, "", "gradient")
        # Elsewhere the optimizer checks them: one that simulates workers takes a gradient of each.
        if seen is not contextlib.nullcontext:
            errors.check_gradients("value_and_grad", grads, params)
        return values, jax.tree.map(tree.as_array, grads)

    objective = Objective(lambda *arguments: value_and_grad(*arguments)[0], value_and_grad)
    return gathered(objective, seen)


def gathered(objective: Objective, seen: Seen) -> Objective:
    """Return the objective of stored params, differentiated with respect to the gathered ones."""
    return _adapted(objective, seen, lambda params, grads: grads)


def refusing_aux_of_examples(objective: Objective) -> Objective:
    """Return an objective whose aux is averaged: an entry for each example would lose its meaning.

    Raises:
      ValueError: an array in aux grows with the batch.
    """

    def value_and_grad(
        params: Params, model_state: PyTree, batch: Batch, *keys: Any
    ) -> tuple[Values, Updates]:
        values, grads = objective.value_and_grad(params, model_state, batch, *keys)
        if any(map(jnp.ndim, jax.tree.leaves(values.aux))):
            twice = values.aux
            with contextlib.suppress(Exception):  # a loss may take batches of one size only
                double = jax.tree.map(_shape_of_twice, batch)
                twice = jax.eval_shape(objective.value, params, model_state, double, *keys).aux
            _check_aux(values.aux, twice)
        return values, grads

    return Objective(objective.value, value_and_grad)


def _shape_of_twice(x: Leaf) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of a batch with twice the examples."""
    shape = jnp.shape(x)
    return jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]) if shape else (), jnp.result_type(x))


def _check_aux(aux: PyTree, twice: PyTree) -> None:
    """Raise a ValueError if an array of aux has another shape for twice the examples."""
    for (path, x), (_, y) in zip(
        tree.arrays_with_paths(aux), tree.arrays_with_paths(twice), strict=True
    ):
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"aux{f' at {path!r}' if path else ''}: an array of shape {jnp.shape(x)} has an "
                "entry for each example of a worker's part of the batch, and on a mesh or with "
                "microbatches it would become a mean over examples that have nothing in common. "
                "Return a number, such as its mean over the examples; or compute it outside of "
                "the step, with the params that a loss sees"
            )


def packed_objective(objective: Objective) -> Objective:
    """Return the objective as a function of packed params, with packed gradients."""
    return _adapted(
        objective,
        lambda params: contextlib.nullcontext(unpack(params)),
        lambda packed, grads: pack_like(packed.layout, grads),
    )


def sharded_table_objective(objective: Objective) -> Objective:
    """Return the objective as a function of params with ShardedTables, and gradients to match."""
    return _adapted(
        objective, lambda params: contextlib.nullcontext(unwrap_tables(params)), wrap_tables_like
    )


def _adapted(
    objective: Objective, seen: Seen, stored: Callable[[Params, Updates], Updates]
) -> Objective:
    """Return the objective as a function of params in another form, with gradients in that form.

    Args:
      objective: the objective.
      seen: a context manager from params in that form to those that the objective takes.
      stored: (params, gradients of `objective`) -> the gradients in that form.
    """

    def value(params: Params, *arguments: Any) -> Values:
        with seen(params) as converted:
            return objective.value(converted, *arguments)

    def value_and_grad(params: Params, *arguments: Any) -> tuple[Values, Updates]:
        with seen(params) as converted:
            values, grads = objective.value_and_grad(converted, *arguments)
        return values, stored(params, grads)

    return Objective(value, value_and_grad)


def sharded_objective(make: Callable[[Seen], Objective], layout: Layout) -> Objective:
    """Return the objective of all devices that divide params: a function of whole sharded arrays.

    Loss and gradients are means over these devices. Each device gathers the params that its
    loss needs, and gets its shards of the gradients.

    Args:
      make: returns the objective of one device.
      layout: how params are divided.
    """
    objective = _ShardedObjective(make, layout)
    return Objective(objective.value, objective.value_and_grad)


class _ShardedObjective(NamedTuple):
    """The objective of the devices that divide params; see `sharded_objective`."""

    make: Callable[[Seen], Objective]
    layout: Layout

    def value(self, params: Params, *rest: Any) -> Values:
        """Return the mean of the values over the devices."""
        specs = self.layout.param_specs(params)
        objective = self._device_objective(params, specs)

        def run(shards: Params, model_state: PyTree, batch: Batch, *keys: Any) -> Values:
            return self._mean(objective.value(shards, model_state, batch, *self._local_keys(keys)))

        return self._run(run, specs, P(), params, *rest)

    def value_and_grad(self, params: Params, *rest: Any) -> tuple[Values, Updates]:
        """Return the mean values, and the mean gradients, divided as the layout says."""
        layout = self.layout
        specs, of_gradients = layout.param_specs(params), layout.gradient_specs(params)
        objective = self._device_objective(params, specs)
        # Gradients of divided params arrive with the PartitionSpecs of the params.
        arriving = jax.tree.map(
            lambda p, spec, of_gradient: (
                None if not tree.is_inexact(p) else spec if layout.divisions(spec) else of_gradient
            ),
            params, specs, of_gradients,
        )  # fmt: skip

        def run(
            shards: Params, model_state: PyTree, batch: Batch, *keys: Any
        ) -> tuple[Values, Updates]:
            local_keys = self._local_keys(keys)
            values, grads = objective.value_and_grad(shards, model_state, batch, *local_keys)
            grads = mean_gradients(grads, shards, specs, arriving, layout)
            # shard_map cannot return arrays of dtype float0.
            grads = tree.map_arrays(lambda g: g if tree.is_inexact(g) else None, grads)
            return self._mean(values), grads

        out_specs = P(), self.layout.bound_specs(arriving)
        values, grads = self._run(run, specs, out_specs, params, *rest)

        def laid_out(p: Leaf, g: Leaf, arrived: P | None, spec: P) -> Leaf:
            if arrived is None:
                return numerics.float0_zeros(jnp.shape(p))
            if isinstance(g, LeafKind) or (g.shape == p.shape and arrived == spec):
                return g
            g = lax.slice(g, [0] * p.ndim, p.shape)  # without padding
            return meshes.constrained(g, layout.mesh, spec)

        return values, jax.tree.map(laid_out, params, grads, arriving, of_gradients)

    def _device_objective(self, params: Params, specs: PyTree) -> Objective:
        """Return the objective of one device, which sees whole params."""
        tables = self.layout.is_table(params)
        return self.make(lambda shards: whole(shards, specs, tables, self.layout))

    def _mean(self, values: Values) -> Values:
        names = self.layout.shard_axes
        loss, aux = mean_over_workers((values.loss, values.aux), names)
        return Values(loss, mean_or_first(values.model_state, names), aux)

    def _local_keys(self, keys: Sequence[jax.Array]) -> list[jax.Array]:
        """Return keys that are different on each device."""
        return [jax.random.fold_in(key, lax.axis_index(self.layout.shard_axes)) for key in keys]

    def _run(
        self, function: Callable[..., Any], specs: PyTree, out_specs: PyTree, *arguments: Any
    ) -> Any:
        """Return `function` of the arguments on each device; `specs` are those of params."""
        params, model_state, batch, *keys = arguments
        names = self.layout.shard_axes
        split = jax.tree.map(lambda x: batch_spec(x, names), batch)
        in_specs = (P(), P(), self.layout.bound_specs(specs), P(), split, *[P()] * len(keys))

        def run(factor: jax.Array | None, step: jax.Array | None, *arguments: Any) -> Any:
            # Inside shard_map, arrays must be arguments.
            with scaling_losses(factor), encoding_at(step):
                return function(*arguments)

        mapped = meshes.mapped(run, self.layout.mesh, names, in_specs, out_specs)
        return mapped(current_factor(), current_step(), params, model_state, batch, *keys)


def value_fn(
    objective: Objective, workers: Workers, *arguments: Any
) -> Callable[[Params], jax.Array]:
    """Return params -> loss on the batch of a step, which line searches call.

    Args:
      objective: the objective of the step.
      workers: the workers over which loss and gradients are averaged.
      *arguments: model state, batch and keys of the step.
    """

    @jax.custom_vjp
    def loss(params: Params) -> jax.Array:
        return mean_over_workers(objective.value(params, *arguments).loss, workers.axes)

    def forward(params: Params) -> tuple[jax.Array, Updates]:
        values, grads = objective.value_and_grad(params, *arguments)
        grads, mean = mean_of_all(grads, values.loss, workers)
        return mean, grads

    def backward(grads: Updates, cotangent: jax.Array) -> tuple[Updates]:
        def scaled(g: Leaf) -> Leaf:
            if not tree.is_inexact(g):
                return numerics.float0_zeros(jnp.shape(g))
            return cotangent.astype(g.dtype) * g

        return (tree.map_arrays(scaled, leafwise.densify_rows(grads)),)

    loss.defvjp(forward, backward)

    def value(params: Params, workers: object = None, row_updates: object = None) -> jax.Array:
        # A line search refuses extra arguments that this function does not take.
        del workers, row_updates
        at_params: jax.Array = loss(params)
        return at_params

    return value
