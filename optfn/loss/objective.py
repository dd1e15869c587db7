"""The loss of a training step and its gradients, for all forms of loss functions.

`composition.make_objective` builds an objective from the inside to the outside:

    loss_fn               takes whole params and a batch
    differentiate         takes a device's shards of params (`Gather.wrap`), which are gathered
                          where the loss reads them (loss/loss_program.py), and adds the
                          gradients with respect to these shards
    average_microbatches  takes the batch of a device, and splits it (microbatches.py)
    shard_objective       takes whole arrays, and gives each device its shards and its examples

Where the loss cannot gather by itself (packed params, a user's value_and_grad, `gather_once`),
`differentiate` takes whole params, and `gather_once` gathers all of them around the microbatches.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn.core import errors, leafwise, numerics, tree
from optfn.core.types import DType, Leaf, LeafKind, LossFn, Params, PyTree, Updates
from optfn.leaves.packed import pack_like, unpack
from optfn.leaves.patterns import Pattern
from optfn.loss import scaled_loss
from optfn.loss.jaxprs.constraints import drop_bound_axes
from optfn.loss.jaxprs.sharded_param import ShardedParam, gather_params, is_sharded_param
from optfn.loss.keys import fold_device, restore_unchanged_keys
from optfn.loss.loss_form import Inputs, LossForm, Values
from optfn.loss.loss_program import LossProgram
from optfn.loss.mean import (
    check_constant_weight,
    hold_undefined,
    is_mean,
    take_part,
    take_share,
)
from optfn.loss.recomputation.named_segments import recompute_function
from optfn.loss.scans import LeafShard
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Axes
from optfn.mesh.collectives.devices import Devices, Workers
from optfn.mesh.collectives.means import mean_or_first, mean_over_axes, mean_over_workers
from optfn.mesh.layout.data_parallel import batch_spec
from optfn.mesh.layout.mesh_layout import Layout, ParamEntry
from optfn.mesh.layout.shards import scatter_gradients
from optfn.tables.sharded_table import unwrap_tables, wrap_tables_like

T = TypeVar("T")


# The loss of a step and its gradients with respect to `inputs.params`. Where a line search reads
# the loss alone, XLA drops the gradients: as many products and collectives are compiled.
Objective: TypeAlias = Callable[[Inputs], tuple[Values, Updates]]


class Gather(NamedTuple):
    """The way from the shards of params that a device stores to the params that its loss sees.

    layout: how params are divided.
    entries: a ParamEntry for each leaf of the whole params.
    """

    layout: Layout
    entries: PyTree

    def wrap(self, inputs: Inputs, counts: jax.Array | None = None) -> Params:
        """Return params with a ShardedParam in place of each leaf that the devices divide, and with
        tables unchanged.

        Args:
          inputs: the inputs of the loss.
          counts: whether this device's examples count in the gradient; None if they do.
        """

        def wrap(entry: ParamEntry, x: Leaf) -> Leaf:
            # A loss only looks up the rows of a table.
            if entry.is_table:
                return x
            shard = LeafShard.of(x, entry, self.layout, inputs.packet, counts)
            return x if shard is None else ShardedParam(shard)

        return jax.tree.map(wrap, self.entries, inputs.params)

    def call(self, fn: Callable[[Inputs], T], inputs: Inputs) -> T:
        """Gather all params but tables, and return fn(inputs) with them in place of the shards.

        A gradient that `fn` computes is with respect to whole params, from this device's examples:
        `scatter_gradients` reduces it later.
        """
        leaves, structure = jax.tree.flatten(self.wrap(inputs), is_leaf=is_sharded_param)
        params = jax.tree.unflatten(structure, gather_params(leaves))
        return fn(inputs._replace(params=params))


def differentiate(
    loss_fn: LossFn,
    form: LossForm,
    gather: Gather | None = None,
    *,
    tables: Pattern | None = None,
    owners: Devices | None = None,
    recompute: Sequence[str] | None = None,
    axes: Axes,
    in_parts: bool,
) -> Objective:
    """Return the objective that differentiates a loss function by `jax.value_and_grad`, with `Rows`
    as gradients of tables, and zeros from a device whose `Mean` has weight 0.

    The loss factor in the inputs multiplies the gradients, but not the loss.

    Args:
      loss_fn: (params, batch) -> loss, or another form.
      form: its arguments and results besides params, batch and loss.
      gather: how the params of the loss are gathered from a device's shards, if params are
        divided; gradients are with respect to the shards.
      tables: leaves that are only looked up; see `sparse.value_and_grad`.
      owners: the devices that keep the rows of tables, if these are sharded.
      recompute: names of values that are kept for the backward pass.
      axes: the axes of the devices whose examples a `Mean` is over.
      in_parts: whether it is over further calls as well, so that its weight must be constant.
    """

    def values_at(params: Params, inputs: Inputs) -> tuple[Values, jax.Array | None]:
        returned = loss_fn(params, *form.list_arguments(inputs))
        values = form.check_result("loss_fn", returned, inputs.model_state)
        if not is_mean(values.loss):
            return values, None
        share, weight = take_share(values.loss, axes)
        state = hold_undefined(values.loss.weight, values.model_state, inputs.model_state)
        return Values(share, state, values.aux, weight), values.loss.weight

    def scale_loss(params: Params, inputs: Inputs) -> tuple[jax.Array, Any]:
        (loss, *rest), own_weight = values_at(params, inputs)
        return scaled_loss.scale_gradient(loss, inputs.loss_factor), (rest, own_weight)

    transform = None
    if recompute is not None:
        transform = functools.partial(recompute_function, names=recompute, argument="recompute")

    def objective(inputs: Inputs) -> tuple[Values, Updates]:
        wrapped = inputs.params if gather is None else gather.wrap(inputs)
        program = LossProgram(lambda p: scale_loss(p, inputs), wrapped, tables, owners)
        counts = None
        if program.reduces_gradients and program.shapes[1][1] is not None:
            # Gathers and owners of rows average gradients inside the backward pass, so they have
            # to know before it which devices have weight.
            counts = program.value_of_last() != 0
            wrapped = inputs.params if gather is None else gather.wrap(inputs, counts)
            program = program.with_counts(wrapped, counts)
        (loss, (rest, own_weight)), grads = program.value_and_grad(True, transform)
        if own_weight is None:
            return Values(loss, *rest), grads
        if in_parts and jnp.issubdtype(own_weight.dtype, jnp.floating):
            check_constant_weight(
                lambda params: program.evaluate(params)[1][1], program.whole_params()
            )
        # A device without weight has the gradient 0, where it may be NaN.
        if counts is None:
            grads = leafwise.keep_if(own_weight != 0, grads)
        return Values(loss, *rest), grads

    return functools.partial(drop_bound_axes, objective)


def wrap_value_and_grad(
    function: Callable[..., Any], form: LossForm, gather: Gather | None, axes: Axes
) -> Objective:
    """Return the objective that calls a user's function on whole params, checks its (loss,
    gradients), makes them a share if the loss is a `Mean`, and refuses a loss factor.

    Gradients are not reduced to shards. If the loss is a `Mean`, they are the gradients of its
    quotient, over the examples of this device.
    """

    def objective(inputs: Inputs) -> tuple[Values, Updates]:
        if inputs.loss_factor is not None:
            raise ValueError(
                "dynamic_loss_scale needs loss_fn, whose loss it scales, but value_and_grad "
                "computes loss and gradients itself. Scale the loss there by a constant instead, "
                "and divide by it in tx"
            )
        result = function(inputs.params, *form.list_arguments(inputs))
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise TypeError(
                f"value_and_grad must return a pair, ({form.result}, gradients); got a value of "
                f"type {type(result).__name__}"
            )
        returned, grads = result
        values = form.check_result("the value of value_and_grad", returned, inputs.model_state)
        errors.check_params("value_and_grad", grads, "", "gradient")
        # Elsewhere the optimizer checks them: one that simulates workers takes a gradient of each.
        if gather is not None:
            errors.check_gradients("value_and_grad", grads, inputs.params)
        grads = jax.tree.map(tree.as_array, grads)
        if not is_mean(values.loss):
            return values, grads
        mean = values.loss
        share, weight = take_share(mean, axes)
        part = take_part(mean, weight, axes)
        grads = leafwise.scale(leafwise.keep_if(mean.weight != 0, grads), part)
        state = hold_undefined(mean.weight, values.model_state, inputs.model_state)
        return Values(share, state, values.aux, weight), grads

    return gather_once(objective, gather)


def gather_once(objective: Objective, gather: Gather | None) -> Objective:
    """Wrap an objective so that all params but tables are gathered before it runs, or return it
    unchanged if `gather` is None.

    Its gradients are with respect to whole params, so each device has a different one.
    """
    return objective if gather is None else functools.partial(gather.call, objective)


def pack_objective(objective: Objective) -> Objective:
    """Wrap an objective so that it takes packed params, which are unpacked for it, and returns its
    gradients packed in the same layout."""
    return _convert_params(objective, unpack, lambda packed, grads: pack_like(packed.layout, grads))


def wrap_tables_of_objective(objective: Objective) -> Objective:
    """Wrap an objective so that it takes params with ShardedTables, which are unwrapped for it, and
    returns gradients wrapped in the same way."""
    return _convert_params(objective, unwrap_tables, wrap_tables_like)


def _convert_params(
    objective: Objective,
    convert: Callable[[Params], Params],
    convert_back: Callable[[Params, Updates], Updates],
) -> Objective:
    """Wrap an objective so that `convert` is applied to its params and `convert_back` to its
    gradients, and return its values unchanged.

    Args:
      objective: the objective.
      convert: params in that form -> the params that `objective` takes.
      convert_back: (params in that form, gradients of `objective`) -> gradients in that form.
    """

    def run(inputs: Inputs) -> tuple[Values, Updates]:
        values, grads = objective(inputs._replace(params=convert(inputs.params)))
        return values, convert_back(inputs.params, grads)

    return run


def refuse_aux_of_examples(objective: Objective) -> Objective:
    """Wrap an objective so that it raises a ValueError if an array of aux has another shape in a
    trace on twice the examples, and passes if that trace fails.

    Such an array has an entry for each example. Each device and microbatch has different examples,
    so their mean entry by entry has no meaning.

    Raises:
      ValueError: an array in aux grows with the batch.
    """

    def run(inputs: Inputs) -> tuple[Values, Updates]:
        values, grads = objective(inputs)
        if any(map(jnp.ndim, jax.tree.leaves(values.aux))):
            twice = values.aux
            # A loss that takes batches of one size only fails here: then aux passes.
            with contextlib.suppress(Exception):
                double = inputs._replace(batch=jax.tree.map(_double_batch_shape, inputs.batch))
                twice = jax.eval_shape(objective, double)[0].aux
            _check_aux_shapes(values.aux, twice)
        return values, grads

    return run


def _double_batch_shape(x: Leaf) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array of a batch with its leading axis doubled, or of a
    scalar unchanged."""
    shape = jnp.shape(x)
    return jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]) if shape else (), jnp.result_type(x))


