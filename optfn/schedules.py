"""Learning-rate schedules: functions of the step.

Each function here returns a schedule `step -> rate`, float32, or float64 with `jax_enable_x64`. The
step, i in the equations, is the 0-based index of the update: an int32 array when an optimizer
calls the schedule, or a Python number. Optimizers also take optax's schedules, and any callable
from step to rate. `reduce_on_plateau` depends on a metric instead of the step, so it is a
transform.

Source: fluid's documentation of learning rate schedulers, optax's schedules for the same rules.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.core import checks, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.printing import call_text
from optfn.core.protocol import Call, P, call_factory
from optfn.transforms.learning_rate import check_rate
from optfn.transforms.plateau import record_evaluation, reduce_on_plateau

__all__ = [
    "cosine", "exponential", "inverse_time", "lambda_decay", "linear_warmup", "multi_step",
    "natural_exp", "noam", "one_cycle", "piecewise", "polynomial", "record_evaluation",
    "reduce_on_plateau", "step_decay", "warmup_cosine", "warmup_stable_decay",
]  # fmt: skip


class _Schedule:
    """A function of the step, whose `repr` is the call that made it."""

    def __init__(self, rule: Schedule, call: Call) -> None:
        self.rule, self.call = rule, call

    def __call__(self, step: int | jax.Array) -> Any:
        if isinstance(step, int | np.integer) and abs(int(step)) >= 2**31:
            dtype = numerics.scalar_dtype()
            with jax.enable_x64(True):  # steps beyond the largest int32 must not overflow
                return jnp.asarray(self.rule(step)).astype(dtype)
        return self.rule(step)

    def __repr__(self) -> str:
        return call_text(*self.call)


def _record_call(factory: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Decorate a factory so that the `repr` of its schedules is the call that made them, and steps
    beyond int32 do not overflow."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        return _Schedule(call_factory(factory, args, kwargs), (factory.__name__, args, kwargs))

    return make


def _make_schedule(rule: Callable[[jax.Array], Any]) -> Schedule:
    """Return a schedule that calls `rule` on the step as an array, even if it is a number, and
    casts the result to the dtype of rates."""
    return lambda step: jnp.asarray(rule(jnp.asarray(step))).astype(numerics.scalar_dtype())


def _to_float(step: jax.Array) -> jax.Array:
    """Convert a step to the dtype of rates: strict promotion refuses int32 times a float."""
    return step.astype(numerics.scalar_dtype())


def _count_periods(step: jax.Array, length: int, staircase: bool) -> jax.Array:
    """Return step/length as a float, rounded down if `staircase`.

    It is rounded down in integers, because a compiler may replace a float division by length with a
    product with 1/length, and ⌊41·(1/41)⌋ is 0 in float32.
    """
    return _to_float(step // length) if staircase else _to_float(step) / length


@_record_call
def noam(d_model: float, warmup_steps: float, learning_rate: Number = 1.0) -> Schedule:
    """Return the schedule lr·d^(−½)·min(s^(−½), s·w^(−3/2)) with s = i + 1, which rises in a line
    for w steps and then falls as 1/√s.

    Args:
      d_model: d, the width of the model, > 0.
      warmup_steps: w, the steps of linear growth, > 0.
      learning_rate: lr, ≥ 0.

    Source: Vaswani et al. 2017, arXiv 1706.03762, §5.3 (there without lr).
    """
    d = checks.positive("d_model", d_model)
    w = checks.positive("warmup_steps", warmup_steps)
    lr = checks.nonnegative("learning_rate", learning_rate)

    def rule(i: jax.Array) -> jax.Array:
        s = _to_float(i) + 1
        return lr * d**-0.5 * jnp.minimum(jax.lax.rsqrt(s), s * w**-1.5)

    return _make_schedule(rule)


@_record_call
def exponential(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return the schedule lr·rate^(i/steps), with i/steps rounded down if `staircase`.

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: steps, ≥ 1.
      decay_rate: rate, > 0.
      staircase: whether i/steps is rounded down.
    """
    lr, steps, _ = _check_decay(learning_rate, decay_steps, decay_rate, staircase)
    rate = checks.positive("decay_rate", decay_rate)
    return _make_schedule(lambda i: lr * jnp.power(rate, _count_periods(i, steps, staircase)))


