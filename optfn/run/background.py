"""Writing of checkpoints in the background: copies of states, and the thread that writes them."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core.types import PyTree

# The memory of the host that devices can copy to while they compute.
_PINNED = "pinned_host"


class _Write(NamedTuple):
    """A checkpoint that is being written, or that could not be written."""

    directory: Path
    future: Future[None]


# At most one write for each directory, in the order in which they are written.
_writing: list[_Write] = []


@functools.cache
def _thread() -> ThreadPoolExecutor:
    # `atexit` is too late: by then Python has shut down all pools, and orbax needs its own.
    threading._register_atexit(wait)  # type: ignore[attr-defined]
    return ThreadPoolExecutor(1, "optfn-checkpoint")


def start(directory: Path, write: Callable[[], None]) -> None:
    """Begin to write a checkpoint; call `wait` first for the previous one in the directory."""
    _writing.append(_Write(directory, _thread().submit(write)))


def wait(directory: Path | None = None) -> None:
    """Wait until all checkpoints, or those of a directory, are on the disk.

    If a checkpoint could not be written, in any directory, its error is raised once.
    """
    for write in tuple(_writing):
        if directory in (None, write.directory) or write.future.done():
            try:
                write.future.result()
            finally:
                if write.future.done():  # not if a signal has interrupted the wait
                    _writing.remove(write)


def copied(tree: PyTree) -> PyTree:
    """Return a copy of the arrays of a tree; the arrays may be donated or overwritten at once.

    JAX arrays are copied in the background, to memory of the host if the devices can do that. The
    copies are divided over processes like the arrays.
    """
    groups: dict[frozenset[jax.Device], dict[int, jax.Array]] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            groups.setdefault(frozenset(x.sharding.device_set), {})[id(x)] = x
    copies: dict[int, jax.Array] = {}
    for group in groups.values():
        arrays = list(group.values())
        made = _copier(tuple(map(_host_sharding, arrays)))(arrays)
        copies |= dict(zip(group, made, strict=True))
    return jax.tree.map(lambda x: copies[id(x)] if id(x) in copies else np.array(x), tree)


def _host_sharding(x: jax.Array) -> jax.sharding.Sharding:
    """Return the sharding of an array, in memory of the host if its devices have such memory."""
    kinds = {memory.kind for d in x.sharding.addressable_devices for memory in _memories(d)}
    return x.sharding.with_memory_kind(_PINNED) if _PINNED in kinds else x.sharding


def _memories(device: Any) -> Any:  # jax.Device has no annotations
    return device.addressable_memories()


@functools.lru_cache(maxsize=16)
def _copier(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[PyTree], PyTree]:
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=list(shardings))
