"""Local steps: workers train apart for some steps, and then an outer optimizer joins their params.

The change of a worker's params, θ_start − θ_end, is its pseudo-gradient. The outer optimizer takes
the mean over workers as its gradient, or each worker's pseudo-gradient if it exchanges gradients
itself.

Each worker has a separate optimizer state. Some leaves of it, such as step counters and rates,
cannot differ between workers, because they depend neither on gradients nor on params. We find them
by tracing the update, and keep one for all workers. If the loss is a `Mean`, a local step of a
worker whose examples have no weight does not count, and then these differ too (`keep_apart`).
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, leafwise, numerics, tree
from optfn.core.traits import traits, traits_of
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree, Updates
from optfn.core.updates import apply_updates
from optfn.leaves import patterns, tensors
from optfn.leaves.patterns import Pattern
from optfn.loss.jaxprs.dependence import find_dependent_leaves
from optfn.loss.microbatches import combine_microbatches, scan_batch
from optfn.mesh.collectives.devices import Workers
from optfn.mesh.collectives.means import mean_or_first, mean_over_axes
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.layout import data_parallel, shards, traffic
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.state import per_worker, reports
from optfn.mesh.state.per_worker import PerWorker, is_per_worker
from optfn.tables.rows import Rows
from optfn.train.state import UPDATE_SCOPE, StepFn, TrainState
from optfn.train.worker_step import constrain_params
from optfn.transforms.late_steps import copy_counts
from optfn.wrappers import averaging, uncounted
from optfn.wrappers.accumulation import AccumulateState


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
    """A round: local steps of each worker, and one outer step on their pseudo-gradients.

    steps: the number of local steps.
    tx: the optimizer of the local steps; each worker has a separate state.
    outer: the optimizer that takes the pseudo-gradients.
    layout: how params lie on the mesh, and the axes of the workers.
    tables: the leaves whose gradients are rows, as a pattern of paths.
    """

    steps: int
    tx: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    layout: Layout
    tables: Pattern | None = None

    def init(self, params: Params) -> InnerAndOuter:
        """Return the state of one worker at step 0, with each leaf that may vary in a PerWorker, or
        raise a ValueError if `tx` exchanges gradients or keeps copies of params.

        Raises:
          ValueError: `tx` exchanges gradients by itself, or keeps copies of params.
        """
        state = self.tx.init(params)
        _check_inner(self.tx, state, params)
        one = jnp.ones((), jnp.int32)
        inner = LocalState(one, _wrap_varying(state, find_varying(self.tx, params, self.tables)))
        return InnerAndOuter(inner, self.outer.init(params))

    def round(self, local_step: StepFn) -> StepFn:
        """Return a round, (state, a worker's share of the batch) -> (state, metrics), of `steps`
        local steps on each worker and an outer step on all.

        Args:
          local_step: a step on the state and the batch of one worker.
        """

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
            # 1. Params are whole, or divided as the layout says, before the loop and behind it. The
            #    compiler would divide them like the pseudo-gradient, and gather them twice a step.
            state = state._replace(params=constrain_params(state.params, self.layout))
            # 2. The state is equal on all workers, except leaves of the inner state in a PerWorker;
            #    `start` has these leaves as `tx` takes them. The batch is this worker's.
            counted = state.opt_state.inner.inner_state
            like = copy_counts(jax.eval_shape(self.tx.init, state.params), counted)
            marks = map(is_per_worker, _nodes(counted))
            varies = jax.tree.unflatten(jax.tree.structure(like), marks)
            own = jax.tree.map(lambda y, x: jax.tree.leaves(x)[0].reshape(y.shape), like, counted)
            start = state._replace(opt_state=own)
            # 3. `end`, the metrics, (steps,), and the pseudo-gradient are this worker's.
            end, metrics = scan_batch(
                lambda state, microbatch, _: local_step(state, microbatch),
                start, batch, self.steps, "local_steps",
            )  # fmt: skip
            end_params = constrain_params(end.params, self.layout)
            pseudo_gradient = jax.tree.map(_subtract, state.params, end_params)
            workers = Workers(self.layout.worker_axes, self.layout.group_of(state.params))
            # 4. Metrics, params, outer state and model state are equal on all workers again.
            metrics = _average_metrics(metrics, workers)
            (params, outer, model_state), sent = self._exchange(
                pseudo_gradient, state, end.model_state, workers, metrics
            )
            # 5. The inner state stays this worker's. A worker whose pseudo-gradient is not finite
            #    begins with a fresh state: its moments are not finite either.
            fresh = copy_counts(self.tx.init(params), counted)
            astray = ~tensors.all_finite(pseudo_gradient)
            opt_state = jax.tree.map(
                lambda x, new, is_local: jnp.where(astray, new, x) if is_local else x,
                end.opt_state, fresh, varies,
            )  # fmt: skip
            opt_state = reports.set_flags(opt_state, metrics)  # in any step of the round
            inner = LocalState(state.opt_state.inner.num_workers, _wrap_varying(opt_state, varies))
            state = TrainState(end.step, params, InnerAndOuter(inner, outer), model_state)
            return state, metrics | sent

        return run

    def keep_apart(self, state: TrainState) -> TrainState:
        """Return the state with a copy for each worker of all that differs between workers if
        local steps without weight do not count, or unchanged if it has these copies."""
        local = state.opt_state.inner
        found = find_varying(self.tx, state.params, self.tables, weighted=True)
        found = copy_counts(found, local.inner_state)
        varies, structure = jax.tree.flatten(found)
        nodes = _nodes(local.inner_state)
        if all(is_per_worker(node) for node, own in zip(nodes, varies, strict=True) if own):
            return state
        mesh, axes = self.layout.mesh, self.layout.worker_axes
        count = count_devices(mesh, axes)

        def copy(node: PyTree, own: bool) -> PyTree:
            if not own or is_per_worker(node):
                return node
            copies = jnp.tile(jnp.atleast_1d(node), (count, *[1] * (node.ndim - 1)))
            if not checks.is_traced(copies):
                copies = jax.device_put(copies, NamedSharding(mesh, P(axes)))
            return PerWorker(copies)

        apart = jax.tree.unflatten(structure, map(copy, nodes, varies))
        inner = LocalState(jnp.full_like(local.num_workers, count), apart)
        return state._replace(opt_state=state.opt_state._replace(inner=inner))

    def _exchange(
        self,
        pseudo_gradient: Updates,
        state: TrainState,
        model_state: PyTree,
        workers: Workers,
        metrics: dict[str, Any],
    ) -> tuple[tuple[Params, OptState, PyTree], dict[str, jax.Array]]:
        """Take an outer step, and return params, outer state and model state after it, or before it
        if any pseudo-gradient is not finite or the round does not count, and the bytes sent."""
        before = state.params, state.opt_state.outer, state.model_state
        finite = ~workers.any(~tensors.all_finite(pseudo_gradient))
        grads, _, extra = data_parallel.reduce_gradients(pseudo_gradient, before[1], workers)
        model_state = mean_or_first(model_state, workers.axes)
        if averaging.has_statistics(before[1]):
            extra["model_state"] = model_state
        extra |= {"value": metrics["loss"]} | {k: metrics[k] for k in ("weight",) if k in metrics}
        with jax.named_scope(UPDATE_SCOPE):
            updates, outer = self.outer.update(grads, before[1], state.params, **extra)
            updates, outer, is_dropped = uncounted.drop_uncounted(
                updates, outer, before[1], extra.get("weight")
            )
        if is_dropped is not None:
            model_state = optax.tree.where(is_dropped, state.model_state, model_state)
        params = shards.gather_new_params(apply_updates(state.params, updates), self.layout)
        after = params, outer, model_state
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return after, traffic.traffic_metrics(pseudo_gradient, before[1], after[1], workers.axes)


def check_rounds(opt_state: OptState, local: LocalSteps | None, layout: Layout | None) -> None:
    """Raise a TypeError if only the step or only the state has local steps, and a ValueError if the
    state was made for another number of workers.

    We compare the number of workers only if its value is ready, so that no call waits for a step
    that is still running: the state that such a step returns has the right number anyway.

    Raises:
      TypeError: the state was made without local steps, and the step with them; or the reverse.
      ValueError: the state was made for another number of workers.
    """
    if isinstance(opt_state, InnerAndOuter) != (local is not None):
        made = "with local_steps > 1" if local is None else "without local steps"
        raise TypeError(
            f"the step was made with local_steps={1 if local is None else local.steps}, but the "
            f"state was made {made}. Begin with state = step.init(params)"
        )
    if local is None or layout is None or not _is_readable(opt_state.inner.num_workers):
        return
    found = int(np.asarray(opt_state.inner.num_workers))
    workers = count_devices(layout.mesh, layout.worker_axes)
    if found != workers and per_worker.has_per_worker_state(opt_state.inner):
        raise ValueError(
            f"the state was made for {found} workers, but the step has {workers}. Convert it by "
            f"optfn.distributed.rescale_residuals(state, {workers}), or load it from a checkpoint "
            "by optfn.restore_checkpoint, which converts it"
        )


def _is_readable(x: jax.Array) -> bool:
    """Tell whether an array's value can be read without waiting: it is ready and not traced."""
    is_array = not isinstance(x, jax.ShapeDtypeStruct)
    return is_array and not checks.is_traced(x) and reports.is_ready(x)


def find_varying(
    tx: optax.GradientTransformationExtraArgs,
    params: Params,
    tables: Pattern | None = None,
    *,
    weighted: bool = False,
) -> PyTree:
    """Tell for each leaf of `tx`'s state whether it may vary between workers in a round.

    A leaf may vary if the update computes it from gradients, params, or a leaf that may vary; with
    `weighted`, also if an update without weight leaves it as it was. The gradients of `tables` are
    rows, and a state may depend on which rows these are.
    """
    names = patterns.match_names(tables, params, "tables")

    def make_gradient(path: str, p: jax.Array) -> Leaf:
        """Return an array or rows that depend on p, to stand for its gradient."""
        if path not in names:
            return 1.0 * p
        return Rows(jnp.full(len(p), jnp.sum(p) > 0, jnp.int32), 1.0 * p, len(p))

    def update(params: Params, state: OptState) -> OptState:
        inexact = ((str(place), p) for place, p in tree.items(params) if tree.is_inexact(p))
        grads = leafwise.build_gradients(params, itertools.starmap(make_gradient, inexact))
        # Any number that depends on all params: only the dependence counts.
        loss = sum((jnp.sum(p).real for p in jax.tree.leaves(params) if tree.is_inexact(p)), 0.0)
        loss = jnp.asarray(loss, jnp.float32)
        updates, new = trace_update(tx, grads, state, params, loss, weighted)
        return uncounted.drop_uncounted(updates, new, state, loss)[1] if weighted else new

    shapes = jax.eval_shape(tx.init, params)
    varies = jax.tree.map(lambda x: False, shapes)
    marks = jax.tree.map(lambda x: True, params)
    # Marks only grow, so this ends after at most one turn for each leaf.
    while True:
        found = find_dependent_leaves(update, (params, shapes), (marks, varies))
        if jax.tree.leaves(found) == jax.tree.leaves(varies):
            return varies
        varies = found


def trace_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: Updates,
    state: OptState,
    params: Params,
    loss: jax.Array,
    weighted: bool = False,
) -> tuple[Updates, OptState]:
    """Call `tx.update` as a step does, with the loss as each number that it hands over."""
    extra = {"value": loss, "grad": grads, "value_fn": lambda params: loss}
    if weighted or per_worker.find_nodes(AccumulateState, state):
        extra["weight"] = loss
    return tx.update(grads, state, params, **extra)


