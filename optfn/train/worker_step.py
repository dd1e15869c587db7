"""The training step of one worker: gradients, their mean over the workers, the update.

It runs inside `shard_map` over the worker axes, or on one device. Along the part axes of a layout
it is written for whole arrays, and the compiler divides the update, so that norms are those of
whole arrays.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import checks, core
from optfn.leaves import leafwise, mismatch, tree
from optfn.leaves.traits import traits_of
from optfn.leaves.types import Batch, OptState, Params, PyTree
from optfn.mesh import Axes, constrained, restricted
from optfn.parallel import means, traffic
from optfn.parallel.layout import Layout, is_spec
from optfn.parallel.owners import encoding_at
from optfn.state.per_worker import may_give_rows
from optfn.train.loss_scale import scaling_losses
from optfn.train.objective import Objective, value_fn
from optfn.train.state import StepFn, TrainState
from optfn.transforms.learning_rate import get_learning_rate
from optfn.wrappers.loss_scale import scale_of
from optfn.wrappers.metrics import metrics as recorded_metrics
from optfn.wrappers.nonfinite import gave_up
from optfn.wrappers.spikes import spike_ratios

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
    workers: Axes,
    layout: Layout | None = None,
) -> StepFn:
    """Return the step of one worker; the names of the worker axes are bound where it runs.

    Args:
      objective: the loss and its gradients.
      tx: the optimizer.
      key_of: returns the key of a step; None if the loss takes none.
      workers: the mesh axes of the workers; none if there is only one.
      layout: how params are divided over the mesh.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        keys = () if key_of is None else (key_of(state.step),)
        arguments = (state.model_state, batch, *keys)
        scale = scale_of(state.opt_state)
        state = state._replace(params=_as_laid_out(state.params, layout))
        with scaling_losses(scale), encoding_at(state.step):
            values, grads = objective.value_and_grad(state.params, *arguments)
        parts = layout.parts_of(state.params) if layout and workers else None
        grads, (loss, aux), extra = means.for_optimizer(
            grads, state.opt_state, workers, (values.loss, values.aux), parts
        )
        exchanges_itself = bool(extra)
        params, grads, loss = _barrier((state.params, grads, loss))
        # An optimizer that exchanges gradients itself gets each worker's own; `grad` is their mean.
        mean = means.mean_on_parts(grads, (), workers, parts)[0] if exchanges_itself else grads
        # Line searches take dense gradients. Without one, XLA removes this computation.
        extra |= {"value": loss, "grad": leafwise.to_dense(mean)}
        extra["value_fn"] = value_fn(objective, workers, parts, *arguments)
        if may_give_rows(state.opt_state):
            extra["row_updates"] = True
        with mismatch.naming_integer_leaves(grads), encoding_at(state.step):
            updates, opt_state = tx.update(grads, state.opt_state, params, **extra)
        params = core.apply_updates(params, updates)
        model_state = means.mean_or_first(values.model_state, workers)
        model_state = _kept_where_skipped(model_state, state, opt_state)
        metrics = {"loss": loss} | ({} if aux is None else {"aux": aux}) | _metrics_of(opt_state)
        if exchanges_itself:
            metrics |= traffic.traffic_metrics(grads, state.opt_state, opt_state, workers)
        new_state = TrainState(core.next_step(state.step), params, opt_state, model_state)
        return new_state, metrics

    return step


def _as_laid_out(params: Params, layout: Layout | None) -> Params:
    """Return params with a sharding constraint, so that the compiler leaves them as they are.

    Otherwise it may divide whole params for the update, and gather them for the loss.
    """
    if layout is None or not (layout.worker_axes and layout.inner_axes):
        return params
    return jax.tree.map(
        lambda spec, x: constrained(x, layout.mesh, restricted(spec, layout.inner_axes)),
        layout.of_params(params), params, is_leaf=is_spec,
    )  # fmt: skip


def _kept_where_skipped(model_state: PyTree, before: TrainState, opt_state: OptState) -> PyTree:
    """Return the new model state, or the old one if a guard has skipped the step."""
    pairs = zip(_skips(before.opt_state), _skips(opt_state), strict=True)
    changed = [old != new for old, new in pairs]
    if not changed or model_state is None:
        return model_state
    skipped = functools.reduce(jnp.logical_or, changed)
    return jax.tree.map(
        lambda old, new: jnp.where(skipped, old, new), before.model_state, model_state
    )


def _skips(opt_state: OptState) -> list[jax.Array]:
    """Return the counters of skipped steps in a state, also those of `optax.apply_if_finite`."""

    def counter(x: object) -> str:
        return "total_notfinite" if isinstance(x, _ApplyIfFinite) else traits_of(x).skipped

    def inside(state: PyTree) -> Iterator[jax.Array]:
        for x in jax.tree.leaves(state, is_leaf=lambda x: x is not state and bool(counter(x))):
            if counter(x):
                yield x._asdict()[counter(x)]
                yield from inside(x)

    return list(inside((opt_state,)))


def _barrier(values: PyTree) -> PyTree:
    """Keep XLA from interleaving the update with the loss.

    Both read the parameters, so XLA would have to keep a copy of them.
    """
    leaves, structure = jax.tree.flatten(values)
    kept = iter(lax.optimization_barrier([x for x in leaves if not mismatch.is_float0(x)]))
    whole = [x if mismatch.is_float0(x) else next(kept) for x in leaves]
    return jax.tree.unflatten(structure, whole)


def _metrics_of(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the metrics in a state: its rate, norms, and whether a guard gave up."""

    metrics = {}
    if flags := gave_up(opt_state):
        metrics["gave_up"] = functools.reduce(jnp.logical_or, flags)
    with contextlib.suppress(ValueError):  # no rate, or several
        metrics["learning_rate"] = get_learning_rate(opt_state)
    if (scale := scale_of(opt_state)) is not None:
        metrics["loss_scale"] = scale
    if ratios := spike_ratios(opt_state):
        metrics["spike_ratio"] = functools.reduce(jnp.maximum, ratios)
    with contextlib.suppress(ValueError):  # no recorder, or several
        recorded = recorded_metrics(opt_state)
        metrics |= {name: x for name, x in recorded.items() if name != "learning_rate"}
    return metrics
