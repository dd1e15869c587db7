"""Checkpoints of a run: for each saved step one npz file, or one directory of all processes.

Each is written whole or not at all.
"""

import contextlib
import functools
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optfn import checks
from optfn.leaves.tree import is_key
from optfn.leaves.types import Leaf, PyTree
from optfn.parallel import processes
from optfn.run import sharded_checkpoint as parts
from optfn.state.per_worker import has_own_state
from optfn.state.placement import PER_WORKER_KEY, rescale_residuals
from optfn.train.state_dict import load_state_dict, named_leaves, state_dict

# The bytes that a history and the headers of a small file may take.
_SMALL = 1 << 24
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
    with the parts of other processes, so that any of the directories is enough to resume from.

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

    Raises:
      OSError: the disk is full or cannot be written; nothing of the new file is left.
    """
    if not hasattr(state, "step") or np.shape(state.step) != ():
        raise TypeError(
            "save_checkpoint: state must be a TrainState, with a scalar step; "
            f"got {checks.shown(state)}"
        )
    if not isinstance(history, Mapping | None):
        raise TypeError(
            f"save_checkpoint: history must give arrays by name; got {checks.shown(history)}"
        )
    if sharded is not None:
        checks.flag("sharded", sharded)
    directory = _directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parts.wait()
    if sharded or (sharded is None and parts.holds_parts(state) and parts.is_available()):
        path = directory / f"step_{int(state.step):09d}"
        kept = {k: np.asarray(v) for k, v in (history or {}).items()}
        parts.save(path, state, kept, lambda: _remove_others(path, keep))
        return path
    arrays = state_dict(jax.tree.map(_gathered, state)) | {
        f"history/{k}": np.asarray(v) for k, v in (history or {}).items()
    }
    path = directory / f"step_{int(state.step):09d}.npz"
    try:
        _write_file(path, lambda file: np.savez(file, **arrays))
    except OSError as error:
        words = f"cannot save the state ({error.strerror}); earlier files stay"
        raise OSError(error.errno, words, str(path)) from error
    _remove_others(path, keep)
    return path


def _write_file(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole, or leave nothing of it."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _remove_others(path: Path, keep: int) -> None:
    """Remove the oldest checkpoints beside the one that was just written, until `keep` are left.

    A checkpoint of a later step may lie there, if the run went back to an earlier one.
    """
    others = [other for other in checkpoints(path.parent) if other != path]
    for other in others[: max(0, len(others) + 1 - keep)]:
        if other.is_file():
            other.unlink(missing_ok=True)
        elif jax.process_index() == 0:  # the processes share it
            shutil.rmtree(other)


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
            f"the directory of checkpoints must be a path; got {checks.shown(directory)}"
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

    Arrays lie as those of the template. Per-worker arrays are converted by `rescale_residuals`
    where the number of workers has changed.

    Args:
      path: a file or a directory that `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: it is truncated or damaged, or the state of another run.
    """
    parts.wait()
    if Path(path).is_dir():
        mapping, history = parts.load(Path(path), state, functools.partial(_rescaled, state))
    else:
        mapping, history = _load_file(path, state)
    try:
        return load_state_dict(state, mapping), history
    except ValueError as error:
        raise ValueError(f"{path} is not of this run: {error}") from error


def _load_file(
    path: str | os.PathLike[str], state: PyTree
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the arrays in a file by name, as `state_dict` gives them, and the history."""
    try:
        arrays = _read(path, state)
    except Exception as error:  # zipfile raises many types of errors where its fields are damaged
        raise ValueError(f"{path} is not a whole checkpoint: {error}") from error
    prefix = "history/"
    names = [name for name in arrays if name.startswith(prefix)]
    history = {name.removeprefix(prefix): arrays.pop(name) for name in names}
    return _rescaled(state, arrays), history


def _read(path: str | os.PathLike[str], state: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a file; nothing in it is run, unpickled or unpacked to the disk.

    Allocations are bounded by the bytes of the file, or where it is compressed, by a few times the
    bytes of the template `state`.
    """
    with open(path, "rb") as stream:
        with zipfile.ZipFile(stream) as file:
            for entry in file.infolist():
                _check_entry(file, entry)
            total = sum(entry.file_size for entry in file.infolist())
        needed = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))
        most = max(os.fstat(stream.fileno()).st_size, 4 * needed + _SMALL)
        if total > most:
            raise ValueError(f"it would take {total:,} bytes, more than the {most:,} it may")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    if "version" not in arrays:
        raise ValueError("it does not say the version of its format")
    return arrays


def _check_entry(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise a ValueError unless an entry of a file is the array that its header promises."""
    with file.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or size != entry.file_size - stream.tell():
            raise ValueError(
                f"entry {entry.filename!r} has {entry.file_size - stream.tell()} bytes of data, "
                f"which are no {dtype} array of shape {shape}"
            )


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
    """Return the state and the history of the newest intact checkpoint in `directory`, or None.

    A damaged one is skipped with a warning that names it, and the one before it is read. Files and
    directories may lie side by side. In a run of several processes all call it, and get the newest
    that any of them has: those without it write a copy of its file to their directory.

    Args:
      directory: where `save_checkpoint` wrote.
      state: a TrainState of the same run, as a template.

    Raises:
      ValueError: there are checkpoints, and none can be loaded.
    """
    parts.wait()
    found = checkpoints(directory)
    problems: list[str] = []
    loaded = _newest(found, state, problems)
    if processes.share_state(state):
        loaded = _newest_of_all(Path(directory), loaded, state)
    if found and loaded is None:
        raise ValueError("no checkpoint can be loaded: " + "; ".join(problems))
    return loaded


def _newest(
    paths: list[Path], state: PyTree, problems: list[str]
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the last one that is intact; `problems` gets the faults of those after it."""
    for path in reversed(paths):
        try:
            return load_checkpoint(path, state)
        except ValueError as error:
            problems.append(str(error))
            checks.warn(f"skipped: {error}")
    return None


def _newest_of_all(
    directory: Path, loaded: tuple[PyTree, dict[str, np.ndarray]] | None, state: PyTree
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the newest checkpoint that any process has; the others get a copy of its file."""
    step = -1 if loaded is None else int(loaded[0].step)
    steps = processes.gather_values([step])[:, 0]
    if np.all(steps == step):
        return loaded
    source, newest = int(np.argmax(steps)), int(np.max(steps))
    path = directory / f"step_{newest:09d}.npz"
    is_file = step == newest and path.is_file()
    content = processes.send(source, path.read_bytes() if is_file else b"")
    if not content:
        raise ValueError(
            f"process {source} has a checkpoint of step {newest} that is a directory, which other "
            "processes do not see: all must name the same one, which they share"
        )
    if step == newest:
        return loaded
    checks.warn(f"{path} is a copy of the file of process {source}")
    directory.mkdir(parents=True, exist_ok=True)
    _write_file(path, lambda file: file.write(content))
    return load_checkpoint(path, state)
