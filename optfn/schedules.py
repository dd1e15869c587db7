"""Learning-rate schedules: functions of the step.

Each function here checks its arguments and returns a schedule `step -> rate`, float32. `step` is
the 0-based index of use, i below: an int32 array as the optimizers give it, or a Python number.
optax's schedules, and any other callable from step to value, serve as well. `reduce_on_plateau` is
driven by a metric instead, and so is a transform.

Source: the fluid documentation, "learning rate scheduler"; optax's schedules where the rule is the
same.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core, numerics
from optfn.checks import Number, Schedule
from optfn.leaves import leafwise
from optfn.transforms import learning_rate as rates


def _schedule(rule: Callable[[jax.Array], Any]) -> Schedule:
    """Return `rule`, a function of the step as an array, as a schedule of float32 values."""

    def schedule(step: Any) -> jax.Array:
        return jnp.asarray(rule(jnp.asarray(step))).astype(jnp.float32)

    return schedule


def _positive(name: str, value: Any) -> Any:
    return checks.number(name, value, low=0.0, low_open=True)


def _float(step: jax.Array) -> jax.Array:
    # Strict dtype promotion refuses to multiply an int32 step by a float.
    return step.astype(jnp.float32)


def _periods(step: jax.Array, length: int, staircase: bool) -> jax.Array:
    """Return step/length, whole periods only if `staircase`.

    Whole periods are counted in integers: a compiler may divide by multiplying with 1/length, and
    ⌊41·(1/41)⌋ is 0 in float32.
    """
    return _float(step // length) if staircase else _float(step) / length


def noam(d_model: float, warmup_steps: float, learning_rate: Number = 1.0) -> Schedule:
    """Return lr·d^(−½)·min(s^(−½), s·w^(−3/2)) with s = i + 1.

    Args:
      d_model: d, the width of the model, > 0.
      warmup_steps: w, the steps of linear growth, > 0.
      learning_rate: lr, ≥ 0.

    Source: Vaswani et al. 2017, arXiv 1706.03762, §5.3 (there without lr).
    """
    d = _positive("d_model", d_model)
    w = _positive("warmup_steps", warmup_steps)
    lr = checks.nonnegative("learning_rate", learning_rate)

    def rule(i: jax.Array) -> jax.Array:
        s = _float(i) + 1
        return lr * d**-0.5 * jnp.minimum(jax.lax.rsqrt(s), s * w**-1.5)

    return _schedule(rule)


def exponential(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return lr·rate^(i/steps).

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: steps, ≥ 1.
      decay_rate: rate, > 0.
      staircase: whether i/steps is rounded down.
    """
    lr, steps, _ = _decay_arguments(learning_rate, decay_steps, decay_rate, staircase)
    rate = _positive("decay_rate", decay_rate)
    return _schedule(lambda i: lr * jnp.power(rate, _periods(i, steps, staircase)))


