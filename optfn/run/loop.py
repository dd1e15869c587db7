"""The whole training loop: fluid's minimize, with evaluation, logs and checkpoints."""

import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from optfn import checks
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, Params, PyTree, Updates
from optfn.mesh import AxisName
from optfn.parallel import processes
from optfn.parallel.layout import Kind
from optfn.plot.run_report import RunReport
from optfn.run.checkpoint import restore_checkpoint, save_checkpoint
from optfn.run.history import Evaluator, History, Log, RunLog, as_numbers
from optfn.run.progress import Progress
from optfn.run.sharded_checkpoint import wait as finish_saving
from optfn.train.state import TrainState
from optfn.train.step import TrainStep, make_train_step


def minimize(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformation,
    params: Params,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
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
    local_steps: int = 1,
    outer: optax.GradientTransformation | None = None,
    shard: Kind | None = None,
    shard_tables: bool = False,
    compare_replicas_every: int | None = None,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | None = None,
    monitor: str | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    callback: Callable[[int, TrainState, dict[str, Any]], bool | None] | None = None,
    log: Log | None = None,
    report: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
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
        progress=progress,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        monitor=monitor,
        patience=patience,
        keep_best=keep_best,
        callback=callback,
        log=log,
        report=report,
        checkpoint=checkpoint,
        save_every=save_every,
    )


