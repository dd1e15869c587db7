"""The learning rate as part of the state: a number, an array or a schedule.

A Python or NumPy number is stored in the state and read from there, so you can set it without
recompiling anything. A schedule or a JAX array determines the rate from outside, and the state only
shows it. Both kinds of state have the same fields, but different types.
"""

from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from optfn import checks, core
from optfn.checks import Number, Scalar, Schedule
from optfn.leaves import leafwise, numerics
from optfn.leaves.traits import traits
from optfn.leaves.types import OptState, Params, PyTree, Updates
from optfn.state import names as state_names


class LearningRateState(NamedTuple):
    """A rate that `set_learning_rate` may change: int32 step, float32 rate; 8 bytes.

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
    """The rate of `reduce_on_plateau`, applied after an optimizer whose own rate is 1."""

    __slots__ = ()


RateState = LearningRateState | GivenLearningRateState


def check_rate(learning_rate: Number | Schedule) -> Scalar | Schedule:
    """Return `learning_rate` if it is a number ≥ 0, a real 0-d array or a schedule."""
    if callable(learning_rate):
        return learning_rate
    return checks.nonnegative("learning_rate", learning_rate)


def init(learning_rate: Scalar | Schedule) -> RateState:
    """Return the initial state, which shows the rate of step 0."""
    step, dtype = core.first_step(), numerics.scalar_dtype()
    if checks.is_host_number(learning_rate):
        return LearningRateState(step, jnp.asarray(learning_rate, dtype))
    kind = DrivenLearningRateState if callable(learning_rate) else GivenLearningRateState
    return kind(step, at_step("learning_rate", learning_rate, step, dtype))


def init_plateau(learning_rate: Scalar) -> LearningRateState:
    """Return the initial state of the rate of `reduce_on_plateau`."""
    rate = jnp.array(learning_rate, numerics.scalar_dtype(), copy=True)
    return PlateauLearningRateState(core.first_step(), rate)


def advance(learning_rate: Scalar | Schedule, state: RateState) -> tuple[jax.Array, RateState]:
    """Return the rate of this step, a scalar of the state's dtype, and the state after it."""
    if checks.is_host_number(learning_rate):
        rate = state.learning_rate
    else:
        rate = at_step("learning_rate", learning_rate, state.step, state.learning_rate.dtype)
    return rate, type(state)(core.next_step(state.step), rate)


def at_step(
    argument: str, value: Scalar | Schedule, step: jax.Array, dtype: np.dtype[Any]
) -> jax.Array:
    """Return the value of a schedule at `step`, or of an array; errors name `argument`."""
    number = value(step) if callable(value) else value
    if not (checks.is_host_number(number) or isinstance(number, complex | jax.Array | np.ndarray)):
        raise TypeError(
            f"{argument}: the schedule must return a number; got {checks.shown(number)}"
        )
    number = jnp.asarray(number)
    if number.shape != () or jnp.iscomplexobj(number):
        raise ValueError(
            f"{argument} must be a real scalar; the schedule returned an array of shape "
            f"{number.shape} and dtype {number.dtype}"
        )
    # Copy it, because a step that overwrites the state must not overwrite the caller's array.
    return jnp.array(number, dtype, copy=True)


