"""Names of mesh axes: sets of them, PartitionSpecs, and sizes and types inside a `shard_map`."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from optfn.mesh.compilers.groups import is_bound, varying_axes

# The name of a mesh axis, several names, or None for no axis.
AxisName: TypeAlias = Hashable | Sequence[Hashable]
# Some of these are hashable, but cannot name a mesh axis: JAX takes a number for an array's axis.
_NO_NAMES = (type(None), bool, int, float, complex, np.ndarray, np.generic, jax.Array)


class Axes(tuple[Any, ...]):
    """The names of mesh axes, in order."""


def to_axes(axis_name: AxisName) -> Axes:
    """Return a tuple of the names in `axis_name`, which is one name, a tuple or list of names, or
    None for no name."""
    if axis_name is None:
        return Axes()
    return Axes(axis_name if isinstance(axis_name, tuple | list) else (axis_name,))


def exclude_axes(axis_name: AxisName, excluded: Collection[Any]) -> Axes:
    """Return the axes in `axis_name` that are not `excluded`, in their order."""
    return Axes(axis for axis in to_axes(axis_name) if axis not in excluded)


def join_axes(*axis_names: AxisName) -> Axes:
    """Return the axes of all arguments in the order of their first appearance, each once."""
    return Axes(dict.fromkeys(axis for names in axis_names for axis in to_axes(names)))


def restrict_spec(spec: PartitionSpec, names: Collection[Any]) -> PartitionSpec:
    """Return a PartitionSpec with only its axes that are in `names`, and None for a dimension
    without any."""
    kept = (tuple(axis for axis in to_axes(entry) if axis in names) for entry in spec)
    return PartitionSpec(*(axes or None for axes in kept))


def is_spec(x: object) -> TypeGuard[PartitionSpec]:
    """Tell whether `x` is a PartitionSpec."""
    return isinstance(x, PartitionSpec)


class Division(NamedTuple):
    """A dimension of an array, and the mesh axes that divide it."""

    dimension: int
    axes: Axes


def divisions_of(spec: PartitionSpec, names: Collection[Any]) -> list[Division]:
    """Return the dimensions that a spec divides over some of `names`, each with these axes."""
    entries = enumerate(restrict_spec(spec, names))
    return [Division(dimension, to_axes(entry)) for dimension, entry in entries if entry]


def check_axis_names(argument: str, axis_name: AxisName, *, optional: bool = False) -> Axes:
    """Return the names in `axis_name`, or raise a TypeError if one is no name, or if there is none
    unless `optional`, and a ValueError if one comes twice.

    Raises:
      TypeError: `axis_name` is no name, and no tuple of names.
      ValueError: `axis_name` names an axis twice.
    """
    names = to_axes(axis_name)
    are_names = all(isinstance(x, Hashable) and not isinstance(x, _NO_NAMES) for x in names)
    if not are_names or not (names or optional):
        raise TypeError(
            f"{argument} must be the name of a mesh axis or a tuple of names; got {axis_name!r} of "
            f"type {type(axis_name).__name__}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must name each mesh axis once; got {axis_name!r}")
    return names


def axis_size(names: Axes) -> int:
    """Return the number of devices along bound axes: the product of their sizes, 1 without axes."""
    return int(np.prod([lax.axis_size(axis) for axis in names], dtype=np.int64))


def mark_varying(x: jax.Array, over: Iterable[Hashable]) -> jax.Array:
    """Return x marked as varying over all of these axes, and unchanged if it varies over them
    already.

    The branches of a cond and the carry of a loop must vary over the same axes.
    """
    # Sorted, because the order of a set differs between processes.
    missing = tuple(sorted(set(over) - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def vma_axes(names: Axes) -> Axes:
    """Return those of the bound axes `names` whose variation JAX tracks: a `shard_map` with
    `check_vma=True` has bound them."""
    return Axes(a for a in names if a in varying_axes(lax.axis_index(a)))


def check_axes_bound(name: str, names: Axes) -> None:
    """Raise a ValueError that names the first of these axes that no enclosing `shard_map`, pmap or
    vmap has bound, or do nothing if all are bound.

    `name` is the function that needs them, in the error.
    """
    for axis in names:
        if not is_bound(axis):
            raise ValueError(
                f"{name}: the axis {axis!r} is not bound. Run it inside shard_map, pmap or vmap "
                f"with the axis name {axis!r}, or pass make_train_step a mesh with this axis as "
                "data_axis. If your axis has another name, pass that as axis_name"
            )
