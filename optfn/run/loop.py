"""The whole training loop: fluid's minimize, with evaluation, logs and checkpoints."""

import contextlib
import itertools
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
from optfn.parallel.sharding import Kind
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
    """Train: one step for each batch.

    Ctrl-C or SIGTERM ends the run after the step that is under way: it is evaluated and saved as at
    its end, and what there is comes back. A second Ctrl-C interrupts at once. In a run of several
    processes a signal to any of them ends all after the same step, within some seconds; with JAX's
    option `jax_enable_preemption_service` off, signals act there as they do without optfn.

    Args:
      loss_fn: (params, batch) -> loss, as for `make_train_step`.
      tx: an optimizer of optfn or optax.
      params: the tree to start from; it stays as it is.
      batches: an iterable of batches.
      steps: how many steps to make at most; None goes to the end of `batches`.
      progress: whether to show a bar with loss, learning rate and examples per second on the
        terminal (by tqdm, where it is installed); where there is no terminal, lines
        `step <n> loss <number>`.
      model_state: what the model keeps beside params, such as batch statistics: the initial one.
        `loss_fn` then takes and gives it, as with `make_train_step(model_state=True)`.
      evaluate: (params) -> a number or a dict of numbers; with `model_state` (params, model_state).
        It is called every `evaluate_every` steps and at the end.
      evaluate_every: steps between evaluations, ≥ 1; None means only at the end.
      monitor: the key of the number that should fall, where `evaluate` gives a dict.
      patience: the run ends when so many evaluations in a row were no better than the best, ≥ 1.
      keep_best: whether the state with the best evaluation comes back instead of the last one. It
        is a copy on the devices, and in `checkpoint`/best where there are checkpoints.
      callback: (step, state, metrics) after each step, with metrics as Python numbers; True ends
        the run. The next step overwrites the state: copy what is to be kept of it. Reading the
        metrics waits for the step.
      log: where the metrics of each step go while the run goes on: a path, for a file with one JSON
        object a line, with which a run that resumes goes on; or the SummaryWriter of tensorboardX,
        torch or flax, for TensorBoard: what has `flush()`, and `add_scalar(name, value, step)` or
        `scalar(name, value, step)`.
      report: a file of HTML with the curves of the run, a table of its numbers, what the optimizer
        keeps, versions and devices; see `optfn.plot.report`. It is written about once a minute and
        at the end, also where an error ends the run. Needs matplotlib.
      checkpoint: a directory for checkpoints. A run that finds one there resumes from it: it skips
        the batches that were used, so pass the same ones, and ends bit for bit as if it had not
        been stopped.
      save_every: steps between checkpoints, ≥ 1; the last step is saved as well.

    The other arguments, `has_aux` to `compare_replicas_every`, are those of `make_train_step`. With
    `local_steps` each batch is a round; `steps`, `save_every` and `evaluate_every` count local
    steps, and what is due within a round happens at its end.

    Returns:
      The last TrainState, and the history: NumPy arrays "loss" and, where the step gives them,
      "learning_rate" and "bytes_sent", with one entry per batch, and where `record_metrics` is in
      tx the norms and the clip factor that it records (without local steps); "evaluation", or
      "evaluation/<key>" for each number of a dict, with one entry per evaluation, and
      "evaluation_step", the steps before it. Where only a part of the run, before or after a
      restart, has a number, the rest is NaN.

    Raises:
      ValueError: `batches` holds nothing, or ends before `steps`; no checkpoint can be loaded.
      FloatingPointError: `skip_nonfinite` gave up.
    """
    _check_arguments(steps, local_steps, save_every, batches, callback)
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
    saver = _Saver(step, checkpoint, save_every)
    state, history = saver.restore(step.init(params, model_state))
    evaluator = Evaluator(evaluate, evaluate_every, monitor, patience, history)
    best = _Best(checks.flag("keep_best", keep_best), evaluator, saver)
    best.restore(state)
    n = done = int(state.step)
    stopped = False
    layout = {} if shard is None else {"mesh": mesh, "shard": shard, "data_axis": data_axis}
    with (
        Progress(steps, checks.flag("progress", progress), done, per_call=local_steps) as bar,
        RunLog(log, done) as lines,
        RunReport(report, history, tx, params, local_steps, **layout) as page,
        _interruptible(mesh) as interrupt,
    ):
        rounds = None if steps is None else steps // local_steps
        for batch in itertools.islice(batches, done // local_steps, rounds):
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
        step.check()
        if not stopped:
            _check_batches(n, steps, local_steps)
        if n > done and not evaluator.has_seen(n):
            lines(n, evaluator(n, state))
            best.consider(state)
        saver.save(n, state, history)
        finish_saving()
        if interrupt.name:
            page.end = f"stopped by {interrupt.name} after step {n}"
            bar.say(page.end)
        elif stopped:
            page.end = f"early, after step {n}"
    return best.choose(state), history.arrays()


def _check_batches(n: int, steps: int | None, local_steps: int) -> None:
    """Raise if the batches ended before `steps`, or before the first."""
    if n < (steps or 1):
        raise ValueError(
            f"batches gave {n // local_steps} batches; {steps or 'at least 1'} steps were asked"
            f" for, {local_steps} for each batch"
        )


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
        """Return the state and the history to start from: those that were saved, if any."""
        history = History()
        restored = None if self.directory is None else restore_checkpoint(self.directory, state)
        if restored is not None:
            state, history.earlier = restored
            self.saved = int(state.step)
        return state, history

    def save_if_due(self, n: int, state: TrainState, history: History) -> None:
        if n // self.every > (n - self.step.local_steps) // self.every:
            self.save(n, state, history)

    def save(self, n: int, state: TrainState, history: History) -> None:
        """Save the state after step n, unless it is saved."""
        if self.directory is not None and self.saved != n:
            self.step.check()
            save_checkpoint(self.directory, state, history.arrays())
            self.saved = n


class _Best:
    """The state with the best evaluation so far, where it is asked for."""

    def __init__(self, wanted: bool, evaluator: Evaluator, saver: _Saver) -> None:
        if wanted and evaluator.function is None:
            raise ValueError("keep_best needs evaluate, a function of params")
        self.wanted, self.evaluator = wanted, evaluator
        self.directory = None if saver.directory is None else Path(saver.directory) / "best"
        self.state: TrainState | None = None

    def restore(self, template: TrainState) -> None:
        """Read the best state of the run that is resumed."""
        if self.wanted and self.directory is not None and int(template.step):
            restored = restore_checkpoint(self.directory, template)
            self.state = None if restored is None else restored[0]

    def consider(self, state: TrainState) -> None:
        """Keep a copy of the state that was just evaluated, if it is the best."""
        if self.wanted and self.evaluator.is_best:
            self.state = jax.tree.map(jnp.copy, state)
            if self.directory is not None:
                save_checkpoint(self.directory, state, keep=1)

    def choose(self, last: TrainState) -> TrainState:
        """Return the best state, or the last one."""
        return last if self.state is None else self.state


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
    """Give an object that knows of the first SIGINT or SIGTERM; the next one acts as ever.

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
