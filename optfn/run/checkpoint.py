"""Checkpoints of a run: one npz file for each saved step, or one directory for all processes.

A checkpoint is written as a whole or not at all.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.core import checks, tree
from optfn.core.tree import is_key, list_names
from optfn.core.types import Leaf, Params, PyTree
from optfn.leaves.patterns import Pattern, check_pattern
from optfn.parallel import processes
from optfn.run.background import start_write, wait_for_writes
from optfn.run.checkpoint_directory import ENTRIES, OrbaxDirectory, is_directory_default
from optfn.run.checkpoint_file import NpzFile
from optfn.run.finiteness import may_keep_last_loss
from optfn.run.newest import OtherRun, backend_of, find_newest, remove_oldest
from optfn.run.storage import NONFINITE, Backend, is_remote, to_path
from optfn.sparse.sharded_table import unwrap_tables
from optfn.state.names import arrays_with_names
from optfn.state.per_worker import has_per_worker_state
from optfn.state.placement import PER_WORKER_KEY, find_count_names, rescale_residuals
from optfn.train.changes import Changes, Misfit, misfits
from optfn.train.loading import load_named, to_host
from optfn.train.packed_state import make_placeholders, unpack_state
from optfn.train.state import TrainState
from optfn.train.state_dict import ABOUT, check_names

_HISTORY = "history/"
_TRAIN = "train"  # the first word of the names of a TrainState: `state_word` of its type
# The names of the entries of a checkpoint that are not arrays of the state.
_RESERVED = (*ABOUT, _HISTORY, NONFINITE, *ENTRIES)

_Loaded: TypeAlias = tuple[PyTree, dict[str, np.ndarray], Changes]


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: PyTree,
    history: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int = 2,
    sharded: bool | None = None,
    background: bool | None = None,
) -> Path:
    """Save a training state in `directory`, as the file step_<n>.npz or the directory step_<n>.

    A checkpoint gets its name only when all of it is on the disk. So if the process is killed, at
    any moment, the newest checkpoint is intact. In a run of several processes, all must call it.

    A file (`sharded=False`): each process writes the whole state, with the shards that only other
    processes hold, to a local directory. Any of these directories is enough to resume from.

    If params, the arrays of a field or key "params", or the last "loss" of the history are not
    finite, the checkpoint is marked: it does not count for `keep`, the next save removes it, and
    `restore_checkpoint` passes it over. A loss does not count where tx leaves out steps whose
    gradients are not finite (`skip_nonfinite`).

    A directory (`sharded=True`, by orbax): all processes name the same directory, which they share,
    and each writes its shards. A checksum of each array, of the state and of the history, and one
    of the names are stored beside them.

    In the background: the call returns as soon as a copy of the state is under way, and you may
    overwrite the state at once. A thread writes the copy. The next save in the directory, a restore
    and the end of `minimize` wait for it, and raise its error if it failed; at the end of the
    program, such an error is printed.

    Args:
      directory: where to save; it is created if necessary. For checkpoints that are directories it
        may be an address such as gs://bucket/run, if etils has the package for that store.
      state: a TrainState, or any tree of arrays, PRNG keys and states, such as a dict with the
        TrainStates of two networks. Names (`state_dict`) tell its arrays apart.
      history: arrays by name, to save beside the state.
      step: the number in the name. None: the field or key `step` of the state.
      keep: how many finite checkpoints to keep; older ones are removed.
      sharded: whether to write a directory. None: only if params or state are divided over devices
        (`shard`, `shard_tables`) and orbax is installed.
      background: whether to write in the background. None: only if it is a directory.

    Returns:
      The path of the file or the directory.

    Raises:
      OSError: the disk is full or cannot be written; nothing of the new file is left.
      TypeError: the state has leaves that are no arrays, or no step.
      ValueError: two arrays have the same name, or a name that cannot be saved.
    """
    _check_tree("save_checkpoint: state", state)
    number = _find_step(state) if step is None else checks.count("step", step, low=0)
    if not isinstance(history, Mapping | None):
        raise TypeError(
            "save_checkpoint: history must be a mapping from names to arrays; "
            f"got {checks.show(history)}"
        )
    for name, value in (("sharded", sharded), ("background", background)):
        if value is not None:
            checks.flag(name, value)
    directory = to_path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    wait_for_writes(directory)
    if is_remote(directory) and sharded is False:
        raise ValueError(
            f"sharded=False writes a file, but the store of {directory} takes only directories: "
            "pass sharded=True"
        )
    if sharded is None:
        sharded = is_remote(directory) or is_directory_default(state)
    backend: Backend = OrbaxDirectory() if sharded else NpzFile()
    path = directory / f"step_{number:09d}{backend.suffix}"
    beside = {f"{_HISTORY}{name}": np.array(x) for name, x in (history or {}).items()}
    write = backend.writer(
        path,
        jax.tree.map(_to_key_data, state),
        beside,
        is_loss_finite=may_keep_last_loss(state, history or {}),
    )
    start_write(directory, write, functools.partial(remove_oldest, path, keep))
    if not (sharded if background is None else background):
        wait_for_writes(directory)
    return path


def _check_tree(who: str, state: PyTree) -> None:
    """Raise an error unless a tree can be saved, and be restored by its names."""
    for name, x in tree.arrays_with_paths(state):
        if not tree.is_array(x):
            raise TypeError(
                f"{who} must be a TrainState, or a tree of arrays and states; its leaf "
                f"{name or 'at the top'} is {checks.show(x)}"
            )
    shapes = unwrap_tables(unpack_state(make_placeholders(state)))
    names = [name for name, _ in arrays_with_names(shapes)]
    if "" in names:
        raise ValueError(f"{who} must give its arrays names: put an array alone into a dict")
    check_names(names, _RESERVED)


def _find_step(state: PyTree) -> int:
    step = state.get("step") if isinstance(state, Mapping) else getattr(state, "step", None)
    if not tree.is_array(step) or step.shape or not np.issubdtype(step.dtype, np.integer):
        raise TypeError(
            "save_checkpoint: state must be a TrainState, or have another field or key `step` that "
            "is a scalar integer; else pass step=, the number in the name; "
            f"got {checks.show(state)}"
        )
    return int(step)


def _to_key_data(x: Leaf) -> Leaf:
    return jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x


def load_checkpoint(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    strict: bool = True,
    only: Pattern | None = None,
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """Return the state and the history in one checkpoint, given by its path.

    `restore_checkpoint` finds the newest one of a directory. Arrays are placed like those of the
    template. If the number of workers has changed, per-worker arrays are converted by
    `rescale_residuals`.

    Args:
      path: a file or a directory that `save_checkpoint` wrote.
      state: a TrainState, or what else was saved, of the same run, as a template.
      strict: as in `restore_checkpoint`.
      only: as in `restore_checkpoint`.

    Raises:
      ValueError: the checkpoint is truncated, damaged, or from another run; or `only` matches
        nothing.
    """
    wait_for_writes()
    _check_tree("load_checkpoint: state", state)
    loader = _Loader(state, checks.flag("strict", strict), check_pattern("only", only))
    return loader.warn_of_changes(path, loader.load(to_path(path)))


class _Loader(NamedTuple):
    """Loads checkpoints; `strict` and `only` are those of `restore_checkpoint`."""

    template: PyTree
    strict: bool = True
    only: Pattern | None = None

    def load(self, path: Path) -> _Loaded:
        """Return the state and the history at a path, and the differences of names."""
        like = jax.tree.map(_to_key_data, self.template)
        try:
            saved = backend_of(path).read(path, like, self._is_read)
        except ImportError:
            raise
        except Exception as error:  # of many kinds, from zipfile, from orbax and its storage
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
        names = [name for name in saved if not _is_beside(name)]
        chosen = {*filter(self.is_selected, names)}
        if not chosen:
            raise OtherRun(
                f"only={self.only!r} matches no name in {path}; it has "
                f"{list_names([_public_name(name) for name in names])}"
            )
        found = _rescale_to_template(
            self.template, {k: x for k, x in saved.items() if x is not None}
        )
        mapping = {k: x for k, x in found.items() if k in chosen or k in ABOUT}
        history = {k.removeprefix(_HISTORY): found[k] for k in found if k.startswith(_HISTORY)}
        try:
            is_strict = self.strict and self.only is None
            state, changes = load_named(
                self.template, mapping, strict=is_strict, shown=_public_name
            )
        except ValueError as error:
            hint = _remedy(error)
            if f"{_TRAIN}/step" in saved and not isinstance(self.template, TrainState):
                hint = ". It has a TrainState; load_params loads the parameters alone"
            raise OtherRun(f"{path} is from another run: {error}{hint}") from error
        left_out = [name for name in names if name not in chosen]
        lists = changes.carried, changes.new, [*changes.dropped, *left_out]
        return state, history, Changes(*([*map(_public_name, names)] for names in lists))

    def is_selected(self, name: str) -> bool:
        """Tell whether the array with this name is loaded."""
        name = _public_name(name)
        if callable(self.only):
            return bool(self.only(name))
        return self.only is None or re.fullmatch(self.only, name) is not None

    def _is_read(self, name: str) -> bool:
        """Tell whether it is read. Numbers of workers are, since conversions depend on them."""
        return _is_beside(name) or self.is_selected(name) or name.endswith("/num_workers")

    def warn_of_changes(
        self, path: object, loaded: _Loaded
    ) -> tuple[PyTree, dict[str, np.ndarray]]:
        """Return state and history; warn of differences that strict loading does not allow."""
        state, history, changes = loaded
        if changes and (not self.strict or self.only is not None):
            checks.warn(f"{path}: {changes}")
        return state, history


def _is_beside(name: str) -> bool:
    """Tell whether this names no array of the state, but something beside it."""
    return name in ABOUT or name.startswith(_HISTORY)


def _public_name(name: str) -> str:
    """Return a name in the form that `only` takes, in which those of a TrainState lack "train/".

    The labels of the states of an optimizer come first too, and "train" may be one of them.
    """
    word, _, inner = name.partition("/")
    is_field = word == _TRAIN and inner.split("/")[0] in TrainState._fields
    return inner if is_field else name


def _remedy(error: ValueError) -> str:
    """Return which argument loads the arrays that fit, for its error."""
    if not isinstance(error, Misfit):
        return ""
    if error.arrays:
        return ". To load some of the names, call restore_checkpoint with only="
    return ". To load the names that are in both, call restore_checkpoint with strict=False"


def _rescale_to_template(state: PyTree, mapping: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping whose arrays are those of as many workers as `state` has."""
    if PER_WORKER_KEY not in mapping or not has_per_worker_state(state):
        return mapping
    names = [name for name in map(str, np.asarray(mapping[PER_WORKER_KEY])) if name in mapping]
    both = dict(arrays_with_names(state)), mapping
    now, before = ({int(to_host(x[name])) for name in find_count_names(x, names)} for x in both)
    if now == before or len(now) != 1 or not names:
        return mapping
    return rescale_residuals(mapping | {PER_WORKER_KEY: np.array(names)}, now.pop())


