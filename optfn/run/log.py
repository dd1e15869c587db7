"""The log of a run: the metrics of each step, written during the run."""

import contextlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax

from optfn.checkpoint.storage import replace_text
from optfn.core import checks
from optfn.mesh.state.reports import is_ready
from optfn.run.history import scalars
from optfn.run.speed import Speed, Work


@runtime_checkable
class SummaryWriter(Protocol):
    """A writer of files for TensorBoard, such as SummaryWriter of torch and tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one value of a step."""

    def flush(self) -> object:
        """Write the buffered values to the disk."""


@runtime_checkable
class FlaxSummaryWriter(Protocol):
    """A writer of files for TensorBoard, from flax.metrics.tensorboard."""

    def scalar(self, tag: str, value: float, step: int) -> object:
        """Write one value of a step."""

    def flush(self) -> object:
        """Write the buffered values to the disk."""


@runtime_checkable
class TrackedRun(Protocol):
    """A run of Weights & Biases, or an object that has its method `log`."""

    def log(self, data: dict[str, Any], *, step: int) -> object:
        """Write the values of a step."""


class Sink(Protocol):
    """A target of a log."""

    def write(self, n: int, numbers: dict[str, float], /) -> object:
        """Write the values of step n."""

    def close(self) -> object:
        """End the log."""


# Where a run writes its metrics: the path of a file of JSON lines, a writer for TensorBoard, or a
# run of Weights & Biases.
Log: TypeAlias = str | os.PathLike[str] | SummaryWriter | FlaxSummaryWriter | TrackedRun
Logs: TypeAlias = Log | Sequence[Log] | None


class RunLog:
    """Metrics of each step, written during the run.

    They are written after the device has computed them, at the latest at the end of the run, so
    that writing does not wait for a step.

    Args:
      log: a path, a SummaryWriter of torch, tensorboardX or flax, a run of Weights & Biases, or
        several; None for no log.
      done: how many steps were made before; a file keeps its lines up to that step. None: another
        process writes the files.
      watch: gets the numbers that are written; nothing is read from the device for it alone.
      is_watched: whether it gets the metrics even without a log.
      by_weight: whether the tokens of a step are the weight of its loss, a `Mean`.
    """

    def __init__(
        self, log: Logs, done: int | None, watch: Sink, *, is_watched: bool, by_weight: bool
    ) -> None:
        # The step, its metrics, and its work.
        self.waiting: deque[tuple[int, dict[str, Any], Work]] = deque()
        self.speed, self.by_weight = Speed(), by_weight
        several = log if isinstance(log, list | tuple) else () if log is None else (log,)
        targets = list(map(_parse_target, several))  # check all before a file is opened
        self.sinks: list[Sink] = [x for x in targets if not isinstance(x, Path)]
        if done is not None:
            self.sinks += [_Lines(x, done) for x in targets if isinstance(x, Path)]
        if self.sinks or is_watched:
            self.sinks.append(watch)

    def __enter__(self) -> "RunLog":
        return self

    def __call__(self, n: int, metrics: dict[str, Any], work: Work) -> None:
        """Let the metrics of step n and its work wait until the device has computed them. Metrics
        of a step that waits already are merged. Without a target nothing is done."""
        if not self.sinks:
            return
        if self.waiting and self.waiting[-1][0] == n:
            self.waiting[-1][1].update(metrics)
            return
        while self.waiting and all(map(is_ready, jax.tree.leaves(self.waiting[0][1]))):
            self._write(*self.waiting.popleft())
        self.waiting.append((n, dict(metrics), work))

    def drop_evaluation(self, n: int) -> None:
        """Take the evaluation of step n out of the files, but not out of targets that cannot forget
        a value."""
        for sink in self.sinks:
            if isinstance(sink, _Lines):
                sink.drop_evaluation(n)

    def _write(self, n: int, metrics: dict[str, Any], work: Work, *, is_last: bool = False) -> None:
        """Write the scalars of step n to all targets, with the speeds of the run if they are
        due."""
        numbers = scalars(metrics)
        if self.by_weight and "weight" in numbers:  # else the numbers of an evaluation alone
            work = {**work, "tokens_per_second": numbers["weight"]}
        numbers |= self.speed.add(work, is_last=is_last)
        for sink in self.sinks:
            sink.write(n, numbers)

    def finish(self) -> None:
        """Write the metrics that wait, the last ones of the run."""
        while self.waiting:
            self._write(*self.waiting.popleft(), is_last=not self.waiting)

    def __exit__(self, *error: Any) -> None:
        self.finish()
        for sink in self.sinks:
            sink.close()


