"""The arithmetic of Deep Gradient Compression on one flat leaf of one worker.

g is the gradient, u the local velocity, v the residual: what was accumulated and not yet sent.
"""

import jax
import jax.numpy as jnp

from optfn.checks import Number
from optfn.leaves import numerics


def add_to_residual(
    g: jax.Array, u: jax.Array, v: jax.Array, *, momentum: Number, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (u, v) with u = μu + g, v = v + u; nesterov: u = μ(u + g), v = v + u + g."""
    mu = numerics.scalar(momentum, g)
    if nesterov:
        u = mu * (u + g)
        return u, v + u + g
    u = mu * u + g
    return u, v + u


def subtract_sent(
    u: jax.Array,
    v: jax.Array,
    index: jax.Array,
    remainder: jax.Array,
    *,
    momentum_masking: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return (u, v) after a worker has sent the entries at `index`.

    Args:
      u: the local velocity; with `momentum_masking` it becomes 0 at `index`.
      v: the residual; it becomes `remainder` at `index`.
      index: the entries that were sent, increasing.
      remainder: what rounding left of them, 0 where they were sent exactly.
      momentum_masking: whether to clear the velocity of sent entries.
    """
    v = v.at[index].set(remainder, indices_are_sorted=True, unique_indices=True)
    if momentum_masking:
        u = u.at[index].set(0.0, indices_are_sorted=True, unique_indices=True)
    return u, v


def ramp_step(step: jax.Array, begin: int, length: int, num_ramp_steps: int) -> jax.Array:
    """Return min(⌊(step − begin)·num_ramp_steps/length⌋, num_ramp_steps − 1)."""
    since = jnp.clip(step - begin, 0, length)
    return jnp.minimum(since * num_ramp_steps // length, num_ramp_steps - 1)


def num_sent(size: int, sparsity: float) -> int:
    """Return k = max(1, round(size·(1 − sparsity)))."""
    return max(1, round(size * (1 - sparsity)))
