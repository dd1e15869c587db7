"""The storage of checkpoints: directories of this machine and of object stores."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from optfn.core import checks


def directory_of(directory: object) -> Path:
    """Return the user's path as a Path; for an address with "://", etils makes it."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise TypeError(
            f"the directory of checkpoints must be a path; got {checks.shown(directory)}"
        )
    if not is_remote(directory):
        return Path(directory)
    epath = checks.optional_module("etils.epath", "orbax")
    try:
        path: Path = epath.Path(os.fspath(directory))
        path.exists()  # the packages for a store are imported when it is first used
    except KeyError:
        raise ValueError(
            f"{directory}: checkpoints must be in a directory, or in an object store that etils "
            "knows, such as gs:// or s3://"
        ) from None
    except ImportError as error:
        raise ImportError(f"{directory}: {error}") from error
    return path


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is an address in an object store."""
    return "://" in os.fspath(path)


def absolute(path: Path) -> Path:
    """Return a path that does not depend on the current directory."""
    return path if is_remote(path) else path.absolute()


def remove_directory(path: Path) -> None:
    """Remove a directory and all that is in it."""
    if is_remote(path):
        path.rmtree()  # type: ignore[attr-defined]
    else:
        shutil.rmtree(path)


def write_file(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a whole file, or leave nothing of it."""
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


def publish(unsynced: Path, path: Path) -> None:
    """Give a directory, which is written, its name `path`, once all of it is on the disk."""
    for written in (unsynced, *unsynced.rglob("*")):
        _sync(written)
    if path.exists():
        remove_directory(path)
    os.replace(unsynced, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk; on Windows, nothing."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
