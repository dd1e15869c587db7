"""Compressed means in two steps: packets to the owner of each slice, and packets back.

Each of N workers owns a slice of each array. In the first step, each worker sends every owner a
packet of its slice, and the owner takes their mean. In the second, each owner sends all workers a
packet of this mean. In each step a worker sends (N − 1)/N of the bytes of a packet of the whole
array.

Between the packets of two training steps no state of a compressor is kept. An integer in its state
counts encodings, so it is set to the number of the training step: a compressor that rounds at
random by it rounds the same array in another way in each step.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from optfn.collectives.axes import Axes, axis_size
from optfn.collectives.gathers import all_to_all_in_one, gather_in_one
from optfn.core.checks import shown, warn
from optfn.core.types import PyTree

# A function from arrays to their packets and the next states.
Encode = Callable[[PyTree], tuple[PyTree, Any]]
# A function from packets to arrays.
Decode = Callable[[PyTree], PyTree]

# Arrays with fewer elements are sent as they are: a packet would not be worth it.
MIN_SIZE = 1024


@runtime_checkable
class Compressor(Protocol):
    """The methods that turn a leaf of one worker into a packet, and back.

    A packet is a tree of arrays, whose shapes are the same in each step. The state is a tree of
    arrays as well, or () if there is none. It must be the same on all workers, except for arrays in
    a `PerWorker`. Where no state is kept between steps, as in `sharded`, `encode` gets the first
    one, with the number of the step added to its integers: so let an integer count encodings.

    A compressor may also have the methods of `optfn.compression.compressors.BaseCompressor`;
    defaults replace missing ones.
    """

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first state for a leaf."""

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the packet for a float32 leaf, and the next state."""

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 leaf of this shape that is encoded in a packet."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the packet for a leaf of this shape."""


def check_codec(argument: str, codec: object) -> Compressor:
    """Return a compressor after checking that it can send slices of an array.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it needs the whole array, or its packets are not smaller than the slices.
    """
    if not isinstance(codec, Compressor) or isinstance(codec, type):
        raise TypeError(
            f"{argument} must be a compressor such as quantize(8), with the methods init, encode, "
            f"decode and num_bytes; got {shown(codec)}"
        )
    shape = (MIN_SIZE,)
    has_array = any(jnp.ndim(x) for x in jax.tree.leaves(jax.eval_shape(lambda: codec.init(shape))))
    if has_array or codec.num_bytes(shape) >= 4 * MIN_SIZE:
        raise ValueError(
            f"{argument} must be a compressor that can send any slice of an array, such as "
            f"quantize(8). {codec!r} cannot: it needs whole matrices, keeps state between steps, "
            "or its packets are not smaller than the slices"
        )
    return codec


# How far an entry may be wrong in the mean, relative to the largest one, without a warning.
_MOST_BIAS = 0.01


def check_gather(argument: str, codec: object) -> Compressor:
    """Return a compressor after checking that it can send params, of which each entry counts.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it cannot send slices of an array, or leaves out entries.
    """
    checked = check_codec(argument, codec)
    num_entries = getattr(checked, "num_entries", lambda size: None)(MIN_SIZE)
    if num_entries is not None:
        raise ValueError(
            f"{argument} must be a compressor that keeps every entry, such as quantize(8). "
            f"{codec!r} sends {num_entries} of {MIN_SIZE}, and the loss would see params that are "
            "zero elsewhere"
        )
    return checked


def check_reduce(argument: str, codec: object) -> Compressor:
    """Return a compressor after checking that it can send gradients; warn if it is biased.

    Raises:
      TypeError: it is not a compressor.
      ValueError: it cannot send slices of an array.
    """
    checked = check_codec(argument, codec)
    if getattr(checked, "bias", 0.0) >= _MOST_BIAS:
        warn(
            f"{argument}={codec!r} is wrong in the mean, and gradients that are reduced to shards "
            "have no error feedback: what it leaves out is lost in each step. Take one that is "
            "exact in the mean, such as quantize(4, stochastic=True), or exchange(...), which has "
            "error feedback"
        )
    return checked


def _state_at(codec: Compressor, shape: tuple[int, ...], step: jax.Array | None) -> PyTree:
    """Return the first state of a compressor, with the step added to its integers."""
    state = codec.init(shape)
    if step is None:
        return state

    def counted(x: jax.Array) -> jax.Array:
        dtype = jnp.result_type(x)
        return x + step.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else x

    return jax.tree.map(counted, state)