def _check_aux_shapes(aux: PyTree, twice: PyTree) -> None:
    """Raise a ValueError that names the first array of aux whose shape is another one for twice the
    examples."""
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


def shard_objective(on_device: Callable[[Gather], Objective], layout: Layout) -> Objective:
    """Return the objective that runs one device's objective in a `shard_map` over the shard axes,
    and returns mean values, and mean gradients divided as the layout says.

    It serves every way of sharding. Where params are whole, as with "state", nothing is gathered.

    It takes whole arrays, and returns means over the devices. Inside, each device has its shards of
    params, which it gathers for the loss, its examples of the batch, and its key. It keeps its
    shards of the mean gradients.

    Args:
      on_device: returns the objective of one device, which gathers params by its argument.
      layout: how params are divided.
    """

    def objective(inputs: Inputs) -> tuple[Values, Updates]:
        gather = Gather(layout, layout.describe(inputs.params))
        # An integer leaf has no gradient.
        arriving = jax.tree.map(
            lambda x: x.arriving_spec if tree.is_inexact(x) else None, gather.entries
        )

        def run(inputs: Inputs) -> tuple[Values, Updates]:
            own = fold_device(inputs, layout.shard_axes)
            values, grads = on_device(gather)(own)
            grads = scatter_gradients(grads, inputs.params, gather.entries, layout, inputs.packet)
            # shard_map cannot return arrays of dtype float0.
            grads = tree.map_arrays(lambda g: g if tree.is_inexact(g) else None, grads)
            return _mean_values(values, own, inputs, layout), grads

        out_specs = P(), layout.keep_shard_axes(arriving)
        values, grads = _run_on_devices(run, inputs, gather, out_specs)

        # Gradients leave the devices padded, and divided like the params; the update takes them
        # without padding, and divided as the layout divides gradients.
        def place(entry: ParamEntry, g: Leaf, arrived: P | None) -> Leaf:
            if arrived is None:
                return numerics.float0_zeros(entry.shape)
            spec = entry.gradient_spec
            if isinstance(g, LeafKind) or (g.shape == entry.shape and arrived == spec):
                return g
            g = lax.slice(g, [0] * len(entry.shape), entry.shape)
            return meshes.constrain_sharding(g, layout.mesh, spec)

        return values, jax.tree.map(place, gather.entries, grads, arriving)

    return objective


