"""The learning rate as part of the state: a number, an array or a schedule.

A Python or NumPy number belongs to the state: the program reads it there, so setting it recompiles
nothing. A schedule and a JAX array drive the rate from outside; the state only shows it. The two
cases have states of the same fields, told apart by their type.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn import checks, core


class LearningRateState(NamedTuple):
    """A rate that `set_learning_rate` may change: int32 step, float32 rate; 8 bytes."""

    step: jax.Array
    learning_rate: jax.Array


class DrivenLearningRateState(LearningRateState):
    """A rate that a schedule or an array drives: the state shows the one last used."""

    __slots__ = ()


class PlateauLearningRateState(LearningRateState):
    """A rate that multiplies the one before it, which is 1: `reduce_on_plateau`'s."""

    __slots__ = ()


def check(learning_rate: Any) -> Any:
    """Return `learning_rate` if it is a number ≥ 0, a real 0-d array or a schedule."""
    if callable(learning_rate):
        return learning_rate
    return checks.nonnegative("learning_rate", learning_rate)


def init(learning_rate: Any) -> LearningRateState:
    """Return the state of a rate that has not been used; it shows the rate of step 0."""
    step = core.first_step()
    if checks.is_host_number(learning_rate):
        return LearningRateState(step, jnp.asarray(learning_rate, jnp.float32))
    return DrivenLearningRateState(step, _driven(learning_rate, step))


def init_plateau(learning_rate: Any) -> LearningRateState:
    """Return the state of a rate that a metric lowers."""
    return PlateauLearningRateState(core.first_step(), jnp.asarray(learning_rate, jnp.float32))


def advance(learning_rate: Any, state: LearningRateState) -> tuple[jax.Array, LearningRateState]:
    """Return the rate of this step, a float32 scalar, and the state after it."""
    if checks.is_host_number(learning_rate):
        rate = state.learning_rate
    else:
        rate = _driven(learning_rate, state.step)
    return rate, state._replace(step=core.next_step(state.step), learning_rate=rate)


def _driven(learning_rate: Any, step: jax.Array) -> jax.Array:
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    rate = jnp.asarray(rate)
    if rate.shape != () or jnp.iscomplexobj(rate):
        raise ValueError(
            "learning_rate must be a real scalar; the schedule gave an array of shape "
            f"{rate.shape} and dtype {rate.dtype}"
        )
    return rate.astype(jnp.float32)
