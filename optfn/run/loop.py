"""The training loop (`minimize` in fluid), with evaluation, logs and checkpoints."""

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
    update_in_backward: Pattern | None = None,
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
    """Train a model: take a step for each batch, and return the final state and a history.

        step = make_train_step(loss_fn, tx, …)
        state = step.init(params, model_state)
        return fit(step, state, batches, …)

    Args:
      loss_fn: a function (params, batch) -> loss, as for `make_train_step`.
      tx: an optimizer of optfn or optax.
      params: the parameters to start from, a tree of arrays, which is left untouched.
      batches: an iterable of batches.
      model_state: the initial arrays of the model besides params, such as batch statistics.
        `loss_fn` then takes and returns them, as with `make_train_step(model_state=True)`.

    The arguments from `has_aux` to `compare_replicas_every` are those of `make_train_step`, and all
    others are those of `fit`. So are the result and the errors: the trained parameters are
    `state.params`, and `history` maps names such as "loss" to arrays.
    """
    step = make_train_step(
        loss_fn, tx,
        has_aux=has_aux, model_state=model_state is not None, mesh=mesh, data_axis=data_axis,
        recompute=recompute, packed=packed, tables=tables, rng=rng, value_and_grad=value_and_grad,
        microbatches=microbatches, local_steps=local_steps, outer=outer, shard=shard,
        shard_tables=shard_tables, update_in_backward=update_in_backward,
        compare_replicas_every=compare_replicas_every,
    )  # fmt: skip
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
    """Train with a step that you made, from a state of it: take one step for each batch.

    Ctrl-C or SIGTERM ends the run after the current step. That step is evaluated and saved as the
    last step of a run is, and state and history are returned. A second Ctrl-C interrupts at once.
    In a run of several processes, a signal to any of them ends all of them after the same step,
    within some seconds, unless you have turned off JAX's option `jax_enable_preemption_service`.

    Args:
      step: a training step, from `make_train_step`.
      state: where to start: `step.init(params)`, or any later state of that step. It is donated,
        unless the step was made with `donate=False`.
      batches: an iterable of batches, beginning with that of the first step after `state`. The
        leaves of a batch are numbers, arrays of JAX or NumPy, or tensors (of torch or others) that
        `np.asarray` takes without a copy. You can pass a torch DataLoader as it is.
      steps: the most steps to take, counted from `state`; None: until `batches` ends.
      epochs: how many times to iterate over `batches`, which must then be something like a list or
        a DataLoader; ≥ 1. None: once. With `epochs`, the number of the epoch, from 1, is in the
        history, the log and the progress bar.
      progress: whether to show a bar with loss, learning rate and examples per second on the
        terminal (by tqdm, if it is installed). Without a terminal, lines `step <n> loss <number>`
        are printed. You are also told if the run resumes, or was already finished.
      evaluate: a function params -> a number or a dict of numbers; with `model_state` its arguments
        are (params, model_state). It is called every `evaluate_every` steps and at the end.
        `over_batches(fn, batches)` makes one that takes the mean over batches.
      evaluate_every: the number of steps between evaluations, ≥ 1; "epoch" evaluates after each of
        the `epochs`; None evaluates only at the end.
      monitor: if `evaluate` returns a dict, the key of the number by which evaluations are
        compared; `patience` and `keep_best` then need it.
      mode: "min" if that number should fall, such as a loss; "max" if it should rise, such as an
        accuracy. You get a warning if in all of three or more evaluations it went the other way.
      patience: end the run when this many evaluations in a row were no better than the best, ≥ 1.
        If you start such a run again from its checkpoint, it takes no further step. An evaluation
        of the state in which an earlier run was stopped, between two multiples of
        `evaluate_every` or within an epoch, does not count.
      keep_best: whether to return the state with the best evaluation instead of the last one. It is
        kept as a copy on the devices and, with `checkpoint`, in `checkpoint`/best. A run that
        resumes compares the state kept there, the one that it resumes from, and those that it
        evaluates. If an earlier evaluation was better, but its state was not kept because
        `keep_best` was off, the best of these is returned, and a warning names the better step.
      callback: a function (step, state, metrics), called after each step, with metrics as Python
        numbers. If it returns True, the run ends; otherwise it returns False or None, since it
        cannot replace the state. The next step overwrites the state, so copy the arrays that you
        keep. A callback waits for each step, to read the metrics.
      log: where to write the metrics of each step during the run. A path: a file with one JSON
        object per line, which a run that resumes continues. For TensorBoard: the SummaryWriter of
        tensorboardX, torch or flax, or any object with `flush()` and either
        `add_scalar(name, value, step)` or `scalar(name, value, step)`. Or a list of these.
      report: an HTML file with the curves of the run, a table of its numbers, the optimizer's
        state, versions and devices; see `optfn.plot.report`. It is written about once a minute and
        at the end, even if an error ends the run. Needs matplotlib.
      checkpoint: a directory for checkpoints, which are written in the background
        (`save_checkpoint`). If it has one already, the run resumes from it, with results that are
        bit-identical to those of a run that was never stopped. Pass the same batches: those that
        were used are skipped. They are not even read if the iterator of `batches` has `get_state`
        and `set_state`, as those of grain have, because its state is in the checkpoint. `steps`
        includes those made before. The learning rate is that of the checkpoint; if `state` has
        another number, you get a warning.
      save_every: the number of steps between checkpoints, ≥ 1, or the time between them, such as
        `datetime.timedelta(minutes=10)`. The last step is saved as well.
      keep: how many checkpoints to keep in the directory, ≥ 1; older ones are removed.
      resume: whether the run may resume. If False, checkpoints in the directory are an error.

    With local steps, each batch is a round. `steps`, `save_every` and `evaluate_every` count local
    steps; a save or an evaluation that is due within a round happens at its end.

    Returns:
      The last TrainState, and the history, a dict of NumPy arrays. With one entry per batch it has
      "loss"; "learning_rate" and "bytes_sent", if the step returns them; the norms and the clip
      factor of `record_metrics`, if it is in tx (without local steps); "aux", or "aux/<key>" for
      each number of a tree, if the loss returns numbers; and "epoch", with `epochs`. With one entry
      per evaluation it has "evaluation", or "evaluation/<key>" for each number of a dict; and
      "evaluation_step", the number of steps before it. If a number was recorded only before or only
      after a restart, its other entries are NaN.

    Raises:
      ValueError: `batches` is empty, ends before `steps` or before the step of the checkpoint, or
        cannot be iterated again for `epochs`; there is a checkpoint although `resume` is False; no
        checkpoint can be loaded; `evaluate` does not return the number that `monitor` names; or
        `patience` or `keep_best` need `monitor`, because `evaluate` returns a dict.
      FloatingPointError: `skip_nonfinite` gave up.
      TypeError: `step` is not a TrainStep, or `state` is no state of it; an option is of a wrong
        type; or `callback` returns anything else than a bool or None.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"step must be a TrainStep, as make_train_step returns it; got {checks.shown(step)}"
        )
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
        step.check_state(state)
        options.check_batches(batches, step.local_steps)
        begin = int(state.step)
        self.step, self.options = step, options
        self.saver = Saver(step, options)
        self.state, self.history = self.saver.restore(state)
        self.n = self.done = int(self.state.step)
        has_model_state = state.model_state is not None
        self.remaining = Remaining(
            batches, options, self.done - begin, step.local_steps, self.saver.batches
        )
        self.evaluator = Evaluator(
            options, self.history, step.local_steps, has_model_state, self._ended_epoch
        )
        self.best = Best(self.evaluator, self.saver)
        self.best.restore(self.state)
        steps = self.remaining.last_step()
        self.last = None if steps is None else begin + steps
        self.stopped = self.evaluator.gave_up

    def _ended_epoch(self, n: int) -> bool:
        """Tell whether step n, which an earlier run made, was the last of its epoch."""
        later = (self.done - n) // self.step.local_steps
        if not later:
            return self.remaining.ends_epoch()
        epochs = self.history.earlier.get("epoch", np.zeros(0))
        return later >= len(epochs) or epochs[-later] != epochs[-later - 1]

    def to_the_end(self) -> tuple[TrainState, dict[str, np.ndarray]]:
        """Take all steps; return the last state, or the best one, and the history."""
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
                bar.say(f"the run in {self.saver.place} is already finished; no step was taken")
        return self.best.choose(self.state), self.history.arrays()

    def _make_step(self, batch: Batch) -> dict[str, Any]:
        """Call the step, and evaluate if that is due; return the numbers of both."""
        self.state, metrics = self.step(self.state, batch)
        self.n += self.step.local_steps
        if self.remaining.epoch is not None:
            metrics["epoch"] = self.remaining.epoch
        self.history.append(metrics)
        if self.evaluator.is_due(self.n, self.remaining.ends_epoch):
            metrics |= self._evaluate()
        return metrics

    def _evaluate(self) -> dict[str, float]:
        numbers = self.evaluator(self.n, self.state)
        self.best.consider(self.state)
        return numbers

    def _callback_stops(self, metrics: dict[str, Any]) -> bool:
        callback = self.options.callback
        if callback is None:
            return False
        answer = callback(self.n, self.state, as_numbers(metrics))
        is_bool = isinstance(answer, bool) or (
            isinstance(answer, np.bool_ | np.ndarray | jax.Array)
            and answer.dtype == bool
            and not answer.shape
        )
        if not (is_bool or answer is None):
            raise TypeError(
                f"callback must return True to end the run, or False or None; got "
                f"{checks.shown(answer)}. It cannot replace the state: to change it between steps, "
                "end the run, change the state that fit returns, and pass it to fit again"
            )
        return bool(answer)

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
        """Return how the run ended early; "" if it did not."""
        if by_signal:
            return f"stopped by {by_signal} after step {self.n}"
        return f"early, after step {self.n}" if self.stopped else ""
