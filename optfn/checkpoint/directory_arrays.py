"""The arrays in a directory that orbax wrote, read by tensorstore, the library that orbax uses.

Orbax reads each shard for each device in a loop of coroutines: thousands of small arrays take long,
and if one of them is damaged, each array that is still being read prints a traceback.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from optfn.checkpoint.storage import is_remote
from optfn.core.types import Leaf
from optfn.interop import packages
from optfn.mesh.compilers import memories
from optfn.mesh.layout import processes

# An array of fewer bytes is read as a whole by each process, whatever the sharding of the result.
_SMALL = 1 << 20
_AT_ONCE = 1 << 30  # bytes of arrays that are read at the same time
_CACHE = {"cache_pool": {"total_bytes_limit": 1 << 27}}  # of the index of the names

# zarr describes an array in one of these files; the driver that reads it.
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}

_Region: TypeAlias = tuple[tuple[int, int], ...]
_Finish: TypeAlias = Callable[[], Leaf]


def read_directory(
    path: Path, templates: Mapping[str, Leaf], is_read: Callable[[str], bool]
) -> dict[str, Leaf]:
    """Return the selected arrays of a directory by name, large ones that fit their templates with
    the template's sharding and the rest on the host.

    Args:
      path: the directory.
      templates: arrays, or ShapeDtypeStructs, by name.
      is_read: tells whether the array with a name is read.

    Raises:
      ValueError: an array cannot be read; in a run of several processes that divide an array, it is
        raised in all of them.
    """
    arrays = (x for x in templates.values() if isinstance(x, jax.Array))
    is_shared = not all(x.is_fully_addressable for x in arrays)
    found, error = {}, None
    try:
        found = _read_all(path, templates, is_read)
    except Exception as caught:
        # Every process must reach the gather below: without one of them all would wait there for
        # ever.
        error = caught
    if is_shared and processes.is_true_anywhere(error is not None):
        raise ValueError("a process cannot read all of its arrays") from error
    if error is not None:
        raise error
    return found


def _read_all(
    path: Path, templates: Mapping[str, Leaf], is_read: Callable[[str], bool]
) -> dict[str, Leaf]:
    """Read the selected arrays of a directory by name, and wait for those under way whenever they
    exceed `_AT_ONCE` bytes."""
    ts = packages.optional_module("tensorstore", "orbax")
    context = ts.Context(_CACHE)
    base = f"{path}/" if is_remote(path) else {"driver": "file", "path": f"{path.absolute()}/"}
    kvstore = {"driver": "ocdbt", "base": base}
    keys = ts.KvStore.open(kvstore, context=context).result().list().result()
    opened = {}
    for key in map(bytes.decode, keys):
        name, _, file = key.rpartition("/")
        if file in _DRIVERS and is_read(name):
            spec = {"driver": _DRIVERS[file], "kvstore": kvstore | {"path": f"{name}/"}}
            opened[name] = ts.open(spec, open=True, read=True, context=context)
    found: dict[str, Leaf] = {}
    waiting: dict[str, _Finish] = {}
    size = 0
    for name, future in opened.items():
        store = future.result()
        waiting[name] = _begin_read(store, templates.get(name))
        size += _store_bytes(store)
        if size > _AT_ONCE:  # bounds the host memory of arrays that are read and not yet placed
            found |= {name: finish() for name, finish in waiting.items()}
            waiting, size = {}, 0
    return found | {name: finish() for name, finish in waiting.items()}


def _store_bytes(store: Any) -> int:
    return int(store.size) * int(store.dtype.numpy_dtype.itemsize)


def _begin_read(store: Any, template: Leaf) -> _Finish:
    """Begin to read an array in the shards of its template, or as a whole if it is small or does
    not fit, and return a function that waits for it.

    It is also read as a whole if the template is not committed to its devices.
    """
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    sharding: Any = getattr(template, "sharding", None)
    fits = sharding is not None and (template.shape, template.dtype) == (shape, dtype)
    if not fits or _store_bytes(store) < _SMALL or not getattr(template, "committed", True):
        whole = store.read()
        return lambda: np.asarray(whole.result())

    def region(index: tuple[slice, ...]) -> _Region:
        return tuple((*x.indices(n)[:2],) for x, n in zip(index, shape, strict=True))

    indices = sharding.addressable_devices_indices_map(shape).values()
    # Devices that hold the same shard share a read.
    pieces = {region(index): store[index].read() for index in indices}

    def finish() -> Leaf:
        return memories.make_array(
            shape, sharding, lambda index: np.asarray(pieces[region(index or ())].result())
        )

    return finish