def _check_inner(
    tx: optax.GradientTransformationExtraArgs, state: OptState, params: Params
) -> None:
    """Raise a ValueError if `tx` exchanges gradients, or if its state has copies or averages of
    params."""
    if per_worker.has_exchange(state):
        raise ValueError(
            "with local_steps > 1, tx must not exchange gradients: workers train apart, and "
            "exchange the change of their params through outer. Put the exchange there, as in "
            "outer=optfn.chain(optfn.distributed.exchange(...), optfn.sgd(1.0))"
        )
    marks = jax.tree.map(lambda x: True, params)
    copies = any(jax.tree.leaves(find_dependent_leaves(tx.init, (params,), (marks,))))
    follows = jax.tree.leaves(state, is_leaf=_is_made_of_params)
    if copies or any(map(_is_made_of_params, follows)):
        raise ValueError(
            "with local_steps > 1, tx must not keep copies or averages of params (master_weights, "
            "an average, schedule_free), because they would miss the exchange. Put them in outer"
        )


def _is_made_of_params(x: object) -> bool:
    """Tell whether a state has fields that are computed from params."""
    return bool(traits_of(x).made_of_params)


def _wrap_varying(state: OptState, varies: PyTree) -> OptState:
    """Wrap each leaf that varies in a PerWorker, a scalar as an array of shape (1,).

    A PerWorker is divided along its first axis.
    """

    def wrap(x: jax.Array, varies: bool) -> PyTree:
        return PerWorker(jnp.reshape(x, x.shape or (1,))) if varies else x

    return jax.tree.map(wrap, state, varies)


