"""Writing of checkpoints in the background: copies of states, and the thread that writes them."""

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core.types import PyTree

# From 3.12.0 to 3.12.2, Python starts no thread once a program has ended (CPython gh-104690), so a
# write that needs new threads, as one by orbax, must be on the disk before.
STARTS_THREADS_AT_EXIT = not (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2)

# The memory of the host that devices can copy to while they compute.
_PINNED = "pinned_host"

# The write under way of each directory, the oldest first.
_writing: dict[Path, Future[Any]] = {}


@functools.cache
def _get_thread() -> ThreadPoolExecutor:
    """Return the pool of the one thread that writes, made at the first call, which also has Python
    wait for all writes at the end of the program."""
    # `atexit` is too late: by then Python has shut down all pools, and orbax needs a pool.
    threading._register_atexit(wait_for_writes)  # type: ignore[attr-defined]
    return ThreadPoolExecutor(1, "optfn-checkpoint")


def start_write(directory: Path, *calls: Callable[[], None]) -> None:
    """Run `calls` in order in the thread that writes, until one of them fails, and record this as
    the write under way of `directory`.

    Call `wait_for_writes` first, for an earlier write of the same directory.
    """
    _writing[directory] = _get_thread().submit(lambda: [call() for call in calls])


def wait_for_writes(directory: Path | None = None) -> None:
    """Wait until the write of a directory has ended, or for None every write, and raise the error
    of a failed one, also of one in another directory.

    Each error is raised once.
    """
    for place, write in list(_writing.items()):
        # A failed write of another directory is raised here too, or nobody would hear of it.
        if directory in (None, place) or write.done():
            try:
                write.result()
            finally:
                if write.done():  # not if a signal has interrupted the wait
                    del _writing[place]


def copy_to_host(tree: PyTree) -> PyTree:
    """Copy the arrays of a tree, JAX arrays in the background and to the host if it has pinned
    memory, so that the originals may be overwritten at once.

    JAX arrays are copied in the background, to pinned memory of the host if their devices have it,
    and stay divided over processes; everything else is copied by NumPy, now.
    """
    # One program for each set of devices: jit takes no arguments on different ones.
    groups: dict[frozenset[jax.Device], list[jax.Array]] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            groups.setdefault(frozenset(x.sharding.device_set), []).append(x)
    copies: dict[int, jax.Array] = {}
    in_mesh = not jax.sharding.get_abstract_mesh().empty
    for devices, arrays in groups.items():
        shardings = [_to_host_sharding(x) for x in arrays]
        if in_mesh and len(devices) == 1:
            # Under jax.set_mesh, jit of JAX 0.12 refuses arrays off the mesh, such as counters.
            made = jax.device_put(arrays, shardings, may_alias=False)
        else:
            made = _copier(tuple(shardings))(arrays)
        copies |= dict(zip(map(id, arrays), made, strict=True))
    return jax.tree.map(lambda x: copies[id(x)] if id(x) in copies else np.array(x), tree)


def _to_host_sharding(x: jax.Array) -> jax.sharding.Sharding:
    """Return an array's sharding, in pinned host memory if its devices have such memory."""
    devices: set[Any] = x.sharding.addressable_devices  # jax.Device has no annotations
    kinds = {memory.kind for device in devices for memory in device.addressable_memories()}
    return x.sharding.with_memory_kind(_PINNED) if _PINNED in kinds else x.sharding


@functools.lru_cache(maxsize=16)  # a later save of the same state does not compile again
def _copier(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[PyTree], PyTree]:
    """Return a jitted function that copies a list of arrays, each to the sharding at its place in
    `shardings`."""
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=list(shardings))
