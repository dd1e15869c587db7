"""The training step of one worker: gradients, their mean over the workers, the update.

It runs inside `shard_map` over the worker axes, or on one device. Along the axes that divide params
the compiler divides the update, so the code here sees whole arrays, and a norm covers all shards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import core
from optfn.core import checks, errors, leafwise, tree
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree, Updates
from optfn.core.updates import apply_updates
from optfn.loss.keys import fold_in, fold_worker_into_keys, restore_unchanged_keys
from optfn.loss.loss_form import Inputs, Values
from optfn.loss.objective import Objective, make_value_fn
from optfn.mesh.collectives.axes import Axes, is_spec, restrict_spec
from optfn.mesh.collectives.devices import Workers
from optfn.mesh.collectives.means import mean_or_first, mean_over_workers
from optfn.mesh.collectives.mesh import constrain_sharding
from optfn.mesh.compilers import xla
from optfn.mesh.layout import traffic
from optfn.mesh.layout.data_parallel import reduce_gradients
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.layout.shards import gather_new_params
from optfn.mesh.state.per_worker import find_nodes, has_exchange, may_give_rows
from optfn.mesh.state.reports import collect_reports
from optfn.train.options import StepArguments
from optfn.train.state import UPDATE_SCOPE, TrainState
from optfn.transforms.rates import collect_rates
from optfn.wrappers.accumulation import AccumulateState
from optfn.wrappers.attributes import mask_frozen
from optfn.wrappers.averaging import has_statistics
from optfn.wrappers.loss_scale import scale_of
from optfn.wrappers.uncounted import drop_uncounted


def make_key(rng: bool | int | jax.Array) -> jax.Array | None:
    """Return the key of the argument `rng` of `make_train_step`, with seed 0 for True, and None for
    False. Raise a TypeError if it is neither a seed nor a key."""
    if rng is False:
        return None
    if rng is True or checks.is_host_number(rng):
        return jax.random.key(0 if rng is True else checks.count("rng", rng, low=0))
    if not isinstance(rng, jax.Array) or not tree.is_key(rng):
        raise TypeError(
            f"rng must be True, a seed or a key from jax.random.key; got {checks.show(rng)}"
        )
    return rng


class _Needs(NamedTuple):
    """The demands of an optimizer's state on the step around its update.

    exchanges: whether it exchanges gradients itself, of all leaves or of some.
    gives_rows: whether its updates may be row-sparse.
    accumulates: whether it takes the mean of several gradients by `accumulate`.
    averages_statistics: whether it averages the model state.
    curvature: whether it differentiates the loss twice, as sophia does.
    loss_factor: the scale of a `dynamic_loss_scale`; None without one.
    """

    exchanges: bool
    gives_rows: bool
    accumulates: bool
    averages_statistics: bool
    curvature: bool
    loss_factor: jax.Array | None


def _ask(opt_state: OptState) -> _Needs:
    """Return the demands of a state on the step, or raise a ValueError for several scales of the
    loss."""
    return _Needs(
        has_exchange(opt_state),
        may_give_rows(opt_state),
        bool(find_nodes(AccumulateState, opt_state)),
        has_statistics(opt_state),
        bool(find_nodes(optax.contrib.HutchinsonState, opt_state)),
        scale_of(opt_state),
    )


@dataclasses.dataclass(frozen=True)
class WorkerStep:
    """The step of one worker, in stages.

    With several workers it must run where their axes are bound, inside `shard_map`.

    make_objective: returns the loss and its gradients for a layout, and for whether the optimizer
      takes the mean of several gradients.
    options: the options of the step.
    axes: the mesh axes of the workers; none if there is only one, and in a round of local steps.
    layout: how params are divided over the mesh.
    key: the first key, of which each step has a fold; None if the loss takes none.
    """

    make_objective: Callable[[Layout | None, bool], Objective]
    options: StepArguments
    axes: Axes
    layout: Layout | None
    key: jax.Array | None

    @functools.cached_property
    def later(self) -> Layout | None:
        """The layout without means in the loss, None without a layout. It is cached, because it
        keeps its descriptions of params."""
        return self.layout and self.layout.average_later()

    # JAX names the compiled program after this function, which profiles show.
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Return the next state and the metrics, from this worker's part of the batch."""
        # 1. The batch and all keys are this worker's. Params and state are equal on all workers,
        #    except a PerWorker; the devices of a worker divide them as the layout says. The step is
        #    an input too: arrays reach the inside of `shard_map` only as arguments.
        state = state._replace(params=constrain_params(state.params, self.layout))
        inputs, needs = _make_inputs(state, batch, self.key, self.layout), _ask(state.opt_state)
        values, grads, averaged = self._differentiate(inputs, needs)
        # 2. Gradients become means over workers, except the leaves that the loss has averaged or
        #    the optimizer exchanges.
        group = self.layout.group_of(state.params) if self.layout and self.axes else None
        workers, own = Workers(self.axes, group), (values.loss, values.aux)
        grads, (loss, aux), extra = reduce_gradients(
            grads, state.opt_state, workers, own, self.options.reduce_dtype, averaged
        )
        # Without a barrier, XLA begins to update params before the loss has read all of them, and
        # copies those that it would overwrite.
        params, grads, loss = xla.barrier((state.params, grads, loss))
        extra |= self._make_arguments(inputs, workers, grads, needs) | {"value": loss}
        model_state = _average_model_state(values.model_state, inputs, state, self.axes)
        if values.weight is not None:
            _refuse_multi_steps(state.opt_state)
            extra["weight"] = values.weight
            # Statistics of no examples mean nothing, and may be NaN.
            empty = values.weight == 0
            model_state = optax.tree.where(empty, state.model_state, model_state)
        if needs.averages_statistics:
            extra["model_state"] = model_state
        # 3. Updates and metrics are equal on all workers; the new state has the sharding of step 1.
        state_before, state = state, TrainState(state.step, params, state.opt_state, model_state)
        update = functools.partial(self._update, grads=grads, extra=extra)
        if self.options.state_memory is not None:
            from optfn.train.host_state import run_on_host

            update = functools.partial(run_on_host, update, self.layout)
        state = update(state_before, state)
        metrics = _collect_metrics(loss, aux, state.opt_state)
        if values.weight is not None:
            # A mean over nothing is no number.
            metrics["loss"] = jnp.where(empty, jnp.nan, loss)
            metrics["weight"] = values.weight
        if needs.exchanges:
            before, after = state_before.opt_state, state.opt_state
            metrics |= traffic.traffic_metrics(grads, before, after, self.axes)
        return state, metrics

    def _differentiate(self, inputs: Inputs, needs: _Needs) -> tuple[Values, Updates, PyTree]:
        """Return the results of the loss, this worker's gradients, masked where frozen, and the
        worker axes of each gradient's mean in the loss, None without a layout."""
        # An exchange takes each worker's gradient, of all leaves or of some.
        of_loss = self.later if needs.exchanges else self.layout
        averaged = of_loss and jax.tree.map(
            lambda entry: entry.mean_axes, of_loss.describe(inputs.params)
        )
        scaled = inputs._replace(loss_factor=needs.loss_factor)
        values, grads = self.make_objective(of_loss, needs.accumulates)(scaled)
        # A frozen leaf has no gradient: nothing of it is averaged, exchanged or sent.
        return values, mask_frozen(self.options.tx, _conjugate(grads)), averaged

    def _make_arguments(
        self, inputs: Inputs, workers: Workers, grads: Updates, needs: _Needs
    ) -> dict[str, Any]:
        """Return the extra arguments of `update` that describe the loss: its function, and the mean
        gradients."""
        # The mean is equal on all workers in all leaves. Line searches of optax take it, as dense
        # arrays. If the optimizer reads no "grad", XLA removes this computation.
        mean, dtype = grads, self.options.reduce_dtype
        if needs.exchanges:
            mean, _ = mean_over_workers(grads, (), workers, dtype)
        of_value = self.make_objective(self.later, needs.accumulates)
        value_fn = make_value_fn(of_value, workers, inputs, dtype)
        rows = {"row_updates": True} if needs.gives_rows else {}
        # optax's sophia calls the function of the loss `obj_fn`, which its line searches refuse.
        twice = {"obj_fn": value_fn} if needs.curvature else {}
        return {"grad": leafwise.densify_rows(mean), "value_fn": value_fn, **twice, **rows}

    def _update(
        self, before: TrainState, state: TrainState, grads: Updates, extra: dict[str, Any]
    ) -> TrainState:
        """Update params and the optimizer's state, and return the next state. If the update does
        not count, params and both states stay as before the step.

        Args:
          before: the state before the step.
          state: the same with the new model state, and params behind a barrier.
          grads: the gradients, as the optimizer takes them.
          extra: the extra arguments of `update`, with the weight of the loss if that is a `Mean`.
        """
        with errors.name_integer_leaves(grads), jax.named_scope(UPDATE_SCOPE):
            tx, old = self.options.tx, before.opt_state
            updates, opt_state = tx.update(grads, old, state.params, **extra)
            updates, opt_state, is_dropped = drop_uncounted(
                updates, opt_state, old, extra.get("weight")
            )
        params = gather_new_params(apply_updates(state.params, updates), self.layout)
        model_state = state.model_state
        if is_dropped is not None:
            model_state = optax.tree.where(is_dropped, before.model_state, model_state)
        return TrainState(core.next_step(before.step), params, opt_state, model_state)


