"""Arithmetic that rules share: functions of arrays.

Nothing here depends on trees or transforms. Hyper-parameters are Python floats or real 0-d arrays;
`scalar` casts an array to the dtype of its operand, so that no hyper-parameter promotes a dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from optfn.core.checks import Number, Scalar


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for arithmetic and moments of a leaf: its dtype from float32 on, else
    float32.

    Squares underflow to zero in float16, and 0.999·ν + 0.001·g² rounds back to ν in bfloat16.
    """
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


@functools.cache
def wide_dtype(dtype: object) -> np.dtype[Any] | None:
    """Return the dtype for arithmetic with leaves of `dtype`, float32 or wider, or None for
    integers and keys."""
    if isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact):
        return accumulator_dtype(dtype)
    return None


def promote(*dtypes: Any) -> np.dtype[Any]:
    """Return the dtype that numbers of some dtypes are promoted to, also where JAX's own promotion
    is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.result_type(*dtypes))


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x.astype(dtype), or x itself if it has this dtype."""
    # `astype` to the same dtype costs a call of JAX, for each leaf in each step.
    return x if x.dtype == dtype else x.astype(dtype)


def accumulator_bytes(x: jax.Array) -> int:
    """Return the bytes of an accumulator of the shape of `x`: at least 4 per element."""
    return x.size * accumulator_dtype(x.dtype).itemsize


def scalar_dtype() -> np.dtype[Any]:
    """Return the dtype of scalars such as rates: float64 with `jax_enable_x64`, else float32.

    Such a scalar is rounded to the dtype of the leaf that it multiplies, never to less.
    """
    return jnp.dtype(jnp.result_type(float))


def scalar(value: Number, like: jax.Array) -> Scalar:
    """Return `value` so that `value * like` keeps the dtype of `like`, a Python number unchanged
    and an array in the real dtype of `like`.

    A Python number is weakly typed: 1 − 0.999 is then computed in float64; in float32 its relative
    error would be 1e-5.
    """
    if isinstance(value, int | float):
        return value
    return jnp.asarray(value).astype(jnp.finfo(like.dtype).dtype)


def abs_squared(x: jax.Array) -> jax.Array:
    """Return |x|², real also for complex x."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def moving_average(average: jax.Array, x: jax.Array, decay: Number) -> jax.Array:
    """Return decay·average + (1 − decay)·x."""
    decay = scalar(decay, x)
    return decay * average + (1 - decay) * x


def bias_correction(decay: Number, step: jax.Array) -> jax.Array:
    """Return 1 − decay^step, the sum of the weights of a moving average after `step` steps."""
    # −expm1(step·log(decay)), with the logarithm of a Python number in float64: in float32 the
    # relative error of 1 − 0.999 alone is 1e-5.
    if isinstance(decay, int | float):
        log_decay: Scalar = math.log(decay) if decay > 0 else -math.inf
    else:
        log_decay = jnp.log(jnp.asarray(decay).astype(scalar_dtype()))
    return -jnp.expm1(step.astype(scalar_dtype()) * log_decay)


# √x, whose derivative at 0 is 0: the infinite one makes the derivative of a step NaN where a
# gradient has always been 0.
sqrt = jax.custom_jvp(jnp.sqrt)
sqrt.defjvps(lambda t, y, x: jnp.where(y > 0, t / (2 * jnp.where(y > 0, y, 1)), 0))


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return ∑|x|² as a scalar."""
    return jnp.sum(abs_squared(x))


def norm(x: jax.Array) -> jax.Array:
    """Return the L2 norm of one tensor, ‖x‖ = √∑|x|², as a scalar."""
    return sqrt(sum_of_squares(x))


def power(x: jax.Array, exponent: Number) -> jax.Array:
    """Return x^exponent for x ≥ 0, where a Python ½ gives the square root and a Python 1 gives x
    itself."""
    if isinstance(exponent, int | float):
        if exponent == 0.5:
            return sqrt(x)
        if exponent == 1.0:
            return x
    return jnp.power(x, scalar(exponent, x))


def integer_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return integer zeros of `shape` that take no memory: the update of an integer leaf."""
    # A NumPy array, so that the next transform of a chain sees zeros, also while JAX traces it.
    return np.broadcast_to(np.zeros((), dtype), shape)


def negative_zero(dtype: np.dtype[Any]) -> float | complex:
    """Return −0.0, or for a complex dtype −0.0 − 0.0i: p plus it is p, bit for bit."""
    return complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0


def float0_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of integers of this shape as JAX gives it, a float0."""
    return np.zeros(shape, jax.dtypes.float0)


def is_known_zero(x: object) -> bool:
    """Tell whether `x` is a NumPy array of integer or bool zeros, as from `integer_zeros`, with
    False for every traced array."""
    return (
        isinstance(x, np.ndarray)
        and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_)
        and not x.any()
    )
