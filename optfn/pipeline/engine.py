"""The clock of a pipeline: one scan per phase of the plan, in every device of the stage axis.

At a tick, a device does what its plan says: a forward on what arrived from the stage before, a
backward on what arrived from the stage after, or both; and passes the results on. Work of a tick
that does not exist (the bubble) is done on whatever is there, for all devices run one program, and
what comes of it is not taken: the choice is made after the gradient, so that no NaN gets through.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn import numerics
from optfn.autodiff.pullback import inexact_leaves
from optfn.pipeline.model import At, Gradient, Model, Weights
from optfn.pipeline.plan import Plan, backward_order, forward_order


class Batch(NamedTuple):
    """A worker's share of the batch, in microbatches: leaves (m, size, …).

    first: the number of the first microbatch, counted over all workers.
    rng: a random key, or None.
    """

    inputs: Any
    targets: Any
    first: Any
    rng: Any


class Progress(NamedTuple):
    """What goes from tick to tick."""

    arriving: Any  # activations from the stage before
    returning: Any  # cotangents from the stage after
    kept: Any  # a ring, from forward to backward
    waiting: Any  # a ring, from backward to the gradient of the weights
    gradient: Gradient  # sums over the microbatches; own: (v, …)
    loss: jax.Array


def at_microbatch(batch: Batch, microbatch: Any, stage: Any) -> At:
    """Return what `stage` of the model finds at a microbatch."""
    feed, target = _pick((batch.inputs, batch.targets), microbatch)
    key = batch.rng
    if key is not None:
        key = jax.random.fold_in(jax.random.fold_in(key, batch.first + microbatch), stage)
    return At(stage, feed, target, key)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model run by a plan; `run` is for the inside of a shard_map over `axis_name`.

    weights: own, leaves (v, …), the chunks of this device; and shared.
    """

    plan: Plan
    model: Model
    axis_name: str
    weights: Weights
    batch: Batch

    def run(self) -> tuple[jax.Array, Gradient]:
        """Return the sums over the microbatches of the loss, in the last stage, and gradients."""
        progress = self._start()
        for phase in self.plan.phases:
            ticks = jnp.arange(phase.start, phase.stop)
            progress, _ = lax.scan(partial(self._tick, phase.work), progress, ticks)
        return progress.loss, progress.gradient

    def _start(self) -> Progress:
        at, weights = at_microbatch(self.batch, 0, 0), self._weights(0)
        wire = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.model.wire)
        kept = jax.eval_shape(self.model.forward, at, weights, wire)[1]
        loss, _, back, context = jax.eval_shape(
            self.model.backward, at, weights, kept, inexact_leaves(wire)
        )
        sums = Gradient(*(jax.tree.map(_accumulator, inexact_leaves(w)) for w in self.weights))
        return Progress(
            wire,
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), back),
            _ring(kept, self.plan.ring),
            _ring(context, self.plan.waiting),
            sums,
            _accumulator(loss),
        )

    def _tick(self, work: str, progress: Progress, tick: jax.Array) -> tuple[Progress, None]:
        if "F" in work:
            progress = self._forward(progress, tick)
        if "B" in work:
            progress = self._backward(progress, tick)
        if "W" in work:
            progress = self._gradient(progress, tick)
        return progress, None

    def _forward(self, progress: Progress, tick: jax.Array) -> Progress:
        k, exists = self._item("F", tick - lax.axis_index(self.axis_name))
        microbatch, chunk = forward_order(k, self.plan.num_stages, self.plan.virtual_stages)
        y, new = self.model.forward(
            self._at(microbatch, chunk), self._weights(chunk), progress.arriving
        )
        kept = _put(progress.kept, new, k, self.plan.ring, exists)
        return progress._replace(arriving=self._pass_on(y, 1), kept=kept)

    def _backward(self, progress: Progress, tick: jax.Array) -> Progress:
        plan = self.plan
        late = plan.num_stages - 1 - lax.axis_index(self.axis_name)
        k, exists = self._item("B", tick - late)
        microbatch, chunk, stored = backward_order(k, plan.num_stages, plan.virtual_stages)
        at, weights = self._at(microbatch, chunk), self._weights(chunk)
        loss, shared, back, context = self.model.backward(
            at, weights, _pick(progress.kept, stored % plan.ring), progress.returning
        )
        progress = progress._replace(
            returning=self._pass_on(back, -1),
            loss=_add(progress.loss, loss, exists),
            gradient=progress.gradient._replace(
                shared=_add(progress.gradient.shared, shared, exists)
            ),
        )
        if plan.splits:
            return progress._replace(
                waiting=_put(progress.waiting, context, k, plan.waiting, exists)
            )
        return self._add_gradient(progress, at, weights, context, chunk, exists)

    def _gradient(self, progress: Progress, tick: jax.Array) -> Progress:
        plan = self.plan
        k, exists = self._item("W", tick)
        microbatch, chunk, _ = backward_order(k, plan.num_stages, plan.virtual_stages)
        context = _pick(progress.waiting, k % plan.waiting)
        at = self._at(microbatch, chunk)
        return self._add_gradient(progress, at, self._weights(chunk), context, chunk, exists)

    def _add_gradient(
        self, progress: Progress, at: At, weights: Weights, context: Any, chunk: Any, exists: Any
    ) -> Progress:
        own, shared = self.model.gradient(at, weights, context)
        sums = progress.gradient
        own = [
            lax.dynamic_update_index_in_dim(
                total, _added(lax.dynamic_index_in_dim(total, chunk, 0, False), g, exists), chunk, 0
            )
            for total, g in zip(sums.own, own, strict=True)
        ]
        return progress._replace(gradient=Gradient(own, _add(sums.shared, shared, exists)))

    def _item(self, work: str, since_start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which item of its order a device works on, and whether there is one."""
        k = since_start - self.plan.windows[work][0]
        return jnp.clip(k, 0, self.plan.items - 1), (k >= 0) & (k < self.plan.items)

    def _at(self, microbatch: Any, chunk: Any) -> At:
        stage = chunk * self.plan.num_stages + lax.axis_index(self.axis_name)
        return at_microbatch(self.batch, microbatch, stage)

    def _weights(self, chunk: Any) -> Weights:
        return Weights(_pick(self.weights.own, chunk), self.weights.shared)

    def _pass_on(self, tree: Any, by: int) -> Any:
        # All wires go around in every device and at every tick, never inside a branch: a
        # collective that some devices do not come to is one that never ends.
        p = self.plan.num_stages
        ring = [(d, (d + by) % p) for d in range(p)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, ring), tree)


def _pick(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _ring(shapes: Any, slots: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), shapes if slots else None)


def _put(ring: Any, new: Any, k: jax.Array, slots: int, exists: jax.Array) -> Any:
    """Write item k to its slot, if it exists: a slot may still hold an item that does."""

    def put(slot: jax.Array, x: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(slot, k % slots, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(slot, jnp.where(exists, x, old), k % slots, 0)

    return jax.tree.map(put, ring, new)


def _accumulator(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, numerics.accumulator_dtype(x.dtype))


def _added(total: jax.Array, new: jax.Array, exists: jax.Array) -> jax.Array:
    return total + jnp.where(exists, new, 0).astype(total.dtype)


def _add(totals: Any, new: Any, exists: jax.Array) -> Any:
    return jax.tree.map(lambda total, x: _added(total, x, exists), totals, new)
