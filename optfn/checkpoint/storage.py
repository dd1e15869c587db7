"""The storage of checkpoints: directories of this machine and of object stores."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from optfn.checkpoint.snapshot import Snapshot
from optfn.core import checks
from optfn.interop import packages

Arrays: TypeAlias = Mapping[str, np.ndarray]

# The mark of a checkpoint whose params or loss are not finite.
NONFINITE = "nonfinite"

# The end of the name of a checkpoint that is kept while another of the same step replaces it.
ASIDE = ".aside"


class Backend(Protocol):
    """A way to store checkpoints, each at a path that the caller chooses.

    suffix: the end of the names of such checkpoints.
    """

    suffix: str

    def writer(
        self, path: Path, snapshot: Snapshot, beside: Arrays, *, is_loss_finite: bool = True
    ) -> Callable[[], None]:
        """Return a function, which any thread may call, that writes a checkpoint as a whole,
        replaces one at the path, and marks it if it is not finite.

        Args:
          path: where; if there is a checkpoint, it is replaced.
          snapshot: the arrays, PRNG keys as data. They may be overwritten at once.
          beside: further arrays by name, of the host.
          is_loss_finite: whether the last loss is; if it or params are not, the checkpoint is
            marked.
        """

    def read(self, path: Path, like: Snapshot, is_read: Callable[[str], bool]) -> dict[str, Any]:
        """Return the arrays of a checkpoint by name, with None for an array that is not read. Raise
        an error of any kind if an array is not as it was saved.

        Names are as in `state_dict` and in `beside`. An array with the shape and dtype of its
        template may have the template's sharding; the rest are host arrays. Arrays without elements
        may be there although they are not read.

        Args:
          path: where the checkpoint is.
          like: the snapshot of a state like the saved one, PRNG keys as data.
          is_read: tells whether the array with a name is read; arrays of `beside` always are.

        Raises:
          Exception: of any kind, if an array is not as it was saved.
        """

    def is_finite(self, path: Path) -> bool:
        """Tell whether a checkpoint lacks the mark of params or a loss that is not finite, without
        reading anything else of it."""

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, finished or not."""


def to_path(directory: str | os.PathLike[str]) -> Path:
    """Return a directory as an absolute Path without "..", or an address with "://" as a path of
    etils, and raise a TypeError for anything else. The program may change its working directory
    during a run."""
    checks.path("the directory of checkpoints", directory)
    if not is_remote(directory):
        path = Path(directory).absolute()
        # tensorstore takes no ".."; links are left alone otherwise.
        return path.resolve() if ".." in path.parts else path
    epath = packages.optional_module("etils.epath", "orbax")
    try:
        path = epath.Path(os.fspath(directory))
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
    """Tell whether a path is an address in an object store, because it contains "://"."""
    return "://" in os.fspath(path)


def try_to_write(directory: Path) -> None:
    """Create a directory and a file in it, which is removed again, or raise the OSError of a place
    where nothing can be written."""
    directory.mkdir(parents=True, exist_ok=True)
    # The next save removes such a file if this process is killed.
    with tempfile.NamedTemporaryFile(dir=directory, prefix="step_", suffix=".unfinished"):
        pass


def replace_text(path: Path, text: str) -> Path:
    """Write a file so that a reader, or a run that goes on after a kill, finds the old text or the
    new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk, or do nothing on Windows."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
