"""Gradient accumulation: one step of an optimizer for several gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core, numerics
from optfn.autodiff.in_place import when
from optfn.leaves import leafwise, mismatch, tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates, declares
from optfn.parallel.per_worker import PerWorker, has_workers_in_front, own_leaves


@declares(passes_own_gradients=True)
class AccumulateState(NamedTuple):
    """State of `accumulate`: 4 bytes per parameter, the micro-step, and the inner state.

    total: the sum of gradients, of leaves whose gradient is the same on all workers.
    own_total: the sum, flat, of those that the inner optimizer takes from each worker.
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

        total += g;  n += 1
        if n = every:  u = tx(total/every);  total = 0;  n = 0
        else:          u = −0.0

    For a loss that is a mean over examples this is the step of the whole batch. `tx` runs only when
    it is due, so that its schedules and averages advance with the real steps. Around an optimizer
    that exchanges gradients by itself, each worker keeps the sum of its own.

    Args:
      tx: an optimizer of optfn or optax.
      every: gradients in a step, ≥ 1.

    State: the micro-step n, the sum of gradients in float32, 4 bytes per parameter, and the state
    of `tx`.

    Raises:
      TypeError: tx is no gradient transformation, every no Python integer.
      ValueError: `tx` is an `on_each_device`: accumulate goes inside it.
    """
    every = checks.count("accumulate: every", every)
    inner = optax.with_extra_args_support(core.check_transform("accumulate: tx", tx))

    def init(params: Params) -> AccumulateState:
        inner_state = inner.init(params)
        if has_workers_in_front(inner_state):
            raise ValueError(
                "accumulate stands around on_each_device, whose gradients have the workers in "
                "front; put it inside: on_each_device(accumulate(tx, every), mesh, spec=spec)"
            )
        totals, structure = tree.flatten(leafwise.zeros_like(leafwise.inexact(params)))
        own = own_leaves(inner_state, params)
        totals = [
            x.reshape(-1) if is_own and not tree.is_masked(x) else x
            for x, is_own in zip(totals, own, strict=True)
        ]
        return AccumulateState(core.first_step(), *_by_owner(totals, own, structure), inner_state)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        mismatch.check_shapes("accumulate", updates, "the state", state.total)
        if params is not None:
            mismatch.check_shapes("accumulate", updates, "params", params)
        gradients, structure = tree.flatten(updates)
        shared, apart = (tree.flatten(x)[0] for x in (state.total, state.own_total.value))
        own = [not tree.is_masked(x) for x in apart]
        totals = [b if is_own else a for a, b, is_own in zip(shared, apart, own, strict=True)]
        due = state.micro_step + 1 == every
        totals = [_added(total, g) for total, g in zip(totals, gradients, strict=True)]
        arrays, others = _divided(extra)

        def step(totals: list[Leaf], inner_state: OptState, reads: PyTree) -> Any:
            params, arrays = reads
            means = [
                total.reshape(jnp.shape(g)) / every if _counts(total, g) else g
                for total, g in zip(totals, gradients, strict=True)
            ]
            mean = structure.unflatten(means)
            new, inner_state = inner.update(mean, inner_state, params, **arrays, **others)
            if params is None:
                new = jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates)
            return new, inner_state

        new, totals, inner_state = _step_when(
            due, step, totals, state.inner_state, (params, arrays)
        )
        micro_step = jnp.where(due, 0, state.micro_step + 1)
        return new, AccumulateState(micro_step, *_by_owner(totals, own, structure), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _by_owner(totals: list[Leaf], own: list[bool], structure: Any) -> tuple[Updates, PerWorker]:
    """Return the totals that all workers share, and those that are a worker's own."""
    masked = optax.MaskedNode()
    shared, apart = (
        structure.unflatten(
            [
                total if is_own is wanted else masked
                for total, is_own in zip(totals, own, strict=True)
            ]
        )
        for wanted in (False, True)
    )
    return shared, PerWorker(apart)


def _counts(total: Leaf, g: Leaf) -> bool:
    """Tell whether a gradient is added up: the others are handed on as they are."""
    return tree.is_inexact(g) and not tree.is_masked(total)


def _added(total: Leaf, g: Leaf) -> Leaf:
    return total + g.astype(total.dtype).reshape(total.shape) if _counts(total, g) else total


def _divided(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the extra arguments that are trees of arrays, and the others."""

    def is_array(x: Any) -> bool:
        return isinstance(x, jax.Array | float | int)

    arrays = {k: v for k, v in extra.items() if all(map(is_array, jax.tree.leaves(v)))}
    return arrays, {k: v for k, v in extra.items() if k not in arrays}


def _step_when(
    due: jax.Array, step: Any, totals: list[Leaf], inner_state: OptState, reads: PyTree
) -> tuple[Updates, list[Leaf], OptState]:
    """Return (updates, totals, inner_state) after `step` where `due`, else as they stand."""
    shapes = jax.eval_shape(step, totals, inner_state, reads)[0]
    leaves, structure = tree.flatten(shapes)
    moving = [tree.is_inexact(leaf) for leaf in leaves]
    unmoved = [
        _unmoved(total, leaf)
        for total, leaf, moves in zip(totals, leaves, moving, strict=True)
        if moves
    ]

    def run(unmoved: Any, totals: Any, inner_state: Any, reads: PyTree) -> tuple[Any, Any, Any]:
        del unmoved
        updates, inner_state = step(totals, inner_state, reads)
        pairs = zip(tree.flatten(updates)[0], moving, strict=True)
        moved = [u for u, moves in pairs if moves]
        return moved, jax.tree.map(jnp.zeros_like, totals), inner_state

    carry = (unmoved, totals, inner_state)
    # The inner optimizer may close over arrays, such as a rate that is differentiated.
    closed, constants = jax.closure_convert(run, *carry, reads)
    moved, totals, inner_state = when(due, closed, carry, reads, *constants)
    given = iter(moved)
    updates = [
        next(given) if moves else _zero(leaf) for leaf, moves in zip(leaves, moving, strict=True)
    ]
    return structure.unflatten(updates), totals, inner_state


def _unmoved(total: jax.Array, like: Any) -> jax.Array:
    """Return −0.0 like an update, sharded over the mesh and varying over its axes as `total` is."""
    zero = jnp.where(jnp.zeros_like(total, dtype=bool), total.astype(like.dtype), -0.0)
    return zero.reshape(like.shape)


def _zero(leaf: Leaf) -> Leaf:
    return leaf if tree.is_masked(leaf) else numerics.integer_zeros(leaf.shape, leaf.dtype)