def _refuse_multi_steps(opt_state: OptState) -> None:
    """Raise a ValueError if optax.MultiSteps averages gradients, because it knows no weights."""
    if find_nodes(optax.MultiStepsState, opt_state):
        raise ValueError(
            "optax.MultiSteps takes the plain mean of several gradients, but the loss is an "
            "optfn.Mean, whose calls count by their weights. Use optfn.accumulate"
        )


def _conjugate(grads: Updates) -> Updates:
    """Conjugate the gradients of complex params.

    For f = u + iv jax.grad gives ∂f/∂x − i ∂f/∂y, the conjugate of the direction in which f rises.
    """

    def of_leaf(g: Leaf) -> Leaf:
        return jnp.conj(g) if jnp.issubdtype(g.dtype, jnp.complexfloating) else g

    return jax.tree.map(of_leaf, grads)


def _make_inputs(
    state: TrainState, batch: Batch, key: jax.Array | None, layout: Layout | None
) -> Inputs:
    """Return the inputs of a worker's loss, without a loss factor. All keys are this worker's."""
    workers = Axes() if layout is None else layout.worker_axes
    if key is not None:
        key = fold_in(key, state.step)
        key = fold_in(key, lax.axis_index(workers)) if workers else key
    model_state = fold_worker_into_keys(state.model_state, workers)
    return Inputs(state.params, model_state, batch, key, state.step, state.step, None)


