"""The progress of a run on the screen: a bar, or lines if there is no terminal."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optfn.core.types import Batch

# After so many shapes of batches, a line says so.
_MANY_SHAPES = 3


class Progress:
    """A progress bar on a terminal, lines elsewhere, or nothing if it is turned off.

    Reading a loss waits for the device, so the bar reads it a few times a second at most. Lines are
    printed for the first and the last step, after each tenth of the steps, and for each evaluation.
    `seen` gets each loss that was read. After the third shape of batches, a line says that each
    shape has a compilation.
    """

    def __init__(
        self,
        steps: int | None,
        shown: bool,
        done: int = 0,
        per_call: int = 1,
        seen: Callable[[float], None] = lambda loss: None,
    ) -> None:
        self.steps, self.done, self.per_call = steps, done, per_call
        # None without a console, as under pythonw.
        self.file, self.seen = sys.stderr, seen
        self.shown = shown and self.file is not None
        self.bar: Any = None
        self.every = max(1, steps // 10) if steps else 100
        self.last: tuple[int, dict[str, Any]] | None = None
        self.printed = 0
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self.examples, self.since = 0, time.monotonic()  # since the speed was last shown

    def __enter__(self) -> "Progress":
        # A logger in the place of a stream may only write.
        if self.shown and getattr(self.file, "isatty", bool)():
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self.bar = tqdm(
                total=self.steps, initial=self.done, file=self.file, unit="step", mininterval=0.25
            )
        return self

    def __call__(self, n: int, metrics: dict[str, Any], batch: Batch = None) -> None:
        """Show step n with its metrics on the bar, or without a terminal print a line for some of
        the steps, and do nothing if progress is off.

        The bar shows a step a few times a second at most. A line is printed for the first step, for
        each tenth of the steps, and for each evaluation; without a known end, for each hundredth
        step.
        """
        if not self.shown:
            return
        self.last = n, metrics
        self.examples += count_examples(batch) or 0
        self._count_shapes(batch)
        if self.bar is not None:
            if self.bar.update(self.per_call):  # tqdm tells when it draws
                self._set_postfix(metrics)
        elif (
            n == self.done + self.per_call
            or n // self.every > (n - self.per_call) // self.every
            or any(key.startswith("evaluation") for key in metrics)
        ):
            self._print_line()

    def add_evaluation(self, values: dict[str, float]) -> None:
        """Add the evaluation of the last step to its metrics, which are then shown once more at the
        end, or do nothing if there is none."""
        if self.last is not None and values:
            self.last[1].update(values)
            self.printed = 0

    def say(self, text: str, *, always: bool = False) -> None:
        """Show a line of text above the bar or on the screen, but nothing if progress is off,
        unless `always` is given."""
        if self.bar is not None:
            self.bar.write(text, file=self.file)
        elif self.shown or (always and self.file is not None):
            print(text, file=self.file, flush=True)

    def _count_shapes(self, batch: Batch) -> None:
        """Say once, at the third shape of batches, that the step was compiled for three shapes."""
        if len(self.shapes) == _MANY_SHAPES:
            return
        before = len(self.shapes)
        self.shapes.add(tuple(np.shape(x) for x in jax.tree.leaves(batch)))
        if before < len(self.shapes) == _MANY_SHAPES:
            listed = ", ".join(" and ".join(map(str, one)) for one in sorted(self.shapes))
            self.say(
                f"the step was compiled for {_MANY_SHAPES} shapes of batches: {listed}; it is "
                "compiled again for each new one, unless you pad batches to a few shapes"
            )

    def _print_line(self) -> None:
        """Print the last step and its metrics, and pass its loss to `seen`, unless that was
        done."""
        if self.last is not None and self.last[0] != self.printed:
            self.printed, metrics = self.last
            self.seen(float(metrics["loss"]))
            text = format_metrics(metrics, self.per_call)
            print(f"step {self.printed} {text}", file=self.file, flush=True)

    def _set_postfix(self, metrics: dict[str, Any]) -> None:
        """Show metrics behind the bar, with the examples per second since the last call."""
        text = format_metrics(metrics, self.per_call)
        self.seen(float(metrics["loss"]))
        now = time.monotonic()  # once the device has computed the metrics
        if self.examples and now > self.since:
            text += f" {self.examples / (now - self.since):.3g} examples/s"
        self.examples, self.since = 0, now
        self.bar.set_postfix_str(text, refresh=False)

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            if self.last is not None:
                self._set_postfix(self.last[1])
            self.bar.close()
        else:
            self._print_line()


def count_examples(batch: Batch) -> int | None:
    """Return the length that the leading axes of a batch have in common, 0 for scalars, or None if
    its leaves differ or it has none."""
    lengths = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def format_metrics(metrics: dict[str, Any], steps: int = 1) -> str:
    """Return the loss as text, with the epoch, rate, bytes per step and evaluations that metrics
    have besides."""
    text = f"epoch {metrics['epoch']} " if "epoch" in metrics else ""
    text += f"loss {format_number(metrics['loss'])}"
    if "learning_rate" in metrics:
        text += f" rate {float(metrics['learning_rate']):.3g}"
    if "bytes_sent" in metrics:
        text += f" sent {format_bytes(float(metrics['bytes_sent']) / steps)}/step"
    for key in metrics:
        if key.startswith("evaluation"):
            text += f" {key.removeprefix('evaluation/')} {format_number(metrics[key])}"
    return text


def format_bytes(x: float) -> str:
    """Return a count of bytes as text with three significant digits, such as "1.23 MB"."""
    for unit in ("B", "kB", "MB"):
        if x < 999.5:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} GB"


def format_number(x: Any) -> str:
    """Return a value as text with five significant digits, or by its name if it is NaN or
    infinite."""
    x = float(x)
    return f"{x:#.5g}" if math.isfinite(x) else str(x)
