"""The whole training loop: fluid's minimize, with evaluation, logs and checkpoints."""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optfn import checks
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, Params, PyTree, Updates
from optfn.mesh import AxisName
from optfn.parallel.sharding import Kind
from optfn.plot.run_report import RunReport
from optfn.run.background import wait as finish_saving
from optfn.run.batches import Remaining
from optfn.run.evaluation import Evaluator
from optfn.run.history import as_numbers
from optfn.run.interrupt import interruptible
from optfn.run.log import Logs, RunLog
from optfn.run.options import Callback, LoopOptions
from optfn.run.progress import Progress
from optfn.run.saving import Best, Saver
from optfn.train.state import TrainState
from optfn.train.step import TrainStep, make_train_step


def minimize(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformation,
    params: Params,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    progress: bool = True,
    has_aux: bool = False,
    model_state: PyTree = None,
    mesh: Mesh | None = None,
    data_axis: AxisName = "data",
    recompute: Sequence[str] | None = None,
    packed: bool = False,
    tables: Pattern | None = None,
    rng: bool | int | jax.Array = False,
    value_and_grad: Callable[..., tuple[Any, Updates]] | None = None,
    microbatches: int = 1,
    local_steps: int = 1,
    outer: optax.GradientTransformation | None = None,
    shard: Kind | None = None,
    shard_tables: bool = False,
    compare_replicas_every: int | None = None,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | Literal["epoch"] | None = None,
    monitor: str | None = None,
    mode: Literal["min", "max"] = "min",
    patience: int | None = None,
    keep_best: bool = False,
    callback: Callback | None = None,
    log: Logs = None,
    report: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | datetime.timedelta = 100,
    keep: int = 2,
    resume: bool = True,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train from params: make the step, its first state, and `fit` it.

        step = make_train_step(loss_fn, tx, …)
        state = step.init(params, model_state)
        return fit(step, state, batches, …)

    Args:
      loss_fn: (params, batch) -> loss, as for `make_train_step`.
      tx: an optimizer of optfn or optax.
      params: the tree to start from; it stays as it is.
      batches: an iterable of batches.
      model_state: the model's arrays beside params, such as batch statistics: the initial ones.
        `loss_fn` then takes and returns them, as with `make_train_step(model_state=True)`.

    The arguments `has_aux` to `compare_replicas_every` are those of `make_train_step`, all others
    those of `fit`. Returns and errors are those of `fit`.
    """
    step = make_train_step(
        loss_fn,
        tx,
        has_aux=has_aux,
        model_state=model_state is not None,
        mesh=mesh,
        data_axis=data_axis,
        recompute=recompute,
        packed=packed,
        tables=tables,
        rng=rng,
        value_and_grad=value_and_grad,
        microbatches=microbatches,
        local_steps=local_steps,
        outer=outer,
        shard=shard,
        shard_tables=shard_tables,
        compare_replicas_every=compare_replicas_every,
    )
    return fit(
        step,
        step.init(params, model_state),
        batches,
        steps=steps,
        epochs=epochs,
        progress=progress,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        monitor=monitor,
        mode=mode,
        patience=patience,
        keep_best=keep_best,
        callback=callback,
        log=log,
        report=report,
        checkpoint=checkpoint,
        save_every=save_every,
        keep=keep,
        resume=resume,
    )


def fit(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    progress: bool = True,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | Literal["epoch"] | None = None,
    monitor: str | None = None,
    mode: Literal["min", "max"] = "min",
    patience: int | None = None,
    keep_best: bool = False,
    callback: Callback | None = None,
    log: Logs = None,
    report: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | datetime.timedelta = 100,
    keep: int = 2,
    resume: bool = True,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train: one step for each batch.

    Ctrl-C or SIGTERM ends the run after the step that is under way: it is evaluated and saved as at
    its end, and its state and history are returned. A second Ctrl-C interrupts at once. In a
    run of several processes a signal to any of them ends all after the same step, within some
    seconds; with JAX's option `jax_enable_preemption_service` off, signals act there as they do
    without optfn.

    Args:
      step: a training step, from `make_train_step`.
      state: where to start: `step.init(params)`, or any later state of that step. It is used up,
        unless the step is made with `donate=False`.
      batches: an iterable of batches, the first of them for the step after `state`. Their leaves
        are numbers, arrays of JAX or NumPy, or tensors of torch and others that `np.asarray` takes
        without a copy; a torch DataLoader is taken as it is.
      steps: how many steps to make at most, from `state` on; None goes to the end of `batches`.
      epochs: how many times to go through `batches`, which it must be possible to iterate again,
        such as a list or a DataLoader; ≥ 1. None is once, without counting. The number of the
        epoch, from 1, is in the history, the log and the bar.
      progress: whether to show a bar with loss, learning rate and examples per second on the
        terminal (by tqdm, where it is installed); where there is no terminal, lines
        `step <n> loss <number>`. A run that resumes, and one that finds itself finished, says so
        there.
      evaluate: (params) -> a number or a dict of numbers; with `model_state` (params, model_state).
        It is called every `evaluate_every` steps and at the end. `over_batches(fn, batches)` makes
        one of the mean over a set of batches.
      evaluate_every: steps between evaluations, ≥ 1; "epoch" evaluates after each of the `epochs`;
        None means only at the end.
      monitor: the key of the number that tells which evaluation is better, where `evaluate` gives a
        dict. It is needed there with `patience` and `keep_best`.
      mode: "min" where that number should fall, such as a loss; "max" where it should rise, such as
        an accuracy. A warning says so if all evaluations, three or more, went the other way.
      patience: the run ends when so many evaluations in a row were no better than the best, ≥ 1.
        Started again from its checkpoint, it makes no further step.
      keep_best: whether the state with the best evaluation comes back instead of the last one. It
        is a copy on the devices, and in `checkpoint`/best where there are checkpoints. A run that
        resumes compares the state kept there, the one it resumes from and those it evaluates. If
        an evaluation before was better, and its state was not kept because `keep_best` was off,
        the best of these comes back with a warning that names the step of the better one.
      callback: (step, state, metrics) after each step, with metrics as Python numbers; True ends
        the run. The next step overwrites the state: copy the arrays to keep. Reading the metrics
        waits for the step.
      log: where the metrics of each step go while the run goes on: a path, for a file with one JSON
        object a line, with which a run that resumes goes on; or the SummaryWriter of tensorboardX,
        torch or flax, for TensorBoard: any object with `flush()`, and either
        `add_scalar(name, value, step)` or `scalar(name, value, step)`. Several make a list.
      report: a file of HTML with the curves of the run, a table of its numbers, the optimizer's
        state, versions and devices; see `optfn.plot.report`. It is written about once a minute
        and at the end, also where an error ends the run. Needs matplotlib.
      checkpoint: a directory for checkpoints, which are written in the background
        (`save_checkpoint`). A run that finds one there resumes from it: it skips the batches that
        were used, so pass the same ones, and ends bit for bit as if it had not been stopped. Where
        the iterator of `batches` has `get_state` and `set_state`, as those of grain have, its state
        is in the checkpoint, and no used batch is read again. The run counts the steps since
        `state` that were made before. Its learning rate is that of the checkpoint, and a warning
        says so if `state` has another number.
      save_every: steps between checkpoints, ≥ 1, or the time between them, such as
        `datetime.timedelta(minutes=10)`; the last step is saved as well.
      keep: how many checkpoints stay in the directory, ≥ 1; older ones are removed.
      resume: whether a run may resume; if False, checkpoints in the directory are an error.

    With local steps each batch is a round; `steps`, `save_every` and `evaluate_every` count local
    steps, and a save or an evaluation due within a round happens at its end.

    Returns:
      The last TrainState, and the history: NumPy arrays "loss" and, where the step gives them,
      "learning_rate" and "bytes_sent", with one entry per batch, and where `record_metrics` is in
      tx the norms and the clip factor that it records (without local steps); "aux", or "aux/<key>"
      for each number of a tree, where the loss gives some; "epoch" with `epochs`; "evaluation", or
      "evaluation/<key>" for each number of a dict, with one entry per evaluation, and
      "evaluation_step", the steps before it. Where only a part of the run, before or after a
      restart, has a number, the rest is NaN.

    Raises:
      ValueError: `batches` holds nothing, or ends before `steps` or before the step of the
        checkpoint, or cannot be iterated again for `epochs`; there is a checkpoint, and `resume` is
        False; `evaluate` does not give the number that `monitor` names, or gives a dict where
        `patience` or `keep_best` needs `monitor`; no checkpoint can be loaded.
      FloatingPointError: `skip_nonfinite` gave up.
    """
    options = LoopOptions(
        steps=steps,
        epochs=epochs,
        progress=progress,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        monitor=monitor,
        mode=mode,
        patience=patience,
        keep_best=keep_best,
        callback=callback,
        log=log,
        report=report,
        checkpoint=checkpoint,
        save_every=save_every,
        keep=keep,
        resume=resume,
    )
    return _Run(step, state, batches, options).to_the_end()


class _Run:
    """A run: its records, its checkpoints, and its state after step n."""

    def __init__(
        self, step: TrainStep, state: TrainState, batches: Iterable[Batch], options: LoopOptions
    ) -> None:
        if not isinstance(step, TrainStep):
            raise TypeError(
                f"step must be a TrainStep, as make_train_step gives it; got {checks.shown(step)}"
            )
        step.check_state(state)
        options.check_batches(batches, step.local_steps)
        begin = int(state.step)
        self.step, self.options = step, options
        self.saver = Saver(step, options)
        self.state, self.history = self.saver.restore(state)
        self.n = self.done = int(self.state.step)
        self.evaluator = Evaluator(options, self.history, state.model_state is not None)
        self.best = Best(self.evaluator, self.saver)
        self.best.restore(self.state)
        self.remaining = Remaining(
            batches, options, self.done - begin, step.local_steps, self.saver.batches
        )
        steps = self.remaining.last_step()
        self.last = None if steps is None else begin + steps
        self.stopped = self.evaluator.gave_up

    def to_the_end(self) -> tuple[TrainState, dict[str, np.ndarray]]:
        """Make the steps; return the last state, or the best one, and the history."""
        options, per_call = self.options, self.step.local_steps
        with (
            Progress(self.last, options.progress, self.done, per_call=per_call) as bar,
            RunLog(options.log, self.done) as lines,
            RunReport(options.report, self.history.arrays, self.step, self.state) as page,
            interruptible(self.step.mesh) as interrupt,
        ):
            if self.saver.resumed is not None:
                bar.say(f"resumed from step {self.done} of {self.saver.place}")
            for batch in () if self.stopped else self.remaining:
                metrics = self._make_step(batch)
                bar(self.n, metrics, batch)
                lines(self.n, metrics)
                page()
                self.stopped = self._callback_stops(metrics) or self.evaluator.gave_up
                self.stopped |= interrupt.is_due(self.n // per_call)
                if self.stopped:
                    break
                if self.saver.is_due(self.n):
                    self._save()
            self._end(lines)
            page.end = self._early_end(interrupt.name) or page.end
            if interrupt.name:
                bar.say(page.end)
            elif self.n == self.saver.resumed:
                bar.say(f"the run in {self.saver.place} is finished; no step was left to make")
        return self.best.choose(self.state), self.history.arrays()

    def _make_step(self, batch: Batch) -> dict[str, Any]:
        """Call the step, and evaluate if it is due; return the numbers of both."""
        self.state, metrics = self.step(self.state, batch)
        self.n += self.step.local_steps
        if self.remaining.epoch is not None:
            metrics["epoch"] = self.remaining.epoch
        self.history.append(metrics)
        if self.evaluator.is_due(self.n, self.step.local_steps, self.remaining.ends_epoch):
            metrics |= self._evaluate()
        return metrics

    def _evaluate(self) -> dict[str, float]:
        numbers = self.evaluator(self.n, self.state)
        self.best.consider(self.state)
        return numbers

    def _callback_stops(self, metrics: dict[str, Any]) -> bool:
        if self.options.callback is None:
            return False
        result = self.options.callback(self.n, self.state, as_numbers(metrics))
        if isinstance(result, jax.Array):  # a comparison of params, say
            result = np.asarray(result)[()]
        return isinstance(result, bool | np.bool_) and bool(result)

    def _end(self, lines: RunLog) -> None:
        """Check, evaluate and save the last state."""
        self.step.check(self.state)
        if not self.stopped:
            self.remaining.check()
        is_new = self.n > self.done
        to_evaluate = is_new and not self.evaluator.has_seen(self.n)
        if to_evaluate:
            lines(self.n, self._evaluate())
        if is_new:
            self.evaluator.warn_of_mode()
        if self.saver.saved != self.n or to_evaluate:
            self._save()
        finish_saving()

    def _save(self) -> None:
        self.saver.save(self.state, self.history, self.remaining)

    def _early_end(self, by_signal: str) -> str:
        """Return how the run ended before its last step; "" for one that did not."""
        if by_signal:
            return f"stopped by {by_signal} after step {self.n}"
        return f"early, after step {self.n}" if self.stopped else ""
