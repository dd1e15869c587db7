"""Reduce-scatter and all-gather of compressed slices, and the protocol of a compressor.

Each of N workers owns a slice of each array. In the reduce-scatter, each worker sends every owner a
packet of its slice, and the owner takes the mean of the packets. In the all-gather, each owner
sends all workers a packet of its slice. In both, a worker sends (N − 1)/N of the bytes of a packet
of the whole array.

`mean_scatter_packets` and `all_gather_packets` keep no state of the compressor between two training
steps. An integer in this state counts encodings, so they set it to the number of the training step:
a compressor that rounds at random then rounds the same array differently in each step.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core.checks import show, warn
from optfn.core.types import PyTree
from optfn.mesh.collectives.axes import Axes, axis_size
from optfn.mesh.collectives.gathers import GatheredPackets, all_to_all_leaves

# The function from arrays to their packets and the next states.
Encode = Callable[[PyTree], tuple[PyTree, Any]]
# The function from packets to arrays.
Decode = Callable[[PyTree], PyTree]

# Arrays with fewer elements are sent as they are. Their collectives take latency, not bandwidth, so
# smaller messages would save nothing.
MIN_SIZE = 1024


@runtime_checkable
class Compressor(Protocol):
    """The methods that turn a leaf of one worker into a packet, and back.

    A packet is a tree of arrays, whose shapes are the same in each step. The state is a tree of
    arrays as well, or () if there is none. It must be the same on all workers, except for arrays in
    a `PerWorker`. `sharded` keeps no state between steps: `encode` then gets the state of `init`,
    with the number of the step added to its integers. So let an integer count encodings.

    A compressor may also have the methods of `optfn.compression.compressors.BaseCompressor`;
    defaults replace missing ones.
    """

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first state for a leaf of this shape, () if there is none."""

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the packet for a float32 leaf, and the next state."""

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 leaf of this shape that is encoded in a packet."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of the packet for a leaf of this shape."""


def check_compressor(argument: str, compressor: object) -> Compressor:
    """Return the compressor, or raise a TypeError if it is none, and a ValueError if its state has
    arrays or its packets are not smaller than float32 slices.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it needs the whole array, or its packets are not smaller than the slices.
    """
    if not isinstance(compressor, Compressor) or isinstance(compressor, type):
        raise TypeError(
            f"{argument} must be a compressor such as quantize(8), with the methods init, encode, "
            f"decode and num_bytes; got {show(compressor)}"
        )
    shape = (MIN_SIZE,)
    # Tried at the least size that is sent in packets.
    state = jax.eval_shape(lambda: compressor.init(shape))
    has_array = any(jnp.ndim(x) for x in jax.tree.leaves(state))
    if has_array or compressor.num_bytes(shape) >= 4 * MIN_SIZE:
        raise ValueError(
            f"{argument} must be a compressor that can send any slice of an array, such as "
            f"quantize(8). {compressor!r} cannot: it needs whole matrices, keeps state between "
            "steps, or its packets are not smaller than the slices"
        )
    return compressor


# A bias of this size, relative to the largest entry, gets a warning: without error feedback it adds
# up over steps.
_MOST_BIAS = 0.01


def check_param_compressor(argument: str, compressor: object) -> Compressor:
    """Return the compressor, or raise a TypeError if it is none, and a ValueError if it cannot send
    slices of an array or leaves entries out.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it cannot send slices of an array, or leaves out entries.
    """
    checked = check_compressor(argument, compressor)
    num_entries = getattr(checked, "num_entries", lambda size: None)(MIN_SIZE)
    if num_entries is not None:
        raise ValueError(
            f"{argument} must be a compressor that keeps every entry, such as quantize(8). "
            f"{compressor!r} sends {num_entries} of {MIN_SIZE}, and the loss would see params that "
            "are zero elsewhere"
        )
    return checked


def check_gradient_compressor(argument: str, compressor: object) -> Compressor:
    """Return the compressor with a warning if its bias is at least 1 %, or raise a TypeError if it
    is none and a ValueError if it cannot send slices of an array.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it cannot send slices of an array.
    """
    checked = check_compressor(argument, compressor)
    if getattr(checked, "bias", 0.0) >= _MOST_BIAS:
        warn(
            f"{argument}={compressor!r} is wrong in the mean, and gradients that are reduced to "
            "shards have no error feedback: its error is lost in each step. Take one that "
            "is exact in the mean, such as quantize(4, stochastic=True), or exchange(...), which "
            "has error feedback"
        )
    return checked


