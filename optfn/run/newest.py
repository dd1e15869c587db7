"""The checkpoints of a run: which there are, which to load, and which to remove."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from optfn.core import checks
from optfn.parallel import processes
from optfn.run.checkpoint_directory import OrbaxDirectory
from optfn.run.checkpoint_file import NpzFile, write_file
from optfn.run.storage import Backend, directory_of

T = TypeVar("T")

_NAME = re.compile(r"step_(\d+)(\.npz)?")
_UNFINISHED = ("step_*.unfinished", "step_*.unsynced", "step_*.orbax-checkpoint-tmp*")


class OtherRun(ValueError):
    """A checkpoint is intact, but from another run."""


def backend_of(path: Path) -> Backend:
    """Return the backend that wrote a checkpoint."""
    return OrbaxDirectory() if path.is_dir() else NpzFile()


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in `directory`, the newest last."""
    found = [path for path in directory_of(directory).glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def remove_oldest(path: Path, keep: int) -> None:
    """Remove the oldest checkpoints until `keep` are left; the one just written is not removed.

    It may not be the newest, if the run went back to an earlier step. Incomplete checkpoints, which
    a process left when it was killed, are removed too.
    """
    earlier = [found for found in checkpoints(path.parent) if found != path]
    unfinished = [found for pattern in _UNFINISHED for found in path.parent.glob(pattern)]
    for found in earlier[: max(0, len(earlier) + 1 - keep)] + unfinished:
        backend_of(found).remove(found)


def newest(
    directory: Path, read: Callable[[Path], T], is_shared: bool = False
) -> tuple[Path, T] | None:
    """Return the path of the newest intact checkpoint in a directory, and the result of `read`.

    Returns None if there is no checkpoint. Each that is passed over is warned of. One that is
    intact, but from another run, ends the search: those before it are of that run too.

    Args:
      directory: where the run saves.
      read: reads the checkpoint at a path, and raises a ValueError if it cannot.
      is_shared: whether all processes call this, and get the newest that any of them has.

    Raises:
      ValueError: there are checkpoints, but none can be loaded.
    """
    found, problems = None, []
    for path in reversed(checkpoints(directory)):
        try:
            found = path, read(path)
            break
        except ValueError as error:
            problems.append(str(error))
            if isinstance(error, OtherRun):
                break
    if is_shared:
        found = _newest_of_all(directory, found, read)
    if found is None and problems:
        raise ValueError("no checkpoint can be loaded: " + "; ".join(problems))
    for problem in problems:
        checks.warn(f"skipped: {problem}")
    return found


def _newest_of_all(
    directory: Path, found: tuple[Path, T] | None, read: Callable[[Path], T]
) -> tuple[Path, T] | None:
    """Return the newest checkpoint of all processes; those without it get a copy of its file."""
    step = -1 if found is None else _step_of(found[0])
    steps = processes.gather_values([step])[:, 0]
    if np.all(steps == step):
        return found
    source, last = int(np.argmax(steps)), int(np.max(steps))
    path = directory / f"step_{last:09d}.npz"
    is_file = step == last and path.is_file()
    content = processes.send(source, path.read_bytes() if is_file else b"")
    if not content:
        raise ValueError(
            f"process {source} has a checkpoint of step {last} that is a directory, but other "
            "processes cannot see it: all processes must name the same, shared directory"
        )
    if step == last:
        return found
    checks.warn(f"{path} was missing here, and is now a copy of the file of process {source}")
    directory.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(content))
    return path, read(path)
