"""Losses and batches of a run that are not finite: the first such loss, and batches left out."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from optfn.checkpoint.finiteness import find_guards
from optfn.core import checks, tree
from optfn.run.history import History
from optfn.run.options import FitArguments

_EPOCHS = 3  # so many in a row that leave out the same batch


def find_bad_batches(history: Mapping[str, Any]) -> list[int]:
    """Return the places in an epoch, from 0, whose steps a guard left out in three epochs in a row,
    or [] if the history lacks epochs or a guard.

    A step that `dynamic_loss_scale` leaves out and then halves its scale does not count: it tells
    that the scale was too large, as after each growth.
    """
    if not {"skipped", "epoch"} <= history.keys():
        return []
    skipped, epoch = np.asarray(history["skipped"]), np.asarray(history["epoch"])
    scale = np.asarray(history.get("loss_scale", np.ones(skipped.shape)))
    left_out = (np.diff(skipped, prepend=0) > 0) & ~(np.diff(scale, prepend=scale[:1]) < 0)
    ends = 1 + np.flatnonzero(np.diff(epoch))
    places = [set(np.flatnonzero(x)) for x in np.split(left_out, ends)]
    groups = zip(*(places[i:] for i in range(_EPOCHS)), strict=False)
    return sorted({int(i) for group in groups for i in set.intersection(*group)})


def warn_of_bad_batches(history: Mapping[str, Any]) -> None:
    """Warn of the batches that `find_bad_batches` finds, if there are any."""
    bad = tree.list_words(list(map(str, find_bad_batches(history))), 20)
    if bad:
        checks.warn(
            f"the gradients of batch {bad} of an epoch, from 0, were not finite in {_EPOCHS} "
            "epochs in a row, at a loss scale that fell no further, and their steps were left out. "
            "Look at the data of these batches"
        )


class LossWatch:
    """Finds the first loss of a run that is not finite, when the loop reads losses anyway.

    A run whose optimizer leaves such steps out is not watched.

    Args:
      options: the arguments of `fit`; they tell whether such a loss ends the run.
      history: the history of the run.
      done: the steps made before.
    """

    def __init__(self, options: FitArguments, history: History, done: int) -> None:
        self.history, self.done, self.per_call = history, done, options.step.local_steps
        self.stops = options.on_nonfinite == "stop"
        self.is_over = bool(find_guards(options.state.opt_state))
        self.is_seen = self.is_warned = False

    def see(self, loss: float) -> None:
        """Take note of a loss that something has read, if it is not finite."""
        self.is_seen |= not math.isfinite(loss)

    def write(self, n: int, numbers: Mapping[str, float]) -> None:
        """See the loss of step n, as a target of a log."""
        self.see(numbers.get("loss", 0.0))

    def close(self) -> None:
        """Do nothing, as a target of a log."""

    def check(self) -> None:
        """Warn once of the first loss that is not finite, or raise a FloatingPointError if `stops`,
        but do neither if the optimizer leaves such steps out. A first loss without weight is warned
        of in any case.

        Raises:
          FloatingPointError: there is such a loss, and it ends the run.
        """
        self._warn_of_weight()
        if self.is_over or not (self.is_seen or self.history.nonfinite):
            return
        self.is_over = True
        row = self.history.first_nonfinite()
        self._warn_of_weight()
        if row is None:
            self.is_over = self.is_seen = False  # the loss that was seen had no weight
            return
        n, value = self.done + (row[0] + 1) * self.per_call, row[1]
        # A NaN from 0/0, as of a microbatch or a worker whose rows are all padding.
        mean = (
            "; if the loss divides by a count, such as the sum of a mask, which may be 0, return "
            "optfn.Mean(total, count)"
        )
        words = (
            f"the loss of step {n} is {value}. Remedies: optfn.skip_nonfinite(tx) leaves out "
            "steps whose gradients are not finite; a clip (grad_clip=) or a lower learning rate "
            "makes steps smaller; JAX_DEBUG_NANS=1 shows the operation that makes the first NaN"
            + (mean if math.isnan(value) and "weight" not in self.history.earlier else "")
        )
        if self.stops:
            raise FloatingPointError(f"{words}. The run ends, because on_nonfinite='stop'")
        checks.warn(words)

    def _warn_of_weight(self) -> None:
        """Warn once of the first step whose loss, a `Mean`, has no weight, if there is one on the
        host."""
        if self.history.weightless is None or self.is_warned:
            return
        self.is_warned = True
        n = self.done + (self.history.weightless + 1) * self.per_call
        checks.warn(
            f"the weights of the loss add up to 0 in step {n}, which has changed no param: its "
            "batch has nothing to learn from. history['weight'] has the weight of each step"
        )
