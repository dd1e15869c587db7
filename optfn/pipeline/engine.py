"""The clock of a pipeline: one scan per phase of the plan, on every device of the stage axis.

In each tick, a device does the work of its plan: a forward on the activation from the previous
stage, a backward on the cotangent from the next stage, or both. Then it passes the results on. If a
tick has no work for a device (the bubble), the device computes with whatever values are there,
because all devices run one program. Such results are masked out, and only after the gradient is
taken, so that no NaN gets through.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import leafwise, numerics
from optfn.core.types import PyTree
from optfn.loss.jaxprs.pullback import Key, select_inexact_leaves
from optfn.loss.keys import fold_in
from optfn.loss.mean import is_mean
from optfn.pipeline.model import Activation, Gradient, Index, Model, Weights, WorkItem
from optfn.pipeline.plan import Plan, forward_order
from optfn.pipeline.stage import Context, Stash


class Microbatches(NamedTuple):
    """A worker's share of the batch, with leaves (m, examples, …) of inputs and targets.

    first: the index of the first microbatch, counted over all workers.
    rng: a random key, or None.
    """

    inputs: PyTree
    targets: PyTree
    first: Index
    rng: Key


class Carry(NamedTuple):
    """The carry of a scan over the ticks."""

    activation: Activation  # received from the previous stage
    cotangent: Activation  # received from the next stage
    stash: Stash  # ring buffers, from forward to backward
    context: Context  # ring buffers, from backward to the gradient of the weights
    gradient: Gradient  # sums over the microbatches; leaves of the stages are (v, …)
    loss: PyTree  # the sum over the microbatches, or both sums of a `Mean`


def make_work_item(microbatches: Microbatches, index: Index, stage: Index) -> WorkItem:
    """Return the inputs, target and key of one stage on the microbatch at `index`, with microbatch
    and stage folded into the key, or None as the key without one."""
    model_input, target = _take((microbatches.inputs, microbatches.targets), index)
    key = microbatches.rng
    if key is not None:
        # Counted over all data workers: the masks do not depend on how the batch is split.
        key = fold_in(fold_in(key, microbatches.first + index), stage)
    return WorkItem(stage, model_input, target, key)


class Task(NamedTuple):
    """The work of a device in a tick, and the weights for it.

    chunk: the index of the stage on its device.
    valid: whether there is such work; False in the bubble.
    """

    item: WorkItem
    chunk: Index
    weights: Weights
    valid: jax.Array


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model and its plan on one device. Call `run` inside a shard_map over `axis_name`.

    weights: the weights of the chunks of this device, with leaves (v, …), and the shared ones.
    """

    plan: Plan
    model: Model
    axis_name: str
    weights: Weights
    microbatches: Microbatches

    def run(self) -> tuple[PyTree, Gradient]:
        """Run all ticks, and return this device's sums of loss and gradients over the microbatches.
        Only the device of the last stage has a loss; elsewhere it is 0."""
        carry = self._init_carry()
        for phase in self.plan.phases:
            ticks = jnp.arange(phase.start, phase.stop)
            carry, _ = lax.scan(partial(self._run_tick, phase.work), carry, ticks)
        return carry.loss, carry.gradient

    def _init_carry(self) -> Carry:
        """Return the carry before the first tick, zeros of the shapes that an abstract forward and
        backward give, without running a stage."""
        item, weights = make_work_item(self.microbatches, 0, 0), self._get_chunk_weights(0)
        activation = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.model.activation)
        # Only shapes: no stage runs before the first tick.
        stash = jax.eval_shape(self.model.forward, item, weights, activation)[1]
        (loss, _), cotangent, context = jax.eval_shape(
            self.model.backward, item, weights, stash, select_inexact_leaves(activation)
        )
        counts = jax.ShapeDtypeStruct((), jnp.bool_) if is_mean(loss) else None
        inexact = map(select_inexact_leaves, self.weights)
        sums = Gradient(*(jax.tree.map(_zeros_for_sum, leaves) for leaves in inexact))
        return Carry(
            activation,
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cotangent),
            _init_ring(stash, self.plan.stash_slots),
            _init_ring((context, counts), self.plan.context_slots),
            sums,
            jax.tree.map(_zeros_for_sum, loss),
        )

    def _run_tick(self, work: str, carry: Carry, tick: jax.Array) -> tuple[Carry, None]:
        """Run the kinds of work that `work` has, in the order forward, backward, weight gradient,
        and return the new carry and None."""
        # Forward first: the backward of the last stage takes the stash of the same tick.
        if "F" in work:
            carry = self._run_forward(carry, tick)
        if "B" in work:
            carry = self._backward(carry, tick)
        if "W" in work:
            carry = self._run_weight_gradient(carry, tick)
        return carry, None

    def _run_forward(self, carry: Carry, tick: jax.Array) -> Carry:
        """Run a forward on the received activation, save its stash except in the bubble, and send
        the result to the next stage."""
        k, valid = self._position("F", tick - lax.axis_index(self.axis_name))
        index, chunk = forward_order(k, self.plan.num_stages, self.plan.virtual_stages)
        task = self._make_task(index, chunk, valid)
        activation, stash = self.model.forward(task.item, task.weights, carry.activation)
        ring = _write(carry.stash, stash, k, self.plan.stash_slots, valid)
        return carry._replace(activation=self._pass_on(activation, 1), stash=ring)

    def _backward(self, carry: Carry, tick: jax.Array) -> Carry:
        """Run a backward on the received cotangent and its stash, add its loss and gradients, or
        for zb save its context, and send the cotangent of x to the previous stage."""
        plan = self.plan
        stages_after = plan.num_stages - 1 - lax.axis_index(self.axis_name)
        k, valid = self._position("B", tick - stages_after)
        index, chunk, forward_k = plan.backward_order(k)
        task = self._make_task(index, chunk, valid)
        stash = _take(carry.stash, forward_k % plan.stash_slots)
        (loss, shared_gradient), cotangent, context = self.model.backward(
            task.item, task.weights, stash, carry.cotangent
        )
        counts = self._find_counts(task, loss, carry.cotangent)
        sums = carry.gradient
        carry = carry._replace(
            cotangent=self._pass_on(leafwise.keep_if(counts, cotangent), -1),
            loss=_add(carry.loss, loss, valid),
            gradient=sums._replace(shared=_add(sums.shared, shared_gradient, valid)),
        )
        # zb: the weight gradient comes in a later tick; until then the ring keeps its context.
        if plan.splits_backward:
            ring = _write(carry.context, (context, counts), k, plan.context_slots, valid)
            return carry._replace(context=ring)
        return self._add_gradient(carry, task, context, counts)

    def _find_counts(self, task: Task, loss: PyTree, received: Activation) -> jax.Array | None:
        """Tell whether a task's microbatch has weight, if the loss is a `Mean`, else return None.

        Without weight its cotangents are 0 in each stage, and 0 times a NaN of the stage, as of a
        mean over padding, would be NaN.
        """
        if not is_mean(loss):
            return None
        is_last = task.item.stage == self.plan.num_stages * self.plan.virtual_stages - 1
        has_any = jnp.any(jnp.array([jnp.any(x != 0) for x in received]))
        return jnp.where(is_last, loss.weight != 0, has_any)

    def _run_weight_gradient(self, carry: Carry, tick: jax.Array) -> Carry:
        """Compute the weight gradient of an earlier backward, whose context the ring has kept, and
        add it to the sums, but nothing in the bubble."""
        plan = self.plan
        k, valid = self._position("W", tick)
        index, chunk, _ = plan.backward_order(k)
        context, counts = _take(carry.context, k % plan.context_slots)
        task = self._make_task(index, chunk, valid)
        return self._add_gradient(carry, task, context, counts)

    def _add_gradient(
        self, carry: Carry, task: Task, context: Context, counts: jax.Array | None
    ) -> Carry:
        """Compute the gradient of a task's weights, and add it to the sums of its chunk and of the
        shared weights, but nothing in the bubble, or of a microbatch without weight."""
        item, chunk, weights, valid = task
        valid = valid if counts is None else valid & counts
        stage_gradient, shared_gradient = self.model.weight_gradient(item, weights, context)
        sums = carry.gradient

        def add_to_chunk(total: jax.Array, g: jax.Array) -> jax.Array:
            chunk_total = _add(lax.dynamic_index_in_dim(total, chunk, 0, False), g, valid)
            return lax.dynamic_update_index_in_dim(total, chunk_total, chunk, 0)

        stage_sums = list(map(add_to_chunk, sums.stage, stage_gradient))
        shared_sums = _add(sums.shared, shared_gradient, valid)
        return carry._replace(gradient=Gradient(stage_sums, shared_sums))

    def _position(self, work: str, stage_tick: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a stage's position in its order of this work, clipped to the order, and whether it
        was inside, which it is not in the bubble."""
        k = stage_tick - self.plan.windows[work][0]
        return jnp.clip(k, 0, self.plan.work_items - 1), (k >= 0) & (k < self.plan.work_items)

    def _make_task(self, index: Index, chunk: Index, valid: jax.Array) -> Task:
        """Return the task of this device for a microbatch and a chunk, with the chunk's weights."""
        stage = chunk * self.plan.num_stages + lax.axis_index(self.axis_name)
        item = make_work_item(self.microbatches, index, stage)
        return Task(item, chunk, self._get_chunk_weights(chunk), valid)

    def _get_chunk_weights(self, chunk: Index) -> Weights:
        """Return the weights of one chunk of this device, and the shared ones."""
        return Weights(_take(self.weights.stage, chunk), self.weights.shared)

    def _pass_on(self, arrays: PyTree, distance: int) -> PyTree:
        """Send arrays to the device `distance` stages further along the ring, and return the arrays
        that arrive."""
        # Every device must call it in every tick, never inside a branch: a collective that some
        # devices do not reach would deadlock.
        p = self.plan.num_stages
        ring = [(d, (d + distance) % p) for d in range(p)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, ring), arrays)