def _parse_target(log: Log) -> "Path | _Borrowed":
    """Return the Path of a file, or an object with the functions of a writer or a run, and raise a
    TypeError for anything else."""
    if isinstance(log, SummaryWriter):
        return _Borrowed(partial(_add_scalars, log.add_scalar), log.flush)
    if isinstance(log, FlaxSummaryWriter):
        return _Borrowed(partial(_add_scalars, log.scalar), log.flush)
    # A Logger of Python has a `log` too, with different arguments.
    if isinstance(log, TrackedRun) and not isinstance(log, logging.Logger):
        return _Borrowed(lambda n, numbers: log.log(dict(numbers), step=n), lambda: None)
    if not isinstance(log, str | os.PathLike):
        raise TypeError(
            "log must be a path or a SummaryWriter, with the methods add_scalar (or scalar, in "
            "flax) and flush, or a run of Weights & Biases, with the method log; got "
            f"{checks.show(log)}"
        )
    return Path(log)


class _Lines:
    """A file with one JSON object per step. NaN and infinity, which JSON lacks, become null."""

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that resumes writes the steps after its checkpoint again.
        if done and path.is_file():
            self._keep(line for line in self._read() if _is_earlier(line, done))
        self.file = path.open("a" if done else "w")

    def _read(self) -> list[str]:
        """Return the lines of the file."""
        return self.path.read_text().splitlines()

    def _keep(self, lines: Iterable[str]) -> None:
        """Replace the lines of the file at once, since a kill may end the run at any time."""
        replace_text(self.path.resolve(), "".join(f"{line}\n" for line in lines))

    def drop_evaluation(self, n: int) -> None:
        """Rewrite the file without the numbers of the evaluation of step n, before a further line
        is written. A device such as /dev/stdout keeps its lines."""

        def drop(line: str) -> str:
            row = json.loads(line)
            kept = {k: x for k, x in row.items() if not k.startswith("evaluation")}
            return json.dumps(kept) if row["step"] == n else line

        if self.path.is_file():
            self.close()
            self._keep(map(drop, self._read()))
            self.file = self.path.open("a")

    def write(self, n: int, numbers: dict[str, float]) -> None:
        """Write a line with the numbers of step n, null for NaN and infinity, and flush it."""
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        try:
            self.file.write(json.dumps({"step": n} | finite) + "\n")
            self.file.flush()
        except OSError as error:  # of a full disk; it does not name the file
            raise OSError(
                error.errno, f"log cannot be written: {error.strerror}", str(self.path)
            ) from None

    def close(self) -> None:
        """Close the file. A line that could not be written has had its error."""
        with contextlib.suppress(OSError):
            self.file.close()


class _Borrowed(NamedTuple):
    """A writer for TensorBoard, or a run of Weights & Biases. It belongs to the caller, so it stays
    open."""

    write: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def _add_scalars(
    add: Callable[[str, float, int], object], n: int, numbers: dict[str, float]
) -> None:
    """Write the values of step n as scalars of TensorBoard."""
    for name, value in numbers.items():
        add(name, value, n)


def _is_earlier(line: str, done: int) -> bool:
    """Tell whether a line is of a step up to `done`, with False for a part of a line."""
    try:
        return bool(json.loads(line)["step"] <= done)
    except (ValueError, KeyError, TypeError):  # a killed process may leave half a line
        return False
