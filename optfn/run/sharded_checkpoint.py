"""Checkpoints of which each process writes the shards that it holds, by orbax.

A checkpoint is a directory step_<n>. It has the arrays under the names of `state_dict`; the
history; "about", which is the version, the names of both, and which arrays are per worker; and a
checksum of each of these. The directory gets its name when all of it is on the disk.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from optfn.core import checks
from optfn.core.tree import is_key, listed
from optfn.core.types import Leaf, PyTree
from optfn.parallel.fingerprint import begin_fingerprints, fingerprints
from optfn.run.background import copied
from optfn.run.storage import absolute, is_remote, publish
from optfn.sparse.sharded_table import bare, natural
from optfn.state.per_worker import Divided, PerWorker
from optfn.state.placement import PER_WORKER_KEY
from optfn.train.packed_state import unpack_state
from optfn.train.state_dict import VERSION, named_leaves, per_worker_names

_ABOUT, _CHECKSUMS, _HISTORY = "about", "checksums", "history/"


def is_available() -> bool:
    """Tell whether orbax is installed."""
    try:
        import orbax.checkpoint  # noqa: F401
    except ImportError:
        return False
    return True


def is_divided(state: PyTree) -> bool:
    """Tell whether arrays of a state, besides per-worker ones, are divided over devices."""
    shared = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PerWorker | Divided))
    return any(
        isinstance(x, jax.Array)
        and isinstance(x.sharding, NamedSharding)
        and not x.sharding.is_fully_replicated
        for x in shared
    )


@functools.cache
def _checkpointer() -> Any:
    """Return orbax's checkpointer of this process.

    It synchronizes processes through the coordinator. A collective of devices, from the thread that
    writes, could meet the collectives of the training in another order in each process.
    """
    ocp = checks.optional_module("orbax.checkpoint", "orbax")
    processes = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
        multiprocessing_options=processes,
    )


def writer(path: Path, state: PyTree, history: Mapping[str, np.ndarray]) -> Callable[[], None]:
    """Return a function that writes a state to the directory `path`; any thread may call it.

    Args:
      path: the directory; if it exists, it is replaced.
      state: a TrainState, which may be overwritten at once.
      history: arrays by name.
    """
    checks.optional_module("orbax.checkpoint", "orbax")
    state = natural(unpack_state(state))
    arrays = {name: _data(x) for name, x in named_leaves(state) if x.size}
    beside = {f"{_HISTORY}{k}": np.array(v) for k, v in history.items() if np.size(v)}
    about = {
        "version": VERSION,
        PER_WORKER_KEY: per_worker_names(state),
        "names": list(arrays),
        "beside": list(beside),
    }
    beside = {_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8), **beside}
    copies = copied(arrays)
    checksums = begin_fingerprints(list(arrays.values()))

    def write() -> None:
        sums = np.concatenate([checksums(), _digests(beside.values())])
        _save(absolute(path), copies | beside | {_CHECKSUMS: sums})

    return write


def _digests(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return a checksum of each array of the host, with its dtype and shape, uint32 (n, 2)."""
    native = (x.astype(x.dtype.newbyteorder("=")) for x in arrays)  # as orbax returns them
    contents = [f"{x.dtype.name}{x.shape}".encode() + x.tobytes() for x in native]
    digests = b"".join(hashlib.sha256(content).digest()[:8] for content in contents)
    return np.frombuffer(digests, np.uint32).reshape(-1, 2)


_published = itertools.count()  # the same in all processes, which all save


def _save(path: Path, saved: dict[str, Any]) -> None:
    """Write arrays to a directory, and give it its name when all of it is on the disk.

    Orbax does not wait until the disk has its metadata, so it writes under another name.
    """
    ocp = checks.optional_module("orbax.checkpoint", "orbax")
    unsynced = path if is_remote(path) else path.with_suffix(".unsynced")
    _checkpointer().save(unsynced, args=ocp.args.PyTreeSave(saved), force=True)
    if is_remote(path):
        return
    try:
        if jax.process_index() == 0:  # the processes share the directory
            publish(unsynced, path)
    finally:  # no process waits in vain
        every = set(range(jax.process_count()))
        ocp.multihost.sync_global_processes(f"optfn {next(_published)}", processes=every)


