"""The factor by which a step multiplies its loss, for optimizers with `dynamic_loss_scale`."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from optfn.core import numerics

_factor: ContextVar[jax.Array | None] = ContextVar("factor", default=None)


@contextlib.contextmanager
def scaling_losses(factor: jax.Array | None) -> Iterator[None]:
    """Multiply the losses that are differentiated inside this context by a factor, unless None."""
    token = _factor.set(factor)
    try:
        yield
    finally:
        _factor.reset(token)


def current_factor() -> jax.Array | None:
    """Return the factor of the enclosing `scaling_losses`; None outside of one."""
    return _factor.get()


def scaled_loss(loss: jax.Array) -> jax.Array:
    """Return a loss, in float32 or wider, whose gradient has the factor of `scaling_losses`."""
    factor = _factor.get()
    if factor is None:
        return loss
    wide = loss.astype(numerics.accumulator_dtype(loss.dtype))
    return _scaled(wide, factor.astype(wide.dtype))


@jax.custom_vjp
def _scaled(loss: jax.Array, factor: jax.Array) -> jax.Array:
    return loss


_scaled.defvjp(
    lambda loss, factor: (loss, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor))
)


def check_unscaled(name: str) -> None:
    """Raise a ValueError within `scaling_losses`, where gradients come without a loss."""
    if _factor.get() is not None:
        raise ValueError(
            f"dynamic_loss_scale needs loss_fn, whose loss it scales, but {name} computes loss and "
            "gradients itself. Scale the loss there by a constant instead, and divide by it in tx"
        )
