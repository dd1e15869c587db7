"""The states that a run keeps: its checkpoints, and the one with the best evaluation."""

import datetime
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from optfn import checks
from optfn.parallel import processes
from optfn.run import position
from optfn.run.batches import Remaining
from optfn.run.checkpoint import checkpoints, restore_checkpoint, save_checkpoint
from optfn.run.evaluation import Evaluator
from optfn.run.history import History
from optfn.run.options import LoopOptions
from optfn.run.storage import directory_of
from optfn.train.state import TrainState
from optfn.train.step import TrainStep
from optfn.transforms.learning_rate import numbers_of_rates


class Saver:
    """Saves a run in a directory, where one is given, and finds the one that was saved there.

    step, options: those of the run.
    saved: the step of the last checkpoint; None before there is one.
    resumed: the step of the one that the run resumes from; None for a new run.
    batches: where the iterator of batches stood there, if that is known.
    """

    def __init__(self, step: TrainStep, options: LoopOptions) -> None:
        self.step, self.options = step, options
        self.directory = options.checkpoint
        self._clock = (
            _Clock(options.save_every, processes.share(step.mesh))
            if isinstance(options.save_every, datetime.timedelta)
            else None
        )
        self.saved: int | None = None
        self.resumed: int | None = None
        self.batches: position.Position | None = None

    @property
    def place(self) -> str:
        """The directory, as text that ends with a separator."""
        return "" if self.directory is None else os.path.join(self.directory, "")

    def restore(self, state: TrainState) -> tuple[TrainState, History]:
        """Return the state and the history to start from: those that were saved, if any.

        Raises:
          ValueError: those that were saved are of a step before `state`, or are not wanted.
        """
        history, begin = History(), int(state.step)
        if self.directory is None:
            return state, history
        if directory_of(self.directory).is_file():
            raise NotADirectoryError(f"checkpoint must be a directory; {self.directory} is a file")
        if not self.options.resume:
            self._check_empty(state)
            return state, history
        restored = restore_checkpoint(self.directory, state)
        if restored is None:
            return state, history
        found, arrays = restored
        self.batches = position.decoded(arrays)
        history.earlier = {k: x for k, x in arrays.items() if k != position.BATCHES}
        self.saved = self.resumed = int(found.step)
        if self.saved < begin:
            raise ValueError(
                f"the checkpoint in {self.directory} is of step {self.saved}, before step "
                f"{begin} of state: give the state that the run began with, or another directory"
            )
        _warn_of_rates(state, found)
        return found, history

    def _check_empty(self, state: TrainState) -> None:
        """Raise a ValueError where a process has checkpoints, in all processes of the run."""
        assert self.directory is not None
        found = checkpoints(self.directory)
        count = len(found)
        if processes.share_state(state):
            count = int(np.sum(processes.gather_values([count])))
        if count:
            which = f"there is {found[-1]}" if found else "another process has a checkpoint"
            raise ValueError(
                f"resume=False, and {which}: give another directory, remove the checkpoints, or "
                "pass resume=True to go on from the newest"
            )

    def is_due(self, n: int) -> bool:
        """Tell whether a save was due in the steps of the last call, which ended with step n."""
        every = self.options.save_every
        if self.directory is None:
            return False
        if isinstance(every, int):
            return n // every > (n - self.step.local_steps) // every
        return self._clock is not None and self._clock.is_due()

    def save(self, state: TrainState, history: History, batches: Remaining) -> None:
        """Save a state, the history and where the batches stand."""
        if self.directory is not None:
            self.step.check(state)
            stands = position.encoded(batches.position(), processes.share_state(state))
            arrays, keep = history.arrays() | stands, self.options.keep
            save_checkpoint(self.directory, state, arrays, keep=keep, background=True)
            self.saved = int(state.step)


class _Clock:
    """Tells whether an interval has passed since the last save, the same in all processes.

    They must agree, which stops them until the devices are done. So they look at the clock of
    process 0 only at a few calls: after half of the calls that the rest of the interval seems to
    have room for, and again.
    """

    def __init__(self, interval: datetime.timedelta, is_shared: bool) -> None:
        self.seconds, self.is_shared = interval.total_seconds(), is_shared
        self._restart()

    def _restart(self) -> None:
        self.began, self.calls, self.next_look = time.monotonic(), 0, 1

    def is_due(self) -> bool:
        """Tell so, once after each call of the step."""
        self.calls += 1
        if self.calls < self.next_look:
            return False
        passed = time.monotonic() - self.began
        if self.is_shared:
            passed = int(processes.gather_values([min(int(1000 * passed), 2**31 - 1)])[0, 0]) / 1000
        if passed >= self.seconds:
            self._restart()
            return True
        rest = (self.seconds - passed) / max(passed, 1e-3) * self.calls
        self.next_look = self.calls + max(1, int(rest / 2))
        return False


def _warn_of_rates(given: TrainState, found: TrainState) -> None:
    """Warn of learning rates, given as numbers, that a resumed state has others for."""
    new, old = numbers_of_rates(given.opt_state), numbers_of_rates(found.opt_state)
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            checks.warn(
                f"the run resumes at the learning rate of its checkpoint, {old[name]:g}, and not "
                f"at that of tx, {new[name]:g}. To change it, restore the checkpoint, call "
                "optfn.set_learning_rate, and save it again"
            )
            return


class Best:
    """The state with the best evaluation among those that the run can return, where asked for."""

    def __init__(self, evaluator: Evaluator, saver: Saver) -> None:
        self.evaluator = evaluator
        self.is_kept = evaluator.options.keep_best
        self.directory = None if saver.directory is None else directory_of(saver.directory) / "best"
        self.state: TrainState | None = None
        self.value = evaluator.worst

    def restore(self, resumed: TrainState) -> None:
        """Begin with the state that was kept, or the one that is resumed if that is better."""
        if not self.is_kept or not int(resumed.step):
            return
        found = None if self.directory is None else restore_checkpoint(self.directory, resumed)
        # A state from after the last checkpoint is not in the history; the run makes it again.
        if found is not None and int(found[0].step) in self.evaluator.monitored:
            self.state = found[0]
            self.value = self.evaluator.monitored[int(self.state.step)]
        self.consider(resumed)

    def consider(self, state: TrainState) -> None:
        """Keep a copy of a state if its evaluation is the best."""
        if not self.is_kept:
            return
        value = self.evaluator.monitored.get(int(state.step), np.nan)
        if self.evaluator.is_better(value, self.value):
            self.state, self.value = jax.tree.map(jnp.copy, state), value
            if self.directory is not None:
                save_checkpoint(self.directory, state, keep=1, background=True)

    def choose(self, last: TrainState) -> TrainState:
        """Return the best state, or the last one; warn where an earlier run had a better one."""
        state = last if self.state is None else self.state
        evaluator = self.evaluator
        if self.is_kept and evaluator.is_better(evaluator.best, self.value):
            checks.warn(
                f"keep_best: the state of step {int(state.step)} comes back. The evaluation of "
                f"step {evaluator.best_step} is better, {evaluator.best:g}, but its "
                "state was not kept when the run was there"
            )
        return state
