"""The states that a run keeps: its checkpoints, and the one with the best evaluation."""

import contextlib
import datetime
import os
import secrets
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from optfn.checkpoint.checkpoint import choose_form, restore_newest, warn_of_rates, write_checkpoint
from optfn.checkpoint.directory import is_directory_default
from optfn.checkpoint.frozen import FrozenParams
from optfn.checkpoint.loader import Loader
from optfn.checkpoint.newest import OtherRun, list_checkpoints, remove_checkpoints
from optfn.checkpoint.storage import is_remote, to_path, try_to_write
from optfn.core import checks
from optfn.mesh.layout import processes
from optfn.mesh.state.reports import read_local
from optfn.run import position
from optfn.run.batches import Remaining
from optfn.run.evaluation import Evaluator
from optfn.run.history import History
from optfn.run.options import STOPPED, LoopOptions
from optfn.train.state import TrainState
from optfn.train.step import TrainStep
from optfn.train.worker_step import make_key


class Saver:
    """Saves a run in a directory, if there is one, and restores a run that was saved there.

    step, options: the step and the options of the run.
    place: the directory, as text that ends with a separator; "" if there is none.
    saved: the step of the last checkpoint; None before there is one.
    resumed: the step of the checkpoint that the run resumes from; None for a new run.
    batches: the record of the batches before that checkpoint, as it has it.
    frozen: leaves frozen params out of the checkpoints; None if they are saved.
    """

    def __init__(self, step: TrainStep, options: LoopOptions, *, is_shared: bool) -> None:
        self.step, self.options, self.is_shared = step, options, is_shared
        self.directory = None if options.checkpoint is None else to_path(options.checkpoint)
        self.frozen = None if options.save_frozen else FrozenParams(step.tx)
        self.place = "" if options.checkpoint is None else os.path.join(options.checkpoint, "")
        self._clock: _Clock | None = None
        if isinstance(options.save_every, datetime.timedelta):
            self._clock = _Clock(options.save_every, is_shared)
        self.saved: int | None = None
        self.resumed: int | None = None
        self.batches = position.NOTHING
        self._rng = None if self.directory is None else _describe_key(step.options.rng)

    def restore(self, state: TrainState) -> tuple[TrainState, History]:
        """Return the saved state and history, or the given state and an empty history if none are
        saved, and raise a ValueError if the run must not resume.

        Raises:
          ValueError: the saved ones are from a step before `state`, or the run must not resume; or
            several processes would write files into one directory.
        """
        self._check_directories(state)
        history, begin = History(), int(state.step)
        restored = None if self.directory is None else self._restore_newest(self.directory, state)
        if restored is None:
            _warn_of_other_directories(self.directory)
            _try_directory(self.directory, state)
            return state, history
        found, arrays = restored
        self.batches = position.decode_position(arrays)
        history.earlier = {k: x for k, x in arrays.items() if k not in (position.BATCHES, STOPPED)}
        self.saved = self.resumed = int(found.step)
        if self.saved < begin:
            raise ValueError(
                f"the checkpoint in {self.directory} is from step {self.saved}, but state is from "
                f"a later step, {begin}. Pass the state that the run began with, or another "
                "directory"
            )
        remedy = "restore the checkpoint, call optfn.set_learning_rate, and save it again"
        warn_of_rates(state, found, remedy)
        self._warn_of_rng()
        return found, history

    def _warn_of_rng(self) -> None:
        """Warn if the run goes on with another `rng=` than before, unless one of the two is
        unknown."""
        known = (self.batches.rng, self._rng)
        if None not in known and known[0] != known[1]:
            checks.warn(
                f"the run goes on with another rng than until step {self.saved}, so its random "
                "numbers are not those of one run; pass the same seed or key to continue it"
            )

    def _check_directories(self, state: TrainState) -> None:
        """Raise a ValueError in every process if only some of them have a directory, or if several
        write files into the same one.

        Several processes write under the same names, so one removes the file that another is
        writing. Each process creates a file and lists the directory, because paths do not tell
        which disks they share.

        Raises:
          ValueError: a directory is shared; checkpoints that are directories must be.
        """
        if not self.is_shared:
            return
        without = np.flatnonzero(processes.gather_values([self.directory is not None])[:, 0] == 0)
        if 0 < len(without) < jax.process_count():
            raise ValueError(
                f"checkpoint: process {without[0]} has no directory, but other processes have one. "
                "Pass a directory in every process: all save together"
            )
        if self.directory is None:
            return
        place = self.directory
        has_files = not (is_remote(place) or is_directory_default(state))
        # A number of process 0, so that the file of a killed run is not mistaken for a process.
        number = secrets.randbelow(2**31)
        number = int(processes.gather_values([number])[0, 0])
        # `remove_oldest` removes such a file if this process is killed.
        own = place / f"step_process_{number}_{jax.process_index()}.unfinished"
        if has_files:
            with contextlib.suppress(OSError):  # no process waits in vain; a save raises the error
                place.mkdir(parents=True, exist_ok=True)
                own.touch()
        processes.gather_values([0])  # every process has written
        seen = [*place.glob(f"step_process_{number}_*.unfinished")] if has_files else []
        counts = processes.gather_values([len(seen)])[:, 0]
        if has_files:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
        if np.any(counts > 1):
            raise ValueError(
                f"checkpoint: {np.max(counts)} processes would write files into the same "
                f"directory, such as {self.directory} of process {np.argmax(counts)}. Each process "
                "needs its own: "
                f'checkpoint=f"{self.directory}/{{jax.process_index()}}"'
            )

    def _restore_newest(
        self, directory: Path, state: TrainState
    ) -> tuple[TrainState, dict[str, np.ndarray]] | None:
        """Return the newest checkpoint in a directory, or None if there is none, and raise a
        ValueError if there is one and the run must not resume."""
        if directory.is_file():
            raise NotADirectoryError(f"checkpoint must be a directory; {directory} is a file")
        if self.options.resume:
            try:
                return restore_newest(directory, Loader(state))
            except OtherRun as error:
                raise OtherRun(
                    f"checkpoint: {directory} has the checkpoints of another run; use another "
                    f"directory for this one: {error}"
                ) from error
        found = list_checkpoints(directory)
        # All processes must raise: the rest would wait for ever in their next collective.
        if np.any(processes.gather_values([len(found)]) if self.is_shared else len(found)):
            which = f"there is {found[-1]}" if found else "another process has a checkpoint"
            raise ValueError(
                f"resume=False, but {which}. Pass another directory, remove the checkpoints, or "
                "pass resume=True to continue from the newest"
            )
        return None

    def is_due(self, n: int) -> bool:
        """Tell whether a save is due after step n, because a multiple of `save_every` or its time
        has passed, but never without a directory."""
        every = self.options.save_every
        if self.directory is None:
            return False
        if isinstance(every, int):
            return n // every > (n - self.step.local_steps) // every
        return self._clock is not None and self._clock.is_due()

    def save(
        self, state: TrainState, history: History, batches: Remaining, evaluator: Evaluator
    ) -> None:
        """Check a state, and save it with the history, the position of the batches and the
        evaluations that the history lacks in the background, or do nothing without a directory."""
        if self.directory is not None:
            # Before the write: a state that must end the run does not become a checkpoint.
            self.step.check(state)
            beside = position.Saved(
                None, batches.checksum, self._rng, evaluator.provisional, evaluator.first
            )
            is_shared = processes.has_state_on_all_processes(state)
            stands = position.encode_position(batches.position(), is_shared, beside)
            arrays, keep = history.arrays() | stands, self.options.keep
            write_checkpoint(
                self.directory, state, arrays, keep=keep, background=True, frozen=self.frozen
            )
            self.saved = int(state.step)


