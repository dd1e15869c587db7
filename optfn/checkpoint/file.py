"""A checkpoint in one npz file, with the whole state. Any process can read it alone.

A damaged or forged file can cost only little time and memory.
"""

import contextlib
import functools
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.lib import format as npy

from optfn.checkpoint import background, finiteness
from optfn.checkpoint.snapshot import Snapshot
from optfn.checkpoint.storage import NONFINITE, Arrays, sync
from optfn.core.types import Leaf

# A history and the headers of a small file may take this many bytes.
_SMALL = 1 << 24


class NpzFile:
    """A `Backend`: each checkpoint is a file."""

    suffix = ".npz"

    def writer(
        self, path: Path, snapshot: Snapshot, beside: Arrays, *, is_loss_finite: bool = True
    ) -> Callable[[], None]:
        """Begin to copy a whole state to the host in each process, and return the function that
        writes it as a file, with a mark if params or loss are not finite."""
        names = list(snapshot.arrays)
        whole = background.copy_to_host(list(map(_gather_leaf, snapshot.arrays.values())))

        def write() -> None:
            host = dict(zip(names, map(np.asarray, whole), strict=True))
            arrays = snapshot._replace(arrays=host).to_mapping(beside)
            judged = finiteness.select_judged(host.items())
            if not (is_loss_finite and all(np.all(np.isfinite(x)) for x in judged)):
                arrays[NONFINITE] = np.array(True)
            write_file(path, functools.partial(_write_arrays, arrays))

        return write

    def read(self, path: Path, like: Snapshot, is_read: Callable[[str], bool]) -> dict[str, Any]:
        """Return the arrays of a file by name, with None for names that `is_read` leaves out, or
        raise a ValueError if it has no version or is too large for the state.

        Nothing is run, unpickled or unpacked to the disk.

        Allocations are bounded by the bytes of the file or, if it is compressed, by a few times
        the bytes of the template.
        """
        with open(path, "rb") as stream, zipfile.ZipFile(stream) as file:
            total = sum(entry.file_size for entry in file.infolist())
            needed = sum(x.size * x.dtype.itemsize for x in like.arrays.values())
            # A small compressed file can hold zeros of any size (a zip bomb).
            most = max(os.fstat(stream.fileno()).st_size, 4 * needed + _SMALL)
            if total > most:
                raise ValueError(
                    f"it would take {total:,} bytes, more than {most:,}, the most for this state"
                )
            names = [name.removesuffix(".npy") for name in file.namelist()]
            if "version" not in names:
                raise ValueError("it lacks the version of its format")
            return {
                name: _read_array(file, f"{name}.npy") if is_read(name) else None
                for name in names
                if name != NONFINITE
            }

    def is_finite(self, path: Path) -> bool:
        """Tell whether a file lacks the mark of params or a loss that is not finite, which is also
        true if it cannot be opened.

        `read` then raises its error.
        """
        try:
            with zipfile.ZipFile(path) as file:
                return f"{NONFINITE}.npy" not in file.namelist()
        except (OSError, zipfile.BadZipFile):
            return True

    def remove(self, path: Path) -> None:
        """Remove a file, or do nothing if it does not exist."""
        path.unlink(missing_ok=True)


def _gather_leaf(x: Leaf) -> Leaf:
    """Gather an array if this process holds only a shard of it, or take the first copy of a
    replicated array."""
    if isinstance(x, jax.Array) and x.is_fully_replicated:
        return x.addressable_data(0)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return x


def _write_arrays(arrays: Mapping[str, np.ndarray], file: IO[bytes]) -> None:
    """Write arrays by name as `np.savez` does, which has no room for the names of its arguments."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, x in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                npy.write_array(stream, np.asanyarray(x), allow_pickle=False)


def write_file(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name and rename it once it is on the disk, or remove it and
    raise an OSError that explains why it failed."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as file:
            fill(file)
            # The bytes reach the disk before the name does; `sync` then makes the name last.
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        words = f"cannot save the state ({error.strerror}); earlier checkpoints are intact"
        if isinstance(error, FileNotFoundError) and jax.process_count() > 1:
            words += ", unless another process writes there: each needs a directory of its own"
        raise OSError(error.errno, words, str(path)) from error


def _read_array(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an entry of a zip file as an array, or raise a ValueError if it has objects or another
    count of bytes than its npy header says."""
    # The header first: read_array allocates as much as the header says, before it reads any data.
    with file.open(name) as stream:
        is_first = npy.read_magic(stream) == (1, 0)
        header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, _, dtype = header(stream)
        size = file.getinfo(name).file_size - stream.tell()
        if dtype.hasobject or size != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"entry {name!r} has {size} bytes of data, which cannot be an array of dtype "
                f"{dtype} and shape {shape}"
            )
    with file.open(name) as stream:
        return npy.read_array(stream, allow_pickle=False)
