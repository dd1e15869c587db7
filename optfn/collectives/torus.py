"""Gathers and scatters over mesh axes, one axis after the other, along the torus of a TPU.

A scatter goes over the last axis first, and a gather over the first one: the outer axes of a mesh
have the slower links, and they then send the smaller arrays.

XLA for TPUs compiles a reduce-scatter over several dimensions of the torus of chips as an
all-reduce of the whole array, and an all-gather over three, or over two if it gives at most 16 MiB.
Over fewer each of them is native. One after the other they send the same bytes: a scatter divides
along the outermost dimension first, and a gather joins along the innermost ones first, so that the
array of a device is always contiguous.
"""

import contextlib
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh


class PhaseOfCollective(NamedTuple):
    """One of the collectives, one after the other, that make a collective over several axes.

    axis: the mesh axis.
    groups: the numbers along this axis of the devices of each group; None for one group of all.
    """

    axis: Hashable
    groups: list[list[int]] | None


# The dimensions of a torus over which a collective is native, and sends no array as a whole; a
# gather of at most so many bytes has those of a scatter.
_SCATTERED, _GATHERED, _SMALL_GATHER = 1, 2, 1 << 24
# The mesh for which a program is traced; None outside of a step.
_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextlib.contextmanager
def tracing_for(mesh: Mesh) -> Iterator[None]:
    """Let collectives in this context follow the torus of the devices of a mesh."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def gather_along(
    x: jax.Array, names: Sequence[Hashable], dimension: int, to: str = "varying"
) -> jax.Array:
    """Return the arrays of all devices along some axes, side by side along a dimension.

    Args:
      x: the array of each device.
      names: the mesh axes.
      dimension: the dimension of x.
      to: whether JAX, where it tracks this, is told that the result is the same on all devices:
        "invarying" or "varying".
    """
    for i, name in enumerate(names):
        pieces, along = _split_dimension(x, names[:i], dimension)
        num_bytes = x.size * x.dtype.itemsize * lax.axis_size(name)
        most = _GATHERED if num_bytes > _SMALL_GATHER else _SCATTERED
        for axis, groups in reversed(phases(name, most)):
            pieces = lax.all_gather(
                pieces, axis, axis=along, tiled=True, axis_index_groups=groups, to=to
            )
        x = lax.collapse(pieces, dimension, along + 1)
    return x


def sum_scatter(x: jax.Array, names: Sequence[Hashable], dimension: int) -> jax.Array:
    """Return a device's slice, along a dimension, of the sum over the devices along some axes.

    Args:
      x: the array of each device.
      names: the mesh axes.
      dimension: a dimension of x that the number of devices divides.
    """
    for i, name in reversed(list(enumerate(names))):
        pieces, along = _split_dimension(x, names[:i], dimension)
        for number, phase in enumerate(phases(name, _SCATTERED)):
            is_minor = along == pieces.ndim - 1
            scattered = _scattered_minor if number and is_minor else _scattered
            pieces = scattered(pieces, phase, along)
        x = lax.collapse(pieces, dimension, along + 1)
    return x


def _scattered(x: jax.Array, phase: PhaseOfCollective, dimension: int) -> jax.Array:
    axis, groups = phase
    slice_: jax.Array = lax.psum_scatter(
        x, axis, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
    )
    return slice_


def _scattered_minor(x: jax.Array, phase: PhaseOfCollective, dimension: int) -> jax.Array:
    """Return `_scattered` along the last dimension, with the slices one behind the other.

    Of slices side by side XLA for TPUs makes an all-reduce, if the columns of x stay its minor
    dimension, and it may not move them: so of the rows of an embedding.
    """
    axis, groups = phase
    count = lax.axis_size(axis) if groups is None else len(groups[0])
    slices = jnp.moveaxis(x.reshape(*x.shape[:dimension], count, -1), dimension, 0)
    slice_: jax.Array = lax.psum_scatter(slices, axis, axis_index_groups=groups)
    return slice_


def _split_dimension(
    x: jax.Array, outer: Sequence[Hashable], dimension: int
) -> tuple[jax.Array, int]:
    """Return an array with a dimension split in a slice for each device along the outer axes.

    The second result is the dimension inside of a slice.
    """
    if not outer:
        return x, dimension
    count = math.prod(lax.axis_size(name) for name in outer)
    before, size, after = x.shape[:dimension], x.shape[dimension], x.shape[dimension + 1 :]
    return x.reshape(*before, count, size // count, *after), dimension + 1


def phases(axis: Hashable, most: int) -> list[PhaseOfCollective]:
    """Return the phases of a scatter over an axis; those of a gather are in reversed order.

    Args:
      axis: the mesh axis.
      most: the number of dimensions of a torus that one phase may have.
    """
    return _phases_along(axis, _mesh.get(), most)


@functools.lru_cache
def _phases_along(axis: Hashable, mesh: Mesh | None, most: int) -> list[PhaseOfCollective]:
    sizes = () if mesh is None else box(mesh.devices, mesh.axis_names.index(axis))
    if len(sizes) <= most:
        return [PhaseOfCollective(axis, None)]
    sizes = (*sizes[:-most], math.prod(sizes[-most:]))
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return [
        PhaseOfCollective(axis, np.moveaxis(numbers, k, -1).reshape(-1, size).tolist())
        for k, size in enumerate(sizes)
    ]


def box(devices: np.ndarray, axis: int) -> tuple[int, ...]:
    """Return the sizes of the box of chips along an axis of a mesh of TPUs, outermost first.

    The devices may be in any order: their groups in each phase are then smaller boxes, which
    the compiler knows as well. It is () for other devices, and for those that fill no box.

    Args:
      devices: the devices of a mesh.
      axis: the number of an axis.
    """
    if any(device.platform != "tpu" for device in devices.flat):
        return ()
    lines = np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])
    found = set(map(_extents, lines))
    return found.pop() if len(found) == 1 else ()


def _extents(line: np.ndarray) -> tuple[int, ...]:
    places = [(*reversed(device.coords), device.core_on_chip) for device in line]
    sizes = tuple(len(set(values)) for values in zip(*places, strict=True))
    fill = len(set(places)) == len(line) == np.prod(sizes)
    return tuple(size for size in sizes if size > 1) if fill else ()