@_record_call
def natural_exp(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return the schedule lr·e^(−rate·i/steps), with i/steps rounded down if `staircase`.

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: steps, ≥ 1.
      decay_rate: rate, ≥ 0.
      staircase: whether i/steps is rounded down.
    """
    lr, steps, rate = _check_decay(learning_rate, decay_steps, decay_rate, staircase)
    return _make_schedule(lambda i: lr * jnp.exp(-rate * _count_periods(i, steps, staircase)))


@_record_call
def inverse_time(
    learning_rate: Number, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """Return the schedule lr/(1 + rate·i/steps), with i/steps rounded down if `staircase`.

    Args:
      learning_rate: lr, ≥ 0.
      decay_steps: steps, ≥ 1.
      decay_rate: rate, ≥ 0.
      staircase: whether i/steps is rounded down.
    """
    lr, steps, rate = _check_decay(learning_rate, decay_steps, decay_rate, staircase)
    return _make_schedule(lambda i: lr / (1 + rate * _count_periods(i, steps, staircase)))


def _check_decay(
    lr: Number, steps: int, rate: float, staircase: bool
) -> tuple[Scalar, int, Scalar]:
    """Return lr, steps and rate, or raise a TypeError or ValueError if one of them or `staircase`
    has the wrong type or is out of range."""
    checks.flag("staircase", staircase)
    lr, steps = checks.nonnegative("learning_rate", lr), checks.count("decay_steps", steps)
    return lr, steps, checks.nonnegative("decay_rate", rate)


@_record_call
def polynomial(
    learning_rate: Number,
    decay_steps: int,
    end_learning_rate: Number = 1e-4,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Return the schedule (lr − end)·((D − min(i, D))/D)^power + end, which is end from step D on,
    or rises again after each D steps if `cycle`.

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
    exponent = checks.positive("power", power)
    checks.flag("cycle", cycle)

    def rule(i: jax.Array) -> jax.Array:
        # The steps that are left, in integers, so that the last value is exact: 1 − D/D may be
        # compiled to 1 − D·(1/D), which is not always 0. The last cycle may end behind 2³¹, so its
        # length is a sum of floats.
        if cycle:
            left = jnp.where(i == 0, steps, -i % steps)
            length = _to_float(i) + _to_float(left)
        else:
            left, length = steps - jnp.minimum(i, steps), _to_float(jnp.asarray(steps))
        return (lr - end) * numerics.power(_to_float(left) / length, exponent) + end

    return _make_schedule(rule)


@_record_call
def piecewise(boundaries: Sequence[int], values: Sequence[Number]) -> Schedule:
    """Return the schedule values[j] for the first j with i < boundaries[j], or the last value if
    there is none, or raise a ValueError if the lengths do not fit.

    Args:
      boundaries: increasing steps ≥ 1; at each the rate changes.
      values: rates ≥ 0, one more than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            "values must have one more entry than boundaries; "
            f"got {len(values)} values and {len(boundaries)} boundaries"
        )
    steps = _check_increasing("boundaries", boundaries)
    rates = [checks.nonnegative(f"values[{j}]", v) for j, v in enumerate(values)]
    return _make_schedule(optax.join_schedules([*map(optax.constant_schedule, rates)], steps))


def _check_increasing(name: str, steps: Sequence[int]) -> list[int]:
    """Return steps as integers, or raise a TypeError unless all are integers and a ValueError if
    one is below 1 or they do not increase."""
    steps = [checks.count(f"{name}[{j}]", step) for j, step in enumerate(steps)]
    if any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"{name} must increase; got {steps}")
    return steps


