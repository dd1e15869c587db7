"""The learning rate as part of the state: a number, an array or a schedule.

A Python or NumPy number is stored in the state and read from there, so you can set it without
recompiling anything. A schedule or a JAX array determines the rate from outside, and the state only
shows it. The type of the state says which of these drives the rate; each has the step and the rate.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.leafwise import PerLeaf
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.leaves import tensors
from optfn.transforms.scheduled import evaluate_schedule, first_rate


@traits(words=("step", "learning_rate"))
class LearningRateState(NamedTuple):
    """A rate that `set_learning_rate` may change: int32 step and float32 rate, 8 bytes.

    The rate is float64 where `jax_enable_x64` is set at init.
    """

    step: jax.Array
    learning_rate: jax.Array


class DrivenLearningRateState(LearningRateState):
    """A rate that a schedule drives: the state shows the one last used."""

    __slots__ = ()


@traits(words=("step", "learning_rate"))
class GivenLearningRateState(NamedTuple):
    """A rate that an array drives, as in `optax.inject_hyperparams`.

    The array is in the state of the function that gives it, under the name `learning_rate`, by
    which `optax.tree.get` finds it; so the field here has another name.
    """

    step: jax.Array
    given: jax.Array

    @property
    def learning_rate(self) -> jax.Array:
        """The rate last used."""
        return self.given


class PlateauLearningRateState(LearningRateState):
    """The rate of `reduce_on_plateau`, applied after an optimizer of the rate 1."""

    __slots__ = ()


RateState = LearningRateState | GivenLearningRateState


def check_rate(learning_rate: Number | Schedule) -> Scalar | Schedule:
    """Return `learning_rate` if it is a number ≥ 0, a real 0-d array or a schedule, else raise a
    TypeError or a ValueError."""
    if callable(learning_rate):
        return learning_rate
    return checks.nonnegative("learning_rate", learning_rate)


def init(learning_rate: Scalar | Schedule) -> RateState:
    """Return the initial state with the rate of step 0, of another type for a number, a schedule or
    an array, or raise a ValueError unless the rate is finite and ≥ 0.

    Raises:
      ValueError: a schedule is negative or not finite at step 0, or an array is.
    """
    step, dtype = core.first_step(), numerics.scalar_dtype()
    if checks.is_host_number(learning_rate):
        return LearningRateState(step, jnp.asarray(learning_rate, dtype))
    kind = DrivenLearningRateState if callable(learning_rate) else GivenLearningRateState
    return kind(step, first_rate(learning_rate, step, dtype))


def init_plateau(learning_rate: Scalar) -> LearningRateState:
    """Return the initial state of `reduce_on_plateau`'s rate, with a copy of `learning_rate`."""
    # A copy: a step that donates the state must not delete the caller's array.
    rate = jnp.array(learning_rate, numerics.scalar_dtype(), copy=True)
    return PlateauLearningRateState(core.first_step(), rate)


def advance_rate(learning_rate: Scalar | Schedule, state: RateState) -> tuple[jax.Array, RateState]:
    """Return the rate of this step and the state after it, where the rate of a number is read from
    the state, and a schedule or an array is evaluated."""
    rate = state.learning_rate
    if not checks.is_host_number(learning_rate):
        rate = evaluate_schedule("learning_rate", learning_rate, state.step, rate.dtype)
    return rate, type(state)(core.next_step(state.step), rate)


def rate_factor(factors: Mapping[str, float] | None, updates: Updates) -> float | PerLeaf:
    """Return the factor of each leaf's rate, by its path in `factors`, as a PerLeaf, or 1.0 if
    `factors` is None."""
    return 1.0 if factors is None else tensors.scalars_of_leaves(factors.__getitem__, updates)


@traits(link="rate", passes_rows=True)
class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`: the step and the rate, 8 bytes."""

    rate: RateState


@core.transform(complex_leaves=True)
def scale_by_learning_rate(learning_rate: Number | Schedule) -> core.Unchecked:
    """Turn an ascent direction into a step, u = −lr·u, where a number lr is read from the state,
    and a schedule or an array gives it from outside.

    Args:
      learning_rate: lr ≥ 0. A Python or NumPy number is stored in the state, where
        `set_learning_rate` can change it. A 0-d array, or a schedule step -> lr, determines the
        rate from outside. A schedule is called with the 0-based step, int32.

    `update` takes `rate_factors`, factors of the rate by path, which an optimizer with
    `param_attrs` passes.

    State: the step and the rate last used (after init, the rate of step 0), float32, or float64
    with `jax_enable_x64`. Real and complex leaves.
    """
    lr = check_rate(learning_rate)

    def scale(u: jax.Array, *, rate: Scalar, factor: Scalar) -> jax.Array:
        return -numerics.scalar(rate * factor, u) * u

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        rate, new = advance_rate(lr, state.rate)
        factor = rate_factor(extra.get("rate_factors"), updates)
        updates = leafwise.apply(scale, updates, rows="linear", rate=rate, factor=factor)
        return updates, ScaleByLearningRateState(new)

    return core.Unchecked(lambda params: ScaleByLearningRateState(init(lr)), update)
