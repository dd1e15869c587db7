"""Gradient accumulation: one step of an optimizer for several gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef

from optfn import checks, core
from optfn.leaves import leafwise, mismatch, numerics, tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates, declares
from optfn.state.per_worker import PerWorker, has_workers_in_front, own_leaves
from optfn.transforms.in_place import when


@declares(passes_own_gradients=True)
class AccumulateState(NamedTuple):
    """State of `accumulate`: 4 bytes per parameter, the micro-step, and the inner state.

    total: the sum of the gradients of leaves whose gradient is the same on all workers; at
      micro-step 0 it is the last update, and the next gradient takes its place.
    own_total: the sum, flat, for leaves whose gradient the inner optimizer takes from each worker.
    """

    micro_step: jax.Array
    total: Updates
    own_total: PerWorker
    inner_state: OptState


@core.named
def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Step once for every `every` gradients, with their mean.

        total = g if n = 0, else total + g;  n += 1
        if n = every:  u = tx(total/every);  n = 0
        else:          u = −0.0

    For a loss that is a mean over examples this is the step of the full batch. `tx` runs only at
    every n-th call, so that its schedules and averages count real steps. Around an optimizer that
    exchanges gradients by itself, each worker keeps the sum of its own gradients.

    Args:
      tx: an optimizer of optfn or optax.
      every: the number of gradients in a step, ≥ 1.

    State: the micro-step n, the sum of gradients in float32, 4 bytes per parameter, and the state
    of `tx`.

    Raises:
      TypeError: `tx` is not a gradient transformation, or `every` not a Python integer.
      ValueError: `every` < 1, or `tx` is an `on_each_device`; accumulate must be inside it.
    """
    every = checks.count("accumulate: every", every)
    inner = optax.with_extra_args_support(core.check_transform("accumulate: tx", tx))

    def init(params: Params) -> AccumulateState:
        inner_state = inner.init(params)
        if has_workers_in_front(inner_state):
            raise ValueError(
                "accumulate cannot wrap on_each_device, whose gradients have a leading axis of "
                "workers; put it inside: on_each_device(accumulate(tx, every), mesh, spec=spec)"
            )
        totals, structure = tree.flatten(leafwise.zeros_like(leafwise.inexact(params)))
        per_worker = own_leaves(inner_state, params)
        totals = [
            x.reshape(-1) if is_own and not tree.is_masked(x) else x
            for x, is_own in zip(totals, per_worker, strict=True)
        ]
        sums = _by_owner(totals, per_worker, structure)
        return AccumulateState(core.first_step(), *sums, inner_state)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        core.check_state("accumulate", state, AccumulateState)
        mismatch.check_shapes("accumulate", updates, "the state", state.total)
        if params is not None:
            mismatch.check_shapes("accumulate", updates, "params", params)
        gradients, structure = tree.flatten(updates)
        shared, owned = (tree.flatten(x)[0] for x in (state.total, state.own_total.value))
        per_worker = [not tree.is_masked(x) for x in owned]
        totals = [
            b if is_own else a for a, b, is_own in zip(shared, owned, per_worker, strict=True)
        ]
        due = state.micro_step + 1 == every
        is_first = state.micro_step == 0
        totals = [_added(total, g, is_first) for total, g in zip(totals, gradients, strict=True)]
        arrays, others = _split_extra(extra)

        def step(
            totals: list[Leaf], inner_state: OptState, reads: PyTree
        ) -> tuple[Updates, OptState]:
            params, arrays = reads
            means = [
                total.reshape(jnp.shape(g)) / every if _is_summed(total, g) else g
                for total, g in zip(totals, gradients, strict=True)
            ]
            mean = structure.unflatten(means)
            updated, inner_state = inner.update(mean, inner_state, params, **arrays, **others)
            if params is None:
                updated = jax.tree.map(lambda u, g: u.astype(g.dtype), updated, updates)
            return updated, inner_state

        updated, totals, inner_state = _step_when(
            due, step, totals, state.inner_state, (params, arrays)
        )
        micro_step = jnp.where(due, 0, state.micro_step + 1)
        sums = _by_owner(totals, per_worker, structure)
        return updated, AccumulateState(micro_step, *sums, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _by_owner(
    totals: list[Leaf], per_worker: list[bool], structure: PyTreeDef
) -> tuple[Updates, PerWorker]:
    """Return a tree of the totals that all workers share, and one of the per-worker totals."""
    masked = optax.MaskedNode()
    pairs = list(zip(totals, per_worker, strict=True))
    shared = structure.unflatten([masked if is_own else total for total, is_own in pairs])
    owned = structure.unflatten([total if is_own else masked for total, is_own in pairs])
    return shared, PerWorker(owned)


def _is_summed(total: Leaf, g: Leaf) -> bool:
    """Tell whether a gradient is added to a total; others are passed on unchanged."""
    return tree.is_inexact(g) and not tree.is_masked(total)


def _added(total: Leaf, g: Leaf, is_first: jax.Array) -> Leaf:
    if not _is_summed(total, g):
        return total
    return jnp.where(is_first, 0, total) + g.astype(total.dtype).reshape(total.shape)


def _split_extra(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the extra arguments that are trees of arrays, and the others.

    Without those that speak of one gradient only.
    """
    extra = {k: v for k, v in extra.items() if k not in ("grad", "value_fn")}

    def is_array(x: object) -> bool:
        return isinstance(x, jax.Array | float | int)

    arrays = {k: v for k, v in extra.items() if all(map(is_array, jax.tree.leaves(v)))}
    return arrays, {k: v for k, v in extra.items() if k not in arrays}


def _step_when(
    due: jax.Array,
    step: Callable[[list[Leaf], OptState, PyTree], tuple[Updates, OptState]],
    totals: list[Leaf],
    inner_state: OptState,
    reads: PyTree,
) -> tuple[Updates, list[Leaf], OptState]:
    """Return (updates, totals, inner_state) after `step` where `due`.

    Elsewhere the updates are −0.0, and the totals and the state are those passed in. The updates
    are written over the totals: arrays of their own would be allocated at every call. Updates of
    integer leaves are zero in both cases, and stay outside the conditional.
    """
    shapes = jax.eval_shape(step, totals, inner_state, reads)[0]
    leaves, structure = tree.flatten(shapes)

    def run(
        totals: list[Leaf], inner_state: OptState, reads: PyTree
    ) -> tuple[list[Leaf], OptState]:
        updates, inner_state = step(totals, inner_state, reads)
        pairs = zip(totals, tree.flatten(updates)[0], strict=True)
        return [_in_place_of(total, u) for total, u in pairs], inner_state

    totals, inner_state = when(due, [run], (totals, inner_state), reads)
    updates = [
        _update_of(due, total, leaf) if tree.is_inexact(leaf) else _zero(leaf)
        for total, leaf in zip(totals, leaves, strict=True)
    ]
    return structure.unflatten(updates), totals, inner_state


def _in_place_of(total: Leaf, u: Leaf) -> Leaf:
    """Return an update in the shape and dtype of the total, whose memory it takes."""
    return u.astype(total.dtype).reshape(total.shape) if tree.is_inexact(u) else total


def _update_of(due: jax.Array, total: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the update that stands in the place of the total, and −0.0 where there was no step."""
    return jnp.where(due, total.astype(like.dtype), -0.0).reshape(like.shape)


def _zero(leaf: Leaf) -> Leaf:
    return leaf if tree.is_masked(leaf) else numerics.integer_zeros(leaf.shape, leaf.dtype)