@_record_call
def cosine(learning_rate: Number, step_each_epoch: int, epochs: int) -> Schedule:
    """Return the schedule lr/2·(cos(π·⌊i/step_each_epoch⌋/epochs) + 1), which falls from lr to 0
    over `epochs` epochs and then rises again.

    After the last epoch the cosine continues, as in fluid. Use `warmup_cosine` or
    `optax.cosine_decay_schedule` if the rate should keep its last value.

    Args:
      learning_rate: lr, ≥ 0.
      step_each_epoch: the number of steps in an epoch, ≥ 1.
      epochs: the number of epochs after which the rate has fallen from lr to 0, ≥ 1.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    length = checks.count("step_each_epoch", step_each_epoch)
    epochs = checks.count("epochs", epochs)

    def rule(i: jax.Array) -> jax.Array:
        epoch = i // length
        # float32 has no digits for a cosine of many turns. Steps are int32.
        if 2 * epochs < 2**31:
            epoch = epoch % (2 * epochs)
        return lr / 2 * (jnp.cos(jnp.pi * _to_float(epoch) / epochs) + 1)

    return _make_schedule(rule)


@_record_call
def linear_warmup(
    learning_rate: Number | Schedule, warmup_steps: int, start_lr: Number, end_lr: Number
) -> Schedule:
    """Return the schedule start + (end − start)·i/w for i < w, and from step w on `learning_rate`,
    which is called with i if it is a schedule.

    A schedule is not called with the number of steps since the warm-up, so the rate may jump at w;
    see `warmup_cosine`.

    Args:
      learning_rate: the rate after the warm-up, a number ≥ 0 or a schedule.
      warmup_steps: w, ≥ 1.
      start_lr: start, ≥ 0.
      end_lr: end, ≥ 0.
    """
    w = checks.count("warmup_steps", warmup_steps)
    start = checks.nonnegative("start_lr", start_lr)
    end = checks.nonnegative("end_lr", end_lr)
    after = check_rate(learning_rate)

    then = _make_schedule(after if callable(after) else lambda i: after)
    return _add_warmup(w, start, end, then)


@_record_call
def warmup_cosine(
    peak: Number, warmup_steps: int, total_steps: int, *, start: Number = 0.0, end: Number = 0.0
) -> Schedule:
    """Return the schedule that rises in a line to peak at step w, falls as a cosine to end at step
    T, and is end from then on.

        start + (peak − start)·i/w                             i < w
        end + (peak − end)·(1 + cos(π·(i − w)/(T − w)))/2      w ≤ i < T
        end                                                    from T on

    Args:
      peak: the highest rate, ≥ 0.
      warmup_steps: w, ≥ 0.
      total_steps: T, the steps of warm-up and cosine together, > w.
      start: the rate of step 0, ≥ 0; not used if w is 0.
      end: the rate from step T on, ≥ 0.

    Source: Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts; `optax.schedules`'
    warmup_cosine_decay_schedule.
    """
    top = checks.nonnegative("peak", peak)
    w = checks.count("warmup_steps", warmup_steps, low=0)
    total = checks.count("total_steps", total_steps)
    if total <= w:
        raise ValueError(
            f"total_steps includes the warm-up, so it must be more than warmup_steps, {w}; "
            f"got {total}"
        )
    first, last = checks.nonnegative("start", start), checks.nonnegative("end", end)

    def decay(i: jax.Array) -> jax.Array:
        # (1 + cos(π − x))/2 = sin²(x/2), which keeps its digits where the rate is small.
        left = _to_float(jnp.clip(total - i, 0, total - w)) / (total - w)
        return last + (top - last) * jnp.sin(jnp.pi / 2 * left) ** 2

    return _add_warmup(w, first, top, decay)


def _add_warmup(
    length: int, start: Scalar, end: Scalar, after: Callable[[jax.Array], jax.Array]
) -> Schedule:
    """Return the schedule that goes from start to end in a line for the first `length` steps, and
    is after(i) from then on."""
    return _make_schedule(
        lambda i: jnp.where(i < length, _interpolate(i, length, start, end), after(i))
    )


def _interpolate(i: jax.Array, length: int, start: Scalar, end: Scalar) -> jax.Array:
    """Return start + (end − start)·i/length, the value at step i of a line; a length of 0 counts as
    1."""
    return start + (end - start) * _to_float(i) / max(length, 1)


@_record_call
def warmup_stable_decay(
    peak: Number,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    *,
    start: Number = 0.0,
    end: Number = 0.0,
) -> Schedule:
    """Return the schedule that rises in a line for w steps to peak, is constant for s steps, falls
    in a line for d steps to end, and is end from then on.

        start + (peak − start)·i/w              i < w
        peak                                    w ≤ i < w + s
        end + (peak − end)·(w + s + d − i)/d    w + s ≤ i < w + s + d
        end                                     from then on

    While the rate is constant, you can decide to train for longer, which a cosine does not allow.

    Args:
      peak: the highest rate, ≥ 0.
      warmup_steps: w, ≥ 0.
      stable_steps: s, ≥ 0.
      decay_steps: d, ≥ 1.
      start: the rate of step 0, ≥ 0; not used if w is 0.
      end: the rate after the decay, ≥ 0.

    Source: Hu et al. 2024, arXiv 2404.06395, §4 (there with an exponential decay).
    """
    top = checks.nonnegative("peak", peak)
    w = checks.count("warmup_steps", warmup_steps, low=0)
    s = checks.count("stable_steps", stable_steps, low=0)
    d = checks.count("decay_steps", decay_steps)
    first, last = checks.nonnegative("start", start), checks.nonnegative("end", end)

    def after(i: jax.Array) -> jax.Array:
        falling = _interpolate(jnp.clip(w + s + d - i, 0, d), d, last, top)
        constant = jnp.asarray(top, falling.dtype)  # last + (top − last) may be rounded
        return jnp.where(i < w + s, constant, falling)

    return _add_warmup(w, first, top, after)


_HALF = checks.Range("in [0, 0.5] with three_phase=True", lambda x: 0 <= x <= 0.5)


@_record_call
def one_cycle(
    peak: Number,
    total_steps: int,
    *,
    pct_start: float = 0.3,
    anneal: Literal["cosine", "linear"] = "cosine",
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Return the schedule that rises from peak/d to peak, falls to peak/(d·f) at step T − 1, by way
    of peak/d if `three_phase`, and is constant from then on.

    Each phase goes from its rate a to its rate b along half a cosine, or a line:

        b + (a − b)·(1 + cos(π·t))/2        t = (i − start)/(stop − start)
        b + (a − b)·(1 − t)

    The peak is at step p·T − 1. With three phases the rate is back at peak/d at step 2·p·T − 2, and
    falls to its end from there. From step T − 1 on it is constant. These are the rates of torch's
    `OneCycleLR`, which cycles the momentum as well (see the page on moving from torch);
    `optax.schedules.cosine_onecycle_schedule` has its peak a step later.

    Args:
      peak: the highest rate, ≥ 0; torch's max_lr.
      total_steps: T, ≥ 1.
      pct_start: p, in [0, 1]: the rate rises during this fraction of the steps; with three phases
        in [0, 0.5].
      anneal: "cosine" or "linear"; torch's anneal_strategy.
      div_factor: d, > 0.
      final_div_factor: f, > 0.
      three_phase: whether the rate falls as long as it rose, before it falls to its end.

    Source: Smith & Topin 2017, arXiv 1708.07120; torch.optim.lr_scheduler.OneCycleLR.
    """
    top = checks.nonnegative("peak", peak)
    total = checks.count("total_steps", total_steps)
    checks.choice("anneal", anneal, ("cosine", "linear"))
    first = top / checks.positive("div_factor", div_factor)
    last = first / checks.positive("final_div_factor", final_div_factor)
    if checks.flag("three_phase", three_phase):
        part = checks.number("pct_start", pct_start, _HALF)
        stops = [part * total - 1, 2 * part * total - 2, total - 1]
        rates = [first, top, first, last]
    else:
        part = checks.number("pct_start", pct_start, checks.UNIT)
        stops, rates = [part * total - 1, total - 1], [first, top, last]
    phases = [*zip(itertools.pairwise([0, *stops]), itertools.pairwise(rates), strict=True)]

    def rule(i: jax.Array) -> jax.Array:
        step = jnp.minimum(_to_float(i), total - 1)
        found = jnp.full(step.shape, last, step.dtype)
        for (start, stop), (a, b) in reversed(phases):
            # A phase of no step has no length: 0/0 where its one step is its stop.
            left = (stop - step) / jnp.maximum(stop - start, np.finfo(np.float32).tiny)
            if anneal == "cosine":
                left = jnp.sin(jnp.pi / 2 * left) ** 2  # (1 + cos(π·t))/2, exact where left is 0
            found = jnp.where(step <= stop, b + (a - b) * left, found)
        return found

    return _make_schedule(rule)