def _init_at(compressor: Compressor, shape: tuple[int, ...], step: jax.Array | None) -> PyTree:
    """Return the compressor's first state for a leaf of this shape, with the training step added to
    its integers unless `step` is None."""
    state = compressor.init(shape)
    if step is None:
        return state

    def add_step(x: jax.Array) -> jax.Array:
        dtype = jnp.result_type(x)
        return x + step.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else x

    return jax.tree.map(add_step, state)


def mean_scatter_slices(
    slices: PyTree, encode: Encode, decode: Decode, names: Axes
) -> tuple[PyTree, PyTree, Any]:
    """Send the packet of slice k to worker k, and return the mean of the packets of this worker's
    slice, the packets that it sent, and the states of `encode`.

    Packets are decoded and added in the order of the workers, so that the result is reproducible.

    Args:
      slices: arrays (N, …), with one slice for each of the N workers.
      encode: encodes all slices of each array; packets have the same leading axis.
      decode: decodes the packets of one slice of each array.
      names: the mesh axes of the workers.

    Returns:
      The mean of the slice that this worker owns, the packets that it has sent, and the states that
      `encode` returns.
    """
    # 1. Send a packet to each owner.
    packets, states = encode(slices)
    received, workers = all_to_all_leaves(packets, names), axis_size(names)

    def decode_slice(worker: jax.Array | int) -> PyTree:
        return decode(jax.tree.map(lambda x: x[worker], received))

    def add_slice(worker: jax.Array, means: PyTree) -> PyTree:
        return jax.tree.map(lambda mean, x: mean + x / workers, means, decode_slice(worker))

    # 2. Decode packets one at a time, because all of them decoded take N slices of memory.
    first = jax.tree.map(lambda x: x / workers, decode_slice(0))
    return lax.fori_loop(1, workers, add_slice, first), packets, states


def all_gather_slices(
    owned: PyTree, encode: Encode, decode: Decode, names: Axes
) -> tuple[PyTree, PyTree, Any]:
    """Send the packet of the slice that this worker owns to all workers, and return the decoded
    slices of all of them, the packet, and the states of `encode`.

    Every worker decodes all packets, the owner too: all workers get the same bits.

    Args:
      owned: the slice of each array that a worker owns.
      encode: encodes one slice of each array.
      decode: decodes the packets of one slice of each array.
      names: the mesh axes of the workers.

    Returns:
      The slices of all workers, (N, …), the packets that this worker has sent, and the states that
      `encode` returns.
    """
    packets, states = encode(owned)
    return jax.vmap(decode)(GatheredPackets.of(packets, names).packets), packets, states


def mean_scatter_packets(
    x: jax.Array, dimension: int, names: Axes, compressor: Compressor, step: jax.Array | None
) -> jax.Array:
    """Send slices of an array as packets, and return this device's shard, along one dimension, of
    the mean over devices of the decoded packets, in the dtype of x.

    Args:
      x: the array of each device.
      dimension: the dimension that is divided.
      names: the axes of the mean, which also divide it.
      compressor: the compressor that makes the packets.
      step: the number of the training step; None stands for 0.
    """
    size = x.shape[dimension] // axis_size(names)
    side_by_side = x.reshape(*x.shape[:dimension], -1, size, *x.shape[dimension + 1 :])
    slices = jnp.moveaxis(side_by_side, dimension, 0)
    shape = slices.shape[1:]
    state = _init_at(compressor, shape, step)

    def encode(slices: jax.Array) -> tuple[PyTree, None]:
        return jax.vmap(lambda x: compressor.encode(x, state)[0])(slices), None

    decode = _decoder(compressor, shape)
    # Compressors take float32.
    mean, _, _ = mean_scatter_slices(slices.astype(jnp.float32), encode, decode, names)
    return jnp.astype(mean, x.dtype)


def all_gather_packets(
    shard: jax.Array, dimension: int, names: Axes, compressor: Compressor, step: jax.Array | None
) -> jax.Array:
    """Send this device's shard as a packet, and return the whole array of all decoded shards along
    one dimension, the same bits on all devices.

    The arguments are as for `mean_scatter_packets`.
    """

    def encode(x: jax.Array) -> tuple[PyTree, None]:
        return compressor.encode(x, _init_at(compressor, x.shape, step))[0], None

    decode = _decoder(compressor, shard.shape)
    shards, _, _ = all_gather_slices(shard.astype(jnp.float32), encode, decode, names)
    side_by_side = jnp.moveaxis(shards, 0, dimension)
    whole = side_by_side.reshape(*shard.shape[:dimension], -1, *shard.shape[dimension + 1 :])
    return jnp.astype(whole, shard.dtype)


def _decoder(compressor: Compressor, shape: tuple[int, ...]) -> Decode:
    """Return the function that decodes a packet by the compressor to a float32 array of this
    shape."""
    return lambda packet: compressor.decode(packet, shape).reshape(shape)
