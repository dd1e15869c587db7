"""The arithmetic that rules share: arrays in, arrays out.

Nothing here knows of trees or transforms. Hyper-parameters are Python floats or real 0-d arrays;
`scalar` brings an array to the dtype it meets, so that no hyper-parameter ever promotes anything.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def accumulator_dtype(dtype: Any) -> Any:
    """Return the dtype in which to compute and keep moments of a leaf: float32 or wider.

    fp16 squares underflow to a zero denominator, and 0.999·ν + 0.001·g² stands still in bf16.
    """
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of |x| for x of `dtype`."""
    return jnp.finfo(dtype).dtype


def scalar(value: Any, like: jax.Array) -> Any:
    """Return the hyper-parameter `value` so that `value * like` keeps the dtype of `like`.

    A Python number is weakly typed and stays one: 1 − 0.999 is then taken in float64, where
    float32 would be off by 1e-5.
    """
    if isinstance(value, int | float):
        return value
    return jnp.asarray(value).astype(real_dtype(like.dtype))


def abs_squared(x: jax.Array) -> jax.Array:
    """Return |x|², real also for complex x."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def moving_average(average: jax.Array, x: jax.Array, decay: Any) -> jax.Array:
    """Return decay·average + (1 − decay)·x."""
    decay = scalar(decay, x)
    return decay * average + (1 - decay) * x


def bias_correction(decay: Any, step: jax.Array) -> jax.Array:
    """Return 1 − decay^step, the weight that a moving average has gathered after `step` steps.

    Through expm1 and a logarithm that is taken in float64 where `decay` is a Python number: in
    float32, 1 − 0.999 alone is off by 1e-5.
    """
    if isinstance(decay, int | float):
        log_decay: Any = math.log(decay) if decay > 0 else -math.inf
    else:
        log_decay = jnp.log(jnp.asarray(decay).astype(jnp.float32))
    return -jnp.expm1(step.astype(jnp.float32) * log_decay)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return ∑|x|² as a scalar."""
    return jnp.sum(abs_squared(x))


def norm(x: jax.Array) -> jax.Array:
    """Return the L2 norm of one tensor, ‖x‖ = √∑|x|², as a scalar."""
    return jnp.sqrt(sum_of_squares(x))


def power(x: jax.Array, exponent: Any) -> jax.Array:
    """Return x^exponent for x ≥ 0, by a square root where the exponent is ½."""
    if isinstance(exponent, int | float):
        if exponent == 0.5:
            return jnp.sqrt(x)
        if exponent == 1.0:
            return x
    return jnp.power(x, scalar(exponent, x))


def integer_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an integer zero of `shape` that takes no memory and is known to be zero while tracing.

    It is the update of an integer leaf; being a NumPy array, it is still recognisable as zero by
    the next transform of a chain.
    """
    return np.broadcast_to(np.zeros((), dtype), shape)
