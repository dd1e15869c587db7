"""The report that `minimize` writes during the run, by `optfn.plot.report`."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from optfn.checkpoint.state_dict import summary
from optfn.checkpoint.storage import try_to_write
from optfn.core import checks
from optfn.interop import packages
from optfn.leaves.packed import unpack
from optfn.plot.page import report
from optfn.train.state import TrainState
from optfn.train.step import TrainStep

# Reading the history waits for the device, and drawing it takes a large fraction of a second.
_SECONDS_BETWEEN = 60.0
# The options of a step that say how its work is divided.
_OPTIONS_OF_WAY = ("shard", "microbatches", "packed", "partitioner", "local_steps", "reduce_dtype")


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
        self.facts, self.summary = {"optimizer": repr(step.tx), **_describe_way(step)}, ""
        self.end = "after its last step"
        self.since = self.began = time.monotonic()
        self.done = 0
        if self.path is not None:  # fail now, not after hours
            packages.optional_module("matplotlib", "plot")
            if jax.process_index() == 0:
                try_to_write(self.path.parent)
            if self.path.is_dir():
                raise IsADirectoryError(f"report must be a file; {self.path} is a directory")
            self.summary = _summarize_state(step, state)
            self.done = self.local_steps * len(history().get("loss", ()))

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
        process 0, and after the first loss. A failure is a warning: the run goes on."""
        series = self.history() if jax.process_index() == 0 else {}
        if self.path is None or "loss" not in series:
            return
        steps = self.local_steps * len(series["loss"])
        facts = {"steps": f"{steps:,}", "ended": end, **self.facts, **self._find_speed(steps)}
        # In a thread: matplotlib leaves cycles that refer to all frames below its frames, and so to
        # the run, whose state would stay on the devices until Python collects them.
        with ThreadPoolExecutor(1) as thread:
            drawn = thread.submit(
                report, series, self.path, title=f"Training run: {self.path.stem}", about=facts,
                summary=self.summary, local_steps=self.local_steps,
            )  # fmt: skip
        if (error := drawn.exception()) is not None:
            checks.warn(f"report: {self.path} was not written: {type(error).__name__}: {error}")

    def _find_speed(self, steps: int) -> dict[str, str]:
        """Return the steps per second of this part of the run, compilation and evaluations counted,
        or {} if it has made none."""
        made, seconds = steps - self.done, time.monotonic() - self.began
        return {"speed": f"{made / seconds:.3g} steps/s"} if made > 0 and seconds > 0 else {}

    def __exit__(self, kind: type[BaseException] | None, error: object, *where: Any) -> None:
        if self.path is not None:
            self._write(self.end if kind is None else f"by {kind.__name__}: {error}")


def _describe_way(step: TrainStep) -> dict[str, str]:
    """Return the options of a step that say how it is divided, and its mesh, as text."""
    given = {k: repr(x) for k, x in step.options.list_given().items() if k in _OPTIONS_OF_WAY}
    if step.mesh is not None:
        given["mesh"] = ", ".join(f"{name}: {n}" for name, n in step.mesh.shape.items())
    return given


def _summarize_state(step: TrainStep, state: TrainState) -> str:
    """Return the table of the bytes that the optimizer keeps, by parameter."""
    options, params = step.options, jax.eval_shape(unpack, state.params)
    return summary(
        step.tx, params, mesh=options.mesh, shard=options.shard, data_axis=options.data_axis
    )
