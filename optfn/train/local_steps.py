"""Local steps: workers train apart for some steps, and then average the drift of their params.

Each worker has its own optimizer state. Some of its leaves, such as step counters and rates, cannot
differ between workers, because they depend neither on gradients nor on params. They are found by
tracing the update, and shared.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.collectives.devices import Workers
from optfn.collectives.means import mean_or_first, mean_over_workers
from optfn.core import checks, leafwise, numerics, tree
from optfn.core.traits import traits, traits_of
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree, Updates
from optfn.core.updates import apply_updates
from optfn.jaxprs.dependence import depends
from optfn.leaves import tensors
from optfn.parallel import traffic
from optfn.parallel.data_parallel import reduce_gradients
from optfn.parallel.mesh_layout import Layout
from optfn.parallel.shards import gather_new_params
from optfn.state import reports
from optfn.state.per_worker import PerWorker, exchanges, has_own_state
from optfn.state.placement import num_workers
from optfn.state.reports import over_round
from optfn.train.microbatches import combined, scan_batch
from optfn.train.state import StepFn, TrainState
from optfn.train.worker_step import constrain_params
from optfn.transforms.late_steps import with_counts_of


@traits(words=("num_workers", "inner_state"))
class LocalState(NamedTuple):
    """The state of the workers' optimizers.

    num_workers: the number of workers, int32.
    inner_state: the state of `tx`; leaves that differ between workers are in a `PerWorker`.
    """

    num_workers: jax.Array
    inner_state: OptState


@traits(labels="inner", passes_own_gradients=True)
class InnerAndOuter(NamedTuple):
    """The optimizer state of a run with local steps: inner is the workers', outer the rounds'."""

    inner: LocalState
    outer: OptState


class LocalSteps(NamedTuple):
    """A round: `steps` local steps with `tx` on each worker, then one step of `outer` on the drift.

    The workers are those of `layout`.
    """

    steps: int
    tx: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    layout: Layout

    def init(self, params: Params) -> InnerAndOuter:
        """Return the state of one worker at step 0.

        Raises:
          ValueError: `tx` exchanges gradients by itself, or keeps copies of params.
        """
        state = self.tx.init(params)
        _check_inner(self.tx, state, params)
        one = jnp.ones((), jnp.int32)
        inner = LocalState(one, _laid_out(state, varying(self.tx, params)))
        return InnerAndOuter(inner, self.outer.init(params))

    def round(self, local_step: StepFn) -> StepFn:
        """Return the step of one worker: (state, its slice of the batch) -> (state, metrics).

        Args:
          local_step: a step on the state and the batch of one worker.
        """

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
            # 1. Params are whole, or divided as the layout says, before the loop and behind it: the
            #    compiler would divide them as the drift is, and gather them twice in each step.
            state = state._replace(params=constrain_params(state.params, self.layout))
            # 2. The state is equal on all workers, except the leaves of the inner one in a
            #    PerWorker; `start` has these as `tx` takes them. The batch is this worker's.
            counted = state.opt_state.inner.inner_state
            varies = with_counts_of(varying(self.tx, state.params), counted)
            like = with_counts_of(jax.eval_shape(self.tx.init, state.params), counted)
            start = state._replace(opt_state=_unwrapped(counted, like))
            # 3. `end`, the metrics, (steps,), and the drift in float32 are this worker's.
            end, metrics = scan_batch(
                lambda state, microbatch, _: local_step(state, microbatch),
                start, batch, self.steps, "local_steps",
            )  # fmt: skip
            end_params = constrain_params(end.params, self.layout)
            drift = jax.tree.map(_drift, state.params, end_params)
            workers = Workers(self.layout.worker_axes, self.layout.group_of(state.params))
            # 4. Metrics, params, outer state and model state are equal on all workers again.
            metrics = _mean_of_metrics(metrics, workers)
            (params, outer, model_state), sent = self._exchange(
                drift, state, end.model_state, workers, metrics["loss"]
            )
            # 5. The inner state stays this worker's: one whose drift is not finite begins anew.
            fresh = with_counts_of(self.tx.init(params), counted)
            astray = ~tensors.all_finite(drift)
            opt_state = jax.tree.map(
                lambda x, new, is_local: jnp.where(astray, new, x) if is_local else x,
                end.opt_state, fresh, varies,
            )  # fmt: skip
            opt_state = reports.with_flags(opt_state, metrics)  # in any step of the round
            inner = LocalState(state.opt_state.inner.num_workers, _laid_out(opt_state, varies))
            state = TrainState(end.step, params, InnerAndOuter(inner, outer), model_state)
            return state, metrics | sent

        return run

    def _exchange(
        self,
        drift: Updates,
        state: TrainState,
        model_state: PyTree,
        workers: Workers,
        loss: jax.Array,
    ) -> tuple[tuple[Params, OptState, PyTree], dict[str, jax.Array]]:
        """Return params, outer state and model state after an outer step, and the bytes sent.

        They are those of `state` if the drift of a worker is not finite.
        """
        before = state.params, state.opt_state.outer, state.model_state
        finite = ~workers.any(~tensors.all_finite(drift))
        grads, _, extra = reduce_gradients(drift, before[1], workers)
        updates, outer = self.outer.update(grads, before[1], state.params, value=loss, **extra)
        params = gather_new_params(apply_updates(state.params, updates), self.layout)
        after = params, outer, mean_or_first(model_state, workers.axes)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return after, traffic.traffic_metrics(drift, before[1], after[1], workers.axes)


def check_rounds(opt_state: OptState, local: LocalSteps | None, layout: Layout | None) -> None:
    """Raise unless a state was made for these local steps and for as many workers.

    The number of workers is compared only if its value is ready, so that no call waits for a step
    that is still running; the result of such a step has the right number anyway.
    """
    if isinstance(opt_state, InnerAndOuter) != (local is not None):
        made = ("without local steps", "with local_steps > 1")
        steps = 1 if local is None else local.steps
        raise TypeError(
            f"the step was made with local_steps={steps}, but the state was made "
            f"{made[isinstance(opt_state, InnerAndOuter)]}. Begin with state = step.init(params)"
        )
    if local is None or layout is None or not _can_be_read(opt_state.inner.num_workers):
        return
    found = int(np.asarray(opt_state.inner.num_workers))
    workers = num_workers(layout.mesh, layout.worker_axes)
    if found != workers and has_own_state(opt_state.inner):
        raise ValueError(
            f"the state was made for {found} workers, but the step has {workers}. Convert it by "
            f"optfn.distributed.rescale_residuals(state, {workers}), or load it from a checkpoint "
            "by optfn.restore_checkpoint, which converts it"
        )


def _can_be_read(x: jax.Array) -> bool:
    """Tell whether the value of an array can be read without waiting."""
    if not isinstance(x, jax.Array):
        return True
    return not checks.is_traced(x) and bool(x.is_ready())  # type: ignore[attr-defined]


def varying(tx: optax.GradientTransformationExtraArgs, params: Params) -> PyTree:
    """Tell for each leaf of the state of `tx` whether it may vary between workers in a round."""

    def update(params: Params, state: OptState) -> OptState:
        grads = jax.tree.map(_like_gradient, params)
        loss = sum((jnp.sum(p).real for p in jax.tree.leaves(params) if tree.is_inexact(p)), 0.0)
        loss = jnp.asarray(loss, jnp.float32)
        extra = {"value": loss, "grad": grads, "value_fn": lambda p: loss}
        return tx.update(grads, state, params, **extra)[1]

    shapes = jax.eval_shape(tx.init, params)
    varies = jax.tree.map(lambda x: False, shapes)
    marks = jax.tree.map(lambda x: True, params)
    while True:
        found = depends(update, (params, shapes), (marks, varies))
        if jax.tree.leaves(found) == jax.tree.leaves(varies):
            return varies
        varies = found


def _like_gradient(p: Leaf) -> Leaf:
    return 1.0 * p if tree.is_inexact(p) else numerics.float0_zeros(p.shape)


def _check_inner(
    tx: optax.GradientTransformationExtraArgs, state: OptState, params: Params
) -> None:
    """Raise a ValueError for optimizers that are incorrect between exchanges of params."""
    if exchanges(state):
        raise ValueError(
            "with local_steps > 1, tx must not exchange gradients: workers train apart, and "
            "exchange the drift of their params through outer. Put the exchange there, as in "
            "outer=optfn.chain(optfn.distributed.exchange(...), optfn.sgd(1.0))"
        )
    marks = jax.tree.map(lambda x: True, params)
    copies = any(jax.tree.leaves(depends(tx.init, (params,), (marks,))))
    follows = jax.tree.leaves(state, is_leaf=_follows_params)
    if copies or any(map(_follows_params, follows)):
        raise ValueError(
            "with local_steps > 1, tx must not keep copies or averages of params (master_weights, "
            "an average, schedule_free), because they would miss the exchange. Put them in outer"
        )


def _follows_params(x: object) -> bool:
    return bool(traits_of(x).made_of_params)


def _laid_out(state: OptState, varies: PyTree) -> OptState:
    """Return a state whose per-worker leaves are each in a PerWorker, scalars of shape (1,)."""

    def laid_out(x: jax.Array, is_local: bool) -> PyTree:
        return PerWorker(jnp.reshape(x, x.shape or (1,))) if is_local else x

    return jax.tree.map(laid_out, state, varies)


def _unwrapped(laid_out: OptState, like: OptState) -> OptState:
    """Return the state of `tx` from the result of `_laid_out`."""
    return jax.tree.map(lambda y, x: jax.tree.leaves(x)[0].reshape(y.shape), like, laid_out)


def _drift(start: Leaf, end: Leaf) -> Leaf:
    """Return start − end in float32 or wider; integer leaves do not drift."""
    if not tree.is_inexact(start):
        return numerics.float0_zeros(start.shape)
    wide = numerics.accumulator_dtype(start.dtype)
    return leafwise.cast(start, wide) - leafwise.cast(end, wide)


def _mean_of_metrics(metrics: dict[str, Any], workers: Workers) -> dict[str, Any]:
    """Return the metrics of a round from those of its steps."""
    values = combined({k: metrics[k] for k in ("loss", "aux") if k in metrics})
    reduced = mean_over_workers(values, workers.axes)
    if "learning_rate" in metrics:  # workers differ in it only behind a guard
        reduced["learning_rate"] = workers.max(metrics["learning_rate"][-1])
    return reduced | over_round(metrics, workers)