def _warn_of_other_directories(directory: Path | None) -> None:
    """Warn if a local directory without checkpoints has directories of processes, "0", "1", …, with
    some, which a run of one process does not see."""
    if directory is None or is_remote(directory) or not directory.is_dir():
        return
    found = [x for x in directory.iterdir() if x.name.isdigit() and x.is_dir()]
    saved = sorted((x for x in found if list_checkpoints(x)), key=lambda x: int(x.name))
    if saved:
        checks.warn(
            f"checkpoint: {directory} has no checkpoint, and the run begins anew, but {saved[0]} "
            "has some, as of a run of several processes: pass that directory to continue it"
        )


def _try_directory(directory: Path | None, state: TrainState) -> None:
    """Try the directory of a new run, so that a place where nothing can be saved is an error before
    the first step, or do nothing without one or for an object store."""
    if directory is not None and not (choose_form(directory, state) and is_remote(directory)):
        try_to_write(directory)


def _describe_key(rng: bool | int | jax.Array) -> list[int | str] | None:
    """Return the data of the key of `rng=` and the name of its implementation as a list that a
    checkpoint can keep, or None without a key."""
    key = make_key(rng)
    if key is None:
        return None
    return [*np.ravel(read_local(jax.random.key_data(key))).tolist(), str(jax.random.key_impl(key))]


