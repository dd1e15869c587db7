"""Gradient clipping by value, by the norm of each tensor and by the norm of all."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import checks, core
from optfn.checks import Number, Scalar
from optfn.leaves import leafwise, numerics
from optfn.leaves.types import OptState, Params, Updates
from optfn.mesh import axes


class ClipState(NamedTuple):
    """State of the clips by norm: the (smallest) factor of the last update, 4 bytes."""

    factor: jax.Array


def _unclipped(params: Params) -> ClipState:
    del params
    return ClipState(jnp.ones((), jnp.float32))


def clip_factor(norm: jax.Array, max_norm: Scalar) -> jax.Array:
    """Return max_norm/max(norm, max_norm): 1 for a norm up to max_norm, 0 included."""
    max_norm = numerics.scalar(max_norm, norm)
    return max_norm / jnp.maximum(norm, max_norm)


@core.transform()
def clip_by_value(
    max_value: Number, min_value: Number | None = None
) -> optax.GradientTransformationExtraArgs:
    """Limit each element: g = min(max(g, min_value), max_value).

    Args:
      max_value: the upper bound; > 0 if `min_value` is None.
      min_value: the lower bound, ≤ max_value; None means −max_value.

    No state. Real leaves.

    Source: fluid.clip.GradientClipByValue.
    """
    if min_value is None:
        high = checks.positive("max_value", max_value)
        low = -high
    else:
        high = checks.number("max_value", max_value)
        low = checks.number("min_value", min_value)
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise ValueError(f"min_value must be <= max_value; got {low} and {high}")

    def clip(g: jax.Array) -> jax.Array:
        return jnp.clip(g, numerics.scalar(low, g), numerics.scalar(high, g))

    # Where zero is out of bounds, the zeros of the rows that are not touched are clipped too.
    keeps_zero = isinstance(low, float) and isinstance(high, float) and low <= 0 <= high
    rows = "touched" if keeps_zero else "dense"
    return core.stateless(lambda updates, params: leafwise.apply(clip, updates, rows=rows))


@core.transform(complex_leaves=True)
def clip_by_norm(max_norm: Number) -> optax.GradientTransformationExtraArgs:
    """Limit the norm of each tensor: g = g·c/‖g‖ where ‖g‖ > c.

    Args:
      max_norm: c, > 0.

    State: the smallest factor of the last update, 4 bytes. Real and complex leaves.

    Source: fluid.clip.GradientClipByNorm.
    """
    c = checks.positive("max_norm", max_norm)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ClipState]:
        del state, params
        updates = leafwise.merge_rows(updates)
        factors = leafwise.combine(clip_factor, leafwise.norms(updates), max_norm=c)
        smallest = jnp.ones((), jnp.float32)
        for factor in factors.all():
            smallest = jnp.minimum(smallest, jnp.min(factor).astype(jnp.float32))
        new = leafwise.apply(_multiply, updates, rows="touched", factor=factors)
        return new, ClipState(_smallest_of_workers(smallest, extra))

    return core.rule(_unclipped, update)


def _smallest_of_workers(factor: jax.Array, extra: dict[str, Any]) -> jax.Array:
    """Return the smallest factor of all workers, where each clips its own gradient."""
    axis_name = extra.get("axis_name")
    return factor if axis_name is None else lax.pmin(factor, axes(axis_name))


def _multiply(g: jax.Array, *, factor: Scalar) -> jax.Array:
    return g * numerics.scalar(factor, g)


@core.transform(complex_leaves=True)
def clip_by_global_norm(max_norm: Number) -> optax.GradientTransformationExtraArgs:
    """Limit the norm of all tensors together: g = g·c/max(N, c), N = √∑‖g‖².

    Each tensor is multiplied by one scalar factor, which XLA fuses into the operations that follow;
    the result of an elementwise division would be kept in memory.

    Args:
      max_norm: c, > 0.

    State: the factor of the last update, 4 bytes. Real and complex leaves.

    Source: Pascanu et al. 2013, arXiv 1211.5063; fluid.clip.GradientClipByGlobalNorm.
    """
    c = checks.positive("max_norm", max_norm)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ClipState]:
        del state, params
        updates = leafwise.merge_rows(updates)
        factor = clip_factor(leafwise.global_norm(updates), c)
        new = leafwise.apply(_multiply, updates, rows="touched", factor=factor)
        return new, ClipState(_smallest_of_workers(factor.astype(jnp.float32), extra))

    return core.rule(_unclipped, update)
