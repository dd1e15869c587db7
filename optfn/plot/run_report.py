"""The report that `minimize` writes during the run, by `optfn.plot.report`."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from optfn.checkpoint.state_dict import summary
from optfn.core import checks
from optfn.leaves.packed import unpack
from optfn.plot.page import report
from optfn.train.state import TrainState
from optfn.train.step import TrainStep

# Reading the history waits for the device, and drawing it takes a large fraction of a second.
_SECONDS_BETWEEN = 60.0


class RunReport:
    """Writes the report of a run about once a minute, and at the end, however the run ends.

    In a run of several processes, process 0 writes it.

    Args:
      path: the file; None for no report.
      history: returns the arrays to report.
      step: the training step.
      state: a state of it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        history: Callable[[], Mapping[str, np.ndarray]],
        step: TrainStep,
        state: TrainState,
    ) -> None:
        self.history, self.local_steps = history, step.local_steps
        # Absolute, since a callback may change the working directory.
        self.path = None if path is None else checks.path("report", path).absolute()
        self.optimizer, self.summary = repr(step.tx), ""
        self.end = "after its last step"
        self.since = time.monotonic()
        if self.path is not None:
            checks.optional_module("matplotlib", "plot")  # fail now, not after hours
            self.summary = _summarize_state(step, state)

    def __enter__(self) -> "RunReport":
        return self

    def __call__(self) -> None:
        """Write the report if a minute has passed since the last one, or do nothing, as without a
        path."""
        if self.path is not None and time.monotonic() - self.since > _SECONDS_BETWEEN:
            self._write("not yet")
            self.since = time.monotonic()

    def _write(self, end: str) -> None:
        """Write the page, with the words `end` for how the run ended, but only with a path, in
        process 0, and after the first loss."""
        series = self.history() if jax.process_index() == 0 else {}
        if self.path is None or "loss" not in series:
            return
        steps = self.local_steps * len(series["loss"])
        report(
            series,
            self.path,
            title=f"Training run: {self.path.stem}",
            about={"steps": f"{steps:,}", "ended": end, "optimizer": self.optimizer},
            summary=self.summary,
            local_steps=self.local_steps,
        )

    def __exit__(self, kind: type[BaseException] | None, error: object, *where: Any) -> None:
        if self.path is not None:
            self._write(self.end if kind is None else f"by {kind.__name__}: {error}")


def _summarize_state(step: TrainStep, state: TrainState) -> str:
    """Return the table of the bytes that the optimizer keeps, by parameter."""
    options, params = step.options, jax.eval_shape(unpack, state.params)
    if options.shard is None:
        return summary(step.tx, params)
    return summary(
        step.tx, params, mesh=options.mesh, shard=options.shard, data_axis=options.data_axis
    )