def _data(x: Leaf) -> Leaf:
    return jax.random.key_data(x) if is_key(x) else x


def load(
    path: Path,
    state: PyTree,
    convert: Callable[[dict[str, Any]], dict[str, Any]],
    is_read: Callable[[str], bool],
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Return the arrays in a directory by name (as in `state_dict`), the history, and all names.

    Args:
      path: a directory that `writer` wrote.
      state: a state of the same run, as a template.
      convert: converts per-worker arrays to the current number of workers; it gets them on the
        host, together with the saved numbers of workers.
      is_read: tells whether the array with a name is read.

    Raises:
      ValueError: an array is missing or damaged, or does not fit.
    """
    templates = dict(named_leaves(bare(unpack_state(state))))
    try:
        about, history, arrays = _read_checked(path, templates, is_read)
    except ImportError:
        raise
    except Exception as error:  # orbax and its storage raise errors of many kinds
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    mapping = {"version": np.asarray(about["version"]), **arrays}
    if about[PER_WORKER_KEY]:
        mapping[PER_WORKER_KEY] = np.array(about[PER_WORKER_KEY])
        mapping = convert(mapping)
    return mapping, history, [*about["names"], *(k for k in arrays if k not in about["names"])]


def _read_checked(
    path: Path, templates: Mapping[str, Leaf], is_read: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Return the metadata, the history, and the checked arrays."""
    shapes = _checkpointer().metadata(absolute(path)).item_metadata.tree

    def wanted(name: str) -> Any:
        """Return an array of the host like the saved one, or its shape as the template lies."""
        like = _data(templates.get(name))
        shape, dtype = tuple(shapes[name].shape), shapes[name].dtype
        fits = like is not None and like.shape == shape and like.dtype == dtype
        if fits and isinstance(like, jax.Array | jax.ShapeDtypeStruct) and like.sharding:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=like.sharding)
        return np.zeros(shape, dtype)

    extra = [name for name in shapes if name.startswith(_HISTORY)]
    beside = _restore(path, {name: wanted(name) for name in (_ABOUT, *extra)})
    about = json.loads(bytes(beside[_ABOUT]))
    extra = about.get("beside", extra)
    names = [name for name in about["names"] if is_read(name)]
    arrays = _restore(path, {name: wanted(name) for name in (_CHECKSUMS, *names)})
    sums = np.asarray(arrays.pop(_CHECKSUMS))
    # Directories of earlier versions have checksums of the arrays alone.
    saved = zip([*about["names"], _ABOUT, *extra], sums, strict="beside" in about)
    _check_sums(
        {name: arrays[name] for name in names},
        {name: beside[name] for name in (_ABOUT, *extra)},
        dict(saved),
    )
    history = {name.removeprefix(_HISTORY): np.asarray(beside[name]) for name in extra}
    # Arrays without elements are not written.
    empty = {name: np.zeros(x.shape, x.dtype) for name, x in templates.items() if not x.size}
    return about, history, empty | arrays


def _restore(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return saved arrays by name; they lie as `wanted` does."""
    ocp = checks.optional_module("orbax.checkpoint", "orbax")
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    return dict(_checkpointer().restore(absolute(path), args=args))


def _check_sums(
    arrays: Mapping[str, Leaf], beside: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray]
) -> None:
    """Raise a ValueError if an array is not the one that was saved."""
    found = dict(zip(arrays, fingerprints(list(arrays.values())), strict=True)) if arrays else {}
    found |= zip(beside, _digests(beside.values()), strict=True)
    damaged = [
        name for name, x in found.items() if name in saved and not np.array_equal(x, saved[name])
    ]
    if damaged:
        raise ValueError(f"the checksum of {listed(damaged)} is wrong")
