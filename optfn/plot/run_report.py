"""The report that `minimize` writes: `optfn.plot.report` of the run, while it goes on."""

import os
import time
from typing import Any

import jax
import optax

from optfn import checks
from optfn.leaves.types import Params
from optfn.plot.page import report
from optfn.run.history import History
from optfn.train.state_dict import summary

# Reading the history waits for the device, and drawing it takes a good part of a second.
_SECONDS_BETWEEN = 60.0


class RunReport:
    """Writes the report of a run about once a minute, and when the run ends, however it does.

    In a run of several processes the first one writes it.

    Args:
      path: the file; None for no report.
      history: what is reported.
      tx: the optimizer.
      params: what it trains.
      local_steps: as for `minimize`.
      **layout: further arguments of `summary`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        history: History,
        tx: optax.GradientTransformation,
        params: Params,
        local_steps: int,
        **layout: Any,
    ) -> None:
        self.history, self.local_steps = history, local_steps
        self.path = None if path is None else checks.path("report", path)
        self.optimizer, self.summary = repr(tx), ""
        self.end = "after its last step"
        self.since = time.monotonic()
        if self.path is not None:
            checks.optional_module("matplotlib", "plot")  # now, and not after hours
            self.summary = summary(tx, params, **layout)

    def __enter__(self) -> "RunReport":
        return self

    def __call__(self) -> None:
        """Write the report, unless it was written a short time ago."""
        if self.path is not None and time.monotonic() - self.since > _SECONDS_BETWEEN:
            self._write("not yet")
            self.since = time.monotonic()

    def _write(self, end: str) -> None:
        series = self.history.arrays() if jax.process_index() == 0 else {}
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
