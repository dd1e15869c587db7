"""The composition of a training step from its options: objective, update, rounds, placement."""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.core.types import Batch
from optfn.loss import objective as objectives
from optfn.loss.compiler_objective import constrain_gradients, show_axes_to_loss, split_over_devices
from optfn.loss.loss_form import LossForm
from optfn.loss.mean import divide_means
from optfn.loss.microbatches import average_microbatches
from optfn.loss.objective import Gather, Objective
from optfn.mesh.collectives.axes import Axes, join_axes
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.collectives.mesh import hide_explicit_axes
from optfn.mesh.compilers.options import drop_unknown_options, follow_options
from optfn.mesh.layout import data_parallel as parallel
from optfn.mesh.layout.as_placed import AsPlaced
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.layout.sharding import Sharded
from optfn.optimizers.sgd import sgd
from optfn.train.local_steps import LocalSteps
from optfn.train.options import StepArguments
from optfn.train.state import StepFn, TrainState
from optfn.train.worker_step import WorkerStep, make_key


def compose_step(options: StepArguments, layout: Layout | None, local: LocalSteps | None) -> StepFn:
    """Compose the step of all devices, (state, batch) -> (state, metrics), which is not yet
    compiled.

    Args:
      options: the arguments of `make_train_step`. With local steps, `tx` is the optimizer of each
        worker.
      layout: how params lie on a mesh; None without a mesh.
      local: the round of local steps; None if a call is one step.
    """
    if layout is not None and layout.compiler_axes:
        return _compose_for_compiler(options, layout)
    workers = Axes() if layout is None else layout.worker_axes
    averaged = workers if local is None else Axes()

    # From the innermost function to the outermost one, with the arrays that each takes:
    # 1. The objective takes params and the batch of one worker. With shard axes, each device
    #    along them has its shards in it (or whole params), gathers them for the loss, and computes
    #    on its examples; loss and gradients are means over these devices, and gradients lie as the
    #    layout says.
    make = functools.partial(make_objective, options, averaged)
    # 2. The step takes the state as one worker has it. Gradients become means over the workers,
    #    except in a round, where each worker trains apart; it returns the worker's new state.
    of_loss = layout and average_in_loss(layout, averaged, options)
    step: StepFn = WorkerStep(make, options, averaged, of_loss, make_key(options.rng)).step
    # 3. A round takes the batch of H steps. Inside it, params and inner state differ between
    #    workers; the params that it returns are equal again.
    if local is not None:
        step = local.round(step)
    # 4. From here on the batch has the examples of all workers along its leading axis. Params are
    #    equal on all workers, and per-worker arrays are joined along their first axis.
    if layout is not None and workers:
        step = parallel.shard_map_step(step, layout.mesh, workers)
    # 5. The state comes and goes as it is stored between steps: divided and padded.
    if layout is not None and layout.is_divided:
        step = _place_state(step, layout)
    return _finish_means(step)


def make_loss_form(options: StepArguments) -> LossForm:
    """Return the arguments and results of the loss function of a step."""
    return LossForm(options.model_state, options.has_aux, options.pass_step)


def compile_step(options: StepArguments, layout: Layout | None, local: LocalSteps | None) -> Any:
    """Compose a step by `compose_step`, and return it jitted, (state, batch) -> (state, metrics),
    with a layout as a third argument if params keep their placement."""
    step = compose_step(options, layout, local)
    known = None
    if options.compiler_options:
        device = None if layout is None else layout.mesh.devices.flat[0]
        known = drop_unknown_options(options.compiler_options, device)
    donated = (0,) if options.donate else ()
    jit = functools.partial(jax.jit, donate_argnums=donated, compiler_options=known)
    if not isinstance(layout, AsPlaced):
        return jit(follow_options(known)(step))

    @follow_options(known)
    def run(
        state: TrainState, batch: Batch, layout: Layout = layout
    ) -> tuple[TrainState, dict[str, Any]]:
        return compose_step(options, layout, local)(state, batch)

    return jit(run, static_argnums=2)


def _compose_for_compiler(options: StepArguments, layout: Layout) -> StepFn:
    """Compose a step that XLA divides over the mesh: the step of one device, on placed arrays.

    Explicit axes are visible only to the loss.
    """
    mesh = layout.mesh
    inner = dataclasses.replace(layout, mesh=Mesh(mesh.devices, mesh.axis_names))

    def make_objective(_: Layout | None, accumulates: bool) -> Objective:
        objective = _differentiate(options, accumulates, Axes())
        objective = show_axes_to_loss(objective, layout)
        if not options.packed:  # each microbatch adds to divided gradients
            objective = constrain_gradients(objective, inner)
        objective = average_microbatches(objective, options.microbatches, split_over_devices(inner))
        if options.packed:
            objective = constrain_gradients(objectives.pack_objective(objective), inner)
        if options.has_aux and options.microbatches > 1:
            objective = objectives.refuse_aux_of_examples(objective)
        return objective

    worker = WorkerStep(make_objective, options, Axes(), inner, make_key(options.rng))
    step = _finish_means(worker.step)
    if layout.is_divided:
        step = _place_state(step, inner)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        specs = specs_of_state(state, layout), P()
        return hide_explicit_axes(step, mesh, specs)(state, batch)

    return run


