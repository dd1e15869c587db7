"""Checkpoints of a run: one npz file per saved step, written whole or not at all."""

import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optfn.leaves.tree import is_key
from optfn.leaves.types import Leaf, PyTree
from optfn.train.state_dict import load_state_dict, state_dict

_NAME = re.compile(r"step_(\d+)\.npz")


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: PyTree,
    history: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
) -> Path:
    """Write a training state to `directory`/step_<n>.npz.

    The file appears under its name only when all of it is on the disk, so that a process killed at
    any moment leaves the newest checkpoint intact. In a run of several processes all call it, each
    with a directory of its own, and each writes the full state, including what other processes
    hold, so that any of the directories is enough to resume from.

    Args:
      directory: made if it is not there.
      state: a TrainState.
      history: arrays by name to keep beside it.
      keep: how many checkpoints stay; older ones are removed.

    Returns:
      The path of the file.
    """
    if not hasattr(state, "step") or np.shape(state.step) != ():
        raise TypeError(
            "save_checkpoint: state must be a TrainState, with a scalar step; "
            f"got {state!r} of type {type(state).__name__}"
        )
    if not isinstance(history, Mapping | None):
        raise TypeError(
            "save_checkpoint: history must give arrays by name; "
            f"got {history!r} of type {type(history).__name__}"
        )
    directory = _directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = state_dict(jax.tree.map(_gathered, state)) | {
        f"history/{k}": np.asarray(v) for k, v in (history or {}).items()
    }
    path = directory / f"step_{int(state.step):09d}.npz"
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    _sync(directory)
    for old in checkpoints(directory)[:-keep]:
        old.unlink()
    return path


def _gathered(x: Leaf) -> Leaf:
    """Return an array on this host, gathered if other processes hold a part of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = jax.random.key_data(x) if is_key(x) else x
        return multihost_utils.process_allgather(x, tiled=True)
    return x


def _sync(directory: Path) -> None:
    """Write a renaming to the disk, where the system lets a directory be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _directory(directory: object) -> Path:
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise TypeError(
            "the directory of checkpoints must be a path; "
            f"got {directory!r} of type {type(directory).__name__}"
        )
    return Path(directory)


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in `directory`, the newest last."""
    found = [
        path for path in _directory(directory).glob("step_*.npz") if _NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step_")))


def load_checkpoint(
    path: str | os.PathLike[str], state: PyTree
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """Return the TrainState in a file, and the history beside it.

    Args:
      path: a file that `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: the file is truncated or damaged, or it is the state of another run.
    """
    try:
        with open(path, "rb") as stream, np.load(stream) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}") from error
    prefix = "history/"
    names = [name for name in arrays if name.startswith(prefix)]
    history = {name.removeprefix(prefix): arrays.pop(name) for name in names}
    return load_state_dict(state, arrays), history


def restore_checkpoint(
    directory: str | os.PathLike[str], state: PyTree
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the newest intact checkpoint in `directory`; None if there is no checkpoint.

    A damaged file is skipped with a warning that names it, and the one before it is read.

    Args:
      directory: where `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: there are checkpoints, and none can be loaded.
    """
    found = checkpoints(directory)
    problems = []
    for path in reversed(found):
        try:
            return load_checkpoint(path, state)
        except ValueError as error:
            problems.append(str(error))
            warnings.warn(f"skipped: {error}", stacklevel=2)
    if found:
        raise ValueError("no checkpoint can be loaded: " + "; ".join(problems))
    return None
