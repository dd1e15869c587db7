"""Reading of checkpoints: arrays of a file or a directory in the place of a template's."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from optfn.checkpoint.changes import Changes, Misfit
from optfn.checkpoint.directory import ENTRIES
from optfn.checkpoint.frozen import FROZEN, compare_frozen, select_frozen
from optfn.checkpoint.loading import load_named
from optfn.checkpoint.newest import OtherRun, backend_of
from optfn.checkpoint.snapshot import ABOUT, Snapshot
from optfn.checkpoint.storage import NONFINITE
from optfn.core import checks
from optfn.core.tree import list_names
from optfn.core.types import PyTree
from optfn.leaves.patterns import Pattern, matches
from optfn.mesh.state.bits import DecodedArrays
from optfn.mesh.state.placement import (
    PER_WORKER_KEY,
    find_count_names,
    read_counts,
    rescale_residuals,
)
from optfn.mesh.state.reports import read_local
from optfn.tables.sharded_table import unwrap_tables
from optfn.train.state import TrainState

HISTORY = "history/"
_TRAIN = "train"  # the first word of the names of a TrainState

Loaded: TypeAlias = tuple[PyTree, dict[str, np.ndarray], Changes]


def list_reserved(state: PyTree) -> tuple[str, ...]:
    """Return the names that arrays of a state must not have, because a checkpoint has entries of
    these names beside the state. In a TrainState "history" may be a label."""
    folders = () if isinstance(state, TrainState) else (HISTORY,)
    return (*ABOUT, NONFINITE, *ENTRIES, *folders)


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads checkpoints into a template. `strict` and `only` are as in `restore_checkpoint`.

    renamed: the first words of names of the checkpoint, and those that the template has in their
      place; the checkpoint's names with the latter get the former.
    """

    template: PyTree
    strict: bool = True
    only: Pattern | None = None
    renamed: tuple[str, str] = ("", "")

    @functools.cached_property
    def like(self) -> Snapshot:
        """The arrays of the template by name. Rows of divided tables are in stored order."""
        return Snapshot.of(self.template, list_reserved(self.template), unwrap_tables)

    def list_names(self, path: Path) -> list[str]:
        """Return the names of the state's arrays in a checkpoint, without the history's names. No
        array is read."""
        saved = backend_of(path).read(path, self.like, lambda name: False)
        return [name for name in saved if not self._is_beside(name)]

    def load(self, path: Path) -> Loaded:
        """Return (state, history, changes of names) of the checkpoint at a path, or raise an
        OtherRun if it does not fit and a ValueError if it is damaged.

        Raises:
          OtherRun: names or shapes do not fit the template, or `only` matches none.
          ValueError: the checkpoint is damaged.
        """
        like = self.like
        try:
            saved = backend_of(path).read(path, like, self._is_read)
        except ImportError:  # a missing package is no damage of the file
            raise
        except Exception as error:  # of many kinds, from zipfile, from orbax and its storage
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
        if (entry := saved.get(f"{HISTORY}{FROZEN}")) is not None:
            saved |= select_frozen(entry, self.template)
        saved = {self._rename(name): x for name, x in saved.items()}
        names = [name for name in saved if not self._is_beside(name)]
        chosen = self._select(path, names)
        found = _rescale_to_template(like, {k: x for k, x in saved.items() if x is not None})
        mapping = {k: x for k, x in found.items() if k in chosen or k in ABOUT}
        is_of_a_run = f"{_TRAIN}/step" in saved and not isinstance(self.template, TrainState)
        decoded = DecodedArrays(found)
        beside = [k for k in found if k not in ABOUT and self._is_beside(k)]
        history = {k.removeprefix(HISTORY): decoded[k] for k in beside}
        try:
            # `only` leaves names out on purpose.
            is_strict = self.strict and self.only is None
            state, changes = load_named(
                self.template, mapping, strict=is_strict, shown=self._public_name
            )
        except ValueError as error:
            hint = _remedy(error)
            if is_of_a_run:
                hint = ". It has a TrainState; load_params loads the parameters alone"
            raise OtherRun(f"{path} is from another run: {error}{hint}") from error
        if self.only is not None and not changes.carried:
            hint = ". It has a TrainState; load_params(path, params, only=) loads some params"
            hint = hint if is_of_a_run else ""
            matched = list_names([*map(self._public_name, chosen)])
            raise OtherRun(
                f"only={self.only!r} matches {matched} in {path}, but no name of the template is "
                f"among them{hint}"
            )
        left_out = [name for name in names if name not in chosen]
        lists = changes.carried, changes.new, [*changes.dropped, *left_out]
        return state, history, Changes(*([*map(self._public_name, names)] for names in lists))

    def _select(self, path: Path, names: Sequence[str]) -> set[str]:
        """Return the names that are loaded, or raise an OtherRun if there are none."""
        chosen = {*filter(self.is_selected, names)}
        if chosen or self.only is None:
            return chosen
        states = [x.removesuffix(f"/{_TRAIN}/step") for x in names if x.endswith(f"/{_TRAIN}/step")]
        if states and f"{states[0]}/{_TRAIN}/step" not in self.like.arrays:
            raise OtherRun(
                f"{path} has the states {list_names(states)} of a tree: call restore_checkpoint "
                f'with a template of that tree, or a part of it and only="{states[0]}/.*"'
            )
        shown = "a function" if callable(self.only) else repr(self.only)
        raise OtherRun(
            f"only={shown} matches no name in {path}; it has "
            f"{list_names([*map(self._public_name, names)])}"
        )

    def is_selected(self, name: str) -> bool:
        """Tell whether the array with this name is loaded, as all are if `only` is None."""
        return matches(self.only, self._public_name(name))

    def _rename(self, name: str) -> str:
        """Return the name that the template has for a name of the checkpoint."""
        first, second = self.renamed
        for words, others in ((first, second), (second, first)):
            if name.startswith(words):
                return others + name.removeprefix(words)
        return name

    def _is_beside(self, name: str) -> bool:
        """Tell whether a name is of the history or of the format, and not of an array of the
        state, which may have "history" as a label."""
        return name in ABOUT or (name.startswith(HISTORY) and name not in self.like.arrays)

    def _public_name(self, name: str) -> str:
        """Return a name as `only` takes it: the name of a TrainState's field without "train/", a
        name of its optimizer with "opt_state/" if its label is the name of a field, and unchanged
        otherwise."""
        word, _, inner = name.partition("/")
        if word == _TRAIN and inner.split("/")[0] in TrainState._fields:
            return inner
        is_label = word in TrainState._fields and isinstance(self.template, TrainState)
        return f"opt_state/{name}" if is_label else name

    def _is_read(self, name: str) -> bool:
        """Tell whether an array is read: entries beside the state and numbers of workers always,
        the rest if they are selected.

        Conversions need the numbers of workers.
        """
        own = self._rename(name)
        return self._is_beside(name) or self.is_selected(own) or name.endswith("/num_workers")

    def warn_of_changes(self, path: object, loaded: Loaded) -> tuple[PyTree, dict[str, np.ndarray]]:
        """Return (state, history) after a check of frozen params that the checkpoint lacks, and
        warn of changed names unless loading is strict without `only`.

        Raises:
          ValueError: the checkpoint lacks its frozen params, and the template's differ from them.
        """
        state, history, changes = loaded
        # Not in `load`: all processes take part in checksums, and one of them may load again.
        if FROZEN in history:
            entry = history.pop(FROZEN)
            compare_frozen(path, entry, self.template, self.is_selected, self._public_name)
        if changes and (not self.strict or self.only is not None):
            checks.warn(f"{path}: {changes}")
        return state, history


