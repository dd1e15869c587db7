"""The workers of a step, and the devices that divide the arrays of a worker."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import Leaf, LeafKind, PyTree
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Axes, AxisName, check_axes_bound, join_axes


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a mesh along some of its axes, which divide arrays among them.

    Such devices are the shard group of a worker, which divide its gradients by `specs`; or the
    owners of the rows of a table, where `specs` is empty.

    mesh: the mesh.
    axes: the mesh axes of the devices.
    specs: the path of each leaf of params, and the PartitionSpec of its gradient over these axes. A
      tuple can be hashed, and so be the static part of a pytree.
    """

    mesh: Mesh
    axes: Axes
    specs: tuple[tuple[str, P], ...] = ()

    @property
    def size(self) -> int:
        """The number of devices along these axes, 1 without axes."""
        return meshes.count_devices(self.mesh, self.axes)

    @cached_property
    def _spec_of_path(self) -> Mapping[str, P]:
        """The specs as a mapping by path, computed once, because every leaf asks for its spec."""
        return dict(self.specs)

    def specs_of(self, values: PyTree) -> PyTree:
        """Return the spec of each array of a tree by its path, P() for scalars and unknown paths,
        the owners' axes for rows, and masked leaves unchanged.

        An array of spec P() is the same on all devices.
        """

        def spec_of(place: tree.Place, x: Leaf) -> Any:
            if tree.is_masked(x):
                return x
            if isinstance(x, LeafKind):
                # The owners of rows keep them, whatever the spec of the leaf.
                return P(x.mesh_axes)
            # A scalar has no axis to divide, whatever the spec of its path.
            return self._spec_of_path.get(str(place), P()) if jnp.ndim(x) else P()

        return tree.map_named(spec_of, values)

    def axes_of(self, place: object) -> Axes:
        """Return the mesh axes that divide the leaf at a path, or () for a whole leaf or an unknown
        path."""
        return join_axes(*self._spec_of_path.get(str(place), P()))

    def flatten_shards(self, values: PyTree) -> PyTree:
        """Reshape each divided leaf to (devices, n), with a row for each device that has a shard,
        and return whole and masked leaves unchanged."""

        def flatten(place: tree.Place, x: Leaf) -> Leaf:
            names = self.axes_of(place)
            if not names or tree.is_masked(x):
                return x
            return x.reshape(meshes.count_devices(self.mesh, names), -1)

        return tree.map_named(flatten, values)

    def specs_of_flat_shards(self, values: PyTree) -> PyTree:
        """Return the specs of the arrays that `flatten_shards` returns, by row for divided leaves
        and P() for whole ones, and masked leaves unchanged."""

        def spec_of(place: tree.Place, x: Leaf) -> Any:
            names = self.axes_of(place)
            if tree.is_masked(x):
                return x
            return P(names) if names else P()

        return tree.map_named(spec_of, values)

    def shard_map(
        self, fn: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., Any]:
        """Return a function of whole arrays that runs `fn` on each device's shards of them, in a
        `shard_map` over the axes that are not bound yet."""
        return meshes.shard_map(fn, self.mesh, self.axes, in_specs, out_specs)


class Workers(NamedTuple):
    """Workers with a private gradient each. A step passes them to `update` as `workers=`.

    Where the gradient is already the mean over all workers, there is one worker without axes, and
    each method returns its argument.

    axes: the mesh axes that tell workers apart. A method must be called where they are bound.
    group: the shard group, the devices of each worker; None if a worker is one device.
    """

    axes: Axes = Axes()
    group: Devices | None = None

    def any(self, flag: jax.Array) -> jax.Array:
        """Tell whether the flag of any worker is true, or return the flag unchanged without
        axes."""
        # A collective adds and compares numbers, not booleans.
        return self.max(flag.astype(jnp.int32)) > 0 if self.axes else flag

    def max(self, x: jax.Array) -> jax.Array:
        """Return the largest x of all workers, elementwise, or x unchanged without axes."""
        return lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: jax.Array) -> jax.Array:
        """Return the smallest x of all workers, elementwise, or x unchanged without axes."""
        return lax.pmin(x, self.axes) if self.axes else x

    def root_mean_square(self, x: jax.Array) -> jax.Array:
        """Return √(mean of x² over workers) for x ≥ 0, elementwise, or x unchanged without axes."""
        return jnp.sqrt(lax.pmean(jnp.square(x), self.axes)) if self.axes else x


ONE_WORKER = Workers()


def join_workers(name: str, axis_name: AxisName, extra: Mapping[str, Any]) -> Workers:
    """Return the step's workers, or one worker if it passes none, with the axes of the wrapper
    added, or raise a ValueError if an axis is not bound.

    Args:
      name: the name of the wrapper in errors.
      axis_name: the axes that the caller gave the wrapper; None for none.
      extra: the extra arguments of its update. `workers` are the workers of the step; without it,
        there is one worker.

    Raises:
      ValueError: an axis is not bound.
    """
    given: Workers = extra.get("workers", ONE_WORKER)
    workers = given._replace(axes=join_axes(axis_name, given.axes))
    check_axes_bound(name, workers.axes)
    return workers
