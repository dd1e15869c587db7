"""Hierarchical all-gathers and reduce-scatters: one mesh axis, one torus dimension at a time.

The outer axes of a mesh have the slower links and should send the smaller arrays. So a
reduce-scatter starts with the last axis, and an all-gather with the first.

On a TPU, XLA turns a reduce-scatter over two or more dimensions of the torus of chips into an
all-reduce of the whole array. An all-gather suffers the same over three dimensions, or over two if
its result is at most 16 MiB. So each collective here spans fewer dimensions, and has several
phases. Together they send the same bytes. A scatter divides along the outermost dimension first,
and a gather joins along the innermost ones first, so that the array of a device stays contiguous.

The last phase of a gather has nearly all bytes, so it is the one over two dimensions. On the sparse
cores of v5p and v6e (`overlap_options`) it uses the links of both: half of the array goes along the
first dimension and then the second, the rest in reverse order. Where the step has these options, so
does the first phase of a scatter, whose slices are stacked on a leading axis. In three dimensions
both are one ring through all chips, which is no faster.

A mesh with one axis for each torus dimension would need no groups, but a loss would see other axes
than the user's. XLA compiles both to the same instructions, one by one: a chain of gathers,
products and scatters on v5e:4x4 and v5p:4x4x4.
"""

import contextlib
import functools
import math
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from optfn.core import context
from optfn.mesh.compilers.chips import find_chip
from optfn.mesh.compilers.options import has_plane_scatters


class PhaseOfCollective(NamedTuple):
    """One phase of a hierarchical collective.

    axis: the mesh axis.
    groups: for each group of devices that exchange, their numbers along the axis; None if all
      devices along the axis are one group.
    """

    axis: Hashable
    groups: list[list[int]] | None


