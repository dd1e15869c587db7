"""Names of mesh axes, and what is known inside a `shard_map` over them."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from optfn.compilers.groups import varying_axes

# The name of a mesh axis, several names, or None for no axis.
AxisName: TypeAlias = Hashable | Sequence[Hashable]
# Some of these are hashable; JAX takes a number for an axis of an array.
_NO_NAMES = (type(None), bool, int, float, complex, np.ndarray, np.generic, jax.Array)


class Axes(tuple[Any, ...]):
    """The names of mesh axes, in order."""


def axes(axis_name: AxisName) -> Axes:
    """Return the names of the axes in `axis_name`: one, several or, for None, no axis."""
    if axis_name is None:
        return Axes()
    return Axes(axis_name if isinstance(axis_name, tuple | list) else (axis_name,))


def without(axis_name: AxisName, excluded: Collection[Any]) -> Axes:
    """Return the axes in `axis_name` that are not `excluded`."""
    return Axes(axis for axis in axes(axis_name) if axis not in excluded)


def joined(*axis_names: AxisName) -> Axes:
    """Return the axes of all arguments, each once."""
    return Axes(dict.fromkeys(axis for names in axis_names for axis in axes(names)))


def restricted(spec: PartitionSpec, names: Collection[Any]) -> PartitionSpec:
    """Return a PartitionSpec with only those of its axes that are among these."""
    kept = [tuple(a for a in axes(entry) if a in names) for entry in spec]
    return PartitionSpec(*(entry or None for entry in kept))


def is_spec(x: object) -> TypeGuard[PartitionSpec]:
    """Tell whether `x` is a PartitionSpec."""
    return isinstance(x, PartitionSpec)


class Division(NamedTuple):
    """A dimension of an array, and the mesh axes over which it is divided."""

    dimension: int
    axes: Axes


def check_names(argument: str, axis_name: AxisName, *, optional: bool = False) -> Axes:
    """Return the axes in `axis_name`, the name of one or several; None only if `optional`.

    Raises:
      TypeError: it is not.
      ValueError: an axis is named twice.
    """
    names = axes(axis_name)
    are_names = all(isinstance(x, Hashable) and not isinstance(x, _NO_NAMES) for x in names)
    if not are_names or not (names or optional):
        raise TypeError(
            f"{argument} must be the name of a mesh axis or a tuple of names; got {axis_name!r} of "
            f"type {type(axis_name).__name__}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must name each mesh axis once; got {axis_name!r}")
    return names


def bound_axes() -> set[Any]:
    """Return the axes over which a `shard_map` encloses this place in a program."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def axis_size(names: Axes) -> int:
    """Return the number of workers along the axes."""
    return int(np.prod([lax.axis_size(axis) for axis in names], dtype=np.int64))


def vary(x: jax.Array, over: Iterable[Hashable]) -> jax.Array:
    """Return `x` marked as varying over these axes too, so that the types of branches agree."""
    missing = tuple(sorted(set(over) - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def checked_axes(names: Axes) -> Axes:
    """Return the axes over which JAX tracks variation: all axes, or none."""
    return Axes(a for a in names if a in varying_axes(lax.axis_index(a)))


def check_axis(name: str, names: Axes) -> None:
    """Raise a ValueError unless all mesh axes of `axis_name` are bound here."""
    for axis in names:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"{name}: the axis {axis!r} is not bound. Run it inside shard_map, pmap or vmap "
                f"with the axis name {axis!r}, or pass make_train_step a mesh with this axis as "
                "data_axis. If your axis has another name, pass that as axis_name"
            ) from None
