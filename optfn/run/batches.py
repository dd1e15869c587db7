"""The batches that a run has not used yet, pass by pass."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sized
from typing import NamedTuple

from optfn.core import checks
from optfn.core.types import Batch
from optfn.mesh.layout import processes
from optfn.run.options import WEIGHT, FitArguments
from optfn.run.position import (
    NOTHING,
    Position,
    Saved,
    StatefulIterator,
    TakenPosition,
    find_checksum,
    take_position,
)


def iterate_together(remaining: "Remaining") -> Iterator[Batch]:
    """Yield batches in a run of several processes, and raise a ValueError in all of them if one has
    fewer, since the rest would wait for it for ever.

    Where batches have a length, it is compared once. Else all processes compare before each step,
    unless `steps` says how many are needed.
    """
    length, most = -1, remaining.most
    if isinstance(remaining.batches, Sized):
        with contextlib.suppress(TypeError):  # a DataLoader over a stream
            length = len(remaining.batches)
    is_enough = most is not None and remaining.epochs is None and length >= most
    _check_equal(most if most is not None and is_enough else length, "batches, by their lengths")
    is_asked, iterator = length < 0 and most is None, iter(remaining)
    for number in itertools.count(1):
        batch = list(itertools.islice(iterator, 1))
        if is_asked:
            _check_equal(len(batch), f"batches, 1 or 0 of them, for step {number} of this call")
        if not batch:
            return
        yield batch[0]


def _check_equal(number: int, noun: str) -> None:
    """Raise a ValueError in every process unless all pass the same number."""
    numbers = processes.gather_values([number])[:, 0].tolist()
    if len({*numbers}) > 1:
        raise ValueError(
            f"all processes must give the same number of {noun}; processes 0, 1, … have {numbers}"
        )


class _Drawn(NamedTuple):
    """A batch, the index of its pass, from 1, and its tokens and checksum, None if nothing needs
    them."""

    epoch: int
    batch: Batch
    tokens: int | None
    checksum: int | None


class Remaining:
    """The batches that a run has not used yet, and a count of all batches.

    options: the arguments of `fit`; with `epochs`, their batches are those of one pass.
    done: the number of steps that the run has made.
    found: the record of a checkpoint of the batches before. If it has the iterator's position, and
      the iterator can continue from there, used batches are not drawn again.
    epoch: the number of the pass of the last batch, from 1; None without `epochs`.
    tokens: the tokens of the last batch; None without a log, or without `count_tokens`.
    checksum: the checksum of the last batch; None without checkpoints, or if it is on a device.
    """

    def __init__(self, options: FitArguments, done: int, found: Saved = NOTHING) -> None:
        self.batches, self.local_steps = options.batches, options.step.local_steps
        self.steps, self.epochs = options.steps, options.epochs
        self.used, self.given = done // self.local_steps, 0
        # A batch is a round of `local_steps` steps.
        self.most = None if self.steps is None else self.steps // self.local_steps
        self.is_finished = self.steps is not None and done >= self.steps
        self.epoch: int | None = None
        self.tokens: int | None = None
        is_function = options.log is not None and options.count_tokens != WEIGHT
        count = options.count_tokens if is_function else None
        self._count_tokens = count if callable(count) else None
        self._pass = 1
        self._iterator: Iterator[Batch] = iter(())
        self._is_saved = options.checkpoint is not None
        self.checksum = self._expected = found.checksum
        at = found.position
        self._passes = self._iterate_epochs(at and self._resume_iterator(at))
        # At most one, or the error of the iterator in its place.
        self._ahead: list[_Drawn | Exception] = []
        self._before_ahead: TakenPosition | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._skip_used()
        while not self.is_finished and self.given != self.most and self._look_ahead():
            yield self._draw()

    def close(self) -> None:
        """Let go of the iterator of the batches, which ends its processes and closes its files now
        and not when Python collects cycles."""
        self._passes.close()
        self._iterator, self._ahead = iter(()), []

    def _skip_used(self) -> None:
        """Draw and skip the batches that the run has used, unless the iterator is already behind
        them, and warn if the last one is another than before."""
        if self.is_finished or self.given >= self.used:
            return
        while self.given < self.used and self._look_ahead():
            self._draw()
        known = (self._expected, self.checksum)
        if self.given == self.used and None not in known and len({*known}) > 1:
            checks.warn(
                f"the run goes on with other data: batch {self.used}, the last one before its "
                "checkpoint, is not the batch that it was, so batches are others, or come in "
                "another order. Let a seed decide the order, as optfn.shuffled does"
            )

    def _draw(self) -> Batch:
        """Take the batch that was read ahead, count it and return it, or raise the error that
        reading it has raised."""
        drawn = self._ahead.pop()
        if isinstance(drawn, Exception):
            raise drawn
        self.given += 1
        self.epoch = None if self.epochs is None else drawn.epoch
        self.tokens, self.checksum = drawn.tokens, drawn.checksum
        return drawn.batch

    def _draw_next(
        self, place: Callable[[Batch], Batch] = lambda batch: batch
    ) -> list[_Drawn | Exception]:
        """Draw the next batch, place it, and return it as a list of one, or as an empty list at the
        end of the batches.

        Tokens are counted before: on a device, the count would wait for the step that runs there.
        """
        return [
            _Drawn(epoch, place(x), self._count(x), find_checksum(x) if self._is_saved else None)
            for epoch, x in itertools.islice(self._passes, 1)
        ]

    def _count(self, batch: Batch) -> int | None:
        """Call the user's `count_tokens` on a batch and return the count, or return None without
        such a function."""
        if self._count_tokens is None:
            return None
        found = self._count_tokens(batch)
        return checks.count("count_tokens(batch)", found, low=0, hint="wrap it in int()")

    def _look_ahead(self) -> bool:
        """Draw the next batch, unless one is drawn already, and tell whether there is one."""
        self._ahead = self._ahead or self._draw_next()
        return bool(self._ahead)

    def read_ahead(self, place: Callable[[Batch], Batch]) -> None:
        """Draw the next batch and place it, unless it is drawn already or the run takes no more
        steps, and keep an error until the batch is due.

        The run may end before.
        """
        if not (self.is_finished or self.given == self.most):
            self._draw_ahead(place)

    def _draw_ahead(self, place: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """Draw the next batch, or keep the error of it, unless it is drawn already, and record the
        iterator's position before, which a checkpoint must not skip."""
        if self._ahead:
            return
        if self._is_saved:
            self._before_ahead = self._position()
        try:
            self._ahead = self._draw_next(place)
        except Exception as error:
            self._ahead = [error]

    def _resume_iterator(self, found: Position) -> Iterator[Batch] | None:
        """Return a new iterator restored at a saved position, or None if it has no `set_state`, or
        refuses the state, which a warning says."""
        self._set_epoch(found.epoch)
        iterator = iter(self.batches)
        if not isinstance(iterator, StatefulIterator):
            return None
        try:
            iterator.set_state(found.state)
        except Exception as error:  # any kind, since the iterator is from another library
            checks.warn(
                "the iterator of batches does not accept its state from the checkpoint, so the "
                f"run draws the used batches again and skips them: {error}"
            )
            return None
        self._pass, self.given = found.epoch, self.used
        self.epoch = None if self.epochs is None else found.epoch
        return iterator

    def position(self) -> TakenPosition | None:
        """Return the iterator's position after the last batch of the run, not counting one read
        ahead, or None if the iterator has no state."""
        return self._before_ahead if self._ahead else self._position()

    def _position(self) -> TakenPosition | None:
        """Return the iterator's position after the last batch that it gave, or None if the iterator
        has no state."""
        if isinstance(self._iterator, StatefulIterator):
            return take_position(self._pass, self._iterator.get_state())
        return None

    def _iterate_epochs(
        self, begun: Iterator[Batch] | None
    ) -> Generator[tuple[int, Batch], None, None]:
        """Yield (epoch, batch) from the current epoch on, which `begun`, if given, continues, and
        raise a ValueError if a later epoch is empty.

        An empty first epoch ends the iteration.
        """
        for epoch in range(self._pass, 1 + (self.epochs or 1)):
            self._pass = epoch
            if begun is None:
                self._set_epoch(epoch)
            self._iterator = iter(self.batches) if begun is None else begun
            is_empty, begun = begun is None, None
            for batch in self._iterator:
                is_empty = False
                yield epoch, batch
            if is_empty and epoch == 1:
                return  # `check` raises after the loop, since it knows how many were needed
            if is_empty:
                raise ValueError(
                    f"batches gave no batch in epoch {epoch} of {self.epochs}; with epochs it must "
                    "be something that can be iterated again, such as a list or a DataLoader"
                )

    def _set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of a loader and its samplers, if they have it, with the index of the
        pass from 0, or call nothing without `epochs`. The loader then decides its epoch itself."""
        if self.epochs is None:
            return
        samplers = (getattr(self.batches, name, None) for name in ("sampler", "batch_sampler"))
        for loader in (self.batches, *samplers):
            if callable(set_epoch := getattr(loader, "set_epoch", None)):
                set_epoch(epoch - 1)

    def is_epoch_end(self) -> bool:
        """Tell whether the last batch ended an epoch, by drawing the next one, whose error is
        raised, which is never so without `epochs`."""
        if self.epochs is None:
            return False
        self._skip_used()
        self._draw_ahead()
        if not self._ahead:
            return True
        following = self._ahead[0]
        if not isinstance(following, Exception):
            return following.epoch != self.epoch
        if self.given != self.most:
            # Now: a checkpoint of this step would lack the evaluation that may be due.
            raise following
        return True  # all steps are made, and no batch is needed

    def last_step(self) -> int | None:
        """Return `steps`, or else epochs × batches × local_steps, or None without `steps` if there
        are no `epochs` or the batches have no length."""
        if self.steps is None and self.epochs is not None and isinstance(self.batches, Sized):
            with contextlib.suppress(TypeError):  # a DataLoader over a stream
                return self.epochs * len(self.batches) * self.local_steps
        return self.steps

    def check(self) -> None:
        """Raise a ValueError if there were fewer batches than `steps` or the used batches need,
        unless the run had made all its steps before."""
        needed = max(self.used, 1) if self.most is None else self.most
        if self.is_finished or self.given >= needed:
            return
        if not self.given:
            why = ""
            if isinstance(self.batches, Iterator):
                why = (
                    ", which gives its batches only once: it has been used up, or had none. Make a "
                    "new one for each run"
                )
            raise ValueError(
                f"batches must hold at least one batch; got {checks.show(self.batches)}{why}"
            )
        words = "at least " if self.most is None else ""
        words += f"{needed} are needed"
        words += "" if self.steps is None else f" for steps={self.steps}"
        words += f" with local_steps={self.local_steps}" if self.local_steps > 1 else ""
        words += f". The run has already used the first {self.used}" if self.used else ""
        raise ValueError(f"batches gave {self.given} batches, but {words}")
