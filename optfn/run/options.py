"""The options of the loop, and their checks."""

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from optfn import checks
from optfn.leaves.types import Batch
from optfn.run.log import Logs
from optfn.train.state import TrainState

Bool: TypeAlias = bool | np.bool_ | np.ndarray | jax.Array
# (step, state, metrics) -> True to end the run.
Callback: TypeAlias = Callable[[int, TrainState, dict[str, Any]], Bool | None]

# The value of `evaluate_every` for an evaluation at the end of each epoch.
EPOCH = "epoch"


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The arguments of `fit` besides step, state and batches, checked."""

    steps: int | None = None
    epochs: int | None = None
    progress: bool = True
    evaluate: Callable[..., Any] | None = None
    evaluate_every: int | str | None = None
    monitor: str | None = None
    mode: str = "min"
    patience: int | None = None
    keep_best: bool = False
    callback: Callback | None = None
    log: Logs = None
    report: str | os.PathLike[str] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    save_every: int | datetime.timedelta = 100
    keep: int = 2
    resume: bool = True

    def __post_init__(self) -> None:
        for name in ("progress", "keep_best", "resume"):
            checks.flag(name, getattr(self, name))
        if not isinstance(self.save_every, datetime.timedelta):
            checks.count("save_every", self.save_every)
        elif self.save_every <= datetime.timedelta():
            raise ValueError(f"save_every must be longer than 0; got {self.save_every}")
        checks.count("keep", self.keep)
        for name in ("steps", "epochs", "patience"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        if self.callback is not None and not callable(self.callback):
            raise TypeError(
                f"callback must be a function (step, state, metrics); got {self.callback!r}"
            )
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        checks.choice("mode", self.mode, ("min", "max"))
        if self.evaluate is not None and not callable(self.evaluate):
            raise TypeError(f"evaluate must be a function of params; got {self.evaluate!r}")
        if self.evaluate_every == EPOCH:
            if self.epochs is None:
                raise ValueError(
                    'evaluate_every="epoch" needs epochs=, the number of passes over batches'
                )
        elif self.evaluate_every is not None:
            checks.count("evaluate_every", self.evaluate_every)
        for name in ("evaluate_every", "patience", "keep_best"):
            if getattr(self, name) not in (None, False) and self.evaluate is None:
                raise ValueError(f"{name} needs evaluate, a function of params")

    def check_batches(self, batches: Iterable[Batch], local_steps: int) -> None:
        """Raise an error unless these options fit the batches, each for `local_steps` steps."""
        if self.steps is not None and self.steps % local_steps:
            raise ValueError(
                f"steps must be a multiple of local_steps, {local_steps}, because a run can stop "
                f"only between rounds; got {self.steps}"
            )
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise TypeError(f"batches must be an iterable; got {checks.shown(batches)}")
        if self.epochs is not None and isinstance(batches, Iterator):
            raise ValueError(
                f"epochs={self.epochs} needs batches that can be iterated again, such as a list or "
                f"a DataLoader; got {checks.shown(batches)}, which ends after one pass"
            )
