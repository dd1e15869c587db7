"""Gradient clipping by value, by the norm of each tensor and by the norm of all."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.leaves import tensors


@traits(link="clip", reports={"factor": None})
class ClipState(NamedTuple):
    """State of the clips by norm: the (smallest) factor of the last update, 4 bytes."""

    factor: jax.Array


def _state_without_clip(params: Params) -> ClipState:
    """Return the state with a factor of 1, as at init and after an update without a clip."""
    del params
    return ClipState(jnp.ones((), jnp.float32))


def clip_factor(norm: jax.Array, max_norm: Scalar) -> jax.Array:
    """Return max_norm/norm where the norm exceeds max_norm, else 1, also for a norm of 0 and an
    infinite max_norm."""
    max_norm = numerics.scalar(max_norm, norm)
    # Not norm/max_norm: 0/0 and ∞/∞ would give NaN for a gradient of 0 or a bound of ∞.
    return jnp.where(norm <= max_norm, 1, max_norm / jnp.maximum(norm, max_norm))


@traits(link="clip")
class ClipByValueState(NamedTuple):
    """State of `clip_by_value`: empty."""


@core.transform()
def clip_by_value(max_value: Number, min_value: Number | None = None) -> core.Unchecked:
    """Clip each element of the gradient, g = min(max(g, min_value), max_value), where `min_value`
    is −max_value if it is None.

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
    return core.stateless(
        lambda updates, params: leafwise.apply(clip, updates, rows=rows), ClipByValueState()
    )


@core.transform(complex_leaves=True, reads_state=False)
def clip_by_norm(max_norm: Number) -> core.Unchecked:
    """Scale each tensor whose norm exceeds c to the norm c, g = g·c/‖g‖.

    Squares are added in float32 or wider: a tensor whose norm is above 1.8e19 becomes 0.

    Args:
      max_norm: c, > 0; with ∞ the gradient is unchanged.

    State: the smallest factor of the last update, 4 bytes. Real and complex leaves.

    Source: fluid.clip.GradientClipByNorm.
    """

    def clip(updates: Updates, c: Scalar) -> tuple[Updates, jax.Array]:
        factors = tensors.combine(clip_factor, tensors.tensor_norms(updates), max_norm=c)
        smallest = jnp.ones((), jnp.float32)
        for factor in jax.tree.leaves(factors):
            smallest = jnp.minimum(smallest, jnp.min(factor).astype(jnp.float32))
        return leafwise.scale(updates, factors), smallest

    return _make_clip_link(max_norm, clip)


def _make_clip_link(
    max_norm: Number, clip: Callable[[Updates, Scalar], tuple[Updates, jax.Array]]
) -> core.Unchecked:
    """Return the link of a clip (updates, max_norm) -> (updates, factor), which records the
    workers' smallest factor, or returns updates unchanged if `max_norm` is ∞."""
    c = checks.number("max_norm", max_norm, checks.Range("> 0", lambda x: x > 0))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        del state
        if isinstance(c, float) and math.isinf(c):
            return updates, _state_without_clip(params)
        updates, factor = clip(leafwise.merge_rows(updates), c)
        factor = factor.astype(jnp.float32)
        if "workers" in extra:  # each clips its gradient: the state has their smallest factor
            factor = extra["workers"].min(factor)
        return updates, ClipState(factor)

    return core.Unchecked(_state_without_clip, update)


@core.transform(complex_leaves=True, reads_state=False)
def clip_by_global_norm(max_norm: Number) -> core.Unchecked:
    """Scale all tensors by one factor, g = g·c/max(N, c) with N = √∑‖g‖², which is 1 if their
    common norm N does not exceed c.

    Each tensor is multiplied by one scalar factor, which XLA fuses into the following operations.
    (The result of an elementwise division would be kept in memory.)

    Squares are added in float32 or wider: a gradient whose norm is above 1.8e19 becomes 0.

    Args:
      max_norm: c, > 0; with ∞ the gradient is unchanged.

    State: the factor of the last update, 4 bytes. Real and complex leaves.

    Source: Pascanu et al. 2013, arXiv 1211.5063; fluid.clip.GradientClipByGlobalNorm.
    """

    def clip(updates: Updates, c: Scalar) -> tuple[Updates, jax.Array]:
        factor = clip_factor(leafwise.global_norm(updates), c)
        return leafwise.scale(updates, factor), factor

    return _make_clip_link(max_norm, clip)