@_record_call
def step_decay(learning_rate: Number, step_size: int, decay_rate: float = 0.1) -> Schedule:
    """Return the schedule lr·rate^⌊i/step_size⌋, which is multiplied by `decay_rate` after each
    `step_size` steps.

    Args:
      learning_rate: lr, ≥ 0.
      step_size: ≥ 1.
      decay_rate: rate, > 0.
    """
    checks.count("step_size", step_size)
    return exponential(learning_rate, step_size, decay_rate, staircase=True)


@_record_call
def multi_step(
    learning_rate: Number, milestones: Sequence[int], decay_rate: float = 0.1
) -> Schedule:
    """Return the schedule lr·rate^(the number of milestones ≤ i), which is multiplied by
    `decay_rate` at each milestone.

    Args:
      learning_rate: lr, ≥ 0.
      milestones: increasing steps ≥ 1.
      decay_rate: rate, > 0.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    rate = checks.positive("decay_rate", decay_rate)
    steps = _check_increasing("milestones", milestones)

    def rule(step: jax.Array) -> jax.Array:
        value = jnp.asarray(lr, numerics.scalar_dtype())
        for milestone in steps:
            value = jnp.where(step >= milestone, value * numerics.scalar(rate, value), value)
        return value

    return _make_schedule(rule)


@_record_call
def lambda_decay(learning_rate: Number, lr_lambda: Callable[[Any], Any]) -> Schedule:
    """Return the schedule lr·lr_lambda(i), which calls the function in each step, or raise a
    TypeError if it is not callable.

    Args:
      learning_rate: lr, ≥ 0.
      lr_lambda: a function of the step (int32) that returns a factor.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    checks.instance("lr_lambda", lr_lambda, Callable, "a function of the step")
    return lambda step: lr * jnp.asarray(lr_lambda(step)).astype(numerics.scalar_dtype())
