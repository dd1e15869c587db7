"""Float64 references of the schedules, in NumPy alone.

Each returns a function of i, the 0-based index of use; `reduce_on_plateau` returns the series of
rates that a list of metrics gives.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Schedule = Callable[[int], float]


def series(schedule: Schedule, steps: int) -> np.ndarray:
    """Return the rates of steps 0 to steps − 1."""
    return np.array([schedule(i) for i in range(steps)], np.float64)


def noam(d_model: float, warmup_steps: float, learning_rate: float = 1.0) -> Schedule:
    """lr·d^(−½)·min(s^(−½), s·w^(−3/2)), s = i + 1."""
    return lambda i: (
        learning_rate * d_model**-0.5 * min((i + 1) ** -0.5, (i + 1) * warmup_steps**-1.5)
    )


def _periods(i: int, decay_steps: int, staircase: bool) -> float:
    """i/steps, rounded down with staircase."""
    return i // decay_steps if staircase else i / decay_steps


def exponential(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr·rate^(i/steps)."""
    return lambda i: learning_rate * decay_rate ** _periods(i, decay_steps, staircase)


def natural_exp(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr·e^(−rate·i/steps)."""
    return lambda i: learning_rate * math.exp(-decay_rate * _periods(i, decay_steps, staircase))


def inverse_time(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr/(1 + rate·i/steps)."""
    return lambda i: learning_rate / (1 + decay_rate * _periods(i, decay_steps, staircase))


def polynomial(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 1e-4,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """(lr − end)·(1 − min(i, D)/D)^power + end; with cycle D·max(1, ⌈i/D⌉) for D."""

    def schedule(i: int) -> float:
        d = decay_steps * max(1, -(-i // decay_steps)) if cycle else decay_steps
        return (learning_rate - end_learning_rate) * (1 - min(i, d) / d) ** power + (
            end_learning_rate
        )

    return schedule


def piecewise(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """The first value whose boundary is > i, else the last."""
    return lambda i: values[sum(boundary <= i for boundary in boundaries)]


def cosine(learning_rate: float, step_each_epoch: int, epochs: int) -> Schedule:
    """lr/2·(cos(π·⌊i/step_each_epoch⌋/epochs) + 1)."""
    return lambda i: learning_rate / 2 * (math.cos(math.pi * (i // step_each_epoch) / epochs) + 1)


def linear_warmup(
    learning_rate: float | Schedule, warmup_steps: int, start_lr: float, end_lr: float
) -> Schedule:
    """start + (end − start)·i/w for i < w, then the rate or the schedule at the same i."""

    def schedule(i: int) -> float:
        if i < warmup_steps:
            return start_lr + (end_lr - start_lr) * i / warmup_steps
        return learning_rate(i) if callable(learning_rate) else learning_rate

    return schedule


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, *, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """Linear to the peak at step w, then half a cosine to the end at step T, which stays."""

    def schedule(i: int) -> float:
        if i < warmup_steps:
            return start + (peak - start) * i / warmup_steps
        part = min(1.0, (i - warmup_steps) / (total_steps - warmup_steps))
        return end + (peak - end) * (1 + math.cos(math.pi * part)) / 2

    return schedule


def warmup_stable_decay(
    peak: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    *,
    start: float = 0.0,
    end: float = 0.0,
) -> Schedule:
    """A line to the peak, the peak, a line to the end, the end."""
    decay = warmup_steps + stable_steps

    def schedule(i: int) -> float:
        if i < warmup_steps:
            return start + (peak - start) * i / warmup_steps
        return peak + (end - peak) * min(1.0, max(0, i - decay) / decay_steps)

    return schedule


def one_cycle(
    peak: float,
    total_steps: int,
    *,
    pct_start: float = 0.3,
    anneal: str = "cosine",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Walk the phases as torch does: the first whose last step is not passed, or the last one."""
    first = peak / div_factor
    last = first / final_div_factor
    up = (pct_start * total_steps - 1, first, peak)
    if three_phase:
        phases = [up, (2 * pct_start * total_steps - 2, peak, first)]
        phases.append((total_steps - 1, first, last))
    else:
        phases = [up, (total_steps - 1, peak, last)]

    def schedule(i: int) -> float:
        i = min(i, total_steps - 1)  # torch has no rates beyond its last step; here the rate stays
        start = 0.0
        for end, a, b in phases:
            if i <= end:
                part = (i - start) / (end - start) if end > start else 1.0
                if anneal == "linear":
                    return a + (b - a) * part
                return b + (a - b) / 2 * (1 + math.cos(math.pi * part))
            start = end
        return last

    return schedule


def step_decay(learning_rate: float, step_size: int, decay_rate: float = 0.1) -> Schedule:
    """lr·rate^⌊i/step_size⌋."""
    return lambda i: learning_rate * decay_rate ** (i // step_size)


def multi_step(
    learning_rate: float, milestones: Sequence[int], decay_rate: float = 0.1
) -> Schedule:
    """lr·rate^(the number of milestones ≤ i)."""
    return lambda i: learning_rate * decay_rate ** sum(m <= i for m in milestones)


def lambda_decay(learning_rate: float, lr_lambda: Callable[[int], Any]) -> Schedule:
    """lr·lr_lambda(i)."""
    return lambda i: learning_rate * lr_lambda(i)


def reduce_on_plateau(
    metrics: Sequence[float],
    learning_rate: float,
    *,
    mode: str = "min",
    decay_rate: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
) -> np.ndarray:
    """Return the rate in force before each metric is seen.

    A metric is better where it passes the best one by threshold·best ("rel") or threshold
    ("abs"). More than `patience` metrics in a row that are not better lower the rate; the next
    `cooldown` metrics are then not looked at.
    """
    rate, best, bad, wait = learning_rate, None, 0, 0
    rates = []
    for metric in metrics:
        rates.append(rate)
        if wait > 0:
            wait -= 1
            continue
        margin = 0.0 if best is None else threshold * (best if threshold_mode == "rel" else 1.0)
        if best is None or (metric < best - margin if mode == "min" else metric > best + margin):
            best, bad = metric, 0
        else:
            bad += 1
        if bad > patience:
            rate, bad, wait = min(rate, max(rate * decay_rate, min_lr)), 0, cooldown
    return np.array(rates, np.float64)


PERIODS = (3, 7, 15, 41, 49, 61, 1000)  # n·(1/49) in float32 is less than n/49 for many n
# The arguments with which each schedule is compared.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "noam": [(64, w, 2.0) for w in (1, 400)],
    "exponential": [*((0.5, n, 0.9, True) for n in PERIODS), (0.5, 1000, 0.9, False)],
    "natural_exp": [*((0.5, n, 0.1, True) for n in PERIODS), (0.5, 1000, 0.9, False)],
    "inverse_time": [*((0.5, n, 0.5, True) for n in PERIODS), (0.5, 10, 0.5, False)],
    "polynomial": [
        *((0.5, 700, 0.01, power, False) for power in (2.0, 0.5)),
        *((0.5, n, 0.01, 2.0, True) for n in PERIODS),
    ],
    "piecewise": [([1, 7, 400], [0.3, 0.1, 0.2, 0.0])],
    "cosine": [(0.5, n, 30) for n in PERIODS],
    "linear_warmup": [(0.5, 300, 0.1, 0.4), (0.1, 1, 0.0, 1.0)],
    "warmup_cosine": [(0.5, 0, 1), (0.5, 0, 2500), (0.5, 300, 2999), (0.5, 41, 5000)],
    "warmup_stable_decay": [(0.5, 0, 0, 1), (0.5, 300, 0, 900), (0.5, 7, 2000, 41)],
    "one_cycle": [(0.5, n) for n in (1, 10, 50, 999, 5000)],
    "step_decay": [(0.5, n, 0.9) for n in PERIODS],
    "multi_step": [(0.5, [1, 49, 50, 1000], 0.3)],
    "lambda_decay": [(0.5, lambda i: 1 / (1 + i))],
}
