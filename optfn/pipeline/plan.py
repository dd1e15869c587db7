"""The schedules of a pipeline: the microbatch of each stage in each tick.

A schedule is a clock with up to three windows: one for forwards, one for backwards, and one for the
gradients of the weights. Schedules differ in when these windows begin. `engine` runs them.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax

from optfn.core import checks
from optfn.core.printing import list_changed_fields
from optfn.interop import packages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEDULES = ("1f1b", "gpipe", "zb")

# The label and the colour of each kind of work.
_DRAWN = {
    "F": ("forward", "tab:blue"),
    "B": ("backward", "tab:orange"),
    "W": ("gradient of weights", "tab:green"),
}

# Positions in an order of work: an integer, or an array of integers.
IndexT = TypeVar("IndexT", int, jax.Array)


class Phase(NamedTuple):
    """The ticks [start, stop): all stages do the same kinds of work in them."""

    start: int
    stop: int
    work: str  # a subsequence of "FBW"


class Cell(NamedTuple):
    """One work item at its tick: forward (F), backward (B) or weight gradient (W)."""

    tick: int
    stage: int
    work: str
    microbatch: int
    chunk: int


def forward_order(k: IndexT, num_stages: int, virtual_stages: int) -> tuple[IndexT, IndexT | int]:
    """Return (microbatch, chunk) of a stage's k-th forward, which is (k, 0) without virtual stages,
    else in groups of p microbatches that pass through all chunks."""
    if virtual_stages == 1:
        return k, 0
    group = k // (num_stages * virtual_stages)
    within_group = k % (num_stages * virtual_stages)
    return group * num_stages + within_group % num_stages, within_group // num_stages


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The costs of a schedule, and the tick of each piece of work, as `plan` returns them."""

    num_stages: int
    num_microbatches: int
    virtual_stages: int = 1
    schedule: str = "1f1b"
    activation_bytes: int | None = None

    @property
    def work_items(self) -> int:
        """The count of forwards of each device: microbatches times chunks."""
        return self.num_microbatches * self.virtual_stages

    def backward_order(self, k: IndexT) -> tuple[IndexT, IndexT | int, IndexT]:
        """Return (microbatch, chunk, position of its forward) of a stage's k-th backward, in the
        order of the forwards with the chunks reversed."""
        microbatch, mirrored_chunk = forward_order(k, self.num_stages, self.virtual_stages)
        chunk = self.virtual_stages - 1 - mirrored_chunk
        return microbatch, chunk, k + (chunk - mirrored_chunk) * self.num_stages

    @property
    def waits_for_all_forwards(self) -> bool:
        """Whether no backward begins before the last forward has ended, as in gpipe alone."""
        return self.schedule == "gpipe"

    @property
    def default_stash(self) -> str:
        """The values saved per microbatch if `pipeline_value_and_grad` gets no `stash`, which is
        "input" for 1f1b, else "residual"."""
        return "input" if self.schedule == "1f1b" else "residual"

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are scheduled separately from the backwards, as in
        zb alone."""
        return self.schedule == "zb"

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """The ticks [start, stop) of each kind of work, over all stages, which are F, B and, only
        for zb, W.

        Stage d does its k-th forward at start + k + d, its k-th backward at start + k + p − 1 − d,
        and its k-th weight gradient at start + k, when all stages have done that backward.
        """
        skew = self.num_stages - 1
        length = self.work_items + skew
        # The first microbatch reaches the loss in its p·v-th forward. In 1f1b and zb, its backward
        # begins in the same tick.
        begin = length if self.waits_for_all_forwards else self.num_stages * self.virtual_stages - 1
        windows = {"F": (0, length), "B": (begin, begin + length)}
        if self.splits_backward:
            windows["W"] = (begin + skew, begin + skew + self.work_items)
        return windows

    @property
    def phases(self) -> list[Phase]:
        """The clock, split wherever a window begins or ends, with the work of each span. 1f1b has
        three phases, or one if the model is a single stage."""
        cuts = sorted(set(itertools.chain(*self.windows.values())))

        def work_at(tick: int) -> str:
            return "".join(w for w, (a, b) in self.windows.items() if a <= tick < b)

        return [Phase(start, stop, work_at(start)) for start, stop in itertools.pairwise(cuts)]

    @property
    def ticks(self) -> int:
        """The length of the clock. A stage does at most one work item of each kind per tick."""
        return max(stop for _, stop in self.windows.values())

    @property
    def units(self) -> int:
        """The time, if a forward of a chunk takes 1 and a backward 2, half of it for the weights.

        It is 3(m·v + p − 1) for 1f1b and gpipe, and 3m·v + 2(p − 1) for zb.
        """
        cost = {"F": 1, "B": 1 if self.splits_backward else 2, "W": 1}
        return sum((b - a) * cost[work] for work, (a, b) in self.windows.items())

    @property
    def bubble(self) -> float:
        """The ratio of idle to ideal time: (p − 1)/(v·m), and for zb 2(p − 1)/(3v·m)."""
        ideal = 3 * self.work_items
        return (self.units - ideal) / ideal

    @property
    def stash_slots(self) -> int:
        """The count of microbatches that a device saves between forward and backward, m·v for
        gpipe, and otherwise at most 2v·p − 1 of them."""
        if self.waits_for_all_forwards:
            return self.work_items
        return min(self.work_items, 2 * self.num_stages * self.virtual_stages - 1)

    @property
    def context_slots(self) -> int:
        """The count of microbatches that a device saves between backward and weight gradient, at
        most p for zb, and otherwise 0."""
        return min(self.work_items, self.num_stages) if self.splits_backward else 0

    @property
    def stash(self) -> int:
        """The count of microbatches saved per device, contexts included, or their bytes if
        `activation_bytes` is given."""
        slots = self.stash_slots + self.context_slots
        return slots if self.activation_bytes is None else slots * self.activation_bytes

    def cells(self) -> Iterator[Cell]:
        """Yield the tick, microbatch and chunk of each work item of every stage, kind by kind."""
        p, v = self.num_stages, self.virtual_stages
        for stage in range(p):
            delay = {"F": stage, "B": p - 1 - stage, "W": 0}
            for work, (start, _) in self.windows.items():
                for k in range(self.work_items):
                    if work == "F":
                        microbatch, chunk = forward_order(k, p, v)
                    else:
                        microbatch, chunk, _ = self.backward_order(k)
                    yield Cell(start + delay[work] + k, stage, work, microbatch, chunk)

    def __repr__(self) -> str:
        """Return the call of `plan` that made it, without default arguments."""
        options = list_changed_fields(self)[2:]  # without the two that have no default
        return f"plan({', '.join([f'{self.num_stages}', f'{self.num_microbatches}', *options])})"

    def __str__(self) -> str:
        """Draw the schedule as text: a line per stage, a column per tick and kind of work."""
        columns: list[tuple[int, str]] = []
        for phase in self.phases:
            columns += itertools.product(range(phase.start, phase.stop), phase.work)
        labels = {}
        for c in self.cells():
            chunk = f".{c.chunk}" if self.virtual_stages > 1 else ""
            labels[c.stage, c.tick, c.work] = f"{c.work}{c.microbatch}{chunk}"
        width = max(map(len, labels.values()))
        bytes_ = "" if self.activation_bytes is None else f" ({self.stash:,} bytes)"
        chunks = f", {self.virtual_stages} chunks each" if self.virtual_stages > 1 else ""
        lines = [
            f"{self.schedule}: {self.num_stages} stages{chunks}, {self.num_microbatches} "
            f"microbatches; {self.ticks} ticks, bubble {self.bubble:.1%}, "
            f"{self.stash_slots + self.context_slots} activations held{bytes_}"
        ]
        for stage in range(self.num_stages):
            row = (labels.get((stage, t, w), "·").ljust(width) for t, w in columns)
            lines.append(f"stage {stage}  {' '.join(row)}".rstrip())
        return "\n".join(lines)

    def draw(self, axes: "Axes | None" = None) -> "Axes":
        """Draw the schedule with matplotlib, on `axes` or on new ones, and return the axes.

        A backward is twice as wide as a forward, unless its weight gradient is drawn separately.
        The numbers count microbatches. Later chunks of layers on a device are paler.
        """
        if axes is None:
            pyplot = packages.optional_module("matplotlib.pyplot", "plot")
            size = (8, 1.1 + 0.3 * self.num_stages)
            axes = pyplot.subplots(figsize=size, layout="constrained")[1]
        widths = {"F": 1, "B": 1 if self.splits_backward else 2, "W": 1}
        left, end = {}, 0
        for phase in self.phases:
            for tick in range(phase.start, phase.stop):
                for work in phase.work:
                    left[tick, work] = end
                    end += widths[work]
        for cell in self.cells():
            x, width = left[cell.tick, cell.work], widths[cell.work]
            alpha = 0.8 - 0.5 * cell.chunk / self.virtual_stages
            label, color = _DRAWN[cell.work]
            axes.barh(
                cell.stage, width, left=x, color=color, alpha=alpha, edgecolor="white",
                label=label if cell.stage == cell.microbatch == cell.chunk == 0 else None,
            )  # fmt: skip
            axes.text(
                x + width / 2, cell.stage, str(cell.microbatch),
                ha="center", va="center", fontsize="x-small",
            )  # fmt: skip
        forwards = "forwards of a chunk" if self.virtual_stages > 1 else "forwards"
        axes.set(xlabel=f"time, in {forwards}", ylabel="stage", yticks=range(self.num_stages))
        axes.spines.top.set_visible(False)
        axes.spines.right.set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
        axes.invert_yaxis()
        return axes


def plan(
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    schedule: str = "1f1b",
    *,
    activation_bytes: int | None = None,
) -> Plan:
    """Return the ticks, idle time and memory of a pipeline's schedule as a `Plan`, without running
    it, and raise an error for numbers that do not fit.

        1f1b   ticks m·v + v·p + p − 2    bubble (p − 1)/(v·m)      stash min(m·v, 2v·p − 1)
        gpipe  ticks 2(m·v + p − 1)       bubble (p − 1)/(v·m)      stash m·v
        zb     ticks m·v + v·p + p − 2    bubble 2(p − 1)/(3v·m)    stash 1f1b's + min(m·v, p)

    In a tick of 1f1b a stage does a forward, a backward, or both; `.units` counts a backward as two
    forwards. The stages run in lock step. This costs no time, but a device has to save nearly twice
    as many activations as if stages ran asynchronously (p of them).

    Args:
      num_stages: p ≥ 1, the number of devices along the stage axis.
      num_microbatches: m ≥ 1; must be a multiple of p if v > 1.
      virtual_stages: v ≥ 1, the number of chunks of layers on each device.
      schedule: "1f1b", "gpipe" or "zb".
      activation_bytes: the bytes of the values saved for one microbatch: the input of a chunk
        (stash="input") or its residuals. If you pass it, `.stash` is in bytes.

    Returns:
      A `Plan`. `str` draws it as text, `.draw()` with matplotlib, and `repr` is the call.

    Raises:
      ValueError: a number is out of range, p does not divide m if v > 1, or the schedule is
        unknown.
      TypeError: an argument is not an integer.

    Source: Huang et al. 2019, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, arXiv 2104.04473
    (1F1B with flush, interleaved); Qi et al. 2024, arXiv 2401.10241 (zero bubble).

    >>> print(plan(2, 3))
    1f1b: 2 stages, 3 microbatches; 5 ticks, bubble 33.3%, 3 activations held
    stage 0  F0 F1 ·  F2 B0 ·  B1 B2
    stage 1  ·  F0 B0 F1 B1 F2 B2 ·
    >>> plan(4, 8).ticks, plan(4, 8).bubble, plan(4, 8, schedule="gpipe").stash
    (14, 0.375, 8)
    >>> plan(4, 8, schedule="gpipe")
    plan(4, 8, schedule='gpipe')
    """
    p = checks.count("num_stages", num_stages)
    m = checks.count("num_microbatches", num_microbatches)
    v = checks.count("virtual_stages", virtual_stages)
    checks.choice("schedule", schedule, SCHEDULES)
    # `forward_order` takes microbatches in groups of p.
    if v > 1 and m % p:
        raise ValueError(
            f"num_microbatches must be a multiple of the {p} stages, because virtual_stages={v} is "
            f"above 1; got {m}"
        )
    if activation_bytes is not None:
        checks.count("activation_bytes", activation_bytes, low=0)
    return Plan(p, m, v, schedule, activation_bytes)
