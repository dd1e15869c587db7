"""Mesh axes: their sizes, arrays that vary over them, means over workers, a mesh for data."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optfn import collectives
from optfn.compilers import xla
from optfn.compilers.groups import map_groups, varying_axes
from optfn.core import checks
from optfn.core.types import PyTree

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


def mapped(
    fn: Callable[..., Any], mesh: Mesh, names: Iterable[Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function over these axes of a mesh, which it then has bound.

    The remaining axes are left to the compiler. Inside a `shard_map` over some of these, the mesh
    is that of the context.
    """
    bound = bound_axes()

    @functools.wraps(fn)
    def run(*arguments: Any) -> Any:
        with collectives.tracing_for(mesh):
            return fn(*arguments)

    return jax.shard_map(
        run,
        mesh=None if bound else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(names) - bound,
        # With check_vma, JAX itself would sum the gradient of replicated parameters.
        check_vma=False,
    )


def are_in_order(mesh: Mesh, outer: Collection[Any], inner: Collection[Any]) -> bool:
    """Tell whether the axes of an outer `shard_map` stand before those of an inner one.

    From jaxlib 0.11.2 on, XLA ends the process if they do not, and the two leave an axis of the
    mesh to the compiler.
    """
    places = {name: place for place, name in enumerate(mesh.axis_names)}
    last = max((places[name] for name in outer), default=-1)
    return all(last < places[name] for name in inner)


def constrained(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return an array with a sharding constraint, by a PartitionSpec."""
    # Inside a shard_map the mesh is that of the context.
    placement = spec if bound_axes() else NamedSharding(mesh, spec)
    laid_out: jax.Array = lax.with_sharding_constraint(x, placement)
    return laid_out


def apply_to_whole_matrices(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return fn(x), an array like x, with matrices (…, m, n) that no explicit mesh axis divides.

    JAX does not decide how the product of two divided matrices lies along explicit axes.
    """
    placement = jax.typeof(x).sharding
    spec = placement.spec
    if not any(spec[-2:]):
        return fn(x)
    whole = NamedSharding(placement.mesh, PartitionSpec(*spec[:-2], None, None))
    result: jax.Array = jax.sharding.reshard(fn(jax.sharding.reshard(x, whole)), placement)
    return result


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


def all_gather(x: jax.Array, names: Axes) -> jax.Array:
    """Return the x of every worker, (N, *shape), the same array on all workers."""
    checked = checked_axes(names)
    # Of flat arrays a TPU makes a flat one, without padding that a copy would have to take out.
    rows = vary(x if x.ndim else x[None], checked)
    to = "invarying" if checked else "varying"
    gathered = collectives.gather_along(rows, names, 0, to=to)
    return gathered.reshape(axis_size(names), *x.shape)


def pmean(x: jax.Array, names: Axes) -> jax.Array:
    """Return the mean over workers, in the dtype of x."""
    mean: jax.Array = lax.pmean(xla.widen_for_all_reduce(x), names).astype(x.dtype)
    return mean


def mean_in_one(g: Sequence[jax.Array], names: Axes) -> list[jax.Array]:
    """Return the means over workers, with one all-reduce for all arrays of one dtype.

    If JAX tracks variation, arrays that vary over further axes have a separate all-reduce.
    """

    def means(arrays: list[jax.Array]) -> list[jax.Array]:
        bucket = pmean(jnp.concatenate([x.reshape(-1) for x in arrays]), names)
        found = xla.split(bucket, [x.size for x in arrays])
        return [mean.reshape(x.shape) for mean, x in zip(found, arrays, strict=True)]

    return map_groups(means, g, lambda x: (x.dtype, varying_axes(x)))


def zeros_of_mean(x: jax.Array, names: Axes) -> jax.Array:
    """Return zeros like the mean of x over workers, for the branch of a cond that has no mean."""
    return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x) - set(names))


def gather_in_one(x: PyTree, names: Axes) -> PyTree:
    """Return a tree of the arrays of all workers, (N, *shape) each, by one all-gather per dtype.

    All dtypes of 32 bits share one all-gather.
    """
    buckets, restored = buckets_of(jax.tree.map(lambda array: array[None], x))
    return restored([all_gather(bucket[0], names) for bucket in buckets])


def all_to_all_in_one(x: PyTree, names: Axes) -> PyTree:
    """Return the rows that all workers have for this one, (N, …), by one all-to-all per dtype.

    All dtypes of 32 bits share one all-to-all.

    Args:
      x: a tree of arrays (N, …), with a row for each worker.
      names: the mesh axes of the workers.
    """
    buckets, restored = buckets_of(x)
    return restored([lax.all_to_all(bucket, names, 0, 0) for bucket in buckets])


def buckets_of(x: PyTree) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], PyTree]]:
    """Return arrays of rows side by side, and the function from such buckets to a tree like x.

    Args:
      x: a tree of arrays (rows, …).

    Returns:
      Arrays (rows, size), one for each dtype; all dtypes of 32 bits share one. The function takes
      buckets of any number of rows.
    """
    arrays, structure = jax.tree.flatten(x)
    numbers: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        dtype = jnp.dtype(jnp.uint32) if array.dtype.itemsize == 4 else array.dtype
        numbers.setdefault(dtype, []).append(i)

    def words(i: int, dtype: Any) -> jax.Array:
        return _bits(arrays[i], dtype).reshape(len(arrays[i]), -1)

    def restored(buckets: Sequence[jax.Array]) -> PyTree:
        found: dict[int, jax.Array] = {}
        for group, bucket in zip(numbers.values(), buckets, strict=True):
            pieces = xla.split(bucket, [arrays[i].size // len(arrays[i]) for i in group])
            for i, piece in zip(group, pieces, strict=True):
                like = arrays[i]
                found[i] = _bits(piece, like.dtype).reshape(len(bucket), *like.shape[1:])
        return jax.tree.unflatten(structure, [found[i] for i in range(len(arrays))])

    rows = [[words(i, dtype) for i in group] for dtype, group in numbers.items()]
    return [jnp.concatenate(of_dtype, axis=1) for of_dtype in rows], restored


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def sharding(mesh: Mesh, spec: PartitionSpec, ndim: int) -> NamedSharding:
    """Return the sharding of an array of `ndim` axes, as a jitted function returns it.

    Along explicit axes JAX distinguishes P() from P(None, None), and would compile a step again for
    an array with an equivalent sharding.
    """
    if mesh.explicit_axes:
        spec = PartitionSpec(*spec, *[None] * (ndim - len(spec)))
    return NamedSharding(mesh, spec)


def data_mesh(
    num_workers: int | None = None,
    *,
    axis_name: str = "data",
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh with one axis, for data-parallel training.

    Args:
      num_workers: the number of devices; None: all devices of all processes.
      axis_name: the name of the axis.
      devices: the devices to choose from; None: `jax.devices()`.

    Raises:
      ValueError: there are fewer than `num_workers` devices.
      TypeError: `devices` are not devices, or `axis_name` is not a name.

    >>> data_mesh(1).shape["data"]
    1
    """
    check_names("axis_name", axis_name)
    found = list(jax.devices() if devices is None else devices)
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise TypeError(f"devices must be a sequence of jax.Device; got {devices!r}")
    count = len(found) if num_workers is None else checks.count("num_workers", num_workers)
    if count > len(found):
        raise ValueError(f"num_workers must be at most the {len(found)} devices; got {count}")
    return Mesh(np.array(found[:count]), (axis_name,))


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