def _place_state(step: StepFn, layout: Layout) -> StepFn:
    """Wrap a step so that it takes and returns the state as it is stored between steps, divided and
    padded."""

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        old = state._replace(opt_state=layout.unpad_state(state.opt_state))
        new, metrics = step(old, batch)
        new = new._replace(opt_state=layout.pad_state(new.opt_state, state.params))
        placement = layout.make_shardings(specs_of_state(new, layout))
        of_state = layout.in_memory(placement.opt_state, new.opt_state)
        placement = placement._replace(opt_state=of_state)
        return lax.with_sharding_constraint(new, placement), metrics

    return run


def _finish_means(step: StepFn) -> StepFn:
    """Wrap a step, so that each `Mean` in its aux becomes a number."""

    @functools.wraps(step)
    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = step(state, batch)
        return state, divide_means(metrics)

    return run


def specs_of_state(state: TrainState, layout: Layout) -> TrainState:
    """Return the PartitionSpec of each array of a stored state, by the layout for params and
    optimizer state, and replicated for the rest."""
    return jax.tree.map(lambda x: P(), state)._replace(
        params=layout.param_specs(state.params),
        opt_state=layout.state_specs(state.opt_state, state.params),
    )


def is_gathered_once(options: StepArguments) -> bool:
    """Tell whether a step gathers all params before the loss runs, as a `Sharded` may say."""
    return isinstance(options.shard, Sharded) and options.shard.is_gathered_once


def _differentiate(
    options: StepArguments,
    accumulates: bool,
    axes: Axes,
    gather: Gather | None = None,
    owners: Devices | None = None,
) -> Objective:
    """Return the objective of `loss_fn`, for the axes of its mean and the owners of tables."""
    assert options.loss_fn is not None
    return objectives.differentiate(
        options.loss_fn, make_loss_form(options), gather, tables=options.tables, owners=owners,
        recompute=options.recompute, axes=axes, in_parts=accumulates or options.microbatches > 1,
    )  # fmt: skip


def make_objective(
    options: StepArguments, workers: Axes, layout: Layout | None, accumulates: bool
) -> Objective:
    """Return the objective, loss and gradients, of one device, or with shard axes of all devices
    along them, averaged over microbatches.

    Args:
      options: the arguments of `make_train_step`.
      workers: the axes of the workers whose gradients are averaged.
      layout: how params are divided over the mesh.
      accumulates: whether the optimizer takes the mean of several gradients.
    """
    axes = workers if layout is None else join_axes(workers, layout.shard_axes)
    owners = None
    if layout is not None and layout.tables is not None:
        owners = Devices(layout.mesh, layout.shard_axes)

    def in_microbatches(gather: Gather | None) -> Objective:
        if options.value_and_grad is not None:
            form = make_loss_form(options)
            objective = objectives.wrap_value_and_grad(options.value_and_grad, form, gather, axes)
        else:
            objective = _differentiate(options, accumulates, axes, gather, owners)
        return average_microbatches(objective, options.microbatches)

    def on_device(gather: Gather | None) -> Objective:
        if options.packed:  # a shard of a buffer has parts of leaves, so the loss cannot gather it
            return objectives.gather_once(objectives.pack_objective(in_microbatches(None)), gather)
        if is_gathered_once(options):
            return objectives.gather_once(in_microbatches(None), gather)
        return in_microbatches(gather)

    if layout is None or not layout.shard_axes:
        objective = on_device(None)
    else:
        objective = objectives.shard_objective(on_device, layout)
    if owners is not None:
        objective = objectives.wrap_tables_of_objective(objective)
    if options.has_aux and (layout is not None or options.microbatches > 1):
        objective = objectives.refuse_aux_of_examples(objective)
    return objective


def average_in_loss(layout: Layout, workers: Axes, options: StepArguments) -> Layout:
    """Return the layout whose gathers of params average the gradients over the workers, or it
    unchanged with microbatches or a loss that does not gather itself.

    The backward pass of a gather does so right after it has reduced the gradient to a shard, so
    that the mean of a layer runs beside the products of the next. With microbatches it would send
    each gradient several times. A loss that does not gather by itself has its gradients averaged
    after it.
    """
    is_once = options.microbatches == 1 and not is_gathered_once(options)
    if not is_once or options.packed or options.value_and_grad is not None:
        return layout
    return dataclasses.replace(layout, mean_axes=workers, mean_dtype=options.reduce_dtype)


def make_local_steps(options: StepArguments, layout: Layout | None) -> LocalSteps | None:
    """Return the round of local steps that the options ask for, or None if a call is one step, and
    raise a ValueError if no worker has all of params and state.

    Raises:
      ValueError: params or state are divided over all data axes, so that no worker has all of them.
    """
    if options.local_steps == 1 or layout is None:
        return None
    if not layout.worker_axes:
        raise ValueError(
            f"local_steps={options.local_steps} cannot be combined with params or state divided "
            f"over all of data_axis, {(*layout.shard_axes,)}: workers that train apart have "
            "different params, so none can keep a part for the others. Divide over some of the "
            "axes, shard=sharded(..., axis=)"
        )
    outer = sgd(1.0) if options.outer is None else core.check_transform("outer", options.outer)
    return LocalSteps(options.local_steps, options.tx, outer, layout, options.tables)