def fit(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    progress: bool = True,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | None = None,
    monitor: str | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    callback: Callable[[int, TrainState, dict[str, Any]], bool | None] | None = None,
    log: Log | None = None,
    report: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
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
      batches: an iterable of batches, the first of them for the step after `state`.
      steps: how many steps to make at most, from `state` on; None goes to the end of `batches`.
      progress: whether to show a bar with loss, learning rate and examples per second on the
        terminal (by tqdm, where it is installed); where there is no terminal, lines
        `step <n> loss <number>`.
      evaluate: (params) -> a number or a dict of numbers; with `model_state` (params, model_state).
        It is called every `evaluate_every` steps and at the end.
      evaluate_every: steps between evaluations, ≥ 1; None means only at the end.
      monitor: the key of the number that should fall, where `evaluate` gives a dict.
        It is needed there with `patience` and `keep_best`.
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
        `add_scalar(name, value, step)` or `scalar(name, value, step)`.
      report: a file of HTML with the curves of the run, a table of its numbers, the optimizer's
        state, versions and devices; see `optfn.plot.report`. It is written about once a minute
        and at the end, also where an error ends the run. Needs matplotlib.
      checkpoint: a directory for checkpoints. A run that finds one there resumes from it: it skips
        the batches that were used, so pass the same ones, and ends bit for bit as if it had not
        been stopped. It counts the steps since `state` that were made before.
      save_every: steps between checkpoints, ≥ 1; the last step is saved as well.

    With local steps each batch is a round; `steps`, `save_every` and `evaluate_every` count local
    steps, and a save or an evaluation due within a round happens at its end.

    Returns:
      The last TrainState, and the history: NumPy arrays "loss" and, where the step gives them,
      "learning_rate" and "bytes_sent", with one entry per batch, and where `record_metrics` is in
      tx the norms and the clip factor that it records (without local steps); "evaluation", or
      "evaluation/<key>" for each number of a dict, with one entry per evaluation, and
      "evaluation_step", the steps before it. Where only a part of the run, before or after a
      restart, has a number, the rest is NaN.

    Raises:
      ValueError: `batches` holds nothing, or ends before `steps` or before the step of the
        checkpoint; `evaluate` does not give the number that `monitor` names, or gives a dict where
        `patience` or `keep_best` needs `monitor`; no checkpoint can be loaded.
      FloatingPointError: `skip_nonfinite` gave up.
    """
    local_steps = step.local_steps
    _check_arguments(steps, local_steps, save_every, batches, callback)
    saver = _Saver(step, checkpoint, save_every)
    begin = int(state.step)
    state, history = saver.restore(state)
    evaluator = Evaluator(evaluate, evaluate_every, monitor, patience, keep_best, history)
    best = _Best(evaluator, saver)
    best.restore(state)
    n = done = int(state.step)
    stopped = evaluator.gave_up
    last = None if steps is None else begin + steps
    with (
        Progress(last, checks.flag("progress", progress), done, per_call=local_steps) as bar,
        RunLog(log, done) as lines,
        RunReport(report, history.arrays, step, state) as page,
        _interruptible(step.mesh) as interrupt,
    ):
        remaining = _Remaining(batches, done - begin, steps, local_steps)
        for batch in () if stopped else remaining:
            state, metrics = step(state, batch)
            n += local_steps
            history.append(metrics)
            if evaluator.is_due(n, local_steps):
                metrics |= evaluator(n, state)
                best.consider(state)
            bar(n, metrics, batch)
            lines(n, metrics)
            page()
            stopped = callback is not None and callback(n, state, as_numbers(metrics)) is True
            stopped |= interrupt.is_due(n // local_steps) or evaluator.gave_up
            saver.save_if_due(n, state, history)
            if stopped:
                break
        step.check(state)
        if not stopped:
            remaining.check()
        if n > done and not evaluator.has_seen(n):
            lines(n, evaluator(n, state))
            best.consider(state)
        saver.save(n, state, history)
        finish_saving()
        page.end = _ending(n, stopped, interrupt.name) or page.end
        if interrupt.name:
            bar.say(page.end)
    return best.choose(state), history.arrays()


def _ending(n: int, stopped: bool, by_signal: str) -> str:
    """Return how a run ended before its last step; "" for one that did not."""
    if by_signal:
        return f"stopped by {by_signal} after step {n}"
    return f"early, after step {n}" if stopped else ""


class _Remaining:
    """The batches that a run has not used yet, and how many were given in all.

    Args:
      batches: those of the whole run.
      done: how many steps of it are made.
      steps: how many steps it makes; None for as many as there are batches.
      local_steps: how many steps a batch is for.
    """

    def __init__(
        self, batches: Iterable[Batch], done: int, steps: int | None, local_steps: int
    ) -> None:
        self.batches, self.steps, self.local_steps = batches, steps, local_steps
        self.used, self.given = done // local_steps, 0
        self.needed = max(self.used, 1) if steps is None else steps // local_steps
        self.is_finished = steps is not None and done >= steps

    def __iter__(self) -> Iterator[Batch]:
        most = 0 if self.is_finished else None if self.steps is None else self.needed
        for batch in itertools.islice(self.batches, most):
            self.given += 1
            if self.given > self.used:
                yield batch

    def check(self) -> None:
        """Raise if the batches ended before `steps`, before those that are used, or at once."""
        if self.is_finished or self.given >= self.needed:
            return
        words = "at least " if self.steps is None else ""
        words += f"{self.needed} are needed"
        words += "" if self.steps is None else f" for steps={self.steps}"
        words += f" with local_steps={self.local_steps}" if self.local_steps > 1 else ""
        words += f"; the run passes over the first {self.used}, used before" if self.used else ""
        raise ValueError(f"batches gave {self.given} batches; {words}")


def _check_arguments(
    steps: int | None, local_steps: int, save_every: int, batches: object, callback: object
) -> None:
    """Raise for bad arguments of `minimize` that `make_train_step` does not have."""
    checks.count("save_every", save_every)
    if steps is not None and checks.count("steps", steps) % checks.count(
        "local_steps", local_steps
    ):
        raise ValueError(
            f"steps must be a multiple of local_steps, {local_steps}, since a run can only stop "
            f"between rounds; got {steps}"
        )
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(f"batches must be an iterable; got {checks.shown(batches)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of (step, state, metrics); got {callback!r}")


class _Saver:
    """Saves a run in a directory, where one is given, and finds the one that was saved there."""

    def __init__(
        self, step: TrainStep, directory: str | os.PathLike[str] | None, every: int
    ) -> None:
        self.step, self.directory, self.every = step, directory, every
        self.saved: int | None = None

    def restore(self, state: TrainState) -> tuple[TrainState, History]:
        """Return the state and the history to start from: those that were saved, if any.

        Raises:
          ValueError: those that were saved are of a step before `state`.
        """
        history, begin = History(), int(state.step)
        restored = None if self.directory is None else restore_checkpoint(self.directory, state)
        if restored is not None:
            state, history.earlier = restored
            self.saved = int(state.step)
            if self.saved < begin:
                raise ValueError(
                    f"the checkpoint in {self.directory} is of step {self.saved}, before step "
                    f"{begin} of state: give the state that the run began with, or another "
                    "directory"
                )
        return state, history

    def save_if_due(self, n: int, state: TrainState, history: History) -> None:
        if n // self.every > (n - self.step.local_steps) // self.every:
            self.save(n, state, history)

    def save(self, n: int, state: TrainState, history: History) -> None:
        """Save the state after step n, unless it is saved already."""
        if self.directory is not None and self.saved != n:
            self.step.check(state)
            save_checkpoint(self.directory, state, history.arrays())
            self.saved = n


class _Best:
    """The state with the best evaluation among those that the run can return, where asked for."""

    def __init__(self, evaluator: Evaluator, saver: _Saver) -> None:
        self.evaluator = evaluator
        self.directory = None if saver.directory is None else Path(saver.directory) / "best"
        self.state: TrainState | None = None
        self.value = math.inf

    def restore(self, resumed: TrainState) -> None:
        """Begin with the state that was kept, or the one that is resumed if that is better."""
        if not self.evaluator.keep_best or not int(resumed.step):
            return
        found = None if self.directory is None else restore_checkpoint(self.directory, resumed)
        # A state from after the last checkpoint is not in the history; the run makes it again.
        if found is not None and int(found[0].step) in self.evaluator.monitored:
            self.state = found[0]
            self.value = self.evaluator.monitored[int(self.state.step)]
        self.consider(resumed)

    def consider(self, state: TrainState) -> None:
        """Keep a copy of a state if its evaluation is the best."""
        if not self.evaluator.keep_best:
            return
        value = self.evaluator.monitored.get(int(state.step), math.inf)
        if value < self.value:
            self.state, self.value = jax.tree.map(jnp.copy, state), value
            if self.directory is not None:
                save_checkpoint(self.directory, state, keep=1)

    def choose(self, last: TrainState) -> TrainState:
        """Return the best state, or the last one; warn where an earlier run had a better one."""
        state = last if self.state is None else self.state
        if self.evaluator.keep_best and self.evaluator.best < self.value:
            checks.warn(
                f"keep_best: the state of step {int(state.step)} comes back. The evaluation of "
                f"step {self.evaluator.best_step} is better, {self.evaluator.best:g}, but its "
                "state was not kept when the run was there"
            )
        return state


class _Interrupt:
    """Whether a signal ends the run, and which."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.name = ""
        self.of_all_processes = processes.share(mesh) and bool(
            jax.config.values["jax_enable_preemption_service"]
        )

    def is_due(self, call: int) -> bool:
        """Tell whether the run ends after this call of the step, the same in every process."""
        if self.of_all_processes:
            if not multihost_utils.reached_preemption_sync_point(call):
                return False
            self.name = self.name or "SIGTERM"
        return bool(self.name)


@contextlib.contextmanager
def _interruptible(mesh: Mesh | None) -> Iterator[_Interrupt]:
    """Yield an object that records the first SIGINT or SIGTERM; the next one acts as usual.

    Signals that the program handles itself stay its own. In a run of several processes JAX takes
    SIGTERM as a notice of preemption, upon which the processes agree on the step to stop after;
    SIGINT is made one.
    """
    interrupt = _Interrupt(mesh)
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ours = [s for s, handler in usual.items() if signal.getsignal(s) == handler]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    elif interrupt.of_all_processes:
        ours = [signal.SIGINT] if len(ours) == 2 else []
    elif jax.process_count() > 1:
        ours = []

    def catch(number: int, frame: FrameType | None) -> None:
        interrupt.name = signal.Signals(number).name
        release()
        if interrupt.of_all_processes:
            signal.raise_signal(signal.SIGTERM)

    def release() -> None:
        for s in ours:
            signal.signal(s, usual[s])

    for s in ours:
        signal.signal(s, catch)
    try:
        yield interrupt
    finally:
        release()
