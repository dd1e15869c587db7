"""The checkpoints of a run: which there are, which to load, and which to remove."""

import os
import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import numpy as np

from optfn.checkpoint.background import wait_for_writes
from optfn.checkpoint.directory import OrbaxDirectory
from optfn.checkpoint.file import NpzFile, write_file
from optfn.checkpoint.storage import ASIDE, Backend, to_path
from optfn.core import checks
from optfn.core.checks import T
from optfn.mesh.layout import processes
from optfn.train.state import TrainState

_NAME = re.compile(rf"step_(\d+)(\.npz|{re.escape(ASIDE)})?")
_UNFINISHED = ("step_*.unfinished", "step_*.unsynced", "step_*.orbax-checkpoint-tmp*")


class OtherRun(ValueError):
    """A checkpoint is intact, but from another run. A traceback shows it as a ValueError."""

    __module__, __qualname__ = "builtins", "ValueError"


def backend_of(path: Path) -> Backend:
    """Return the backend of a checkpoint, for directories if there is one at the path and for files
    otherwise."""
    return OrbaxDirectory() if path.is_dir() else NpzFile()


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first. A checkpoint that was put aside
    counts only until a new one has replaced it."""
    found = [path for path in to_path(directory).glob("step_*") if _NAME.fullmatch(path.name)]
    whole = {path.name for path in found}
    found = [path for path in found if path.suffix != ASIDE or path.stem not in whole]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def remove_oldest(path: Path, keep: int) -> None:
    """Remove from the directory of `path`, which is kept, the oldest finite checkpoints beyond
    `keep`, all that are not finite, and the remains of killed processes.

    `path` may not be the newest, if the run went back to an earlier step. A checkpoint that is not
    finite does not count, so that it never displaces a finite one.
    """
    earlier = [found for found in list_checkpoints(path.parent) if found != path]
    finite = [found for found in earlier if is_finite(found)]
    others = [found for found in earlier if found not in finite]
    oldest = finite[: max(0, len(finite) + is_finite(path) - keep)]
    unfinished = [found for pattern in _UNFINISHED for found in path.parent.glob(pattern)]
    # First: without the checkpoint that replaced it, one that was put aside is a checkpoint again.
    replaced = [x for x in path.parent.glob(f"step_*{ASIDE}") if x not in earlier]
    for found in replaced + unfinished + others + oldest:
        try:
            backend_of(found).remove(found)
        except OSError as error:  # the disk has become read-only, for example
            words = f"cannot save the state ({error.strerror}): an older checkpoint, which is to be"
            raise OSError(
                error.errno, f"{words} removed, stays; all are intact", str(found)
            ) from error


def remove_checkpoints(directory: Path, steps: Container[int], state: TrainState) -> None:
    """Wait for the writes of a directory, and remove its checkpoints of these steps, in all
    processes before any goes on.

    Args:
      directory: where they are.
      steps: the steps.
      state: a state of the run, which tells whether several processes share the directory.
    """
    wait_for_writes(directory)
    for path in list_checkpoints(directory):
        if _step_of(path) in steps:
            backend_of(path).remove(path)
    if processes.has_state_on_all_processes(state):
        processes.gather_values([0])  # process 0 has removed them


def is_finite(path: Path) -> bool:
    """Tell whether a checkpoint was not marked as having params or a loss that are not finite when
    it was saved."""
    return backend_of(path).is_finite(path)


def find_newest(
    directory: Path, read: Callable[[Path], T], is_shared: bool = False
) -> tuple[Path, T] | None:
    """Return the path of the newest checkpoint that `read` accepts and its result, or None without
    checkpoints, and raise a ValueError if `read` accepts none.

    A warning names each checkpoint that is passed over. An intact one from another run ends the
    search, because earlier ones are of that run too. One that is not finite is read only if no
    finite one can be read.

    Args:
      directory: where the run saves.
      read: reads the checkpoint at a path, and raises a ValueError if it cannot.
      is_shared: whether all processes call this, and get the newest that any of them has.

    Raises:
      OtherRun: there are checkpoints, but of another run.
      ValueError: there are checkpoints, but none can be loaded.
    """
    found, problems, kind = None, [], ValueError
    newest_first = list_checkpoints(directory)[::-1]
    marked = [path for path in newest_first if not is_finite(path)]
    # Finite ones first, each group the newest first, since sorted is stable.
    for path in sorted(newest_first, key=marked.__contains__):
        try:
            found = path, read(path)
            break
        except ValueError as error:
            problems.append(str(error))
            if isinstance(error, OtherRun):
                kind = OtherRun
                break
    if is_shared:
        found = _share_newest(directory, found, read)
    has_failed = found is None and bool(problems)
    # All processes must raise: the rest would begin anew, and wait for this one for ever.
    if is_shared and found is None and processes.is_true_anywhere(has_failed):
        has_failed, problems = True, problems or ["another process can read none of its own"]
    if has_failed:
        raise kind("no checkpoint can be loaded: " + "; ".join(problems))
    for problem in problems:
        checks.warn(f"skipped: {problem}")
    if found is not None:
        _warn_of_marked(found[0], marked)
    return found


def _warn_of_marked(found: Path, marked: Sequence[Path]) -> None:
    """Warn if the checkpoint that was read is not finite, or else if newer ones were skipped
    because they are not."""
    newer = [path for path in marked if _step_of(path) > _step_of(found)]
    if found in marked:
        checks.warn(
            f"{found} was loaded, but its params or its loss are not finite, and there is no "
            "finite checkpoint"
        )
    elif newer:
        checks.warn(
            f"skipped: the params or the loss in {newer[0]} are not finite. The newest finite "
            f"checkpoint is {found.name}, of step {_step_of(found)}, and was loaded. "
            "load_checkpoint loads the other one"
        )


def _share_newest(
    directory: Path, found: tuple[Path, T] | None, read: Callable[[Path], T]
) -> tuple[Path, T] | None:
    """Return the newest checkpoint that any process has, or raise a ValueError if it is a directory
    that some lack. A process without the file writes and reads a copy.

    Raises:
      ValueError: it is a directory that some processes cannot see.
    """
    step = -1 if found is None else _step_of(found[0])
    # All processes must call it, also those that found nothing.
    steps = processes.gather_values([step])[:, 0]
    if np.all(steps == step):
        return found
    source, last = int(np.argmax(steps)), int(np.max(steps))
    path = directory / f"step_{last:09d}.npz"
    is_file = step == last and path.is_file()
    content = processes.broadcast_bytes(source, path.read_bytes() if is_file else b"")
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
