"""The values of schedules at a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks
from optfn.core.checks import Scalar, Schedule


def evaluate_schedule(
    argument: str, value: Scalar | Schedule, step: jax.Array, dtype: np.dtype[Any]
) -> jax.Array:
    """Return a schedule's value at `step`, or an array, as a new scalar of `dtype`, and raise a
    TypeError or a ValueError unless it is one real number.

    The TypeError is raised unless it is a number or an array, and the ValueError unless it is a
    real scalar.
    """
    try:
        number = value(step) if callable(value) else value
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        error.add_note(
            f"{argument} is a schedule of the step, which JAX traces: write a condition on the "
            "step as jnp.where(step < 10, a, b), and not as `a if step < 10 else b`"
        )
        raise
    if not (checks.is_host_number(number) or isinstance(number, complex | jax.Array | np.ndarray)):
        raise TypeError(f"{argument}: the schedule must return a number; got {checks.show(number)}")
    number = jnp.asarray(number)
    if number.shape != () or jnp.iscomplexobj(number):
        raise ValueError(
            f"{argument} must be a real scalar; the schedule returned an array of shape "
            f"{number.shape} and dtype {number.dtype}"
        )
    # Copy it, because a step that overwrites the state must not overwrite the caller's array.
    return jnp.array(number, dtype, copy=True)


def first_rate(rate: Scalar | Schedule, step: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return the rate of a schedule or an array at the first step, or raise a ValueError if it is
    known to be negative or not finite.

    Raises:
      ValueError: it is negative or not finite, where its value is known.
    """
    value = evaluate_schedule("learning_rate", rate, step, dtype)
    if not checks.is_traced(value) and not 0 <= value < jnp.inf:
        given = "the schedule's value at step 0" if callable(rate) else "the array"
        raise ValueError(f"learning_rate: {given} must be >= 0 and finite; got {float(value):g}")
    return value
