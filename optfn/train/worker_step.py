"""The training step of one worker: gradients, their mean over the workers, the update.

It runs inside `shard_map` over the worker axes, or on one device. Along the axes that divide params
it is written for whole arrays, and the compiler divides the update, so that norms are those of
whole arrays.
"""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import core
from optfn.collectives.axes import Axes, is_spec, restrict_spec
from optfn.collectives.devices import Workers
from optfn.collectives.means import mean_or_first, mean_over_shard_groups
from optfn.collectives.mesh import constrain_sharding
from optfn.compilers import xla
from optfn.core import checks, errors, leafwise, tree
from optfn.core.types import Batch, OptState, Params, PyTree
from optfn.core.updates import apply_updates
from optfn.parallel import traffic
from optfn.parallel.data_parallel import reduce_gradients
from optfn.parallel.mesh_layout import Layout
from optfn.parallel.shards import gather_new_params
from optfn.state.names import is_state
from optfn.state.per_worker import may_give_rows
from optfn.state.reports import nested, reported
from optfn.train.loss_form import Inputs
from optfn.train.objective import Objective, value_fn
from optfn.train.state import StepFn, TrainState
from optfn.transforms.rates import get_learning_rate
from optfn.wrappers.loss_scale import scale_of

_ApplyIfFinite = optax.transforms.ApplyIfFiniteState

# From the number of a step to its key.
KeyOf = Callable[[jax.Array], jax.Array]


def keys_of(rng: bool | int | jax.Array, workers: Axes) -> KeyOf | None:
    """Return the function from a step to its key, which differs by worker; None without rng."""
    if rng is False:
        return None
    if rng is True or checks.is_host_number(rng):
        rng = jax.random.key(0 if rng is True else checks.count("rng", rng, low=0))
    if not isinstance(rng, jax.Array) or not tree.is_key(rng):
        raise TypeError(
            f"rng must be True, a seed or a key from jax.random.key; got {checks.shown(rng)}"
        )

    def key_of(step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(rng, step)
        return jax.random.fold_in(key, lax.axis_index(workers)) if workers else key

    return key_of


def worker_step(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    key_of: KeyOf | None,
    axes: Axes,
    layout: Layout | None = None,
) -> StepFn:
    """Return the step of one worker; the names of the worker axes are bound where it runs.

    Args:
      objective: the loss and its gradients.
      tx: the optimizer.
      key_of: returns the key of a step; None if the loss takes none.
      axes: the mesh axes of the workers; none if there is only one.
      layout: how params are divided over the mesh.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # 1. The batch and the key are this worker's. Params and state are equal on all workers,
        #    except a PerWorker; the devices of a worker divide them as the layout says.
        state = state._replace(params=constrain_params(state.params, layout))
        key = None if key_of is None else key_of(state.step)
        inputs = Inputs(state.params, state.model_state, batch, key, state.step, None)
        scaled = inputs._replace(loss_factor=scale_of(state.opt_state))
        values, grads = objective.value_and_grad(scaled)
        # 2. Gradients become means over workers, except the leaves that the optimizer exchanges.
        workers = Workers(axes, layout.group_of(state.params) if layout and axes else None)
        grads, (loss, aux), extra = reduce_gradients(
            grads, state.opt_state, workers, (values.loss, values.aux)
        )
        exchanges_itself = bool(extra)
        params, grads, loss = xla.barrier((state.params, grads, loss))
        # 3. `mean` is equal on all workers in all leaves. Line searches take it, without rows; if
        #    there is none, XLA removes this computation.
        mean = mean_over_shard_groups(grads, (), workers)[0] if exchanges_itself else grads
        extra |= {"value": loss, "grad": leafwise.densify_rows(mean)}
        extra["value_fn"] = value_fn(objective, workers, inputs)
        if may_give_rows(state.opt_state):
            extra["row_updates"] = True
        # 4. Updates and metrics are equal on all workers; the new state has the sharding of step 1.
        with errors.name_integer_leaves(grads):
            updates, opt_state = tx.update(grads, state.opt_state, params, **extra)
        params = gather_new_params(apply_updates(params, updates), layout)
        model_state = mean_or_first(values.model_state, axes)
        model_state = _kept_where_skipped(model_state, state, opt_state)
        metrics = {"loss": loss} | ({} if aux is None else {"aux": aux}) | _metrics_of(opt_state)
        if exchanges_itself:
            metrics |= traffic.traffic_metrics(grads, state.opt_state, opt_state, axes)
        new_state = TrainState(core.next_step(state.step), params, opt_state, model_state)
        return new_state, metrics

    return step


def constrain_params(params: Params, layout: Layout | None) -> Params:
    """Return params with a sharding constraint, so that the compiler leaves them as they are.

    Otherwise it may divide whole params for the update, and gather them for the loss.
    """
    if layout is None or not (layout.worker_axes and layout.inner_axes):
        return params
    return jax.tree.map(
        lambda spec, x: constrain_sharding(x, layout.mesh, restrict_spec(spec, layout.inner_axes)),
        layout.param_specs(params), params, is_leaf=is_spec,
    )  # fmt: skip


def _kept_where_skipped(model_state: PyTree, before: TrainState, opt_state: OptState) -> PyTree:
    """Return the new model state, or the old one if a guard has skipped the step."""
    changed = list(map(operator.ne, _skips(before.opt_state), _skips(opt_state)))
    if not changed or model_state is None:
        return model_state
    skipped = functools.reduce(jnp.logical_or, changed)
    return jax.tree.map(
        lambda old, new: jnp.where(skipped, old, new), before.model_state, model_state
    )


def _skips(opt_state: OptState) -> list[jax.Array]:
    """Return the counters of skipped steps in a state, also those of `optax.apply_if_finite`."""

    def counts(x: PyTree) -> bool:
        return isinstance(x, _ApplyIfFinite) or (is_state(x) and "skipped" in x._fields)

    found = nested(counts, opt_state)
    return [x.total_notfinite if isinstance(x, _ApplyIfFinite) else x.skipped for x in found]


def _metrics_of(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the metrics in a state: its rate, and all that its wrappers report."""
    metrics = reported(opt_state)
    with contextlib.suppress(ValueError):  # no rate, or several
        metrics["learning_rate"] = get_learning_rate(opt_state)
    return metrics
