"""The checkpoint that is being written: a copy of the state, and the thread that writes it."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.leaves.types import PyTree

# The memory of the host that devices copy to while they compute.
_PINNED = "pinned_host"

# At most one: the checkpoint that is being written, or the error of the last one.
_writing: list[Future[None]] = []


@functools.cache
def _thread() -> ThreadPoolExecutor:
    # Functions of `atexit` come too late: Python has ended all pools then, and orbax needs its own.
    threading._register_atexit(wait)  # type: ignore[attr-defined]
    return ThreadPoolExecutor(1, "optfn-checkpoint")


def start(write: Callable[[], None]) -> None:
    """Begin to write a checkpoint; the one before must be written (`wait`)."""
    assert not _writing
    _writing.append(_thread().submit(write))


def wait() -> None:
    """Wait until the checkpoint being written is on the disk; raise its error, if any, once."""
    while _writing:
        try:
            _writing[0].result()
        finally:
            if _writing[0].done():  # it is not where a signal interrupts the wait
                _writing.pop()


def copied(tree: PyTree) -> PyTree:
    """Return a copy of the arrays of a tree, which may be donated or overwritten at once.

    JAX arrays are copied in the background, to memory of the host where the devices can; the copies
    lie over the processes as the arrays do.
    """
    groups: dict[frozenset[jax.Device], dict[int, jax.Array]] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            groups.setdefault(frozenset(x.sharding.device_set), {})[id(x)] = x
    copies: dict[int, jax.Array] = {}
    for group in groups.values():
        arrays = list(group.values())
        made = iter(_copier(tuple(map(_sharding_on_host, arrays)))(arrays))
        copies |= {key: next(made) for key in group}
    return jax.tree.map(lambda x: copies[id(x)] if id(x) in copies else np.array(x), tree)


def _sharding_on_host(x: jax.Array) -> jax.sharding.Sharding:
    """Return the sharding of an array, in memory of the host where its devices have such memory."""
    kinds = {memory.kind for d in x.sharding.addressable_devices for memory in _memories(d)}
    return x.sharding.with_memory_kind(_PINNED) if _PINNED in kinds else x.sharding


def _memories(device: Any) -> Any:  # jax.Device has no annotations
    return device.addressable_memories()


@functools.lru_cache(maxsize=16)
def _copier(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[PyTree], PyTree]:
    def copy_each(arrays: PyTree) -> PyTree:
        return [jnp.copy(x) for x in arrays]

    return jax.jit(copy_each, out_shardings=list(shardings))
