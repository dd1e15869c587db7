"""The records of a run: its history, its evaluations, and a log of each step."""

import dataclasses
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from optfn import checks
from optfn.leaves.packed import unpack
from optfn.leaves.types import PyTree
from optfn.train.state import TrainState
from optfn.wrappers.metrics import RECORDED

# The metrics of each step that the history keeps.
PER_STEP = ("loss", "learning_rate", "bytes_sent", *RECORDED)


# How many steps may have their metrics on the device, until all of them are moved to the host.
_CHUNK = 1000


class History:
    """The metrics of each step, the last ones on the device, and the evaluations."""

    def __init__(self) -> None:
        self.earlier: dict[str, np.ndarray] = {}
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add a step."""
        if len(self.steps) == _CHUNK:
            self._move_to_host()
        self.steps.append({k: metrics[k] for k in PER_STEP if k in metrics})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return an array for each metric, with the entries of the earlier run first."""
        self._move_to_host()
        evaluations = {k: x for k, x in self.earlier.items() if k.startswith("evaluation")}
        per_step = {k: x for k, x in self.earlier.items() if k not in evaluations}
        return per_step | _joined(evaluations, _columns(self.evaluations))

    def _move_to_host(self) -> None:
        """Add the steps to the earlier ones; reading from the device takes long, so once each."""
        per_step = {k: x for k, x in self.earlier.items() if not k.startswith("evaluation")}
        self.earlier |= _joined(per_step, _columns(jax.device_get(self.steps)))
        self.steps.clear()


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {k: np.array([row[k] for row in rows]) for k in (rows or [{}])[0]}


