"""The whole training loop: fluid's minimize, with a progress bar and checkpoints."""

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optfn import checks
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, Params, Updates
from optfn.parallel.mesh import AxisName
from optfn.train.checkpoint import restore_checkpoint, save_checkpoint
from optfn.train.step import TrainState, make_train_step


def minimize(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformation,
    params: Params,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    progress: bool = True,
    has_aux: bool = False,
    mesh: Mesh | None = None,
    data_axis: AxisName = "data",
    recompute: Sequence[str] | None = None,
    packed: bool = False,
    tables: Pattern | None = None,
    rng: bool | int | jax.Array = False,
    value_and_grad: Callable[[Params, Batch], tuple[Any, Updates]] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train: one step for each batch.

    Args:
      loss_fn: (params, batch) -> loss, as for `make_train_step`.
      tx: an optimizer of optfn or optax.
      params: the tree to start from; it stays as it is.
      batches: an iterable of batches.
      steps: how many steps to make at most; None goes to the end of `batches`.
      progress: whether to show a bar with loss and learning rate on the terminal (by tqdm, where it
        is installed); where there is no terminal, lines `step <n> loss <number>`.
      checkpoint: a directory for checkpoints. A run that finds one there resumes from it: it skips
        the batches that were used, so pass the same ones, and ends bit for bit as if it had not
        been stopped.
      save_every: steps between checkpoints, ≥ 1; the last step is saved as well.

    The other arguments, `has_aux` to `value_and_grad`, are those of `make_train_step`.

    Returns:
      The last TrainState, and the history: NumPy arrays "loss" and, where tx keeps one,
      "learning_rate", with one entry per step.

    Raises:
      ValueError: `batches` holds nothing, or ends before `steps`; no checkpoint can be loaded.
      FloatingPointError: `skip_nonfinite` gave up.
    """
    if steps is not None:
        checks.count("steps", steps)
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches must be an iterable; got {batches!r} of type {type(batches).__name__}"
        )
    step = make_train_step(
        loss_fn,
        tx,
        has_aux=has_aux,
        mesh=mesh,
        data_axis=data_axis,
        recompute=recompute,
        packed=packed,
        tables=tables,
        rng=rng,
        value_and_grad=value_and_grad,
    )
    state = step.init(params)
    checks.count("save_every", save_every)
    run = _History()
    if checkpoint is not None:
        restored = restore_checkpoint(checkpoint, state)
        if restored is not None:
            state, run.earlier = restored
    n = done = int(state.step)
    saved = done if done else None
    with _Progress(steps, checks.flag("progress", progress), done) as report:
        for batch in itertools.islice(batches, done, steps):
            state, metrics = step(state, batch)
            n += 1
            run.append(metrics)
            report(n, metrics)
            if checkpoint is not None and n % save_every == 0:
                step.check()
                save_checkpoint(checkpoint, state, run.arrays())
                saved = n
    step.check()
    if not n or (steps is not None and n < steps):
        raise ValueError(f"batches gave {n} batches; {steps or 'at least 1'} steps were asked for")
    if checkpoint is not None and saved != n:
        save_checkpoint(checkpoint, state, run.arrays())
    return state, run.arrays()


class _History:
    """What each step reports; on the device until it is asked for."""

    def __init__(self) -> None:
        self.earlier: dict[str, np.ndarray] = {}
        self.entries: list[dict[str, Any]] = []

    def append(self, metrics: dict[str, Any]) -> None:
        self.entries.append({k: metrics[k] for k in ("loss", "learning_rate") if k in metrics})

    def arrays(self) -> dict[str, np.ndarray]:
        fetched = jax.device_get(self.entries)
        new = {k: np.array([entry[k] for entry in fetched]) for k in (fetched or [{}])[0]}
        both = {k: [x[k] for x in (self.earlier, new) if k in x] for k in self.earlier | new}
        return {k: np.concatenate(parts) for k, parts in both.items()}


class _Progress:
    """A progress bar on a terminal, lines elsewhere, nothing where it is turned off.

    Reading a loss waits for the device, so it is read a few times a second at most, and for lines
    at the first, the last and each tenth part of the steps.
    """

    def __init__(
        self, steps: int | None, shown: bool, done: int = 0, file: TextIO | None = None
    ) -> None:
        self.steps, self.done = steps, done
        self.file = file or sys.stderr
        self.bar: Any = None
        self.shown = shown
        self.every = max(1, steps // 10) if steps else 100
        self.last: tuple[int, dict[str, Any]] | None = None
        self.printed = 0

    def __enter__(self) -> "_Progress":
        if self.shown and self.file.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self.bar = tqdm(
                total=self.steps, initial=self.done, file=self.file, unit="step", mininterval=0.25
            )
        return self

    def __call__(self, n: int, metrics: dict[str, Any]) -> None:
        if not self.shown:
            return
        self.last = n, metrics
        if self.bar is not None:
            if self.bar.update(1):
                self.bar.set_postfix_str(_words(metrics), refresh=False)
        elif n == self.done + 1 or n % self.every == 0:
            self._line()

    def _line(self) -> None:
        if self.last is not None and self.last[0] != self.printed:
            self.printed, metrics = self.last
            print(f"step {self.printed} {_words(metrics)}", file=self.file, flush=True)

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            if self.last is not None:
                self.bar.set_postfix_str(_words(self.last[1]), refresh=False)
            self.bar.close()
        else:
            self._line()


def _words(metrics: dict[str, Any]) -> str:
    loss = float(metrics["loss"])
    words = f"loss {loss:.4f}" if math.isfinite(loss) else f"loss {loss}"
    if "learning_rate" in metrics:
        words += f" rate {float(metrics['learning_rate']):.3g}"
    return words