def _remedy(error: ValueError) -> str:
    """Return the hint with the argument that loads the arrays that fit, or "" unless the error is a
    Misfit."""
    if not isinstance(error, Misfit):
        return ""
    if error.arrays:
        return ". To load some of the names, call restore_checkpoint with only="
    if "_average/statistics/" in str(error):
        return (
            ". Statistics are averaged with evaluate_average (average_model_state of a step), "
            "which one of the runs lacks: pass the same, or call restore_checkpoint with "
            "strict=False"
        )
    return ". To load the names that are in both, call restore_checkpoint with strict=False"


def _rescale_to_template(like: Snapshot, mapping: dict[str, Any]) -> dict[str, Any]:
    """Rescale the per-worker arrays of a mapping to the template's count of workers, or return it
    unchanged if the counts agree, or the template's is unknown or has a copy on each device."""
    if PER_WORKER_KEY not in mapping or not like.per_worker:
        return mapping
    names = [name for name in map(str, np.asarray(mapping[PER_WORKER_KEY])) if name in mapping]
    wanted, saved = (
        [read_local(x[name]) for name in find_count_names(x, names)] for x in (like.arrays, mapping)
    )
    if any(map(np.ndim, wanted)):
        return mapping
    now, before = read_counts(wanted), read_counts(saved)
    if now == before or len(now) != 1 or not names:
        return mapping
    return rescale_residuals(mapping | {PER_WORKER_KEY: np.array(names)}, now.pop())
