"""The composition of a training step from its options: objective, update, rounds, placement."""

import contextlib
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.core.types import Batch, LossFn
from optfn.mesh import Axes
from optfn.optimizers.sgd import sgd
from optfn.parallel import data_parallel as parallel
from optfn.parallel.layout import Layout
from optfn.parallel.sharding import Sharded
from optfn.sparse.tables import Owners
from optfn.train.local_steps import LocalSteps
from optfn.train.loss_form import Form
from optfn.train.microbatches import in_microbatches
from optfn.train.objective import (
    Objective,
    Seen,
    gathered,
    of_loss,
    of_packed,
    of_sharded_tables,
    of_value_and_grad,
    on_parts,
)
from optfn.train.options import StepArguments
from optfn.train.state import StepFn, TrainState
from optfn.train.worker_step import keys_of, worker_step


def composed(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformationExtraArgs,
    options: StepArguments,
    layout: Layout | None,
    local: LocalSteps | None,
) -> StepFn:
    """Return the step of all devices.

    Args:
      loss_fn: the argument of `make_train_step`.
      tx: likewise.
      options: the other arguments.
      layout: how params lie on a mesh; None without one.
      local: how a round goes; None where a call is one step.
    """
    workers = Axes() if layout is None else layout.worker_axes
    key_of = keys_of(options.rng, workers)
    averaged = workers if local is None else Axes()

    step = worker_step(_objective(loss_fn, options, layout), tx, key_of, averaged, layout)
    if local is not None:
        step = local.round(step)
    if layout is not None and workers:
        step = parallel.step_of_all_workers(step, layout.mesh, workers)
    if layout is not None and layout.divides:
        step = _placed(step, layout)
    return step


def _placed(step: StepFn, layout: Layout) -> StepFn:
    """Return a step whose new state is placed as the layout says."""

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        old = state._replace(opt_state=layout.unpadded(state.opt_state))
        new, metrics = step(old, batch)
        new = new._replace(opt_state=layout.stored(new.opt_state, state.params))
        specs = jax.tree.map(lambda x: P(), new)._replace(
            params=layout.param_specs(state.params),
            opt_state=layout.state_specs(new.opt_state, state.params),
        )
        return lax.with_sharding_constraint(new, layout.place(specs)), metrics

    return run


def _objective(loss_fn: LossFn | None, options: StepArguments, layout: Layout | None) -> Objective:
    """Return the objective of one device, or of all devices of the part axes if there are some."""
    form = Form(options.model_state, options.has_aux)
    owners = None
    if layout is not None and layout.tables is not None:
        owners = Owners(layout.mesh, layout.shard_axes)

    def make(seen: Seen = contextlib.nullcontext) -> Objective:
        once = isinstance(options.shard, Sharded) and options.shard.gathers_once
        if not (once or options.packed):
            return in_microbatches(of_one(seen), options.microbatches)
        whole = in_microbatches(of_one(), options.microbatches)
        return gathered(of_packed(whole) if options.packed else whole, seen)

    def of_one(seen: Seen = contextlib.nullcontext) -> Objective:
        if options.value_and_grad is not None:
            return of_value_and_grad(options.value_and_grad, form, seen)
        assert loss_fn is not None
        return of_loss(
            loss_fn,
            form,
            seen,
            tables=options.tables,
            owners=owners,
            recompute=options.recompute,
        )

    if layout is None or not layout.shard_axes:
        return make()
    objective = on_parts(make, layout)
    return objective if owners is None else of_sharded_tables(objective)


def local_rounds(
    options: StepArguments, tx: optax.GradientTransformationExtraArgs, layout: Layout | None
) -> LocalSteps | None:
    """Return the parts of a round; None if a call is one step."""
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
    return LocalSteps(options.local_steps, tx, optax.with_extra_args_support(outer), layout)