def _nodes(wrapped: OptState) -> list[PyTree]:
    """Return each leaf of a state, or the `PerWorker` around it, without those around no array."""
    return [x for x in jax.tree.leaves(wrapped, is_leaf=is_per_worker) if jax.tree.leaves(x)]


def _subtract(start: Leaf, end: Leaf) -> Leaf:
    """Return start − end in float32 or wider, or zeros of dtype float0 for an integer leaf."""
    if not tree.is_inexact(start):
        return numerics.float0_zeros(start.shape)
    wide = numerics.accumulator_dtype(start.dtype)
    return leafwise.cast(start, wide) - leafwise.cast(end, wide)


def _average_metrics(metrics: dict[str, Any], workers: Workers) -> dict[str, Any]:
    """Reduce the metrics of a round's steps to one value each, over steps and workers.

    Loss and aux are means over steps and workers, by weight if the loss is a `Mean`; the rate is
    the last step's. Numbers that wrappers report combine as each of them says (`Report.rounds`).
    """
    values = combine_microbatches({k: metrics[k] for k in ("loss", "aux") if k in metrics})
    reduced = mean_over_axes(values, workers.axes)
    if (weight := metrics.get("weight")) is not None:
        total = jnp.sum(jnp.where(weight == 0, 0, weight * metrics["loss"]))
        total, weight = lax.psum((total, jnp.sum(weight)), workers.axes)
        reduced |= {"loss": total / weight, "weight": weight}
    for name in metrics:
        if name.partition("/")[0] == "learning_rate":
            # Workers differ in the rate only if a guard has skipped a step of some of them.
            reduced[name] = workers.max(metrics[name][-1])
    return reduced | reports.reduce_over_round(metrics, workers)