# Torus dimensions that one collective may span: a scatter 1; a gather 2, or 1 up to 16 MiB.
_SCATTERED, _GATHERED, _SMALL_GATHER = 1, 2, 1 << 24
# On sparse cores a scatter spans 2, if a slice fills tiles of 8 rows; else XLA makes an all-reduce.
_SCATTERED_IN_PLANES, _ROWS_OF_TILE = 2, 8
# The mesh of the enclosing `shard_map`. Only axis names reach a collective, but its phases depend
# on the coordinates of the chips. None outside of a `shard_map`: collectives then have one phase.
_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def follow_torus_of(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the collectives that are traced follow the torus of this mesh.
    Afterwards they follow the mesh before again."""
    return context.hold(_mesh, mesh)


def all_gather_along(
    x: jax.Array, names: Sequence[Hashable], dimension: int, to: str = "varying"
) -> jax.Array:
    """Concatenate the arrays of all devices along some axes in one dimension, in the order of the
    devices, or return x unchanged without axes.

    Args:
      x: the array of each device.
      names: the mesh axes.
      dimension: the dimension of x to concatenate.
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


def reduce_scatter_along(x: jax.Array, names: Sequence[Hashable], dimension: int) -> jax.Array:
    """Sum x over the devices along some axes, and return this device's slice of the sum along a
    dimension, or x unchanged without axes.

    Args:
      x: the array of each device.
      names: the mesh axes.
      dimension: a dimension of x that the number of devices divides.
    """
    # The transpose of `all_gather_along`, so the axes come in reversed order.
    for i, name in reversed(list(enumerate(names))):
        pieces, along = _split_dimension(x, names[:i], dimension)
        most = _choose_most(pieces, name, along)
        if most > _SCATTERED:
            # XLA would let a product write the stacked slices, with slower loops.
            pieces = lax.optimization_barrier(pieces)
        for number, phase in enumerate(phases(name, most)):
            is_stacked = most > _SCATTERED or (number > 0 and _is_ragged(pieces, phase, along))
            scatter = _reduce_scatter_stacked if is_stacked else _reduce_scatter
            pieces = scatter(pieces, phase, along)
        x = lax.collapse(pieces, dimension, along + 1)
    return x


def _choose_most(x: jax.Array, name: Hashable, dimension: int) -> int:
    """Return how many torus dimensions a phase of a scatter may span, 2 on sparse cores if slices
    along another than the last axis have 8 rows or more, else 1."""
    if not has_plane_scatters() or dimension == x.ndim - 1:
        return _SCATTERED
    rows = x.shape[-2] // (lax.axis_size(name) if dimension == x.ndim - 2 else 1)
    return _SCATTERED_IN_PLANES if rows >= _ROWS_OF_TILE else _SCATTERED


def _is_ragged(x: jax.Array, phase: PhaseOfCollective, dimension: int) -> bool:
    """Tell whether slices along a dimension are no whole tiles of a TPU, as along the last one
    always, and along the one before with over 8 rows but no multiple of 8."""
    if dimension == x.ndim - 1:
        return True
    # Of fewer rows XLA makes an all-reduce if they are stacked.
    rows = x.shape[dimension] // _count_slices(phase)
    return dimension == x.ndim - 2 and rows > _ROWS_OF_TILE and rows % _ROWS_OF_TILE > 0


def _count_slices(phase: PhaseOfCollective) -> int:
    """Return the number of devices in a group of the phase, which is all along its axis if it has
    no groups."""
    axis, groups = phase
    return lax.axis_size(axis) if groups is None else len(groups[0])


def _reduce_scatter(x: jax.Array, phase: PhaseOfCollective, dimension: int) -> jax.Array:
    """Sum x over the devices of each group of a phase, and return this device's slice of the sum
    along a dimension."""
    axis, groups = phase
    return lax.psum_scatter(
        x, axis, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
    )


def _reduce_scatter_stacked(x: jax.Array, phase: PhaseOfCollective, dimension: int) -> jax.Array:
    """Sum x over each group of a phase and return this device's slice along a dimension, as
    `_reduce_scatter`, but with slices stacked on a leading axis.

    Of slices that are not stacked, XLA for TPUs emits an all-reduce if they lie along the minor
    dimension, as the slices of embedding rows do; and if their rows are no multiple of 8, a scatter
    of a padded array, which does not run on sparse cores, and permutes. On a TensorCore, slices of
    whole tiles are not stacked: a step of 70B would compute 6 % longer.
    """
    axis, groups = phase
    shape = *x.shape[:dimension], _count_slices(phase), -1, *x.shape[dimension + 1 :]
    slices = jnp.moveaxis(x.reshape(shape), dimension, 0)
    return lax.psum_scatter(slices, axis, axis_index_groups=groups)


def _split_dimension(
    x: jax.Array, outer: Sequence[Hashable], dimension: int
) -> tuple[jax.Array, int]:
    """Split a dimension into a slice for each device along the outer axes, (…, slices, size, …), or
    change nothing without outer axes.

    Returns:
      The array, and the dimension within a slice.
    """
    if not outer:
        return x, dimension
    count = math.prod(lax.axis_size(name) for name in outer)
    before, size, after = x.shape[:dimension], x.shape[dimension], x.shape[dimension + 1 :]
    return x.reshape(*before, count, size // count, *after), dimension + 1


def phases(axis: Hashable, most: int) -> list[PhaseOfCollective]:
    """Return the phases of a scatter over an axis, which is a single one if the mesh is unknown or
    has no torus of more than `most` dimensions.

    A gather takes them in reversed order.

    Args:
      axis: the mesh axis.
      most: the number of torus dimensions that one phase may span.
    """
    return _phases_along(axis, _mesh.get(), most)


@functools.lru_cache
def _phases_along(axis: Hashable, mesh: Mesh | None, most: int) -> list[PhaseOfCollective]:
    """Return one phase for the first `most` dimensions of the box of chips along an axis and one
    for each further dimension, or a single phase without such a box."""
    # An AbstractMesh has no devices, and no torus that we could know.
    is_known = mesh is not None and not isinstance(mesh, AbstractMesh)
    sizes = find_box(mesh.devices, mesh.axis_names.index(axis)) if mesh and is_known else ()
    if len(sizes) <= most:
        return [PhaseOfCollective(axis, None)]
    sizes = (math.prod(sizes[:most]), *sizes[most:])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    groups = (np.moveaxis(numbers, k, -1).reshape(-1, size) for k, size in enumerate(sizes))
    return [PhaseOfCollective(axis, members.tolist()) for members in groups]


def sort_chips(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Sort the chips of TPUs along their torus, x fastest, if a dimension of it is a ring, else
    return the devices in their order.

    JAX lists TPU chips by hosts, such as 2 × 2 of a torus of 16 × 16. In that order the first 16
    chips fill a square instead of a ring, and the groups of the next phase leave chips out and
    share links. In the order of the torus the groups of a phase are rings. Where all dimensions are
    open, hosts are better: 2 × 2 chips are a ring, and 4 in a line are none. A torus of unknown
    chips counts as closed. Each slice stays together.
    """
    if any(device.platform != "tpu" for device in devices):
        return list(devices)
    chip = find_chip(devices[0].device_kind)
    ring = (chip and chip.ring_of) or 1
    lengths = [len(set(along)) for along in zip(*(x.coords for x in devices), strict=True)]
    if not any(length > 1 and length % ring == 0 for length in lengths):
        return list(devices)

    def place(device: Any) -> tuple[int, ...]:
        return getattr(device, "slice_index", 0), *reversed(device.coords), device.core_on_chip

    return sorted(devices, key=place)


def find_box(devices: np.ndarray, axis: int) -> tuple[int, ...]:
    """Return the sizes above 1 of the box that TPU chips along a mesh axis fill, outermost
    dimension first, or () if they are no TPUs or fill no box.

    The devices may be in any order: the groups of each phase are then smaller boxes, and the
    compiler has native collectives for boxes.

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
    """Return the sizes above 1 of the box that a line of TPU devices fills, outermost dimension
    first, or () if it fills none."""
    places = [(*reversed(device.coords), device.core_on_chip) for device in line]
    sizes = tuple(len(set(values)) for values in zip(*places, strict=True))
    fill = len(set(places)) == len(line) == np.prod(sizes)
    return tuple(size for size in sizes if size > 1) if fill else ()
