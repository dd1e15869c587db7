"""The layout of a step that is left to the compiler. Params keep the shardings that the user gives
them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, tree
from optfn.core.types import Leaf, Params, PyTree
from optfn.mesh.layout.data_parallel import copy_to_devices
from optfn.mesh.layout.mesh_layout import Layout


@dataclasses.dataclass(frozen=True)  # equal for equal specs, so that jit compiles once for them
class AsPlaced(Layout):
    """The layout that keeps the PartitionSpecs of the params that the user passes. The optimizer
    state follows these specs.

    specs: the path and the spec of each leaf; None if they are unknown, because the params are
      traced along axes that are left to the compiler.
    """

    specs: tuple[tuple[str, P], ...] | None = None

    @property
    def is_divided(self) -> bool:
        """Whether the devices of a worker keep shards of arrays, here whether the specs of params
        are known."""
        return self.specs is not None

    def follow(self, params: Params) -> "AsPlaced":
        """Return the layout with the specs of these params, P() for a leaf off the mesh, or this
        layout if they are traced on a mesh without explicit axes."""
        if checks.is_traced(params) and not self.mesh.explicit_axes:
            return self
        specs = [(str(place), _spec_on(self.mesh, x)) for place, x in tree.items(params)]
        return dataclasses.replace(self, specs=tuple(specs))

    def dense_param_specs(self, params: Params) -> PyTree:
        """Return the spec of each leaf, P() where it is unknown, and masked leaves unchanged."""
        specs = dict(self.specs or ())
        return tree.map_named(
            lambda place, x: x if tree.is_masked(x) else specs.get(str(place), P()), params
        )

    def place_params(self, params: Params) -> Params:
        """Copy each leaf of params to its sharding on the mesh, even a leaf that already has it,
        and return traced leaves unchanged."""
        placements = self.shardings(self.param_specs(params), params)

        def place(x: Leaf, placement: NamedSharding) -> jax.Array:
            is_there = isinstance(x, jax.Array) and not checks.is_traced(x)
            if is_there and x.sharding == placement:
                return jnp.copy(x)
            return copy_to_devices(x, placement)

        return jax.tree.map(place, params, placements)


def _spec_on(mesh: Mesh, x: Any) -> P:
    """Return the PartitionSpec that an array has on a mesh, or P() without a NamedSharding on a
    mesh of the same axes and sizes."""
    placement = jax.typeof(x).sharding if checks.is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(placement, NamedSharding) or placement.mesh.shape != mesh.shape:
        return P()
    return placement.spec