def _mean_values(values: Values, own: Inputs, inputs: Inputs, layout: Layout) -> Values:
    """Return the means over the devices of loss, aux and model state, and the weight unchanged.
    Keys and integers of the model state are the first device's.

    A key that the loss has not changed is the key of `inputs`, with no device folded in.
    """
    names = layout.shard_axes
    loss, aux = mean_over_axes((values.loss, values.aux), names)
    state = restore_unchanged_keys(values.model_state, own.model_state, inputs.model_state)
    return Values(loss, mean_or_first(state, names), aux, values.weight)


def _run_on_devices(
    function: Callable[[Inputs], Any], inputs: Inputs, gather: Gather, out_specs: PyTree
) -> Any:
    """Run a function in a `shard_map` on each device's shards of params and examples, with the
    remaining inputs whole, and return results divided by `out_specs`."""
    layout = gather.layout
    names = layout.shard_axes
    replicated: Any = P()
    whole = Inputs(*[replicated] * len(Inputs._fields))
    specs = whole._replace(
        params=layout.keep_shard_axes(jax.tree.map(lambda entry: entry.spec, gather.entries)),
        batch=jax.tree.map(lambda x: batch_spec(x, names), inputs.batch),
    )
    return meshes.shard_map(function, layout.mesh, names, (specs,), out_specs)(inputs)