def _take(arrays: PyTree, i: Index) -> PyTree:
    """Return entry i of the leading axis of each array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), arrays)


def _init_ring(shapes: PyTree, slots: int) -> PyTree:
    """Return zeros of these shapes with `slots` entries along a new leading axis, or None without
    slots."""
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), shapes if slots else None)


def _write(ring: PyTree, new: PyTree, k: jax.Array, slots: int, valid: jax.Array) -> PyTree:
    """Return the ring with `new` in the slot of position k if it is valid, or unchanged if not,
    because the slot may be in use."""

    def write(buffer: jax.Array, x: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(buffer, k % slots, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(buffer, jnp.where(valid, x, old), k % slots, 0)

    return jax.tree.map(write, ring, new)


def _zeros_for_sum(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros in float32 or wider, because m terms are added."""
    return jnp.zeros(x.shape, numerics.accumulator_dtype(x.dtype))


def _add(totals: PyTree, terms: PyTree, valid: jax.Array) -> PyTree:
    """Return totals + terms if they are valid, else the totals, so that a NaN of the bubble does
    not get through."""

    def add(total: jax.Array, x: jax.Array) -> jax.Array:
        return total + jnp.where(valid, x, 0).astype(total.dtype)

    return jax.tree.map(add, totals, terms)
