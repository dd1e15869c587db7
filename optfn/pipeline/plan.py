"""The schedules of a pipeline: which stage works on which microbatch at which tick.

All schedules are one clock with up to three windows: forward work, backward work, and the work of
the weight gradients. They differ in where the windows begin; `engine` runs what is written here.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from optfn import checks

SCHEDULES = ("1f1b", "gpipe", "zb")


class Phase(NamedTuple):
    """A run of ticks, [start, stop), in which every stage does the same kinds of work."""

    start: int
    stop: int
    work: str  # some of "F", "B", "W", in this order


class Cell(NamedTuple):
    """One piece of work: forward (F), backward (B) or the weight gradient (W) of a microbatch."""

    tick: int
    stage: int
    work: str
    microbatch: int
    chunk: int


def forward_order(k: Any, num_stages: int, virtual_stages: int) -> tuple[Any, Any]:
    """Return (microbatch, chunk) of a stage's k-th forward, for integers or integer arrays.

    Groups of p microbatches go through all chunks before the next group begins.
    """
    if virtual_stages == 1:
        return k, 0
    group, rest = k // (num_stages * virtual_stages), k % (num_stages * virtual_stages)
    return group * num_stages + rest % num_stages, rest // num_stages


def backward_order(k: Any, num_stages: int, virtual_stages: int) -> tuple[Any, Any, Any]:
    """Return (microbatch, chunk, number of its forward) of a stage's k-th backward."""
    microbatch, mirrored = forward_order(k, num_stages, virtual_stages)
    chunk = virtual_stages - 1 - mirrored
    return microbatch, chunk, k + (chunk - mirrored) * num_stages


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule costs, and when it does what; see `plan`."""

    num_stages: int
    num_microbatches: int
    virtual_stages: int = 1
    schedule: str = "1f1b"
    activation_bytes: int | None = None

    @property
    def items(self) -> int:
        """Microbatches times chunks: the forwards that each stage has to do."""
        return self.num_microbatches * self.virtual_stages

    @property
    def splits(self) -> bool:
        """Whether weight gradients are work of their own."""
        return self.schedule == "zb"

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """The ticks [start, stop) of each kind of work, over all stages.

        Stage d does its k-th forward d ticks, and its k-th backward p − 1 − d ticks after the
        window's start + k; its k-th weight gradient at start + k, when every stage has done the
        backward.
        """
        skew = self.num_stages - 1
        length = self.items + skew
        # The first microbatch reaches the loss after p·v forwards; its backward follows at once.
        begin = length if self.schedule == "gpipe" else self.num_stages * self.virtual_stages - 1
        windows = {"F": (0, length), "B": (begin, begin + length)}
        if self.splits:
            windows["W"] = (begin + skew, begin + skew + self.items)
        return windows

    @property
    def phases(self) -> list[Phase]:
        """The clock, cut where a window begins or ends: 1f1b is warm-up, steady, cool-down."""
        cuts = sorted({tick for window in self.windows.values() for tick in window})
        return [
            Phase(start, stop, "".join(w for w, (a, b) in self.windows.items() if a <= start < b))
            for start, stop in itertools.pairwise(cuts)
        ]

    @property
    def ticks(self) -> int:
        """Length of the clock; a tick has at most one piece of each kind of work."""
        return max(stop for _, stop in self.windows.values())

    @property
    def units(self) -> int:
        """Time in forwards of a chunk, a backward being two: one for the input, one for weights.

        1f1b and gpipe 3(m·v + p − 1), zb 3m·v + 2(p − 1).
        """
        cost = {"F": 1, "B": 1 if self.splits else 2, "W": 1}
        return sum((b - a) * cost[work] for work, (a, b) in self.windows.items())

    @property
    def bubble(self) -> float:
        """Idle over ideal time: (p − 1)/(v·m); zb 2(p − 1)/(3v·m)."""
        ideal = 3 * self.items
        return (self.units - ideal) / ideal

    @property
    def ring(self) -> int:
        """Microbatches that a stage keeps between forward and backward, each chunk's counted."""
        if self.schedule == "gpipe":
            return self.items
        return min(self.items, 2 * self.num_stages * self.virtual_stages - 1)

    @property
    def waiting(self) -> int:
        """Microbatches that a stage keeps between backward and weight gradient."""
        return min(self.items, self.num_stages) if self.splits else 0

    @property
    def stash(self) -> int:
        """Microbatch activations held per stage; bytes where activation_bytes is given."""
        return (self.ring + self.waiting) * (
            1 if self.activation_bytes is None else self.activation_bytes
        )

    def cells(self) -> Iterator[Cell]:
        """Give every piece of work of every stage."""
        p, v = self.num_stages, self.virtual_stages
        for stage in range(p):
            late = {"F": stage, "B": p - 1 - stage, "W": 0}
            for work, (start, _) in self.windows.items():
                for k in range(self.items):
                    order = forward_order if work == "F" else backward_order
                    microbatch, chunk, *_ = order(k, p, v)
                    yield Cell(start + late[work] + k, stage, work, microbatch, chunk)

    def __str__(self) -> str:
        """Draw the schedule: a line per stage, a column per tick and kind of work in it."""
        columns = [(t, w) for phase in self.phases for t in range(*phase[:2]) for w in phase.work]
        found = {(c.stage, c.tick, c.work): _label(c, self.virtual_stages) for c in self.cells()}
        width = max(map(len, found.values()))
        bytes_ = "" if self.activation_bytes is None else f" ({self.stash:,} bytes)"
        chunks = f", {self.virtual_stages} chunks each" if self.virtual_stages > 1 else ""
        lines = [
            f"{self.schedule}: {self.num_stages} stages{chunks}, {self.num_microbatches} "
            f"microbatches; {self.ticks} ticks, bubble {self.bubble:.1%}, "
            f"{self.ring + self.waiting} activations held{bytes_}"
        ]
        for stage in range(self.num_stages):
            row = (found.get((stage, t, w), "·").ljust(width) for t, w in columns)
            lines.append(f"stage {stage}  {' '.join(row)}".rstrip())
        return "\n".join(lines)

    def draw(self, axes: Any = None) -> Any:
        """Draw the schedule with matplotlib, on `axes` or on new ones, and return the axes.

        A backward is twice as wide as a forward, unless its weight gradient is drawn apart.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            axes = plt.subplots(figsize=(10, 0.5 + 0.4 * self.num_stages), layout="tight")[1]
        widths = {"F": 1, "B": 1 if self.splits else 2, "W": 1}
        left, at = {}, 0
        for phase in self.phases:
            for tick in range(phase.start, phase.stop):
                for work in phase.work:
                    left[tick, work] = at
                    at += widths[work]
        colors = {"F": "tab:blue", "B": "tab:orange", "W": "tab:green"}
        for cell in self.cells():
            x, width = left[cell.tick, cell.work], widths[cell.work]
            # Later chunks are paler.
            alpha = 0.9 - 0.6 * cell.chunk / self.virtual_stages
            color = colors[cell.work]
            axes.barh(cell.stage, width, left=x, color=color, alpha=alpha, edgecolor="white")
            axes.text(x + width / 2, cell.stage, cell.microbatch, ha="center", va="center")
        axes.set(xlabel="time, in forwards", ylabel="stage", yticks=range(self.num_stages))
        axes.invert_yaxis()
        return axes


def _label(cell: Cell, virtual_stages: int) -> str:
    chunk = f".{cell.chunk}" if virtual_stages > 1 else ""
    return f"{cell.work}{cell.microbatch}{chunk}"


def plan(
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    schedule: str = "1f1b",
    *,
    activation_bytes: int | None = None,
) -> Plan:
    """Return what a pipeline's schedule takes: ticks, idle time and memory.

        1f1b   ticks m·v + v·p + p − 2    bubble (p − 1)/(v·m)      stash min(m·v, 2v·p − 1)
        gpipe  ticks 2(m·v + p − 1)       bubble (p − 1)/(v·m)      stash m·v
        zb     ticks m·v + v·p + p − 2    bubble 2(p − 1)/(3v·m)    stash 1f1b's + min(m·v, p)

    In a tick of 1f1b a stage does a forward, or a backward, or both; `.units` weighs them. The
    stages move in lock step, which holds nearly twice the activations of stages that move on their
    own (p), and costs no time.

    Args:
      num_stages: p ≥ 1, the devices along the stage axis.
      num_microbatches: m ≥ 1; a multiple of p where v > 1.
      virtual_stages: v ≥ 1, the chunks of layers on each device.
      schedule: "1f1b", "gpipe" or "zb".
      activation_bytes: size of what is kept of one microbatch: the input of a chunk
        (stash="input") or its residuals; `.stash` is then in bytes.

    Raises:
      ValueError: a number out of range, m that p does not divide, an unknown schedule.
      TypeError: something that is not an integer.

    Source: Huang et al. 2019, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, arXiv 2104.04473
    (1F1B with flush, interleaved); Qi et al. 2024, arXiv 2401.10241 (zero bubble).

    >>> print(plan(2, 3))
    1f1b: 2 stages, 3 microbatches; 5 ticks, bubble 33.3%, 3 activations held
    stage 0  F0 F1 ·  F2 B0 ·  B1 B2
    stage 1  ·  F0 B0 F1 B1 F2 B2 ·
    >>> plan(4, 8).ticks, plan(4, 8).bubble, plan(4, 8, schedule="gpipe").stash
    (14, 0.375, 8)
    """
    p = checks.count("num_stages", num_stages)
    m = checks.count("num_microbatches", num_microbatches)
    v = checks.count("virtual_stages", virtual_stages)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if v > 1 and m % p:
        raise ValueError(
            f"num_microbatches must be a multiple of the {p} stages where virtual_stages > 1; "
            f"got {m} with virtual_stages={v}"
        )
    if activation_bytes is not None:
        checks.count("activation_bytes", activation_bytes, low=0)
    return Plan(p, m, v, schedule, activation_bytes)
