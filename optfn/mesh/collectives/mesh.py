"""JAX's functions on a mesh, with our defaults: `shard_map`, sharding constraints, shardings."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optfn.core import checks
from optfn.core.types import DType
from optfn.mesh.collectives import torus
from optfn.mesh.collectives.axes import AxisName, check_axis_names, to_axes
from optfn.mesh.compilers.groups import manual_axes


def shard_map(
    fn: Callable[..., Any], mesh: Mesh, names: Iterable[Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` of `fn` over the axes `names`, without axes that an enclosing
    `shard_map` has bound. The remaining axes are left to the compiler.

    If an enclosing `shard_map` has bound axes, the mesh comes from the context. The collectives in
    `fn` follow the torus of the mesh.
    """
    bound = manual_axes()

    @functools.wraps(fn)
    def run(*arguments: Any) -> Any:
        with torus.follow_torus_of(mesh):
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


def count_devices(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """Return the product of the sizes of mesh axes, 1 for None, or raise a ValueError if the mesh
    lacks an axis and a TypeError for an argument of another type.

    Raises:
      TypeError: `mesh` is not a mesh, or `axis_name` not a name.
      ValueError: the mesh has no such axis.
    """
    wanted = "a jax.sharding.Mesh such as optfn.distributed.data_mesh()"
    checks.instance("mesh", mesh, Mesh | AbstractMesh, wanted)
    check_axis_names("axis_name", axis_name, optional=True)
    missing = [axis for axis in to_axes(axis_name) if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}; its axes are {mesh.axis_names}. Name those of "
            "the workers: data_axis= of a training step, axis_name= elsewhere"
        )
    return math.prod(mesh.shape[axis] for axis in to_axes(axis_name))


def are_in_order(mesh: Mesh, outer: Collection[Any], inner: Collection[Any]) -> bool:
    """Tell whether all axes of an outer `shard_map` stand before all inner axes in the mesh, which
    is so if there are no outer or no inner ones.

    From jaxlib 0.11.2 on, XLA ends the process if they do not and a further axis of the mesh is
    left to the compiler.
    """
    places = {name: place for place, name in enumerate(mesh.axis_names)}
    last = max((places[name] for name in outer), default=-1)
    return all(last < places[name] for name in inner)


def constrain_sharding(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Constrain an array to a PartitionSpec on `mesh`, or inside a `shard_map` on the mesh of the
    context, and return it."""
    # A NamedSharding of the whole mesh would name axes that the shard_map has already bound.
    placement = spec if manual_axes() else NamedSharding(mesh, spec)
    return lax.with_sharding_constraint(x, placement)


def hide_explicit_axes(fn: Callable[..., Any], mesh: Mesh, out_specs: Any) -> Callable[..., Any]:
    """Return a function that runs `fn` with the explicit axes of a mesh left to the compiler, or
    just on the mesh if it has none.

    On explicit axes JAX has a sharding in the type of each array, and refuses a reshape of a
    divided dimension or the sum of two arrays that are divided in different ways.
    `show_explicit_axes` is the reverse. PartitionSpecs in `fn` need no mesh.

    Args:
      fn: the function, called inside `jax.jit`.
      mesh: the mesh of its arguments.
      out_specs: the PartitionSpecs of its results along explicit axes.
    """

    def run(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if not mesh.explicit_axes:
                return fn(*arguments)
            hide = jax.sharding.auto_axes(axes=mesh.explicit_axes, out_sharding=out_specs)
            return hide(fn)(*arguments)

    return run


def show_explicit_axes(fn: Callable[..., Any], mesh: Mesh, in_specs: Any) -> Callable[..., Any]:
    """Return a function that runs `fn` with explicit axes visible again inside of
    `hide_explicit_axes`, or `fn` itself if the mesh has none.

    Args:
      fn: the function.
      mesh: the mesh as it is outside.
      in_specs: the PartitionSpecs of the arguments of `fn`.
    """
    if not mesh.explicit_axes:
        return fn
    return jax.sharding.explicit_axes(fn, axes=mesh.explicit_axes, in_sharding=in_specs)


def apply_to_whole_matrices(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `fn` to matrices gathered over the explicit mesh axes that divide them, and restore x's
    sharding, or apply it to x directly if no axis divides them.

    `fn` returns an array (…, m, n) like x. JAX refuses the product of two matrices that explicit
    axes divide: it does not choose a sharding for the result.
    """
    placement = jax.typeof(x).sharding
    spec = placement.spec
    if not any(spec[-2:]):
        return fn(x)
    whole = NamedSharding(placement.mesh, PartitionSpec(*spec[:-2], None, None))
    return jax.sharding.reshard(fn(jax.sharding.reshard(x, whole)), placement)


def make_zeros(shape: tuple[int, ...], dtype: DType, like: jax.Array) -> jax.Array:
    """Return zeros that explicit mesh axes divide as the leading axes of `like`, or zeros without a
    given sharding if no explicit axis divides `like`.

    In the second case, the compiler or the caller chooses their sharding.
    """
    placement = explicit_sharding(like)
    if placement is None:
        return jnp.zeros(shape, dtype)
    spec = PartitionSpec(*placement.spec[: len(shape)])
    placed = None if checks.is_traced(like) else getattr(like, "sharding", None)
    if isinstance(placed, NamedSharding):
        # The abstract mesh of the type is that of a context, and `init` may be called in none.
        return jnp.zeros(shape, dtype, device=NamedSharding(placed.mesh, spec))
    return jnp.zeros(shape, dtype, out_sharding=NamedSharding(placement.mesh, spec))


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding of an array, or of its shape, if an explicit mesh axis divides it, and
    None otherwise."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    placement = jax.typeof(x).sharding
    return placement if any(placement.spec) else None


def make_sharding(mesh: Mesh, spec: PartitionSpec, ndim: int) -> NamedSharding:
    """Return the NamedSharding of a spec on a mesh, with an entry for each of `ndim` dimensions if
    the mesh has explicit axes, else with the spec unchanged.

    It is the sharding that a jitted function would give the array. Along explicit axes JAX
    distinguishes P() from P(None, None), and would compile a step again for an equivalent sharding.
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
    """Return a mesh with one axis over the first `num_workers` devices, all by default, for
    data-parallel training, or raise a ValueError if there are fewer.

    Chips of TPUs stand in the order of their torus, so that the groups of a collective are rings of
    neighbours; JAX lists them by hosts. Where no dimension of the torus is a ring, as on 4 × 4 of
    v5e, they keep their order, and so do CPUs and GPUs.

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
    checks.instance("axis_name", axis_name, str, "the name of an axis")
    found = list(jax.devices() if devices is None else devices)
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise TypeError(f"devices must be a sequence of jax.Device; got {devices!r}")
    count = len(found) if num_workers is None else checks.count("num_workers", num_workers)
    if count > len(found):
        raise ValueError(f"num_workers must be at most the {len(found)} devices; got {count}")
    return Mesh(np.array(torus.sort_chips(found[:count])), (axis_name,))


def is_on_several_cpus(x: jax.Array) -> bool:
    """Tell whether an array is on several CPU devices, as the loss of a pipeline may be."""
    if x.sharding.num_devices == 1:  # of most steps, in less than a microsecond
        return False
    device: Any = next(iter(x.sharding.device_set))
    return bool(device.platform == "cpu")
