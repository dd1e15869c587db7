"""The speeds of a run, for its log."""

import math
from collections.abc import Mapping
from time import monotonic
from typing import Any, TypeAlias

import jax
import numpy as np

from optfn.core.types import Batch
from optfn.loss.jaxprs.flops import UncountableError, count_model_flops
from optfn.mesh.compilers.chips import find_peak
from optfn.run.progress import count_examples
from optfn.train.state import UPDATE_SCOPE, TrainState
from optfn.train.step import TrainStep

# A shorter time would measure how the host and the devices take turns.
_SECONDS = 10.0

# The work of a step by the name of its speed: examples, tokens, and the seconds that the model's
# FLOPs take at the peak. NaN: not known.
Work: TypeAlias = Mapping[str, float]


class WorkCounter:
    """Counts the work of the calls of a step.

    Args:
      step: the step.
      is_logged: whether a log shows the work; else nothing is counted.
    """

    def __init__(self, step: TrainStep, is_logged: bool) -> None:
        self.step, self.is_logged = step, is_logged
        self.seconds_at_peak: dict[Any, float] = {}

    def count(self, state: TrainState, batch: Batch, tokens: int | None) -> Work:
        """Return the work of a call by the name of its speed, without tokens if they are None, or
        {} without a log.

        Args:
          state: a state of the step.
          batch: the batch of the call.
          tokens: the tokens of the batch; None if nothing counts them.
        """
        if not self.is_logged:
            return {}
        work = {"examples_per_second": float(count_examples(batch) or 0)}
        if tokens is not None:
            work["tokens_per_second"] = float(tokens)
        # Batches of one shape have one program, so its FLOPs are counted once.
        shapes = tuple(map(np.shape, jax.tree.leaves(batch)))
        if shapes not in self.seconds_at_peak:
            self.seconds_at_peak[shapes] = self._count_seconds(state, batch)
        work["model_flops_utilization"] = self.seconds_at_peak[shapes]
        return work

    def _count_seconds(self, state: TrainState, batch: Batch) -> float:
        """Return the seconds that the model's FLOPs take at the peak of all devices, or NaN if the
        peak or the FLOPs are not known."""
        peak = find_peak([*state.step.sharding.device_set])
        flops = None if peak is None else count_step_flops(self.step, state, batch)
        return math.nan if peak is None or flops is None else flops / peak


def count_step_flops(step: TrainStep, state: TrainState, batch: Batch) -> float | None:
    """Return the FLOPs of the products of a call's loss and gradients, on all devices, or None if
    the equations do not tell them.

    Products that run again in the backward pass, and the optimizer's, do not count: the same model
    has the same FLOPs however it is trained. They are counted from the equations, because XLA's
    `cost_analysis` counts the body of a loop once, on CPUs and TPUs. JAX has kept the equations
    from the call, so nothing is traced or compiled again.

    None if the equations do not tell them: with `value_and_grad`, since a pipeline computes in its
    bubbles too; and for kernels, and loops or branches that the data decides.
    """
    if step.options.value_and_grad is not None:
        return None
    arguments = step.list_arguments(state, step.place_batch(batch, state))
    try:
        return count_model_flops(step.compiled.trace(*arguments).jaxpr.jaxpr, UPDATE_SCOPE)
    except UncountableError:
        return None


class Speed:
    """Work per second, the mean over at least ten seconds of the run, or over a shorter run.

    These seconds have all that the run does: reading of batches, evaluations and saves too.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.since: float | None = None
        self.is_known = False

    def add(self, work: Work, *, is_last: bool = False) -> dict[str, float]:
        """Add the work of a step that has ended, and return the speeds if ten seconds have passed
        or a shorter run ends, and otherwise {}.

        The first step only starts the clock, because it compiles.
        """
        now = monotonic()
        if self.since is None:
            self.since = now
            return {}
        for name, amount in work.items():
            self.total[name] = self.total.get(name, 0.0) + amount
        passed = now - self.since
        found = {name: total / passed for name, total in self.total.items() if total > 0}
        is_due = passed >= _SECONDS or (is_last and not self.is_known and passed > 0)
        if not is_due or not found:
            return {}
        self.total, self.since, self.is_known = {}, now, True
        return found