def load_params(path: str | os.PathLike[str], params: Params) -> Params:
    """Return only the parameters in a checkpoint, for inference or to fine-tune them.

    Args:
      path: a file or a directory that `save_checkpoint` wrote; or the directory where a run saves,
        for the newest intact checkpoint in it.
      params: the parameters of the same model, as a template. The result has its structure, dtypes
        and shardings.

    Raises:
      ValueError: the checkpoint is truncated or damaged, or its params differ in names or shapes.
        To load some of them, use `restore_checkpoint(..., only=)`.
      FileNotFoundError: there is no checkpoint at `path`.
      TypeError: `params` is a TrainState.
    """
    if isinstance(params, TrainState):
        raise TypeError("load_params: params must be the parameters alone; got a TrainState")
    wait_for_writes()
    template = TrainState(jnp.zeros((), jnp.int32), params, optax.EmptyState())
    loader = _Loader(template, only=lambda name: name == "params" or name.startswith("params/"))

    def read(path: Path) -> Params:
        state, _, changes = loader.load(path)
        missing, extra = (
            list(filter(loader.is_selected, x)) for x in (changes.new, changes.dropped)
        )
        if wrong := misfits(missing, extra):
            raise OtherRun(f"{path} has the params of another model: {'; '.join(wrong)}")
        return state.params

    place = to_path(path)
    found = find_newest(place, read)
    if found is not None:
        return found[1]
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        raise FileNotFoundError(f"load_params: there is no checkpoint at {path}")
    return read(place)