def natural_exp(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return lr·e^(−rate·i/steps); arguments as `inverse_time`."""
    lr, steps, rate = _decay_arguments(learning_rate, decay_steps, decay_rate, staircase)
    return _schedule(lambda i: lr * jnp.exp(-rate * _periods(i, steps, staircase)))


def inverse_time(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return lr/(1 + rate·i/steps).

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: steps, ≥ 1.
      decay_rate: rate, ≥ 0.
      staircase: whether i/steps is rounded down.
    """
    lr, steps, rate = _decay_arguments(learning_rate, decay_steps, decay_rate, staircase)
    return _schedule(lambda i: lr / (1 + rate * _periods(i, steps, staircase)))


def _decay_arguments(lr: Any, steps: Any, rate: Any, staircase: Any) -> tuple[Any, Any, Any]:
    checks.flag("staircase", staircase)
    return (
        checks.nonnegative("learning_rate", lr),
        checks.count("decay_steps", steps),
        checks.nonnegative("decay_rate", rate),
    )


def polynomial(
    learning_rate: Number,
    decay_steps: int,
    end_learning_rate: Number = 1e-4,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Return (lr − end)·((D − min(i, D))/D)^power + end.

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: D, ≥ 1.
      end_learning_rate: end, ≥ 0.
      power: > 0.
      cycle: whether D is replaced by D·max(1, ⌈i/D⌉), so that the rate rises again after each D
        steps.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    steps = checks.count("decay_steps", decay_steps)
    end = checks.nonnegative("end_learning_rate", end_learning_rate)
    exponent = _positive("power", power)
    checks.flag("cycle", cycle)

    def rule(i: jax.Array) -> jax.Array:
        length = steps * jnp.maximum(1, -(-i // steps)) if cycle else jnp.asarray(steps)
        # In this order the end is exact; 1 − D·(1/D), as it may be compiled, is not always 0.
        left = _float(length - jnp.minimum(i, length)) / _float(length)
        return (lr - end) * numerics.power(left, exponent) + end

    return _schedule(rule)


def piecewise(boundaries: Sequence[int], values: Sequence[Number]) -> Schedule:
    """Return the first value whose boundary is > i, else the last, by `optax.join_schedules`.

    Args:
      boundaries: increasing steps ≥ 1.
      values: rates ≥ 0, one more than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            "values must have one more entry than boundaries; "
            f"got {len(values)} values and {len(boundaries)} boundaries"
        )
    steps = _increasing("boundaries", boundaries)
    constants = [
        optax.constant_schedule(checks.nonnegative(f"values[{j}]", v)) for j, v in enumerate(values)
    ]
    return _schedule(optax.join_schedules(constants, steps))


def _increasing(name: str, steps: Sequence[int]) -> list[int]:
    steps = [checks.count(f"{name}[{j}]", step) for j, step in enumerate(steps)]
    if any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"{name} must increase; got {steps}")
    return steps


def cosine(learning_rate: Number, step_each_epoch: int, epochs: int) -> Schedule:
    """Return lr/2·(cos(π·⌊i/step_each_epoch⌋/epochs) + 1).

    After the last epoch the cosine goes on and the rate rises again, as in fluid;
    `optax.cosine_decay_schedule` stays at its end.

    Args:
      learning_rate: lr, ≥ 0.
      step_each_epoch: steps in an epoch, ≥ 1.
      epochs: epochs from the whole rate to zero, ≥ 1.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    length = checks.count("step_each_epoch", step_each_epoch)
    epochs = checks.count("epochs", epochs)
    return _schedule(lambda i: lr / 2 * (jnp.cos(jnp.pi * _periods(i, length, True) / epochs) + 1))


def linear_warmup(
    learning_rate: Number | Schedule, warmup_steps: int, start_lr: Number, end_lr: Number
) -> Schedule:
    """Return start + (end − start)·i/w for i < w, then the rate or the schedule at the same i.

    The inner schedule is given the global step, not the steps since the warm-up.

    Args:
      learning_rate: what follows: a number ≥ 0 or a schedule.
      warmup_steps: w, ≥ 1.
      start_lr: start, ≥ 0.
      end_lr: end, ≥ 0.
    """
    w = checks.count("warmup_steps", warmup_steps)
    start = checks.nonnegative("start_lr", start_lr)
    end = checks.nonnegative("end_lr", end_lr)
    after = rates.check(learning_rate)

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step)
        then = jnp.asarray(after(step) if callable(after) else after).astype(jnp.float32)
        return jnp.where(step < w, start + (end - start) * _float(step) / w, then)

    return schedule


def step_decay(learning_rate: Number, step_size: int, decay_rate: float = 0.1) -> Schedule:
    """Return lr·rate^⌊i/step_size⌋.

    Args:
      learning_rate: lr, ≥ 0.
      step_size: ≥ 1.
      decay_rate: rate, > 0.
    """
    checks.count("step_size", step_size)
    return exponential(learning_rate, step_size, decay_rate, staircase=True)


def multi_step(
    learning_rate: Number, milestones: Sequence[int], decay_rate: float = 0.1
) -> Schedule:
    """Return lr·rate^(the number of milestones ≤ i).

    Args:
      learning_rate: lr, ≥ 0.
      milestones: increasing steps ≥ 1.
      decay_rate: rate, > 0.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    rate = _positive("decay_rate", decay_rate)
    steps = _increasing("milestones", milestones)
    return _schedule(optax.piecewise_constant_schedule(lr, dict.fromkeys(steps, rate)))


def lambda_decay(learning_rate: Number, lr_lambda: Callable[[Any], Any]) -> Schedule:
    """Return lr·lr_lambda(i).

    Args:
      learning_rate: lr, ≥ 0.
      lr_lambda: a function of the step (int32) that gives a factor.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    if not callable(lr_lambda):
        raise TypeError(f"lr_lambda must be a function of the step; got {lr_lambda!r}")
    return lambda step: lr * jnp.asarray(lr_lambda(step)).astype(jnp.float32)


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


class ReduceOnPlateauState(NamedTuple):
    """State of `reduce_on_plateau`: seven scalars, 25 bytes."""

    rate: rates.LearningRateState
    best: jax.Array
    value: jax.Array
    observed: jax.Array
    bad_values: jax.Array
    cooldown: jax.Array


def reduce_on_plateau(
    learning_rate: Number,
    *,
    mode: str = "min",
    decay_rate: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Multiply updates by a rate that falls when a metric stops improving.

    The optimizer before it has rate 1, and an average comes after it:

        tx = optfn.chain(optfn.adam(1.0), optfn.schedules.reduce_on_plateau(1e-3))
        updates, state = tx.update(grads, state, params, value=loss)

    The metric given with an update acts from the next update on. In the order of the code, with the
    metric v of the update before:

        while cooling down: count down, and nothing else
        better = v < best − gap (v > best + gap)     gap = threshold·best ("rel") or threshold
        best, bad = (v, 0) if better else (best, bad + 1)
        if bad > patience: rate = max(rate·decay_rate, min_lr), bad = 0, cooling down begins
        u = rate·u

    Args:
      learning_rate: the first rate: a number ≥ 0.
      mode: "min" or "max", what is better.
      decay_rate: the factor of a reduction, in (0, 1).
      patience: how many values without improvement pass before a reduction, ≥ 0.
      threshold: the smallest change that counts, ≥ 0.
      threshold_mode: "rel" or "abs".
      cooldown: values after a reduction that are passed over, ≥ 0.
      min_lr: the smallest rate, ≥ 0.

    `update` takes `value`, a scalar; None where there is no new metric in this step (between two
    epochs, say). `get_learning_rate` and `set_learning_rate` concern this rate.

    Source: fluid.dygraph.ReduceLROnPlateau.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    if mode not in ("min", "max"):
        raise ValueError(f'mode must be "min" or "max"; got {mode!r}')
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f'threshold_mode must be "rel" or "abs"; got {threshold_mode!r}')
    factor = checks.number("decay_rate", decay_rate, low=0, high=1, low_open=True, high_open=True)
    patience = checks.count("patience", patience, low=0)
    threshold = checks.nonnegative("threshold", threshold)
    cooldown = checks.count("cooldown", cooldown, low=0)
    min_lr = checks.nonnegative("min_lr", min_lr)
    sign = 1.0 if mode == "min" else -1.0

    def init(params: Any) -> ReduceOnPlateauState:
        del params
        return ReduceOnPlateauState(
            rate=rates.init_plateau(lr),
            best=jnp.asarray(jnp.inf, jnp.float32),
            value=jnp.zeros((), jnp.float32),
            observed=jnp.zeros((), jnp.bool_),
            bad_values=jnp.zeros((), jnp.int32),
            cooldown=jnp.zeros((), jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        del params
        if "value" not in extra:
            raise ValueError(
                "reduce_on_plateau needs the metric: call update(updates, state, params, "
                "value=metric), with value=None where there is none"
            )
        state = _observe(
            state,
            sign=sign,
            factor=factor,
            patience=patience,
            threshold=threshold,
            relative=threshold_mode == "rel",
            cooldown=cooldown,
            min_lr=min_lr,
        )
        rate = state.rate.learning_rate
        new = leafwise.apply(lambda u: numerics.scalar(rate, u) * u, updates, touched=True)
        value = extra["value"]
        state = state._replace(
            rate=state.rate._replace(step=core.next_step(state.rate.step)),
            observed=jnp.asarray(value is not None),
        )
        if value is not None:
            value = jnp.asarray(value)
            if value.shape != ():
                raise ValueError(f"value must be a scalar; got an array of shape {value.shape}")
            state = state._replace(value=sign * value.astype(jnp.float32))
        return new, state

    return core.transform("reduce_on_plateau", init, update, complex_leaves=True)


def _observe(
    state: ReduceOnPlateauState,
    *,
    sign: float,
    factor: Any,
    patience: int,
    threshold: Any,
    relative: bool,
    cooldown: int,
    min_lr: Any,
) -> ReduceOnPlateauState:
    """Take in the metric of the update before."""
    # `best` and `value` carry the sign of the mode, so that smaller is better.
    gap = sign * threshold * state.best if relative else threshold
    better = jnp.isinf(state.best) | (state.value < state.best - gap)
    bad = jnp.where(better, 0, state.bad_values + 1)
    reduce = bad > patience
    rate = state.rate.learning_rate
    lower = jnp.minimum(rate, jnp.maximum(rate * factor, min_lr))
    counted = state._replace(
        rate=state.rate._replace(learning_rate=jnp.where(reduce, lower, rate)),
        best=jnp.where(better, state.value, state.best),
        bad_values=jnp.where(reduce, 0, bad),
        cooldown=jnp.where(reduce, cooldown, 0),
    )
    cooled = state._replace(cooldown=state.cooldown - 1)
    seen = _choose(state.cooldown > 0, cooled, counted)
    return _choose(state.observed, seen, state)
