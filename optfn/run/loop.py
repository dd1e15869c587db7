"""The training loop (`minimize` in fluid), with evaluation, logs and checkpoints."""

import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from optfn.checkpoint.background import wait_for_writes as finish_saving
from optfn.core import checks
from optfn.core.types import Batch
from optfn.mesh.layout import processes
from optfn.plot.run_report import RunReport
from optfn.run.batches import Remaining, iterate_together
from optfn.run.evaluation import Evaluator
from optfn.run.history import describe_arrays, to_python_numbers
from optfn.run.interrupt import Interrupt, catch_signals
from optfn.run.log import RunLog
from optfn.run.loss_watch import LossWatch, warn_of_bad_batches
from optfn.run.options import STOPPED, WEIGHT, FitArguments, LoopOptions, MinimizeArguments
from optfn.run.progress import Progress
from optfn.run.saving import Best, Saver
from optfn.run.speed import WorkCounter
from optfn.train.ineffective import count_waiting_gradients, warn_of_schedules
from optfn.train.options import StepOptions, accept_fields
from optfn.train.state import TrainState, is_train_state
from optfn.train.step import make_train_step, wait_on_cpus


@accept_fields(MinimizeArguments)
def minimize(arguments: MinimizeArguments) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train a model from `params` by a step for each batch, and return the final state, or the best
    one with `keep_best`, and a history.

        step = make_train_step(loss_fn, tx, …)
        state = step.init(params, model_state)
        return fit(step, state, batches, …)

    Args:
      loss_fn: a function (params, batch) -> loss, a number or an `optfn.Mean`, as for
        `make_train_step`.
      tx: an optimizer of optfn or optax.
      params: the parameters to start from, a tree of arrays, which is left untouched.
      batches: an iterable of batches.
      model_state: the initial arrays of the model besides params, such as batch statistics.
        `loss_fn` then takes and returns them, as with `make_train_step(model_state=True)`.
      **StepOptions
      **LoopOptions

    It returns (state, history) as `fit` does: the trained parameters are `state.params`, and
    `history` maps names such as "loss" to arrays. It raises the errors of `make_train_step` and
    `fit`.
    """
    a = arguments
    with_state = a.model_state is not None
    step = make_train_step(
        a.loss_fn, a.tx, model_state=with_state,
        average_model_state=with_state and a.evaluate_average not in (False, None)
        and not callable(a.evaluate_average), **a.of(StepOptions),
    )  # fmt: skip
    return fit(step, step.init(a.params, a.model_state), a.batches, **a.of(LoopOptions))


@accept_fields(FitArguments)
def fit(options: FitArguments) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train with a step that you made, from a state of it, by one step for each batch, and return
    the last state, or the best with `keep_best`, and a history.

    Ctrl-C or SIGTERM ends the run after the current step. That step is evaluated and saved as the
    last step of a run is, and state and history are returned. A second Ctrl-C interrupts at once.
    In a run of several processes, a signal to any of them ends all of them after the same step,
    within some seconds, unless you have turned off JAX's option `jax_enable_preemption_service`.

    Args:
      step: a training step, from `make_train_step`.
      state: where to start: `step.init(params)`, or any later state of that step. It is donated,
        unless the step was made with `donate=False`.
      batches: an iterable of batches, beginning with the batch of the first step after `state`.
        The leaves of a batch are numbers, arrays of JAX or NumPy, or tensors, of torch for example,
        that `np.asarray` takes without a copy. You can pass a torch DataLoader as it is.
      **LoopOptions

    With local steps, each batch is a round. `steps`, `save_every` and `evaluate_every` count local
    steps; a save or an evaluation that is due within a round happens at its end.

    Returns:
      The last TrainState, and the history, a dict of NumPy arrays. With one entry per batch it has
      "loss"; "learning_rate" and "bytes_sent", if the step returns them; the norms and the clip
      factor of `record_metrics`, if it is in tx (without local steps); "aux", or "aux/<key>" for
      each number of a tree, if the loss returns numbers; and "epoch", with `epochs`. With one entry
      per evaluation it has "evaluation", or "evaluation/<key>" for each number of a dict; and
      "evaluation_step", the number of steps before it. If a number was recorded only before or only
      after a restart, its remaining entries are NaN. "stopped" is a word for the end of the run:
      "steps", "batches", "patience", "callback", or "signal" (Ctrl-C, SIGTERM). A run that ends
      between two evaluations that are due evaluates its last state: no plateau and no `patience`
      counts it, and once the run goes on, in another call, it counts for nothing.

    Raises:
      ValueError: `batches` is empty, ends before `steps` or before the step of the checkpoint, or
        cannot be iterated again for `epochs`; there is a checkpoint although `resume` is False; no
        checkpoint can be loaded; `evaluate` does not return the number that `monitor` names; or
        `patience` or `keep_best` need `monitor`, because `evaluate` returns a dict.
      FloatingPointError: `skip_nonfinite` gave up; or a loss is not finite, with
        `on_nonfinite="stop"`.
      TypeError: `step` is not a TrainStep, or `state` is no state of it; an option is of a wrong
        type; or `callback` returns a state.
    """
    return _Run(options).finish()