def restore_checkpoint(
    directory: str | os.PathLike[str],
    template: PyTree,
    *,
    strict: bool = True,
    only: Pattern | None = None,
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the state and the history of the newest intact checkpoint in `directory`.

    Returns None if there is no checkpoint, so that a program can begin with
    `restore_checkpoint(...) or (template, {})`. A damaged checkpoint is skipped with a warning that
    names it, and the one before it is read. So is one whose params or loss are not finite, unless
    there is no finite one. A directory may contain both kinds of checkpoints. In a
    run of several processes, all must call it, and all get the newest checkpoint that any of them
    has: processes without it write a copy of its file to their directories.

    Args:
      directory: where `save_checkpoint` wrote.
      template: a TrainState of the same run, such as `step.init(params)`, or a tree like that which
        was saved. The result is placed like it, on the same devices, and committed to them if its
        arrays are.
      strict: whether the names in the checkpoint must be exactly those of the template, except
        those that only report on a run (`load_state_dict`). If False, missing arrays are taken from
        the template, and superfluous ones are dropped.
      only: the names to load, such as "params/.*": a regular expression that must match a whole
        name, or a function name -> bool. Everything else, also the step, is taken from the
        template, and `strict` is ignored. Names are those of `state_dict`, without the "train/" of
        step, params and model_state.

    With `strict=False` or `only`, one warning lists the names that were carried over, are new, or
    were dropped. New float32 masters (`master_weights`) are made from the loaded params. If the run
    saved the position of its iterator of batches, the history has it as the bytes "batches".

    Raises:
      ValueError: there are checkpoints, but none can be loaded; or `only` matches no name.
    """
    wait_for_writes()
    place = to_path(directory)
    loader = _Loader(template, checks.flag("strict", strict), check_pattern("only", only))
    _check_tree("restore_checkpoint: template", template)
    found = find_newest(place, loader.load, processes.has_state_on_all_processes(template))
    return None if found is None else loader.warn_of_changes(*found)
