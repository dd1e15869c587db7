"""Pictures of functions of the step: schedules, and the ramp of Deep Gradient Compression."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from optfn.compression.bytes_sent import ramp_step
from optfn.core import checks
from optfn.core.checks import Schedule
from optfn.plot.figure import check_mapping, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# At most this many steps of a schedule are computed.
_SAMPLES = 2000


def schedules(
    schedules: Mapping[str, Schedule] | Sequence[Schedule] | Schedule,
    steps: int,
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the learning rates of schedules, from step 0 to `steps` − 1.

    Args:
      schedules: functions of the step, by name; or one schedule, or several, whose names are then
        their `repr`, the call that makes them.
      steps: how many steps, ≥ 1.
      ax: where to draw; None for a new figure.
    """
    named = _check_schedules(schedules)
    at = np.unique(np.linspace(0, checks.count("steps", steps) - 1, _SAMPLES).round())
    ax = style_axes(ax)
    for name, schedule in named.items():
        ax.plot(at, _sample_schedule(name, schedule, at.astype(np.int32)), label=name)
    ax.set(xlabel="step", ylabel="learning rate")
    ax.legend(frameon=False, fontsize="small")
    return ax


def _check_schedules(
    schedules: Mapping[str, Schedule] | Sequence[Schedule] | Schedule,
) -> dict[str, Schedule]:
    """Return schedules by name, which is the key in a mapping, and otherwise the repr. Raise a
    TypeError if one is no function.

    Raises:
      TypeError: one of them is no function.
    """
    if callable(schedules):
        schedules = [schedules]
    if isinstance(schedules, Sequence) and not isinstance(schedules, str):
        schedules = {repr(schedule): schedule for schedule in schedules}
    named = check_mapping("schedules", schedules)
    for name, schedule in named.items():
        checks.instance(f"schedules[{name!r}]", schedule, Callable, "a function of the step")
    return named


def _sample_schedule(name: str, schedule: Schedule, at: np.ndarray) -> np.ndarray:
    """Return a schedule's rates at the steps `at`, or raise a ValueError unless it gives
    scalars."""
    values = np.asarray(jax.vmap(lambda i: jnp.asarray(schedule(i), jnp.float32))(at))
    if values.shape != at.shape:
        raise ValueError(
            f"schedules[{name!r}] must give a scalar; got an array of shape {values.shape[1:]}"
        )
    return values


def dgc_ramp(
    rampup_begin_step: int,
    rampup_step: int = 1,
    sparsity: Sequence[float] = (0.999,),
    *,
    steps: int | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the share of entries that Deep Gradient Compression sends in each step, in percent.

        step < rampup_begin_step:  100 %
        after it:                  100·(1 − s) %
        s = sparsity[min(⌊(step − rampup_begin_step)·len(sparsity)/rampup_step⌋, len(sparsity) − 1)]

    Args:
      rampup_begin_step: as for `dgc_momentum`.
      rampup_step: as for `dgc_momentum`.
      sparsity: as for `dgc_momentum`.
      steps: how many steps to draw, ≥ 1; None: 1.5 times the last step of the ramp.
      ax: where to draw; None for a new figure.
    """
    begin = checks.count("rampup_begin_step", rampup_begin_step, low=0)
    length = checks.count("rampup_step", rampup_step)
    sent = 100 * (1 - np.array([checks.number("sparsity", s, checks.UNIT) for s in sparsity]))
    steps = begin + length + max(1, (begin + length) // 2) if steps is None else steps
    step = jnp.arange(checks.count("steps", steps))
    i = np.asarray(ramp_step(step, begin, length, len(sent)))
    share = np.where(step < begin, 100.0, sent[i])
    ax = style_axes(ax)
    ax.step(step, share, where="post")
    ax.set(xlabel="step", ylabel="entries sent, %", yscale="log")
    # From an infinite share before step 0, so that the first share has a label too.
    for at in np.flatnonzero(np.diff(share, prepend=np.inf)):
        ax.annotate(
            f"{share[at]:.3g} %",
            (at, share[at]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize="small",
        )
    return ax
