"""Communication between the processes of a run, on the host: all-gathers, broadcasts, checks."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from optfn import _version
from optfn.core import checks, tree
from optfn.core.types import Batch, Leaf, Params, PyTree

# The number of bytes that `broadcast_bytes` sends at once. A broadcast needs a buffer of this size
# on each device.
_PIECE = 1 << 26

# The most bytes of an array of the first batch that `compare_batch` reads: a tenth of a second.
_COMPARED = 1 << 26


def is_on_all_processes(mesh: Mesh | None) -> bool:
    """Tell whether there are several processes and each has devices of the mesh, which is False
    without a mesh."""
    if mesh is None or jax.process_count() == 1:
        return False
    return _include_all_processes(mesh.devices.flat)


def has_state_on_all_processes(state: PyTree) -> bool:
    """Tell whether there are several processes, and each has devices with arrays of the state."""
    if jax.process_count() == 1:
        return False
    arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    return _include_all_processes(set[Any]().union(*(x.sharding.device_set for x in arrays)))


def _include_all_processes(devices: Iterable[Any]) -> bool:
    """Tell whether devices belong, taken together, to all processes."""
    return {device.process_index for device in devices} == set(range(jax.process_count()))


def gather_values(values: Sequence[int]) -> np.ndarray:
    """Gather int32 values from each process into an array (processes, len(values)). All must call
    it."""
    gathered = multihost_utils.process_allgather(np.asarray(values, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), len(values))


def is_true_anywhere(value: bool) -> bool:
    """Tell whether a value is true in any process. All must call it."""
    return bool(np.any(gather_values([value])))


def gather_texts(text: str) -> list[str]:
    """Gather a text from each process, in the order of the processes. All must call it."""
    content = text.encode()
    sizes = gather_values([len(content)])[:, 0]
    # All processes must pass arrays of one shape.
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    found = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(found, sizes, strict=True)]


def broadcast_bytes(source: int, content: bytes) -> bytes:
    """Return the content that process `source` passes, and ignore the content of the rest. All
    processes must call it."""
    # The length goes as a quotient and a remainder, because a large file exceeds an int32.
    num_whole, rest = map(int, gather_values(divmod(len(content), _PIECE))[source])
    is_source, total = jax.process_index() == source, num_whole * _PIECE + rest
    pieces = []
    for start in range(0, total, _PIECE):
        piece = np.zeros(min(_PIECE, total - start), np.uint8)
        if is_source:
            piece[:] = np.frombuffer(content, np.uint8, piece.size, start)
        pieces.append(np.asarray(multihost_utils.broadcast_one_to_all(piece, is_source)).tobytes())
    return b"".join(pieces)


def compare_params(params: Params) -> None:
    """Raise a ValueError unless all processes have the same versions and bit-identical params, but
    do nothing for traced params or a tree without leaves.

    The versions are those of optfn and JAX. Leaves that are already divided over processes are
    compared by shape.

    Raises:
      ValueError: the params differ, or the versions of optfn or JAX. Every process raises it, and
        it names the difference and the processes that have it.
    """
    arrays = jax.tree.leaves(params)
    if not arrays or checks.is_traced(arrays):
        return
    _check_same("versions", f"optfn {_version.__version__}, jax {jax.__version__}")
    _check_same("params", describe_shapes(params))
    names, leaves = zip(*tree.arrays_with_paths(params), strict=True)
    digests = gather_values([_digest(_content(x)) for x in leaves])
    for i in np.flatnonzero(np.any(digests != digests[0], axis=0)):
        raise ValueError(
            f"processes must start from the same params, but {names[i]!r} in process "
            f"{_list_different(digests[:, [i]])} differs from that in process 0"
        )


def compare_batch(batch: Batch) -> None:
    """Raise a ValueError unless all processes pass batches of the same structure, shapes, dtypes
    and values, and compare global arrays by shape alone.

    The devices of a process take their rows of its array, so rows would be lost silently if each
    process passed the examples that it has read. The first 64 MiB of each array are compared. Of a
    global array each process holds a part. Traced arrays are compared by shape, too.
    """
    _check_same("batches", describe_shapes(batch))
    named = [(name, x) for name, x in tree.arrays_with_paths(batch) if not checks.is_traced(x)]
    if not named:
        return
    digests = gather_values([_digest(_content(x, _COMPARED)) for _, x in named])
    for i in np.flatnonzero(np.any(digests != digests[0], axis=0)):
        raise ValueError(
            f"batches of process {_list_different(digests[:, [i]])} differ in their numbers from "
            f"process 0's{f', in {named[i][0]!r}' if named[i][0] else ''}: pass the same array in "
            "every process, or make the global array with jax.make_array_from_process_local_data"
        )


def describe_shapes(values: PyTree) -> str:
    """Return the name, shape and dtype of each array of a tree in words, or "no arrays" if it has
    none."""
    words = []
    for name, x in tree.arrays_with_paths(values):
        kind = x.dtype if tree.is_array(x) else type(x).__name__
        words.append(f"{name or 'one array'} {np.shape(x)} {kind}")
    return ", ".join(words) or "no arrays"


def _check_same(noun: str, text: str) -> None:
    """Raise a ValueError, with the text of this process, in every process unless all pass the same
    text."""
    digests = gather_values([_digest(text.encode())])
    if np.any(digests != digests[0]):
        raise ValueError(
            f"processes must have the same {noun}, but those of process {_list_different(digests)} "
            f"differ from those of process 0. This process, {jax.process_index()}, has {text}"
        )


def _list_different(digests: np.ndarray) -> str:
    """Return as text the indices of the processes whose row differs from the row of process 0."""
    return ", ".join(map(str, np.flatnonzero(np.any(digests != digests[0], axis=1))))


def _content(x: Leaf, most: int | None = None) -> bytes:
    """Return the bytes of a leaf, or of a key's data, at most the first `most` unless it is None,
    or b"" if this process lacks a shard of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return b""
    host = np.asarray(jax.random.key_data(x) if tree.is_key(x) else x)
    if most is not None:
        host = host.reshape(-1)[: most // max(1, host.itemsize)]
    return host.tobytes()


def _digest(content: bytes) -> int:
    """Return the first 32 bits of the SHA-256 of some bytes as a signed integer, because
    `gather_values` takes an int32."""
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "little", signed=True)
