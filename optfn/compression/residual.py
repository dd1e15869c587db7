"""The arithmetic of Deep Gradient Compression on one flat leaf of one worker.

g gradient, u local velocity, v residual: what has been accumulated and not been sent.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optfn import numerics


def accumulate(
    g: jax.Array, u: jax.Array, v: jax.Array, *, momentum: Any, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (u, v) with u = μu + g, v = v + u; nesterov: u = μ(u + g), v = v + u + g."""
    mu = numerics.scalar(momentum, g)
    if nesterov:
        u = mu * (u + g)
        return u, v + u + g
    u = mu * u + g
    return u, v + u


def take(
    u: jax.Array,
    v: jax.Array,
    index: jax.Array,
    kept: jax.Array,
    *,
    momentum_masking: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return (u, v) after the entries at `index` were sent: v keeps `kept`, u is 0 (masking)."""
    v = v.at[index].set(kept, indices_are_sorted=True, unique_indices=True)
    if momentum_masking:
        u = u.at[index].set(0.0, indices_are_sorted=True, unique_indices=True)
    return u, v


def stage_of(step: jax.Array, begin: int, length: int, stages: int) -> jax.Array:
    """Return min(⌊(step − begin)·stages/length⌋, stages − 1), the stage of a ramp."""
    since = jnp.clip(step - begin, 0, length)
    return jnp.minimum(since * stages // length, stages - 1)


def num_sent(size: int, sparsity: float) -> int:
    """Return k = max(1, round(size·(1 − sparsity)))."""
    return max(1, round(size * (1 - sparsity)))
