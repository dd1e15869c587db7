"""A checkpoint as one directory: each process writes the shards that it holds, by orbax.

It has the arrays of the state; the arrays beside it; "about", which is the version, all names, and
the per-worker names; and a checksum of each. Arrays without elements are
left out. The directory gets its name when all of it is on the disk.
"""

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from optfn.checkpoint.background import copy_to_host
from optfn.checkpoint.directory_arrays import read_directory
from optfn.checkpoint.finiteness import select_judged
from optfn.checkpoint.snapshot import ABOUT, KEYS, VERSION, Snapshot
from optfn.checkpoint.storage import ASIDE, NONFINITE, Arrays, is_remote, sync
from optfn.core.tree import list_names
from optfn.core.types import PyTree
from optfn.interop import packages
from optfn.mesh.layout.fingerprint import begin_fingerprints, begin_finite_check, fingerprints
from optfn.mesh.state.bits import list_dtypes
from optfn.mesh.state.per_worker import Divided, PerWorker
from optfn.mesh.state.placement import PER_WORKER_KEY

# The names of the entries that are not arrays of the state.
ENTRIES = _HEADER, _CHECKSUMS = "about", "checksums"


def is_directory_default(state: PyTree) -> bool:
    """Tell whether a state is saved as a directory by default: if devices divide an array besides
    per-worker ones, and orbax is installed. An orbax that cannot be imported is an error."""

    def is_divided(x: Any) -> bool:
        named = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
        return named and not x.is_fully_replicated

    shared = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PerWorker | Divided))
    try:
        return any(map(is_divided, shared)) and bool(_import_orbax())
    except ModuleNotFoundError:
        return False


def _import_orbax() -> Any:
    """Import and return orbax.checkpoint, or raise an ImportError that names the extra to
    install."""
    return packages.optional_module("orbax.checkpoint", "orbax")


@functools.cache
def _get_checkpointer() -> Any:
    """Return this process's one checkpointer of orbax, which synchronizes processes through the
    coordinator instead of collectives.

    A collective of devices, from the thread that writes, could meet the collectives of the training
    in another order in each process.
    """
    ocp = _import_orbax()
    every = set(range(jax.process_count())) if jax.process_count() > 1 else None
    processes = ocp.options.MultiprocessingOptions(active_processes=every)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


_publish_numbers = itertools.count()  # the same in all processes, which all save


