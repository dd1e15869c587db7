"""Local steps: workers train apart for a while, and then exchange how far they have come.

Each worker's optimizer keeps a state of its own. The leaves of it that cannot differ between
workers, such as step counters and rates, are found by tracing its update: they depend neither on
gradients nor on params.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import core
from optfn.jaxprs.dependence import depends
from optfn.leaves import leafwise, mismatch, numerics, tree
from optfn.leaves.types import Batch, Leaf, OptState, Params, PyTree, Updates, declares
from optfn.mesh import AxisName, axes
from optfn.parallel import data_parallel as parallel
from optfn.parallel import traffic
from optfn.state.per_worker import PerWorker, exchanges
from optfn.train.state import StepFn, TrainState


@declares(adds_no_word=True)
class LocalState(NamedTuple):
    """The state of the workers' optimizers.

    num_workers: int32.
    inner_state: the state of `tx`; the leaves that are a worker's own are in `PerWorker`s.
    """

    num_workers: jax.Array
    inner_state: OptState


@declares(labels=True, passes_own_gradients=True, main="inner")
class InnerAndOuter(NamedTuple):
    """The optimizer state of a run with local steps: that of the workers, and the outer one's."""

    inner: LocalState
    outer: OptState


class LocalSteps(NamedTuple):
    """How a round goes: `steps` local steps with `tx`, then one of `outer` on the drift."""

    steps: int
    tx: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs

    def init(self, params: Params) -> InnerAndOuter:
        """Return the state of one worker at step 0.

        Raises:
          ValueError: `tx` communicates, or keeps copies of params.
        """
        state = self.tx.init(params)
        _check_inner(self.tx, state, params)
        one = jnp.ones((), jnp.int32)
        inner = LocalState(one, _laid_out(state, is_own(self.tx, params)))
        return InnerAndOuter(inner, self.outer.init(params))

    def round(self, local_step: StepFn, axis_name: AxisName) -> StepFn:
        """Return the step of one worker: (state, its part of the batch) -> (state, metrics).

        Args:
          local_step: a step on what a worker has alone.
          axis_name: the mesh axes of the workers.
        """

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
            own = is_own(self.tx, state.params)
            like = jax.eval_shape(self.tx.init, state.params)
            opt_state = _taken(state.opt_state.inner.inner_state, like)
            start = state._replace(opt_state=opt_state)
            end, metrics = _scan(local_step, start, batch, self.steps)
            drift = jax.tree.map(_drift, state.params, end.params)
            finite = _all_finite(drift, axis_name)
            metrics = _mean_of_metrics(metrics, axis_name)
            params, outer = self._exchange(drift, state, finite, metrics["loss"], axis_name)
            metrics |= traffic.metrics(drift, state.opt_state.outer, outer, axis_name)
            # A worker that has gone astray would do so again: its optimizer starts anew.
            fresh = self.tx.init(params)
            astray = ~leafwise.all_finite(drift)
            opt_state = jax.tree.map(
                lambda x, new, is_own: jnp.where(astray, new, x) if is_own else x,
                end.opt_state, fresh, own,
            )  # fmt: skip
            inner = LocalState(state.opt_state.inner.num_workers, _laid_out(opt_state, own))
            model_state = jax.tree.map(
                lambda old, new: jnp.where(finite, new, old),
                state.model_state,
                parallel.mean_or_first(end.model_state, axis_name),
            )
            state = TrainState(end.step, params, InnerAndOuter(inner, outer), model_state)
            return state, metrics

        return run

    def _exchange(
        self,
        drift: Updates,
        state: TrainState,
        finite: jax.Array,
        loss: jax.Array,
        axis_name: AxisName,
    ) -> tuple[Params, OptState]:
        """Return the params after an outer step, and its state; the old ones if not `finite`."""
        before = state.opt_state.outer
        grads, _, extra = parallel.for_optimizer(drift, before, axis_name)
        updates, outer = self.outer.update(grads, before, state.params, value=loss, **extra)
        params = core.apply_updates(state.params, updates)
        return jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, outer), (state.params, before)
        )


