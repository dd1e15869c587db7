"""A checkpoint in one npz file. A damaged or forged one can cost only little time and memory."""

import math
import os
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optfn.core.types import PyTree
from optfn.train.loading import ABOUT

# A history and the headers of a small file may take this many bytes.
_SMALL = 1 << 24


def load_file(
    path: str | os.PathLike[str], state: PyTree, is_wanted: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Return the arrays in a file by name (as in `state_dict`), the history, and all names.

    Args:
      path: a file that `save_checkpoint` wrote.
      state: a state of the same run, as a template.
      is_wanted: tells whether the array with a name is read.

    Raises:
      ValueError: the file is truncated or damaged.
    """
    prefix = "history/"

    def is_state(name: str) -> bool:
        return not (name in ABOUT or name.startswith(prefix))

    try:
        arrays, names = _read(path, state, lambda name: not is_state(name) or is_wanted(name))
    except Exception as error:  # zipfile raises many types of errors if its fields are damaged
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    history = {k.removeprefix(prefix): arrays.pop(k) for k in names if k.startswith(prefix)}
    return arrays, history, [name for name in names if is_state(name)]


def _read(
    path: str | os.PathLike[str], state: PyTree, is_read: Callable[[str], bool]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return arrays of a file and all names; nothing is run, unpickled or unpacked to the disk.

    Allocations are bounded by the bytes of the file or, if it is compressed, by a few times the
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
            raise ValueError(
                f"it would take {total:,} bytes, more than {most:,}, the most for this state"
            )
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as file:
            names = list(file.files)
            arrays = {name: file[name] for name in names if is_read(name)}
    if "version" not in arrays:
        raise ValueError("it lacks the version of its format")
    return arrays, names


def _check_entry(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise a ValueError unless an entry of a file has as many bytes as its header says."""
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
                f"which cannot be an array of dtype {dtype} and shape {shape}"
            )
