"""The segmentation of a chain that is cheapest within a memory budget, by dynamic programming.

A segmentation is a nested list of the indices of the chain's functions, in order. An index stands
for a function whose residuals are saved. A list stands for a segment; only its input is saved, and
before its backward, it runs again with the segmentation of the list. For example,
[[0, 1], [2, 3], 4] has Chen's √n segments, with the last segment not recomputed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Segmentation: TypeAlias = list[Any]  # of int and Segmentation
UNITS = 2000  # the resolution of the table: the memory of the chain has so many units


class FunctionCosts(NamedTuple):
    """The costs of one function of a chain, in FLOPs and bytes.

    forward_flops: FLOPs to compute its output.
    recompute_flops: FLOPs to compute only its residuals, when it runs again.
    output_bytes: bytes of its output, and also of the output's cotangent.
    residual_bytes: bytes of its residuals, without its input and its output.
    output_is_residual: whether its output is a residual.
    forward_peak: the most bytes alive in its forward, with the output, without the input.
    forward_peak_with_residuals: the same, if the residuals are saved.
    backward_peak: the most bytes alive in its backward, with both cotangents, without residuals.
    """

    forward_flops: float
    recompute_flops: float
    output_bytes: int
    residual_bytes: int
    output_is_residual: bool
    forward_peak: int
    forward_peak_with_residuals: int
    backward_peak: int

    @property
    def backward_peak_with_residuals(self) -> int:
        """The most bytes alive in its backward, with the residuals, and with its output if that is
        one of them."""
        peak = self.residual_bytes + self.backward_peak
        return peak + self.output_bytes if self.output_is_residual else peak


def list_functions(segmentation: Segmentation) -> list[int]:
    """Return the indices of the functions in a segmentation, also in its nested lists, in order."""
    numbers: list[int] = []
    for x in segmentation:
        numbers += list_functions(x) if isinstance(x, list) else [x]
    return numbers


class Rotor:
    """The segmentations of a chain with the fewest extra FLOPs, for every memory budget.

    With m bytes for the functions s to t, not counting the input of s, the extra FLOPs C(s, t, m)
    are the minimum of

        save the residuals of s:  C(s + 1, t, m − residuals_s − output_s)
        recompute s … c − 1:      ∑ forward_s … forward_{c−2} + recompute_{c−1}
                                  + C(c, t, m − output_{c−1}) + C(s, c − 1, m),    s < c ≤ t

    over the choices whose peak fits into m. Memory is counted in units of 1/2000 of the memory
    that the chain takes if all residuals are saved, rounded up.

    Args:
      costs: the costs of the n ≥ 1 functions of the chain.

    This takes time O(n³) and memory O(n²), with arrays of length 2000.

    Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for
    heterogeneous chains", arXiv 1911.13214 (whose tool is named Rotor). Here an operation is
    charged its peak of memory, and FLOPs stand for time.
    """

    def __init__(self, costs: Sequence[FunctionCosts]) -> None:
        self.costs = costs
        peaks = (
            max(f.forward_peak_with_residuals, f.backward_peak_with_residuals) + f.output_bytes
            for f in costs
        )
        total = sum(f.residual_bytes + f.output_bytes for f in costs) + max(peaks)
        self.unit = max(total / UNITS, 1e-9)
        # C(s, t, ·), for 0 to UNITS units of memory.
        self.table: dict[tuple[int, int], np.ndarray] = {}
        for length in range(len(costs)):
            for s in range(len(costs) - length):
                choices = [flops for _, flops in self._iterate_choices(s, s + length)]
                self.table[s, s + length] = np.min(choices, axis=0)
        self.flops_by_memory = self.table[0, len(costs) - 1]

    @property
    def min_bytes(self) -> int:
        """The smallest budget that a segmentation meets."""
        return math.ceil(int(np.isfinite(self.flops_by_memory).argmax()) * self.unit)

    def find_segmentation(self, budget: float) -> Segmentation:
        """Return the segmentation with the fewest extra FLOPs within `budget` bytes, which must be
        at least `min_bytes` and is not checked."""
        return self._find_best(0, len(self.costs) - 1, self._to_units(budget))

    def predict_bytes(self, budget: float) -> float:
        """Return the fewest bytes, by the table, of a segmentation that needs no more FLOPs than
        the best one within `budget`."""
        flops = self.flops_by_memory[self._to_units(budget)]
        return int((self.flops_by_memory <= flops).argmax()) * self.unit

    def extra_flops(self, segmentation: Segmentation) -> float:
        """Return the FLOPs that a segmentation recomputes, which are for each nested list all
        forwards but the last and the last one's residuals, or 0 without lists."""
        total = 0.0
        for segment in (x for x in segmentation if isinstance(x, list)):
            *before, last = (self.costs[i] for i in list_functions(segment))
            total += sum(f.forward_flops for f in before) + last.recompute_flops
            total += self.extra_flops(segment)
        return total

    def _to_units(self, size: float) -> int:
        """Return how many whole units `size` bytes have, from 0 to UNITS."""
        # A size that is a whole number of units must not be rounded below it.
        return max(0, min(UNITS, math.floor(size / self.unit * (1 + 1e-12))))

    def _restrict(self, flops: np.ndarray, occupied: float, peak: float) -> np.ndarray:
        """Return FLOPs by memory, which at m bytes are `flops` at m less the `occupied` bytes, and
        ∞ if m is less than `occupied` or `peak`."""
        shift = min(UNITS + 1, math.ceil(occupied / self.unit))
        shifted = np.concatenate([np.full(shift, np.inf), flops[: UNITS + 1 - shift]])
        shifted[: min(UNITS + 1, math.ceil(peak / self.unit))] = np.inf
        return shifted

    def _iterate_choices(self, s: int, t: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each choice for the beginning of the functions s to t, s to save its residuals or c
        > s to recompute s to c − 1, with FLOPs by memory."""
        cotangent, first = self.costs[t].output_bytes, self.costs[s]
        peak = max(
            first.backward_peak_with_residuals, cotangent + first.forward_peak_with_residuals
        )
        if s == t:
            yield s, self._restrict(np.zeros(UNITS + 1), 0, peak)
            return
        # 1. Save the residuals of s, and go on behind it.
        occupied = first.residual_bytes + first.output_bytes
        yield s, self._restrict(self.table[s + 1, t], occupied, peak)
        # 2. Keep only the input of s to c − 1 while the functions from c on run, then run them
        # again.
        flops_before, forward_peak, input_bytes = 0.0, 0, 0
        for c in range(s + 1, t + 1):
            last = self.costs[c - 1]
            forward_peak = max(forward_peak, input_bytes + last.forward_peak)
            input_bytes = last.output_bytes
            after = self._restrict(self.table[c, t], last.output_bytes, cotangent + forward_peak)
            yield c, flops_before + last.recompute_flops + after + self.table[s, c - 1]
            flops_before += last.forward_flops

    def _find_best(self, s: int, t: int, units: int) -> Segmentation:
        """Return the segmentation of the functions s to t with the fewest FLOPs in so many units of
        memory."""
        best: Segmentation = []
        while s <= t:
            # The table has the FLOPs alone, so the choice is found again.
            choice, _ = min(self._iterate_choices(s, t), key=lambda pair: pair[1][units])
            if choice == s:
                best.append(s)
                occupied = self.costs[s].residual_bytes + self.costs[s].output_bytes
                s += 1
            else:
                best.append(self._find_best(s, choice - 1, units))
                occupied = self.costs[choice - 1].output_bytes
                s = choice
            units -= math.ceil(occupied / self.unit)
        return best