def is_own(tx: optax.GradientTransformationExtraArgs, params: Params) -> PyTree:
    """Tell for each leaf of the state of `tx` whether workers that train apart may differ in it."""

    def update(params: Params, state: OptState) -> OptState:
        grads = jax.tree.map(_like_gradient, params)
        loss = sum((jnp.sum(p).real for p in jax.tree.leaves(params) if tree.is_inexact(p)), 0.0)
        loss = jnp.asarray(loss, jnp.float32)
        extra = {"value": loss, "grad": grads, "value_fn": lambda p: loss}
        return tx.update(grads, state, params, **extra)[1]

    shapes = jax.eval_shape(tx.init, params)
    own = jax.tree.map(lambda x: False, shapes)
    of_params = jax.tree.map(lambda x: True, params)
    while True:
        found = depends(update, (params, shapes), (of_params, own))
        if jax.tree.leaves(found) == jax.tree.leaves(own):
            return own
        own = found


def _like_gradient(p: Leaf) -> Leaf:
    return 1.0 * p if tree.is_inexact(p) else mismatch.no_gradient(p.shape)


def _check_inner(
    tx: optax.GradientTransformationExtraArgs, state: OptState, params: Params
) -> None:
    """Raise a ValueError for optimizers that are not right where params are exchanged."""
    if exchanges(state):
        raise ValueError(
            "local_steps > 1 with a tx that communicates by itself: workers train apart, and outer "
            "is what communicates"
        )
    marks = jax.tree.map(lambda x: True, params)
    copies = any(jax.tree.leaves(depends(tx.init, (params,), (marks,))))
    follows = jax.tree.leaves(state, is_leaf=_follows_params)
    if copies or any(map(_follows_params, follows)):
        raise ValueError(
            "local_steps > 1 with a tx that keeps copies or averages of params (master_weights, "
            "an average, schedule_free): they would not follow the exchange. Put it in outer"
        )


def _follows_params(x: object) -> bool:
    return bool(getattr(type(x), "follows_params", False))


def _laid_out(state: OptState, own: PyTree) -> OptState:
    """Return a state with the workers' own leaves in PerWorkers; scalars have the shape (1,)."""
    return jax.tree.map(
        lambda x, is_own: PerWorker(jnp.reshape(x, x.shape or (1,))) if is_own else x, state, own
    )


def _taken(laid_out: OptState, like: OptState) -> OptState:
    """Return the state of `tx` from that of `_laid_out`."""
    pairs = zip(jax.tree.leaves(laid_out), jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [x.reshape(y.shape) for x, y in pairs])


def _scan(
    step: StepFn, state: TrainState, batch: Batch, count: int
) -> tuple[TrainState, dict[str, Any]]:
    """Return the state after `count` steps on equal parts of a batch, and stacked metrics."""
    arrays, structure = jax.tree.flatten(batch)
    is_split = [jnp.ndim(x) > 0 for x in arrays]
    parts = [
        jnp.reshape(x, (count, -1, *x.shape[1:]))
        for x, flag in zip(arrays, is_split, strict=True)
        if flag
    ]

    def body(state: TrainState, parts: list[jax.Array]) -> tuple[TrainState, dict[str, Any]]:
        remaining = iter(parts)
        pairs = zip(arrays, is_split, strict=True)
        leaves = [next(remaining) if flag else x for x, flag in pairs]
        return step(state, jax.tree.unflatten(structure, leaves))

    return lax.scan(body, state, parts)


def _drift(start: Leaf, end: Leaf) -> Leaf:
    """Return start − end in float32 or wider; an integer leaf has none."""
    if not tree.is_inexact(start):
        return mismatch.no_gradient(start.shape)
    wide = numerics.accumulator_dtype(start.dtype)
    return leafwise.cast(start, wide) - leafwise.cast(end, wide)


def _all_finite(drift: Updates, axis_name: AxisName) -> jax.Array:
    """Tell whether the drift of every worker is finite."""
    bad = ~leafwise.all_finite(drift)
    return lax.pmax(bad.astype(jnp.int32), axes(axis_name)) == 0


def _mean_of_metrics(metrics: dict[str, Any], axis_name: AxisName) -> dict[str, Any]:
    """Return the metrics of a round from those of its steps."""
    means = {k: metrics[k] for k in ("loss", "aux") if k in metrics}
    reduced = jax.tree.map(
        lambda x: jnp.mean(x, 0) if tree.is_inexact(x) else jnp.sum(x, 0, dtype=x.dtype), means
    )
    reduced = parallel.mean_over_workers(reduced, axis_name)
    if "learning_rate" in metrics:  # workers differ in it only behind a guard
        reduced["learning_rate"] = lax.pmax(metrics["learning_rate"][-1], axes(axis_name))
    if "gave_up" in metrics:
        gave_up = jnp.any(metrics["gave_up"]).astype(jnp.int32)
        reduced["gave_up"] = lax.pmax(gave_up, axes(axis_name)) > 0
    return reduced
