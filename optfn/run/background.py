"""Writing of checkpoints in the background: copies of states, and the thread that writes them."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core.types import PyTree

# The memory of the host that devices can copy to while they compute.
_PINNED = "pinned_host"

# At most one write for each directory, in the order in which they are written.
_writing: dict[Path, Future[Any]] = {}


@functools.cache
def _get_thread() -> ThreadPoolExecutor:
    # `atexit` is too late: by then Python has shut down all pools, and orbax needs its own.
    threading._register_atexit(wait_for_writes)  # type: ignore[attr-defined]
    return ThreadPoolExecutor(1, "optfn-checkpoint")


def start_write(directory: Path, *calls: Callable[[], None]) -> None:
    """Begin to write a checkpoint by some calls; call `wait_for_writes` first."""
    _writing[directory] = _get_thread().submit(lambda: [call() for call in calls])


def wait_for_writes(directory: Path | None = None) -> None:
    """Wait until all checkpoints, or those of a directory, are on the disk.

    If a checkpoint could not be written, in any directory, its error is raised once.
    """
    for place, write in list(_writing.items()):
        if directory in (None, place) or write.done():
            try:
                write.result()
            finally:
                if write.done():  # not if a signal has interrupted the wait
                    del _writing[place]


def copy_to_host(tree: PyTree) -> PyTree:
    """Return a copy of the arrays of a tree; the arrays may be donated or overwritten at once.

    JAX arrays are copied in the background, to memory of the host if the devices can do that. The
    copies are divided over processes like the arrays.
    """
    groups: dict[frozenset[jax.Device], list[jax.Array]] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            groups.setdefault(frozenset(x.sharding.device_set), []).append(x)
    copies: dict[int, jax.Array] = {}
    for arrays in groups.values():
        made = _copier(tuple(map(_to_host_sharding, arrays)))(arrays)
        copies |= dict(zip(map(id, arrays), made, strict=True))
    return jax.tree.map(lambda x: copies[id(x)] if id(x) in copies else np.array(x), tree)


def _to_host_sharding(x: jax.Array) -> jax.sharding.Sharding:
    """Return the sharding of an array, in memory of the host if its devices have such memory."""
    devices: set[Any] = x.sharding.addressable_devices  # jax.Device has no annotations
    kinds = {memory.kind for device in devices for memory in device.addressable_memories()}
    return x.sharding.with_memory_kind(_PINNED) if _PINNED in kinds else x.sharding


@functools.lru_cache(maxsize=16)
def _copier(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[PyTree], PyTree]:
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=list(shardings))