class _Run:
    """A run: its records, its checkpoints, and its state after step n."""

    def __init__(self, options: FitArguments) -> None:
        step, state = options.step, options.state
        step.check_state(state)
        options.check_batches()
        begin = int(state.step)
        self.step, self.options = step, options
        # A pipeline's mesh is its own, and the step has none: the state tells.
        self.is_shared = processes.has_state_on_all_processes(state)
        asks = options.callback is not None or options.patience is not None
        self.can_end_early = processes.is_true_anywhere(asks) if self.is_shared else asks
        self.saver = Saver(step, options, is_shared=self.is_shared)
        self.state, self.history = self.saver.restore(state)
        self.n = self.done = int(self.state.step)
        self.remaining = Remaining(options, self.done - begin, self.saver.batches)
        self.evaluator = Evaluator(options, self.history, self.saver.batches)
        self.watch = LossWatch(options, self.history, self.done)
        self.work = WorkCounter(step, is_logged=options.log is not None)
        self.best = Best(self.evaluator, self.saver)
        self.best.restore(self.state, is_resumed=self.saver.resumed is not None)
        steps = self.remaining.last_step()
        self.last = None if steps is None else begin + steps
        if self.last is not None:
            warn_of_schedules(step.tx, self.last, begin)
        gave_up = self.evaluator.gave_up
        self.stopped = processes.is_true_anywhere(gave_up) if self.is_shared else gave_up

    def finish(self) -> tuple[TrainState, dict[str, np.ndarray]]:
        """Take steps until the batches end or something stops the run, and return the last state,
        or the best one with `keep_best`, and the history."""
        options, per_call = self.options, self.step.local_steps
        with (
            Progress(
                self.last, options.progress, self.done, per_call=per_call, seen=self.watch.see
            ) as bar,
            RunLog(
                options.log,
                None if self.is_shared and jax.process_index() else self.done,
                self.watch,
                is_watched=self.watch.stops,
                by_weight=options.count_tokens == WEIGHT,
            ) as lines,  # fmt: skip
            RunReport(options.report, self.history.arrays, self.step, self.state) as page,
            catch_signals(self.is_shared) as interrupt,
        ):
            if self.saver.resumed is not None:
                bar.say(f"resumed from step {self.done} of {self.saver.place}")
            for batch in self._iterate_batches():
                if self.n == self.done and self.evaluator.go_on():
                    self.best.go_on(self.state)
                    lines.drop_evaluation(self.n)
                metrics = self._take_step(batch)
                bar(self.n, metrics, batch)
                self._say_left_out(bar, metrics)
                lines(self.n, metrics, self.work.count(self.state, batch, self.remaining.tokens))
                page()
                self.stopped = self._is_ended(metrics, interrupt)
                self.watch.check()  # once the log has the step whose loss ends the run
                if self.stopped:
                    break
                if self.saver.is_due(self.n):
                    self._save()
            bar.add_evaluation(self._end(lines))
            word, early = self._describe_end(interrupt.name)
            page.end = early or page.end
            self._announce_end(bar, early, interrupt.name)
        end = cast("Any", np.str_(word))  # a scalar of NumPy, which is a str too
        return self.best.choose(self.state), self.history.arrays() | {STOPPED: end}

    def _take_step(self, batch: Batch) -> dict[str, Any]:
        """Take a step on a batch, read the next batch ahead, evaluate the state if that is due, and
        return the metrics of both."""
        self.state, metrics = self.step.dispatch(self.state, batch)
        self.n += self.step.local_steps
        # Before anything waits for the step, so that its devices and the loader work together.
        if self.options.prefetch:
            self.remaining.read_ahead(functools.partial(self.step.place_batch, state=self.state))
        wait_on_cpus(metrics)
        if self.remaining.epoch is not None:
            metrics["epoch"] = self.remaining.epoch
        if self.options.count_tokens == WEIGHT and "weight" not in metrics:
            raise ValueError(
                f"count_tokens={WEIGHT!r} is the weight of the loss, which must be an optfn.Mean; "
                "got a plain number. Return a Mean, or pass a function batch -> number of tokens"
            )
        self.history.append(metrics)
        if self.evaluator.is_due(self.n, self.remaining.is_epoch_end):
            metrics |= self._evaluate()
        return metrics

    def _evaluate(self, *, is_provisional: bool = False) -> dict[str, float]:
        """Evaluate the state, tell its plateaus unless it is provisional, keep it if it is the best
        so far, and return the values."""
        values = self.evaluator(self.n, self.state, is_provisional=is_provisional)
        if not is_provisional:
            self.state = self.evaluator.tell_plateaus(self.n, self.state)
        self.best.consider(self.state, is_provisional=is_provisional)
        return values

    def _iterate_batches(self) -> Iterator[Batch]:
        """Return the remaining batches, the same number in all processes, or none if the run has
        ended before."""
        if self.stopped:
            return iter(())
        if not self.is_shared:
            return iter(self.remaining)
        return iterate_together(self.remaining)

    def _is_ended(self, metrics: dict[str, Any], interrupt: Interrupt) -> bool:
        """Tell whether the callback, patience or a signal ends the run in any of the processes,
        which would wait for ever for one that has ended alone."""
        ended = self._run_callback(metrics) or self.evaluator.gave_up
        if self.can_end_early and self.is_shared:
            ended = processes.is_true_anywhere(ended)
        # Each call must ask: the processes agree on a call to stop after.
        return interrupt.is_due(self.n // self.step.local_steps) or ended

    def _run_callback(self, metrics: dict[str, Any]) -> bool:
        """Call the user's callback and tell whether it returned True, with False if there is none,
        and raise a TypeError if it returned a state.

        Raises:
          TypeError: it returned a state, which would have no effect.
        """
        callback = self.options.callback
        if callback is None:
            return False
        values = to_python_numbers(metrics)
        self.watch.see(values["loss"])
        answer = callback(self.n, self.state, values)
        if any(map(is_train_state, jax.tree.leaves([answer], is_leaf=is_train_state))):
            raise TypeError(
                f"callback returned {checks.show(answer)}. It cannot replace the state; return "
                "True to end the run, else None. To change the state between steps, end the run, "
                "change the state that fit returns, and pass it to fit again"
            )
        # A comparison of metrics may give a boolean of NumPy or JAX instead of True.
        if isinstance(answer, np.bool_ | np.ndarray | jax.Array):
            return answer.dtype == bool and bool(answer)
        return answer is True

    def _end(self, lines: RunLog) -> dict[str, float]:
        """Check the last state, evaluate it if no evaluation has seen it, save it, and return the
        values of that evaluation, or {} without one."""
        self.step.check(self.state)
        self._read_losses()
        warn_of_bad_batches(self.history.arrays())
        if not self.stopped:  # a run that was stopped leaves batches over
            self.remaining.check()
        is_new = self.n > self.done
        to_evaluate = is_new and not self.evaluator.has_seen(self.n)
        values = self._evaluate(is_provisional=True) if to_evaluate else {}
        if to_evaluate:
            lines(self.n, values, {})
        if is_new:
            self.evaluator.warn_of_mode()
        lines.finish()  # a run that is killed after its last checkpoint writes none of them again
        # The history in a checkpoint of this step lacks the last evaluation.
        must_save = self.saver.saved != self.n or to_evaluate
        if processes.is_true_anywhere(must_save) if self.is_shared else must_save:
            self._save()
        finish_saving()
        self.remaining.close()
        return values

    def _read_losses(self) -> None:
        """Move the losses to the host, and warn or raise if one of them is not finite. A save or
        the end of the run reads them in any case."""
        self.history.first_nonfinite()
        self.watch.check()

    def _save(self) -> None:
        """Check the losses, and save the state, the history and the position of the batches, or
        nothing without a directory."""
        self._read_losses()
        self.saver.save(self.state, self.history, self.remaining, self.evaluator)

    def _say_left_out(self, bar: Progress, metrics: dict[str, Any]) -> None:
        """Show a line after the first step that names the arrays of aux, if there are any and no
        callback gets them."""
        is_first = self.n == self.done + self.step.local_steps
        is_asked = is_first and self.options.callback is None
        if is_asked and (arrays := describe_arrays(metrics.get("aux"))):
            bar.say(
                f"history and log keep numbers, without the arrays of aux: {arrays}. A callback "
                "gets them"
            )

    def _announce_end(self, bar: Progress, early: str, by_signal: str) -> None:
        """Show a line if the run has ended early, took no step, or leaves gradients unused.
        Without progress, show it only if a signal ended the run, and warn of gradients that are
        unused at the end of the data."""
        if by_signal:
            bar.say(early, always=True)
        elif self.n == self.saver.resumed:
            bar.say(f"the run in {self.saver.place} is already finished; no step was taken")
        elif early:
            bar.say(f"stopped {early}")
        elif waiting := count_waiting_gradients(self.state.opt_state):
            words = (
                f"the run ends within an accumulation: {waiting} gradients are summed, and change "
                "no param unless a run goes on from this state"
            )
            # At the end of the data they would be lost without a word.
            bar.say(words) if bar.shown or self.options.steps else checks.warn(words)

    def _describe_end(self, by_signal: str) -> tuple[str, str]:
        """Return the word for the end of the run, "signal", "patience" or "callback", and how it
        ended early in words; else "steps" if `steps` was given and "batches" if not, and ""."""
        if by_signal:
            return "signal", f"stopped by {by_signal} after step {self.n}"
        if self.evaluator.gave_up:
            best = f"the best evaluation is of step {self.evaluator.best_step}"
            if not self.evaluator.best_step:
                best = "no evaluation is a number"
            elif self.best.value == self.evaluator.best:
                best += ", whose state is returned"
            return "patience", f"by patience after step {self.n}; {best}"
        if self.stopped:
            return "callback", f"early, after step {self.n}"
        return "batches" if self.options.steps is None else "steps", ""
