"""Workers with a private gradient each: reductions over them, and the devices of each."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.collectives import mesh as meshes
from optfn.collectives.axes import Axes, AxisName, check_axis, joined
from optfn.core import tree
from optfn.core.types import Leaf, LeafKind, PyTree


class Group(NamedTuple):
    """The devices of a worker, and how they divide arrays that are sharded like the gradients.

    mesh: the mesh.
    axes: the mesh axes of these devices.
    specs: the PartitionSpec of the gradient of each leaf over these axes, by path.
    """

    mesh: Mesh
    axes: Axes
    specs: Mapping[str, P]

    def specs_of(self, values: PyTree) -> PyTree:
        """Return the PartitionSpec of each array of a tree with the paths of params."""

        def spec_of(place: tree.Place, x: Leaf) -> Any:
            if tree.is_masked(x):
                return x
            if isinstance(x, LeafKind):
                return P(x.divided_over)
            return self.specs.get(str(place), P()) if jnp.ndim(x) else P()

        return tree.map_named(spec_of, values)

    def axes_of(self, place: object) -> Axes:
        """Return the axes over which the leaf at a path is divided."""
        return joined(*self.specs.get(str(place), P()))

    def rows(self, values: PyTree) -> PyTree:
        """Return divided leaves as arrays with a flat row for each device that has a shard."""

        def reshaped(place: tree.Place, x: Leaf) -> Leaf:
            names = self.axes_of(place)
            count = math.prod(self.mesh.shape[name] for name in names)
            return x.reshape(count, -1) if names and not tree.is_masked(x) else x

        return tree.map_named(reshaped, values)

    def row_specs(self, values: PyTree) -> PyTree:
        """Return the specs of the arrays that `rows` makes."""

        def spec_of(place: tree.Place, x: Leaf) -> Any:
            names = self.axes_of(place)
            return x if tree.is_masked(x) else P(names) if names else P()

        return tree.map_named(spec_of, values)

    def mapped(
        self, fn: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., Any]:
        """Return `fn` run by each device on its shards of arrays."""
        return meshes.mapped(fn, self.mesh, self.axes, in_specs, out_specs)


class Workers(NamedTuple):
    """Workers with a private gradient each. A step passes them to `update` as `workers=`.

    Where the gradient is already that of all workers, there is one worker, without axes, and each
    method returns its argument.

    axes: the mesh axes along which workers differ; bound where a method is called.
    group: the devices of each worker; None if a worker is one device.
    """

    axes: Axes = Axes()
    group: Group | None = None

    def any(self, flag: jax.Array) -> jax.Array:
        """Tell whether the flag of any worker is true."""
        return self.max(flag.astype(jnp.int32)) > 0 if self.axes else flag

    def max(self, x: jax.Array) -> jax.Array:
        """Return the largest x of all workers."""
        return lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: jax.Array) -> jax.Array:
        """Return the smallest x of all workers."""
        return lax.pmin(x, self.axes) if self.axes else x

    def root_mean_square(self, x: jax.Array) -> jax.Array:
        """Return √(mean of x² over workers), x ≥ 0."""
        return jnp.sqrt(lax.pmean(jnp.square(x), self.axes)) if self.axes else x


ONE_WORKER = Workers()


def joined_workers(name: str, axis_name: AxisName, extra: Mapping[str, Any]) -> Workers:
    """Return the workers that a wrapper agrees with: those of the step, and those it is told of.

    Args:
      name: the name of the wrapper in errors.
      axis_name: the argument of the wrapper, axes that it is told.
      extra: the extra arguments of its update, with the step's workers as `workers`.

    Raises:
      ValueError: an axis is not bound.
    """
    given: Workers = extra.get("workers", ONE_WORKER)
    workers = given._replace(axes=joined(axis_name, given.axes))
    check_axis(name, workers.axes)
    return workers