class _Clock:
    """Tells whether an interval has passed since the last save, with one answer for all processes.

    To agree, the processes have to wait until their devices are done. So they look at the clock of
    process 0 only in a few calls: after half of the calls that the rest of the interval seems to
    have room for, then after half of those that are left, and so on.
    """

    def __init__(self, interval: datetime.timedelta, is_shared: bool) -> None:
        self.seconds, self.is_shared = interval.total_seconds(), is_shared
        self._restart()

    def _restart(self) -> None:
        # Look at once: the time of the first call tells how many calls the interval has room for.
        self.began, self.calls, self.next_look = time.monotonic(), 0, 1

    def is_due(self) -> bool:
        """Count a call of the step and tell whether the interval has passed; if so, it begins anew.
        It must be called once after each call of the step."""
        self.calls += 1
        if self.calls < self.next_look:
            return False
        passed = time.monotonic() - self.began
        if self.is_shared:
            # Milliseconds, up to 24 days: gather_values sends int32.
            passed = int(processes.gather_values([min(int(1000 * passed), 2**31 - 1)])[0, 0]) / 1000
        if passed >= self.seconds:
            self._restart()
            return True
        rest = (self.seconds - passed) / max(passed, 1e-3) * self.calls
        self.next_look = self.calls + max(1, int(rest / 2))
        return False


class Best:
    """The state with the best evaluation among those that the run can return, for `keep_best`."""

    def __init__(self, evaluator: Evaluator, saver: Saver) -> None:
        self.evaluator = evaluator
        self.is_kept = evaluator.options.keep_best
        self.directory = saver.directory and saver.directory / "best"
        self.frozen = saver.frozen
        self.state: TrainState | None = None
        self.value = evaluator.worst

    def restore(self, begun: TrainState, *, is_resumed: bool) -> None:
        """Begin with the state that an earlier run kept, or the first state if it is better, but do
        nothing without `keep_best` or before the first step.

        A state that has made steps without an evaluation is evaluated now, unless the run resumes
        and goes on as if it had not been stopped: then no evaluation is added between those due.
        """
        if not self.is_kept or not int(begun.step):
            return
        is_new = not self.evaluator.monitored
        if is_new and (not is_resumed or self.evaluator.has_been_due(int(begun.step))):
            self.evaluator.record_first(begun)
        self._read(begun)
        self.consider(begun, is_provisional=self.evaluator.provisional == int(begun.step))

    def go_on(self, begun: TrainState) -> None:
        """Forget and remove a state that was kept for a provisional evaluation, and read the one
        before it, or do nothing without `keep_best`."""
        if not self.is_kept:
            return
        if self.directory is not None:
            remove_checkpoints(self.directory, [int(begun.step)], begun)
        self.state, self.value = None, self.evaluator.worst
        self._read(begun)

    def _read(self, begun: TrainState) -> None:
        """Read the state that an earlier run kept, if there is one in the directory and the history
        has its evaluation."""
        if self.directory is None:
            return
        found = restore_newest(self.directory, Loader(begun))
        # A state later than the last checkpoint is not in the history; the run makes it again.
        if found is not None and int(found[0].step) in self.evaluator.monitored:
            # A copy: params that the checkpoint lacks are those of `begun`, which steps overwrite.
            self.state = jax.tree.map(jnp.copy, found[0])
            self.value = self.evaluator.monitored[int(self.state.step)]

    def consider(self, state: TrainState, *, is_provisional: bool = False) -> None:
        """Keep a copy of a state, and save it if there is a directory, if `keep_best` is on and it
        is better than the one kept.

        For a provisional evaluation, the directory keeps the state before it too.
        """
        if not self.is_kept:
            return
        value = self.evaluator.monitored.get(int(state.step), np.nan)
        if self.evaluator.is_better(value, self.value):
            # A copy, because the next step overwrites the state.
            self.state, self.value = jax.tree.map(jnp.copy, state), value
            if self.directory is not None:
                # All stay for it, as one that is not finite would be removed.
                keep = None if is_provisional else 1
                write_checkpoint(
                    self.directory, state, keep=keep, background=True, frozen=self.frozen
                )

    def choose(self, last: TrainState) -> TrainState:
        """Return the kept state, or else the last one, and warn with `keep_best` if the state of a
        better evaluation was not kept."""
        state = last if self.state is None else self.state
        evaluator = self.evaluator
        if self.is_kept and evaluator.is_better(evaluator.best, self.value):
            checks.warn(
                f"keep_best returns the state of step {int(state.step)}. The evaluation of step "
                f"{evaluator.best_step} was better, {evaluator.best:g}, but its state was "
                "not kept at that time"
            )
        return state