def make_value_fn(
    objective: Objective, workers: Workers, inputs: Inputs, reduce_dtype: DType | None = None
) -> Callable[..., jax.Array]:
    """Return the function params -> loss, averaged over the workers, on the batch of a step. Its
    gradient is the objective's, and it ignores the further arguments of a line search.

    JAX cannot differentiate a user's `value_and_grad`. Rows become dense arrays, and an integer
    leaf has no gradient.

    Args:
      objective: the objective of the step.
      workers: the workers that share the mean of loss and gradients.
      inputs: the inputs of the step, without a loss factor; only their params are replaced.
      reduce_dtype: the dtype of the mean of gradients over the workers; None: their dtype.
    """

    @jax.custom_vjp
    def loss(params: Params) -> jax.Array:
        at_params = inputs._replace(params=params)
        return mean_over_axes(objective(at_params)[0].loss, workers.axes)

    def forward(params: Params) -> tuple[jax.Array, Updates]:
        values, grads = objective(inputs._replace(params=params))
        grads, mean = mean_over_workers(grads, values.loss, workers, reduce_dtype)
        return mean, grads

    def backward(grads: Updates, cotangent: jax.Array) -> tuple[Updates]:
        def scale(g: Leaf) -> Leaf:
            if not tree.is_inexact(g):
                return numerics.float0_zeros(jnp.shape(g))
            return jnp.asarray(cotangent, g.dtype) * g

        return (tree.map_arrays(scale, leafwise.densify_rows(grads)),)

    loss.defvjp(forward, backward)

    def value(
        params: Params, workers: object = None, row_updates: object = None, weight: object = None
    ) -> jax.Array:
        # A line search refuses extra arguments that this function does not take.
        del workers, row_updates, weight
        return loss(params)

    return value
