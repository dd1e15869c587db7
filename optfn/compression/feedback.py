"""Error feedback: the residual of an update, which is not sent, is added to the next one."""

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import numerics
from optfn.core.checks import Number


def add_feedback(update: jax.Array, residual: jax.Array, error_feedback: Number) -> jax.Array:
    """Return error_feedback·residual + update in the residual's shape, clipped to finite float32
    values, where NaN remains NaN."""
    largest = np.finfo(np.float32).max
    total = numerics.scalar(error_feedback, residual) * residual + update.reshape(residual.shape)
    # An overflow would stay in the residual: ∞ − ∞ of the next step is NaN.
    return jnp.clip(total, -largest, largest)