def _joined(first: dict[str, np.ndarray], then: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return columns one below the other, NaN where only one of the two tables has a column."""
    tables = [table for table in (first, then) if table]
    missing = [np.full(len(next(iter(table.values()))), np.nan, np.float32) for table in tables]
    return {
        k: np.concatenate([table.get(k, nan) for table, nan in zip(tables, missing, strict=True)])
        for k in first | then
    }


@dataclasses.dataclass
class Evaluator:
    """Evaluates a run every so many steps, and records the best evaluation.

    Args:
      function: (params) or (params, model_state) -> a number or a dict of numbers; None for none.
      every: the number of steps between evaluations; None evaluates at the end only.
      monitor: the key of the number that has to fall, where there are several.
      patience: how many evaluations in a row may be no better than the best; None for any number.
      keep_best: whether the run returns the state of the best evaluation.
      history: where results go; it may hold those of a run before this one.
    """

    function: Callable[..., Any] | None
    every: int | None
    monitor: str | None
    patience: int | None
    keep_best: bool
    history: History

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise TypeError(f"evaluate must be a function of params; got {self.function!r}")
        counts = {"evaluate_every": self.every, "patience": self.patience}
        for name, value in counts.items():
            if value is not None:
                checks.count(name, value)
        checks.flag("keep_best", self.keep_best)
        for name, value in (counts | {"keep_best": self.keep_best or None}).items():
            if value is not None and self.function is None:
                raise ValueError(f"{name} needs evaluate, a function of params")
        self.key = "evaluation" if self.monitor is None else f"evaluation/{self.monitor}"
        # The monitored number of each evaluation, by its step.
        self.monitored: dict[int, float] = {}
        self.best, self.best_step, self.no_better = math.inf, 0, 0
        earlier = self.history.earlier
        if self.key in earlier:
            for i, value in enumerate(earlier[self.key]):
                self._compare(int(earlier["evaluation_step"][i]), float(value))

    def is_due(self, n: int, per_call: int) -> bool:
        """Tell whether an evaluation is due in the `per_call` steps up to n."""
        if self.function is None or self.every is None:
            return False
        return n // self.every > (n - per_call) // self.every

    @property
    def gave_up(self) -> bool:
        """Whether `patience` evaluations in a row were no better than the best."""
        return self.patience is not None and self.no_better >= self.patience

    def has_seen(self, n: int) -> bool:
        """Tell whether this run has evaluated the state after step n, or there is nothing to do."""
        found = self.history.evaluations
        return self.function is None or bool(found and found[-1]["evaluation_step"] == n)

    def __call__(self, n: int, state: TrainState) -> dict[str, float]:
        """Evaluate the state after step n; return the numbers by their names in the history.

        Raises:
          ValueError: there are several numbers, and `monitor` is none of them, or None where one
            is needed.
        """
        assert self.function is not None
        arguments = () if state.model_state is None else (state.model_state,)
        result = self.function(unpack(state.params), *arguments)
        named = result if isinstance(result, Mapping) else {"": result}
        values = {
            "evaluation" + (f"/{k}" if k else ""): _real(k, value) for k, value in named.items()
        }
        if self.key in values:
            self._compare(n, values[self.key])
        elif self.patience or self.keep_best or self.monitor is not None:
            keys = ", ".join(sorted(named))
            raise ValueError(
                f"monitor must be one of the numbers that evaluate gives, {keys}; "
                f"got {self.monitor!r}"
            )
        self.history.evaluations.append({"evaluation_step": n, **values})
        return values

    def _compare(self, n: int, value: float) -> None:
        self.monitored[n] = value
        self.no_better += 1
        if value < self.best:
            self.best, self.best_step, self.no_better = value, n, 0


def _real(key: str, value: Any) -> float:
    if not (checks.is_host_number(value) or isinstance(value, jax.Array | np.ndarray)) or np.shape(
        value
    ):
        name = f" for {key!r}" if key else ""
        raise TypeError(
            f"evaluate must return a number or a dict of numbers; got {value!r}{name} of type "
            f"{type(value).__name__}"
        )
    return float(value)


@runtime_checkable
class SummaryWriter(Protocol):
    """A writer of files for TensorBoard: torch's and tensorboardX's classes of this name."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number of a step."""

    def flush(self) -> object:
        """Write the buffered values to the disk."""


@runtime_checkable
class FlaxSummaryWriter(Protocol):
    """flax.metrics.tensorboard's class of the same purpose."""

    def scalar(self, tag: str, value: float, step: int) -> object:
        """Write one number of a step."""

    def flush(self) -> object:
        """Write the buffered values to the disk."""


# Where a run writes its metrics while it goes on: the path of a file of JSON lines, or TensorBoard.
Log: TypeAlias = str | os.PathLike[str] | SummaryWriter | FlaxSummaryWriter


class RunLog:
    """Metrics of each step, written while the run goes on.

    They are written once the device has computed them, at the latest at the end, so that writing
    does not wait for a step.

    Args:
      log: a path, a SummaryWriter of torch, tensorboardX or flax, or None for no log.
      done: how many steps were made before; a file keeps its lines up to there.
    """

    def __init__(self, log: Log | None, done: int) -> None:
        self.waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self.sink: _Lines | _Scalars | None = None
        if isinstance(log, SummaryWriter):
            self.sink = _Scalars(log.add_scalar, log.flush)
        elif isinstance(log, FlaxSummaryWriter):
            self.sink = _Scalars(log.scalar, log.flush)
        elif log is not None:
            self.sink = _Lines(_log_path(log), done)

    def __enter__(self) -> "RunLog":
        return self

    def __call__(self, n: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of step n; those of a step that is there already are added to it."""
        if self.sink is None:
            return
        if self.waiting and self.waiting[-1][0] == n:
            self.waiting[-1][1].update(metrics)
            return
        while self.waiting and _is_ready(self.waiting[0][1]):
            self._write(*self.waiting.popleft())
        self.waiting.append((n, dict(metrics)))

    def _write(self, n: int, metrics: dict[str, Any]) -> None:
        assert self.sink is not None
        self.sink.write(n, scalars(metrics))

    def __exit__(self, *error: Any) -> None:
        if self.sink is not None:
            for n, metrics in self.waiting:
                self._write(n, metrics)
            self.sink.close()


class _Lines:
    """A file of JSON, one object a step. NaN and infinities, which JSON does not have, are null."""

    def __init__(self, path: Path, done: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if done and path.exists():
            kept = [line for line in path.read_text().splitlines() if _is_earlier(line, done)]
        self.file = path.open("w")
        self.file.writelines(f"{line}\n" for line in kept)

    def write(self, n: int, numbers: dict[str, float]) -> None:
        numbers = {"step": n} | numbers
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _Scalars:
    """Scalars of TensorBoard. The writer stays open: it is the caller's."""

    def __init__(
        self, add: Callable[[str, float, int], object], flush: Callable[[], object]
    ) -> None:
        self.add, self.close = add, flush

    def write(self, n: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.add(name, value, n)


def _log_path(log: object) -> Path:
    if not isinstance(log, str | os.PathLike):
        raise TypeError(
            f"log must be a path; got {checks.shown(log)}, which is no "
            "SummaryWriter either: it lacks add_scalar (or flax's scalar) or flush"
        )
    return Path(log)


def _is_earlier(line: str, done: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= done)
    except (ValueError, KeyError, TypeError):  # the last line of a process that was killed
        return False


def _is_ready(metrics: dict[str, Any]) -> bool:
    arrays = [x for x in jax.tree.leaves(metrics) if isinstance(x, jax.Array)]
    return all(x.is_ready() for x in arrays)  # type: ignore[attr-defined]


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics by name; those of a nested "aux" are "aux/<path>"."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(dict(metrics)):
        if np.ndim(x) == 0:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[name] = np.asarray(x).item()
    return found


def as_numbers(metrics: Mapping[str, Any]) -> PyTree:
    """Return metrics on the host, scalars as Python numbers."""
    return jax.tree.map(
        lambda x: x.item() if np.ndim(x) == 0 and hasattr(x, "item") else x,
        jax.device_get(dict(metrics)),
    )