def constrain_params(params: Params, layout: Layout | None) -> Params:
    """Constrain the sharding of params to the layout if both workers and devices divide the work,
    and return them unchanged otherwise.

    Otherwise the compiler may divide whole params for the update, and gather them for the loss.
    """
    if layout is None or not (layout.worker_axes and layout.inner_axes):
        return params
    return jax.tree.map(
        lambda spec, x: constrain_sharding(x, layout.mesh, restrict_spec(spec, layout.inner_axes)),
        layout.param_specs(params), params, is_leaf=is_spec,
    )  # fmt: skip


def _average_model_state(new: PyTree, inputs: Inputs, before: TrainState, axes: Axes) -> PyTree:
    """Return the model state of all workers: means of floating-point arrays, integers of the first
    worker, and keys that the loss did not change as before.

    Args:
      new: the model state that the loss of this worker returned.
      inputs: the inputs of this worker's loss.
      before: the state before the step.
      axes: the mesh axes of the workers; none in a round of local steps.
    """
    restored = restore_unchanged_keys(new, inputs.model_state, before.model_state)
    return mean_or_first(restored, axes)


def _collect_metrics(loss: jax.Array, aux: PyTree, opt_state: OptState) -> dict[str, Any]:
    """Return the loss, aux unless it is None, all that the wrappers of a state report, and its
    learning rates."""
    metrics = {"loss": loss} | ({} if aux is None else {"aux": aux}) | collect_reports(opt_state)
    return metrics | collect_rates(opt_state)
