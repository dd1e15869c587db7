"""Checkpoints of a run: for each saved step one npz file, or one directory of all processes.

Each is written whole or not at all.
"""

import functools
import os
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optfn import checks
from optfn.leaves.tree import is_key
from optfn.leaves.types import Leaf, PyTree
from optfn.parallel.per_worker import has_own_state
from optfn.parallel.placement import PER_WORKER_KEY, rescale_residuals
from optfn.train import sharded_checkpoint as parts
from optfn.train.state_dict import load_state_dict, named_leaves, state_dict

_NAME = re.compile(r"step_(\d+)(\.npz)?")


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: PyTree,
    history: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    sharded: bool | None = None,
) -> Path:
    """Write a training state to `directory`, as step_<n>.npz or the directory step_<n>.

    It appears under its name only when all of it is on the disk, so that a process killed at any
    moment leaves the newest checkpoint intact. In a run of several processes all call it.

    A file (`sharded=False`): each process has a directory of its own, and writes the full state,
    including what other processes hold, so that any of the directories is enough to resume from.

    A directory (`sharded=True`, by orbax): all processes name the same one, which they share, and
    each writes its own part, in the background. The next save, a restore and the end of `minimize`
    wait for it; the state may be overwritten at once. A checksum of each array lies beside it.

    Args:
      directory: made if it is not there.
      state: a TrainState.
      history: arrays by name to keep beside it.
      keep: how many checkpoints stay; older ones are removed.
      sharded: whether it is a directory; None means a file, unless params or state are spread over
        devices (`shard`, `shard_tables`) and orbax is installed.

    Returns:
      The path of the file or the directory.
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
    if sharded is not None:
        checks.flag("sharded", sharded)
    directory = _directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parts.wait()
    if sharded or (sharded is None and parts.holds_parts(state) and parts.is_available()):
        path = directory / f"step_{int(state.step):09d}"
        kept = {k: np.asarray(v) for k, v in (history or {}).items()}
        parts.save(path, state, kept, lambda: _remove(checkpoints(directory)[:-keep]))
        return path
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
    _remove(checkpoints(directory)[:-keep])
    return path


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_file():
            path.unlink(missing_ok=True)
        elif jax.process_index() == 0:  # the processes share it
            shutil.rmtree(path)


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
    found = [path for path in _directory(directory).glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step_")))


def load_checkpoint(
    path: str | os.PathLike[str], state: PyTree
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """Return the TrainState in a checkpoint, and the history beside it.

    Arrays lie as those of the template. Those that are a worker's own are converted by
    `rescale_residuals` where there were more workers, or fewer.

    Args:
      path: a file or a directory that `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: it is truncated or damaged, or the state of another run.
    """
    parts.wait()
    if Path(path).is_dir():
        return parts.load(Path(path), state, functools.partial(_rescaled, state))
    try:
        with open(path, "rb") as stream, np.load(stream) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}") from error
    prefix = "history/"
    names = [name for name in arrays if name.startswith(prefix)]
    history = {name.removeprefix(prefix): arrays.pop(name) for name in names}
    return load_state_dict(state, _rescaled(state, arrays)), history


def _rescaled(state: PyTree, mapping: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping for as many workers as the template `state` has."""
    if PER_WORKER_KEY not in mapping or not has_own_state(state):
        return mapping
    now, before = (
        {int(np.asarray(_local(x))) for name, x in arrays if f"/{name}".endswith("/num_workers")}
        for arrays in (named_leaves(state), mapping.items())
    )
    if now == before or len(now) != 1:
        return mapping
    return rescale_residuals(mapping, now.pop())


def _local(x: Leaf) -> Leaf:
    """Return a scalar that lies on all devices as one of this process."""
    return x.addressable_data(0) if isinstance(x, jax.Array) else x


def restore_checkpoint(
    directory: str | os.PathLike[str], state: PyTree
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the newest intact checkpoint in `directory`; None if there is no checkpoint.

    A damaged one is skipped with a warning that names it, and the one before it is read. Files and
    directories may lie side by side.

    Args:
      directory: where `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: there are checkpoints, and none can be loaded.
    """
    parts.wait()
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
