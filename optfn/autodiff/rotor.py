"""The cheapest way to differentiate a chain in a given memory, by dynamic programming.

A plan is a list, in the order of the chain. An integer is a piece whose residuals are kept; a list
is a plan for some consecutive pieces of which only the input is kept: they are run again, by that
plan, when their backward comes. [[0, 1], [2, 3], 4] is Chen's √n segments without the last.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Plan = list[Any]  # of int and Plan
UNITS = 2000  # the steps in which memory is counted


class Piece(NamedTuple):
    """What one piece of a chain takes, in FLOPs and bytes.

    forward: FLOPs of its output.
    again: FLOPs of its residuals alone, when it is run again.
    output: bytes of its output, and of the cotangent of that.
    kept: bytes of its residuals other than its input and its output.
    keeps_output: whether its output is a residual.
    forward_peak: bytes alive in its forward, the output included, the input not.
    residual_peak: as forward_peak, where the residuals are kept.
    backward_peak: bytes alive in its backward, both cotangents included, the residuals not.
    """

    forward: float
    again: float
    output: int
    kept: int
    keeps_output: bool
    forward_peak: int
    residual_peak: int
    backward_peak: int

    @property
    def own_peak(self) -> int:
        """Bytes alive in its backward, the residuals included."""
        return self.kept + self.keeps_output * self.output + self.backward_peak


def pieces_of(plan: Plan) -> list[int]:
    """Return the pieces of a plan, in order."""
    nested = (pieces_of(entry) if isinstance(entry, list) else [entry] for entry in plan)
    return [i for some in nested for i in some]


class Rotor:
    """The plans of fewest FLOPs of a chain, for every memory.

    With m bytes for the pieces s to t, beside the input of s, the extra FLOPs are the least of

        keep s:               C(s + 1, t, m − kept_s − output_s)
        run s … c − 1 again:  ∑ forward_s … forward_{c−2} + again_{c−1}
                              + C(c, t, m − output_{c−1}) + C(s, c − 1, m),    s < c ≤ t

    over those whose own work fits into m. Bytes are counted in 2000ths of what the chain takes
    with all residuals, rounded up.

    Args:
      pieces: what each piece takes, n ≥ 1 of them.

    Time O(n³), memory O(n²), with arrays of 2000.

    Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for
    heterogeneous chains", arXiv 1911.13214 (Rotor). Here an operation needs the peak of its
    memory, and FLOPs stand for time.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        everything = sum(p.kept + p.output for p in pieces)
        everything += max(max(p.residual_peak, p.own_peak) + p.output for p in pieces)
        self.unit = max(everything / UNITS, 1e-9)
        self.costs: dict[tuple[int, int], np.ndarray] = {}
        for length in range(len(pieces)):
            for s in range(len(pieces) - length):
                choices = [costs for _, costs in self.choices(s, s + length)]
                self.costs[s, s + length] = np.min(choices, axis=0)
        self.extra_flops = self.costs[0, len(pieces) - 1]

    @property
    def least(self) -> int:
        """The bytes below which there is no plan."""
        return math.ceil(int(np.isfinite(self.extra_flops).argmax()) * self.unit)

    def plan(self, budget: float) -> Plan:
        """Return the best plan for `budget` bytes, at least `least`."""
        return self.best(0, len(self.pieces) - 1, self.floor(budget))

    def peak(self, budget: float) -> float:
        """Return the bytes that the best plan for `budget` needs of it."""
        flops = self.extra_flops[self.floor(budget)]
        return int((self.extra_flops <= flops).argmax()) * self.unit

    def flops(self, plan: Plan) -> float:
        """Return the extra FLOPs of a plan."""
        total = 0.0
        for inner in (entry for entry in plan if isinstance(entry, list)):
            *before, last = (self.pieces[i] for i in pieces_of(inner))
            total += sum(p.forward for p in before) + last.again + self.flops(inner)
        return total

    def floor(self, size: float) -> int:
        """Return the whole units in `size` bytes, no more than the chain can use."""
        return max(0, min(UNITS, math.floor(size / self.unit * (1 + 1e-12))))

    def within(self, costs: np.ndarray, held: float, needed: float) -> np.ndarray:
        """Return `costs` for memory of which `held` bytes are taken, ∞ below `needed` bytes."""
        shift = min(UNITS + 1, math.ceil(held / self.unit))
        moved = np.concatenate([np.full(shift, np.inf), costs[: UNITS + 1 - shift]])
        moved[: min(UNITS + 1, math.ceil(needed / self.unit))] = np.inf
        return moved

    def choices(self, s: int, t: int) -> Iterator[tuple[int, np.ndarray]]:
        """Give what can be done first with the pieces s to t, and its costs.

        s: keep the residuals of s. c > s: run s to c − 1 again.
        """
        pieces = self.pieces
        cotangent, first = pieces[t].output, pieces[s]
        needed = max(first.own_peak, cotangent + first.residual_peak)
        if s == t:
            yield s, self.within(np.zeros(UNITS + 1), 0, needed)
            return
        yield s, self.within(self.costs[s + 1, t], first.kept + first.output, needed)
        forward, peak, arriving = 0.0, 0, 0
        for c in range(s + 1, t + 1):
            last = pieces[c - 1]
            peak = max(peak, arriving + last.forward_peak)
            arriving = last.output
            rest = self.within(self.costs[c, t], last.output, cotangent + peak)
            yield c, forward + last.again + rest + self.costs[s, c - 1]
            forward += last.forward

    def best(self, s: int, t: int, units: int) -> Plan:
        """Return the best plan of the pieces s to t."""
        found: Plan = []
        while s <= t:
            first, _ = min(self.choices(s, t), key=lambda choice: choice[1][units])
            if first == s:
                found.append(s)
                held = self.pieces[s].kept + self.pieces[s].output
                s += 1
            else:
                found.append(self.best(s, first - 1, units))
                held = self.pieces[first - 1].output
                s = first
            units -= math.ceil(held / self.unit)
        return found
