"""The memories of a device and of its host, and arrays that move between them.

JAX calls a memory by a name in a sharding, and by a space in the type of an array.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from optfn.core import checks
from optfn.core.types import Leaf

PINNED_HOST = "pinned_host"
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host

# The least bytes of a large array. A transfer has a latency, so smaller ones stay on the device.
LARGE = 1 << 20


def is_on_host(x: Leaf) -> bool:
    """Tell whether an array, traced or not, lies in the memory of the host."""
    return bool(getattr(jax.typeof(x), "memory_space", _DEVICE) == _HOST)


def is_large(x: Leaf) -> bool:
    """Tell whether an array, or its shape, has at least `LARGE` bytes, with False for keys."""
    if not jnp.ndim(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    size: int = math.prod(x.shape) * x.dtype.itemsize
    return size >= LARGE


def to_host(x: jax.Array) -> jax.Array:
    """Move a traced array to the memory of the host, where its shards lie as on the devices, and
    return one that lies there unchanged."""
    return x if is_on_host(x) else jax.device_put(x, _HOST)


def to_device(x: jax.Array) -> jax.Array:
    """Fetch an array from the memory of the host, traced or not, and return another unchanged."""
    if not is_on_host(x):
        return x
    there: Any = _DEVICE
    if not checks.is_traced(x):
        device: Any = next(iter(x.sharding.device_set))
        there = x.sharding.with_memory_kind(device.default_memory().kind)
    return jax.device_put(x, there)


def type_on_device(x: Leaf) -> Any:
    """Return the type of a traced array as if it lay on the device, to trace with."""
    return jax.typeof(x).update(memory_space=_DEVICE)


def make_array(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[Any], np.ndarray]
) -> jax.Array:
    """Return an array with a sharding, from read(index), which returns a shard.

    From JAX 0.10 to 0.12, `jax.make_array_from_callback` forgets the memory of a
    SingleDeviceSharding in the type of its result, and the next program that takes it ends the
    process.
    """
    if isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind == PINNED_HOST:
        return jax.device_put(np.array(read((slice(None),) * len(shape))), sharding)
    return jax.make_array_from_callback(shape, sharding, read)
