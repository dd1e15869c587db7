"""The multiplication of gradients by a loss factor, for optimizers with `dynamic_loss_scale`."""

import jax
import jax.numpy as jnp

from optfn.core import numerics


def scale_gradient(loss: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return the loss in float32 or wider with its gradient multiplied by a factor, or the loss
    unchanged if the factor is None.

    In float32 the factor fits the dtype of the loss.
    """
    if factor is None:
        return loss
    wide = loss.astype(numerics.accumulator_dtype(loss.dtype))
    return _scale_gradient(wide, factor.astype(wide.dtype))


@jax.custom_vjp
def _scale_gradient(loss: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the loss unchanged, with its gradient multiplied by the factor. The factor's gradient
    is 0."""
    return loss


_scale_gradient.defvjp(
    lambda loss, factor: (loss, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor))
)