class OrbaxDirectory:
    """A `Backend`: each checkpoint is a directory."""

    suffix = ""

    def writer(
        self, path: Path, snapshot: Snapshot, beside: Arrays, *, is_loss_finite: bool = True
    ) -> Callable[[], None]:
        """Begin to copy a state to the host and to compute its checksums, and return the function
        that writes both, with a mark if params or loss are not finite."""
        ocp = _import_orbax()
        arrays = {name: x for name, x in snapshot.arrays.items() if x.size}
        _check_ends(arrays)
        # orbax takes no text.
        texts = {name: x.tolist() for name, x in beside.items() if x.dtype.kind == "U"}
        beside = {name: x for name, x in beside.items() if x.size and name not in texts}
        about = {
            "version": VERSION,
            PER_WORKER_KEY: snapshot.per_worker,
            **({KEYS: [*snapshot.keys.items()]} if snapshot.keys else {}),
            "names": list(arrays),
            "beside": list(beside),
            "texts": texts,
        }
        beside = {_HEADER: np.frombuffer(json.dumps(about).encode(), np.uint8), **beside}
        copies, checksums = copy_to_host(arrays), begin_fingerprints(list(arrays.values()))
        params_are_finite = begin_finite_check(select_judged(arrays.items()))

        def write() -> None:
            sums = np.concatenate([checksums(), _hash_arrays(beside.values())])
            saved = ocp.args.PyTreeSave(copies | beside | {_CHECKSUMS: sums})
            marks = [] if params_are_finite() and is_loss_finite else [NONFINITE]
            if is_remote(path):
                self._write_remote(path, saved, marks)
                return
            # Orbax does not wait until the disk has its metadata, so it writes under another name.
            unsynced = path.with_suffix(".unsynced")
            _get_checkpointer().save(unsynced, args=saved, force=True)
            try:
                if jax.process_index() == 0:  # the processes share the directory
                    for mark in marks:
                        (unsynced / mark).touch()
                    self._publish(unsynced, path)
            finally:  # no process waits in vain
                every = set(range(jax.process_count()))
                ocp.multihost.sync_global_processes(
                    f"optfn {next(_publish_numbers)}", processes=every
                )

        return write

    def _publish(self, unsynced: Path, path: Path) -> None:
        """Flush a written directory to the disk and give it the name `path`. An older directory of
        this name is moved aside first, and removed at the end.

        Readers find the old one aside until the new one has the name. A disk cannot exchange two
        directories at once everywhere.
        """
        for written in (unsynced, *unsynced.rglob("*")):
            sync(written)
        aside = path.with_name(path.name + ASIDE)
        if path.exists():
            if aside.exists():
                self.remove(aside)
            os.replace(path, aside)
        os.replace(unsynced, path)
        sync(path.parent)
        if aside.exists():
            self.remove(aside)

    def _write_remote(self, path: Path, saved: Any, marks: list[str]) -> None:
        """Write a directory and its marks in an object store, first aside if one of this name
        exists, and then under its name.

        Otherwise a process that is killed would leave none, since orbax removes the earlier one.
        """
        aside = path.with_name(path.name + ASIDE)
        is_saved_again = path.exists()
        if is_saved_again:  # a store cannot move it aside
            _get_checkpointer().save(aside, args=saved, force=True)
        _get_checkpointer().save(path, args=saved, force=True)
        for mark in marks if jax.process_index() == 0 else ():
            (path / mark).write_text("")
        if is_saved_again:
            self.remove(aside)

    def read(self, path: Path, like: Snapshot, is_read: Callable[[str], bool]) -> dict[str, Any]:
        """Return all arrays of a directory by name, with None for names that `is_read` leaves out,
        or raise a ValueError if a checksum of those read is wrong.

        Raises:
          ValueError: a checksum is wrong.
        """
        saved = read_directory(path, like.arrays, lambda name: name in ENTRIES or is_read(name))
        about = json.loads(bytes(saved[_HEADER]))
        names, extra = (list(filter(is_read, about[key])) for key in ("names", "beside"))
        beside = [_HEADER, *extra]
        sums = zip([*about["names"], _HEADER, *about["beside"]], saved[_CHECKSUMS], strict=True)
        found = dict(zip(names, fingerprints([saved[name] for name in names]), strict=True))
        found |= zip(beside, _hash_arrays(saved[name] for name in beside), strict=True)
        damaged = [k for k, x in sums if k in found and not np.array_equal(x, found[k])]
        if damaged:
            raise ValueError(f"the checksum of {list_names(damaged)} is wrong")
        listed = [*about["names"], *about["beside"]]
        arrays = dict.fromkeys(listed) | {name: saved[name] for name in (*names, *extra)}
        empty = {name: np.zeros(x.shape, x.dtype) for name, x in like.arrays.items() if not x.size}
        return {
            **list_dtypes(arrays),
            **{name: np.array(about[name]) for name in ABOUT if name in about},
            **empty,
            **arrays,
            **{name: np.array(text) for name, text in about.get("texts", {}).items()},
        }

    def is_finite(self, path: Path) -> bool:
        """Tell whether the directory lacks the file that marks it as not finite."""
        return not (path / NONFINITE).exists()

    def remove(self, path: Path) -> None:
        """Remove a directory and all that is in it if this is process 0: all processes share it."""
        if jax.process_index() != 0:
            return
        if is_remote(path):
            path.rmtree()  # type: ignore[attr-defined]
        else:
            shutil.rmtree(path)


def _check_ends(names: Iterable[str]) -> None:
    """Raise a ValueError that lists the names that end with "/", whose ends orbax cuts off."""
    cut = [name for name in names if name.endswith("/")]
    if cut:
        raise ValueError(
            f"the names {list_names(cut)} end with an empty key or with '/', which orbax cuts "
            "off. Rename them, or save a file by sharded=False"
        )


def _hash_arrays(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return a SHA-256 of each host array, with its dtype and shape, cut to two uint32 (n, 2)."""
    native = (x.astype(x.dtype.newbyteorder("=")) for x in arrays)  # as orbax returns them
    contents = [f"{x.dtype.name}{x.shape}".encode() + x.tobytes() for x in native]
    digests = b"".join(hashlib.sha256(content).digest()[:8] for content in contents)
    return np.frombuffer(digests, np.uint32).reshape(-1, 2)
