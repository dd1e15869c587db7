"""Which checkpoint of a run to load: the newest intact one, of this process or of all."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from optfn.core import checks
from optfn.parallel import processes
from optfn.run.storage import write_file

T = TypeVar("T")


class OtherRun(ValueError):
    """A checkpoint is intact, but from another run."""


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step_"))


def newest_of(
    paths: list[Path], read: Callable[[Path], T], problems: list[str]
) -> tuple[Path, T] | None:
    """Return the last path that is intact, read; `problems` gets the faults of those after it.

    One that is intact, but from another run, ends the search: those before it are of that run too.
    """
    for path in reversed(paths):
        try:
            return path, read(path)
        except ValueError as error:
            problems.append(str(error))
            if isinstance(error, OtherRun):
                break
    return None


def told(newest: T | None, problems: list[str]) -> T:
    """Return the checkpoint that was loaded; warn of each that was passed over for it."""
    if newest is None:
        raise ValueError("no checkpoint can be loaded: " + "; ".join(problems))
    for problem in problems:
        checks.warn(f"skipped: {problem}")
    return newest


def newest_of_all(
    directory: Path, newest: tuple[Path, T] | None, read: Callable[[Path], T]
) -> tuple[Path, T] | None:
    """Return the newest checkpoint of all processes; those without it get a copy of its file."""
    step = -1 if newest is None else step_of(newest[0])
    steps = processes.gather_values([step])[:, 0]
    if np.all(steps == step):
        return newest
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
        return newest
    checks.warn(f"{path} was missing here, and is now a copy of the file of process {source}")
    directory.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(content))
    return path, read(path)