@traits(passes_rows=True)
class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`: the step and the rate, 8 bytes."""

    rate: RateState


@core.transform(complex_leaves=True)
def scale_by_learning_rate(
    learning_rate: Number | Schedule,
) -> core.Rule:
    """Turn an ascent direction into a step: u = −lr·u.

    Args:
      learning_rate: lr ≥ 0. A Python or NumPy number is stored in the state, where
        `set_learning_rate` can change it. A 0-d array, or a schedule step -> lr, determines the
        rate from outside. A schedule is called with the 0-based step, int32.

    `update` takes `rate_factors`, a factor of the rate for each leaf, which an optimizer with
    `param_attrs` passes.

    State: the step and the rate last used (after init, that of step 0), float32, or float64 with
    `jax_enable_x64`. Real and complex leaves.
    """
    lr = check_rate(learning_rate)

    def init_rate(params: Params) -> ScaleByLearningRateState:
        del params
        return ScaleByLearningRateState(init(lr))

    def scale(u: jax.Array, *, rate: Scalar, factor: Scalar) -> jax.Array:
        return -numerics.scalar(rate * factor, u) * u

    def update(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        rate_factors: float | leafwise.PerLeaf = 1.0,
        **extra: Any,
    ) -> tuple[Updates, OptState]:
        del params, extra
        rate, new = advance(lr, state.rate)
        updates = leafwise.apply(scale, updates, rows="linear", rate=rate, factor=rate_factors)
        return updates, ScaleByLearningRateState(new)

    return core.Rule(init_rate, update)


def is_rate(x: object) -> TypeGuard[RateState]:
    """Tell whether `x` is the state of a learning rate."""
    return isinstance(x, LearningRateState | GivenLearningRateState)


def _is_driven(x: RateState) -> bool:
    return isinstance(x, DrivenLearningRateState | GivenLearningRateState)


def get_learning_rate(opt_state: OptState, path: str | None = None) -> jax.Array:
    """Return the learning rate in a state: that of the last update, or of step 0 after init.

    Args:
      opt_state: the state of an optimizer, however wrapped.
      path: if there are several rates (`optax.partition`), words of the name of one's state, such
        as the label of the partition. With local steps, None is the inner rate and "outer" the
        outer one.

    Returns:
      A scalar, float32, or float64 with `jax_enable_x64`. If workers have different rates, it is
      the largest.

    Raises:
      ValueError: the state has no rate, or several different ones, which the error lists.
    """
    found = _selected_rates(opt_state, path)
    values: dict[str, jax.Array] = {
        name: largest(jax.tree.leaves(rate.learning_rate)[0]) for name, rate in found.items()
    }
    first, *others = values.values()
    if any(not _is_same(first, other) for other in others):
        listed = ", ".join(f"{name!r}: {value}" for name, value in values.items())
        raise ValueError(
            f"the state has several learning rates; choose one by path=. They are {listed}"
        )
    return first


def set_learning_rate(opt_state: OptState, value: Number, path: str | None = None) -> OptState:
    """Return `opt_state` with another learning rate; nothing is recompiled.

    Args:
      opt_state: the state of an optimizer, however wrapped. If you have a TrainState, pass its
        `opt_state`, or the whole TrainState.
      value: the new rate, a number ≥ 0 or a 0-d array.
      path: selects one rate, as in `get_learning_rate`; None sets all of them.

    Raises:
      ValueError: the state has no rate, or a schedule or an array determines it.
    """
    checks.nonnegative("value", value)
    found = _selected_rates(opt_state, path)
    driven = [name for name, rate in found.items() if _is_driven(rate)]
    if driven:
        raise ValueError(
            f"the learning rate of {', '.join(map(repr, driven))} cannot be set, since a schedule "
            "or an array determines it. Make the optimizer with a Python number instead"
        )
    chosen = {id(rate) for rate in found.values()}

    def put(node: PyTree) -> PyTree:
        if id(node) not in chosen:
            return node
        # jax.tree.map keeps a wrapper around the array, such as an nnx.Variable.
        rate = jax.tree.map(lambda old: jnp.full_like(old, value), node.learning_rate)
        return node._replace(learning_rate=rate)

    return jax.tree.map(put, opt_state, is_leaf=is_rate)


def _selected_rates(opt_state: OptState, path: str | None) -> dict[str, RateState]:
    """Return the rates in a state, by name, that `path` selects."""
    if path is None:
        opt_state = state_names.main_part(opt_state)
    parts = state_names.named_parts(opt_state, stop=is_rate, unnamed=is_rate)
    rates = {name: part for name, part in parts if is_rate(part)}
    # `reduce_on_plateau` multiplies the rate of the optimizer before it, which is 1.
    plateau = [k for k, v in rates.items() if isinstance(v, PlateauLearningRateState)]
    found = {name: rates[name] for name in plateau or rates}
    if not found:
        raise ValueError("the state has no learning rate")
    if path is None:
        return found
    chosen = {name: rate for name, rate in found.items() if f"/{path}/" in f"/{name}/"}
    if not chosen:
        raise ValueError(f"no learning rate at path {path!r}; there are {', '.join(found)}")
    return chosen


def numbers_of_rates(opt_state: OptState) -> dict[str, float]:
    """Return the learning rates of a state that were given as numbers, by name.

    Rates that a schedule, an array or `reduce_on_plateau` determines are left out. If workers have
    different rates, it is the largest of this process.
    """
    parts = state_names.named_parts(opt_state, stop=is_rate, unnamed=is_rate)
    return {
        name: float(np.max(jax.tree.leaves(x.learning_rate)[0].addressable_data(0)))
        for name, x in parts
        if type(x) is LearningRateState and not checks.is_traced(x)
    }


def largest(rate: jax.Array) -> jax.Array:
    """Return the largest rate of the workers where each has its own."""
    return jnp.max(rate) if rate.ndim else rate


def _is_same(a: jax.Array, b: jax.Array) -> bool:
    return a is b if checks.is_traced((a, b)) else bool(jnp.array_equal(a, b))
