"""Gradient accumulation: one step of an optimizer for several gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core, numerics
from optfn.leaves import leafwise, tree


class AccumulateState(NamedTuple):
    """State of `accumulate`: 4 bytes per parameter, the micro-step, and the inner state."""

    micro_step: jax.Array
    total: Any
    inner_state: Any


def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Step once for every `every` gradients, with their mean.

        total += g;  n += 1
        if n = every:  u = tx(total/every);  total = 0;  n = 0
        else:          u = −0.0

    For a loss that is a mean over examples this is the step of the whole batch. `tx` runs only when
    it is due, so that its schedules and averages advance with the real steps.

    Args:
      tx: an optimizer of optfn or optax.
      every: gradients in a step, ≥ 1.

    State: the micro-step n, the sum of gradients in float32, 4 bytes per parameter, and the state
    of `tx`.
    """
    every = checks.count("every", every)
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> AccumulateState:
        total = leafwise.zeros_like(leafwise.inexact(params))
        return AccumulateState(core.first_step(), total, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        core.check_leaves("accumulate", updates, "the state", state.total)
        gradients, structure = tree.flatten(updates)
        present = [not leafwise.is_absent(g) for g in gradients]
        totals = [
            total + g.astype(total.dtype) if here and not tree.is_hole(total) else total
            for total, g, here in zip(tree.flatten(state.total)[0], gradients, present, strict=True)
        ]

        def step(totals: Any, inner_state: Any) -> tuple[Any, Any]:
            means = [
                total / every if here and not tree.is_hole(total) else g
                for total, g, here in zip(totals, gradients, present, strict=True)
            ]
            new, inner_state = inner.update(
                structure.unflatten(means), inner_state, params, **extra
            )
            if params is None:
                new = jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates)
            return new, inner_state

        due = state.micro_step + 1 == every
        new, totals, inner_state = _when(due, step, totals, state.inner_state)
        micro_step = jnp.where(due, 0, state.micro_step + 1)
        return new, AccumulateState(micro_step, structure.unflatten(totals), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _when(due: jax.Array, step: Any, totals: Any, inner_state: Any) -> tuple[Any, Any, Any]:
    """Return (updates, totals, inner_state) after `step` where `due`, else as they stand still."""
    shapes = jax.eval_shape(step, totals, inner_state)[0]
    leaves, structure = tree.flatten(shapes)
    moving = [not leafwise.is_absent(leaf) for leaf in leaves]
    still = [
        _still(total, leaf.dtype)
        for total, leaf, moves in zip(totals, leaves, moving, strict=True)
        if moves
    ]

    def turn(still: Any, totals: Any, inner_state: Any) -> tuple[Any, Any, Any]:
        del still
        updates, inner_state = step(totals, inner_state)
        pairs = zip(tree.flatten(updates)[0], moving, strict=True)
        moved = [u for u, moves in pairs if moves]
        return moved, jax.tree.map(jnp.zeros_like, totals), inner_state

    moved, totals, inner_state = core.when(due, turn, still, totals, inner_state)
    parts = iter(moved)
    updates = [
        next(parts) if moves else _zero(leaf) for leaf, moves in zip(leaves, moving, strict=True)
    ]
    return structure.unflatten(updates), totals, inner_state


def _still(total: jax.Array, dtype: Any) -> jax.Array:
    """Return −0.0 like `total`, sharded over the mesh and varying over its axes as it is."""
    return jnp.where(jnp.zeros_like(total, dtype=bool), total.astype(dtype), -0.0)


def _zero(leaf: Any) -> Any:
    return leaf if tree.is_hole(leaf) else numerics.integer_zeros(leaf.shape, leaf.dtype)