def mean_at_owners(
    slices: PyTree, encode: Encode, decode: Decode, names: Axes
) -> tuple[PyTree, PyTree, Any]:
    """Return the mean of the slice that a worker owns, its packets, and the states of `encode`.

    Packets are added in the order of the workers.

    Args:
      slices: arrays (N, …), with one slice for each of the N workers.
      encode: encodes all slices of each array; packets have the same leading axis.
      decode: decodes the packets of one slice of each array.
      names: the mesh axes of the workers.
    """
    packets, states = encode(slices)
    received, workers = all_to_all_in_one(packets, names), axis_size(names)

    def decode_slice(worker: jax.Array | int) -> PyTree:
        return decode(jax.tree.map(lambda x: x[worker], received))

    def add_slice(worker: jax.Array, means: PyTree) -> PyTree:
        return jax.tree.map(lambda mean, x: mean + x / workers, means, decode_slice(worker))

    first = jax.tree.map(lambda x: x / workers, decode_slice(0))
    return lax.fori_loop(1, workers, add_slice, first), packets, states


def all_from_owners(
    owned: PyTree, encode: Encode, decode: Decode, names: Axes
) -> tuple[PyTree, PyTree, Any]:
    """Return the slices of all workers, (N, …), the worker's packets, and the states of `encode`.

    Every worker gets the same arrays, which are decoded from packets; so does the owner.

    Args:
      owned: the slice of each array that a worker owns.
      encode: encodes one slice of each array.
      decode: decodes the packets of one slice of each array.
      names: the mesh axes of the workers.
    """
    packets, states = encode(owned)
    return jax.vmap(decode)(gather_in_one(packets, names)), packets, states


def coded_mean_shard(
    x: jax.Array, dimension: int, names: Axes, codec: Compressor, step: jax.Array | None
) -> jax.Array:
    """Return a device's shard, along one dimension, of the mean of an array, sent as packets.

    Args:
      x: the array of each device.
      dimension: the dimension that is divided.
      names: the axes over which the mean is taken, and over which it is divided.
      codec: the compressor that makes the packets.
      step: the number of the training step; None stands for 0.
    """
    size = x.shape[dimension] // axis_size(names)
    slices = jnp.moveaxis(
        x.reshape(*x.shape[:dimension], -1, size, *x.shape[dimension + 1 :]), dimension, 0
    )
    shape = slices.shape[1:]
    state = _state_at(codec, shape, step)

    def encode(slices: jax.Array) -> tuple[PyTree, None]:
        return jax.vmap(lambda x: codec.encode(x, state)[0])(slices), None

    mean, _, _ = mean_at_owners(slices.astype(jnp.float32), encode, _decoding(codec, shape), names)
    return jnp.astype(mean, x.dtype)


def coded_gather(
    shard: jax.Array, dimension: int, names: Axes, codec: Compressor, step: jax.Array | None
) -> jax.Array:
    """Return a whole array, decoded from packets of its shards along one dimension.

    The arguments are those of `coded_mean_shard`.
    """

    def encode(x: jax.Array) -> tuple[PyTree, None]:
        return codec.encode(x, _state_at(codec, x.shape, step))[0], None

    decode = _decoding(codec, shard.shape)
    shards, _, _ = all_from_owners(shard.astype(jnp.float32), encode, decode, names)
    side_by_side = jnp.moveaxis(shards, 0, dimension)
    whole = side_by_side.reshape(*shard.shape[:dimension], -1, *shard.shape[dimension + 1 :])
    return jnp.astype(whole, shard.dtype)


def _decoding(codec: Compressor, shape: tuple[int, ...]) -> Decode:
    return lambda packet: codec.decode(packet, shape).reshape(shape)


def coded_bytes(
    codec: Compressor | None, size: int, shards: int, exact: float, times: int = 1
) -> float:
    """Return the bytes that a device sends to gather an array, or to reduce it to shards.

    Args:
      codec: the compressor that makes the packets; None if the array is sent as it is.
      size: the number of elements of the array.
      shards: into how many shards devices divide it.
      exact: the bytes that the device sends if the array is sent as it is.
      times: into how many equal pieces the array is split, sent one after the other.
    """
    if codec is None or size < MIN_SIZE:
        return exact
    return (shards - 1) * times * codec.num_bytes((size // shards // times,))
