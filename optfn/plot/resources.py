"""Pictures of the costs of training: bytes on a device, recomputation, idle stages."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from optfn.core import checks
from optfn.pipeline.plan import Plan
from optfn.plan.memory_plan import MemoryPlan
from optfn.plan.tuning import Tuning, describe_way
from optfn.plot.figure import check_mapping, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def memory(plans: Mapping[str, MemoryPlan], *, ax: "Axes | None" = None) -> "Axes":
    """Draw the bytes on each device, as a bar for each way of sharding a model.

    Beside each bar are the bytes that a device sends per step.

    Args:
      plans: results of `optfn.distributed.plan_memory`, by name.
      ax: where to draw; None for a new figure.
    """
    named = check_mapping("plans", plans, MemoryPlan)
    ax = style_axes(ax, (7, 1.2 + 0.5 * len(named)))
    factor, unit = _choose_unit(max(sum(plan[:3]) for plan in named.values()))
    end = np.zeros(len(named))
    for i, field in enumerate(MemoryPlan._fields[:3]):
        sizes = np.array([plan[i] for plan in named.values()]) / factor
        ax.barh(list(named), sizes, left=end, label=field)
        end = end + sizes
    for y, (x, plan) in enumerate(zip(end, named.values(), strict=True)):
        sent_factor, sent_unit = _choose_unit(plan.sent)
        text = f" {plan.sent / sent_factor:.3g} {sent_unit} sent per step"
        ax.text(x, y, text, va="center", fontsize="small")
    # Room for the text behind the longest bar; matplotlib warns of an axis of length 0.
    return _label_bars(ax, f"{unit} on each device", 1.35 * end.max() or 1)


def tuning(tuning: Tuning, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the milliseconds of a step, as a bar for each way whose time is known.

    An estimated bar has compute, and the communication that compute waits for. Beside each bar are
    the bytes that a device keeps and needs.

    Args:
      tuning: the result of `optfn.distributed.tune`.
      ax: where to draw; None for a new figure.

    Raises:
      TypeError: it is something else.
      ValueError: the time of no way is known.
    """
    checks.instance("tuning", tuning, Tuning, "a Tuning")
    rows = [row for row in tuning.rows if row.is_usable]
    if not rows:
        raise ValueError(f"the time of no way is known:\n{tuning}")
    ax = style_axes(ax, (8, 1.2 + 0.4 * len(rows)))
    steps = 1e3 * np.array([row.seconds for row in rows], float)
    exposed = 1e3 * np.array([row.exposed or 0 for row in rows], float)
    places = np.arange(len(rows))
    name = "step, measured" if rows[0].is_measured else "compute"
    ax.barh(places, steps - exposed, label=name)
    if exposed.any():
        ax.barh(places, exposed, left=steps - exposed, label="communication, exposed")
    for y, row in enumerate(rows):
        size = (row.kept or 0) + (row.temporaries or 0)
        factor, unit = _choose_unit(size)
        ax.text(steps[y], y, f" {size / factor:.3g} {unit}", va="center", fontsize="small")
    names = [describe_way(row.way) for row in rows]
    if len({row.batch_size for row in rows}) > 1:
        names = [f"{x}, batch {row.batch_size}" for x, row in zip(names, rows, strict=True)]
    ax.set_yticks(places, names)
    return _label_bars(ax, "ms of a step", 1.15 * steps.max())


def _label_bars(ax: "Axes", label: str, end: float) -> "Axes":
    """Label the axis of horizontal bars, which ends at `end`, with the first bar at the top and the
    legend above it."""
    ax.set(xlabel=label, xlim=(0, end))
    ax.grid(visible=False, axis="y")
    ax.invert_yaxis()  # matplotlib puts the first bar at the bottom
    ax.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _choose_unit(size: float) -> tuple[float, str]:
    """Return the largest power of 1,000 that a number of bytes reaches, and its name."""
    power = min(int(np.log10(max(size, 1)) // 3), len(_UNITS) - 1)
    return 1000.0**power, _UNITS[power]


def recompute(
    costs: Mapping[str, tuple[float, float]],
    budgets: Sequence[tuple[float, float]] = (),
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw memory against FLOPs, for ways of recomputing the same gradient.

    Args:
      costs: (bytes, FLOPs) by name, such as `compiled.memory_analysis().temp_size_in_bytes` and
        `compiled.cost_analysis()["flops"]`. FLOPs are drawn as multiples of the first one's, which
        should be the gradient without recomputation. Names at one point share a legend entry.
      budgets: (bytes, FLOPs) of gradients by `recompute(..., memory_budget=)`, joined by a line.
      ax: where to draw; None for a new figure.
    """
    named = {
        k: _check_pair(f"costs[{k!r}]", pair) for k, pair in check_mapping("costs", costs).items()
    }
    line = [_check_pair(f"budgets[{i}]", pair) for i, pair in enumerate(budgets)]
    ax = style_axes(ax, (7, 4))
    once = next(iter(named.values()))[1]
    largest = max(x for x, _ in [*named.values(), *line])
    factor, unit = _choose_unit(largest)
    if line:
        # The line goes by memory, in whatever order the budgets were tried.
        xs, ys = np.array(sorted(line)).T
        ax.plot(xs / factor, ys / once, "o-", label="byte budgets")
    for (x, y), names in _merge_marks(named, (0.01 * largest, 0.005 * once)).items():
        ax.plot(x / factor, y / once, "s", label="\n".join(names), clip_on=False)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    ax.set(xlabel=unit, ylabel="FLOPs, × without recomputation", xlim=(0, 1.05 * largest / factor))
    ax.margins(y=0.1)
    return ax


def _check_pair(name: str, pair: tuple[float, float]) -> tuple[float, float]:
    """Return (bytes, FLOPs) as floats, or raise a ValueError unless both are positive."""
    if np.shape(pair) != (2,) or not np.all(np.asarray(pair) > 0):
        raise ValueError(f"{name} must be (bytes, FLOPs), both > 0; got {pair!r}")
    size, flops = pair
    return float(size), float(flops)


def _merge_marks(
    named: Mapping[str, tuple[float, float]], near: tuple[float, float]
) -> dict[tuple[float, float], list[str]]:
    """Group names by point, where a mark that would overlap an earlier one joins its group."""
    places: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in named.items():
        there = [(u, v) for u, v in places if abs(x - u) <= near[0] and abs(y - v) <= near[1]]
        places.setdefault(there[0] if there else (x, y), []).append(name)
    return places


def timetable(plan: Plan, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the work of each stage of a pipeline over time.

    Args:
      plan: a result of `optfn.distributed.plan`; `plan.draw` draws the same.
      ax: where to draw; None for a new figure.
    """
    checks.instance("plan", plan, Plan, "a Plan")
    return plan.draw(ax)
