"""Placement of the stages' params on the mesh, and gradients in the structure of the params.

The engine takes the weights of all stages as arrays (v, p, …), with p along the stage axis: chunk r
of device d is stage r·p + d. The params of homogeneous stages already have this form
(`StackedStages`). The params of heterogeneous stages are ravelled into buffers (`ListedStages`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import leafwise, tree
from optfn.core.types import Leaf, Params, PyTree, Updates
from optfn.loss.jaxprs.pullback import select_inexact_leaves
from optfn.mesh.collectives import axes as mesh_axes
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Division
from optfn.mesh.collectives.gathers import all_gather_shards
from optfn.mesh.collectives.means import mean_scatter
from optfn.mesh.layout.mesh_layout import check_fit
from optfn.pipeline import buffers
from optfn.pipeline.plan import Plan
from optfn.pipeline.stage import Leaves


@dataclasses.dataclass(frozen=True)
class StagePlacement:
    """The base of both placements.

    data_axis: the data axis, if there is one.
    param_specs: the PartitionSpecs over further axes of the leaves of a stage, or of each stage;
      None if leaves are whole.
    marks: how many `Stacked` were around the params: one for each leading axis.
    """

    mesh: Mesh
    axis_name: str
    plan: Plan
    data_axis: str | None = None
    param_specs: PyTree = None
    marks: int = 0

    def reshard_explicit_axes(self, arrays: PyTree, spec: PyTree) -> PyTree:
        """Reshard arrays by their specs along the mesh's explicit axes, or return them unchanged if
        it has none.

        shard_map itself reshards its arguments only along the remaining axes.

        Args:
          arrays: a tree.
          spec: their PartitionSpec, or a tree of them.
        """
        explicit = self.mesh.explicit_axes
        if not explicit:
            return arrays

        def reshard(spec: P, x: PyTree) -> PyTree:
            placement = NamedSharding(self.mesh, mesh_axes.restrict_spec(spec, explicit))
            return jax.sharding.reshard(x, placement)

        return jax.tree.map(reshard, spec, arrays, is_leaf=mesh_axes.is_spec)

    def check_specs(self, stages: Params, front: int) -> None:
        """Raise a ValueError unless `param_specs` has the structure of params whose leaves have
        `front` leading axes, and divides their remaining axes evenly."""
        found: Any = jax.tree.structure(self.param_specs, is_leaf=mesh_axes.is_spec)
        if found != jax.tree.structure(stages, is_leaf=mesh_axes.is_spec):
            raise ValueError(
                "param_specs must be a tree of PartitionSpecs like the params of a stage; its "
                f"paths are {tree.list_names(tree.paths(self.param_specs))}, but the params have "
                f"{tree.list_names(tree.paths(stages))}"
            )
        for place, x, spec in tree.items(stages, self.param_specs):
            if not tree.is_masked(x):
                check_fit(str(place), x.shape[front:], spec, self.mesh, "param_specs of a stage")

    @staticmethod
    def _inexact_specs(params: Params, specs: PyTree) -> list[P]:
        """Return the PartitionSpecs of the floating-point leaves alone, which have gradients.
        Integers and masked leaves are left out."""
        return [spec for _, x, spec in tree.items(params, specs) if tree.is_inexact(x)]


class StackedStages(StagePlacement):
    """The placement of homogeneous stages, whose params are stacked."""

    def shapes(self, stages: Params) -> PyTree:
        """Return the shapes of the params, without their sharding outside of shard_map."""
        # Inside shard_map the sharding of arrays outside of it has no meaning.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stages)

    def weight_specs(self, stages: Params) -> PyTree:
        """Return the PartitionSpec of weights (v, p, …), one for all leaves, or a tree if
        `param_specs` is given, which raises a ValueError if it does not fit."""
        if self.param_specs is None:
            return P(None, self.axis_name)
        self.check_specs(stages, 2 if self._is_folded(stages) else 1)
        return jax.tree.map(self._weight_spec, self.param_specs, is_leaf=mesh_axes.is_spec)

    def gradient_specs(self, stages: Params) -> PyTree:
        """Return the PartitionSpec of gradients (v, p, …), one for all leaves, or a list for the
        inexact leaves if `param_specs` is given."""
        if self.param_specs is None:
            return P(None, self.axis_name)
        return list(map(self._weight_spec, self._inexact_specs(stages, self.param_specs)))

    def _weight_spec(self, spec: P) -> P:
        """Return the PartitionSpec (v, p, …) of a leaf from its PartitionSpec in a stage, with the
        data axis moved to the innermost place of its dimension.

        The blocks that `gather_along_data` gathers are then consecutive.
        """
        # Innermost: the blocks that a gather joins are then neighbours.
        names = (self.data_axis,)
        entries = [
            (*mesh_axes.exclude_axes(e, names), *(a for a in mesh_axes.to_axes(e) if a in names))
            for e in spec
        ]
        return P(None, self.axis_name, *(entry or None for entry in entries))

    def gather_along_data(self, weights: Params) -> Params:
        """Gather weights (v, …) along the dimensions that `param_specs` divides over the data
        axis."""
        if self.param_specs is None or self.data_axis is None:
            return weights

        def gather(x: jax.Array, spec: P) -> jax.Array:
            return all_gather_shards(x, self._data_divisions(spec))

        return jax.tree.map(gather, weights, self.param_specs)

    def average_over_data(self, weights: Params, gradients: list[jax.Array]) -> list[jax.Array]:
        """Average a device's gradients (v, …) over the data axis, and return shards of the mean
        where `param_specs` divides a leaf over it, else whole means.

        Args:
          weights: the weights of the device.
          gradients: the gradients of the inexact leaves.
        """
        if self.param_specs is None:
            return list(lax.pmean(gradients, self.data_axis))
        names = mesh_axes.to_axes(self.data_axis)
        specs = self._inexact_specs(weights, self.param_specs)
        return [
            mean_scatter(g, self._data_divisions(spec), names, self.mesh)
            for g, spec in zip(gradients, specs, strict=True)
        ]

    def _data_divisions(self, spec: P) -> list[Division]:
        """Return the dimension of a leaf (v, …) that the data axis divides, as a list of one
        Division, or [] if it divides none.

        `spec` is the PartitionSpec of the leaf in a stage, without v.
        """
        divisions = mesh_axes.divisions_of(spec, mesh_axes.to_axes(self.data_axis))
        return [Division(1 + dimension, names) for dimension, names in divisions]

    def weights(self, stages: Params) -> Params:
        """Fold stacked params (p·v, …) to (v, p, …), or return folded ones unchanged, and raise a
        ValueError unless each leaf has the stages as leading axes."""
        self._check_stacked(stages)
        if self._is_folded(stages):
            return stages
        if self.plan.virtual_stages == 1:
            return jax.tree.map(lambda x: x[None], stages)
        v, p = self.plan.virtual_stages, self.plan.num_stages
        # Along an explicit axis JAX cannot tell how (v, p) would be divided if v·p is.
        stages = self.reshard_explicit_axes(stages, P())
        return jax.tree.map(lambda x: x.reshape(v, p, *x.shape[1:]), stages)

    def gradients(self, stages: Params, gradients: list[jax.Array]) -> Updates:
        """Return gradients (v, p, …) as a tree like `stages`, unfolded unless `stages` is folded,
        with float0 for integer leaves."""
        if self._is_folded(stages):
            pass
        elif self.plan.virtual_stages == 1:
            gradients = [jnp.squeeze(g, 0) for g in gradients]
        else:
            gradients = self.reshard_explicit_axes(gradients, P())
            gradients = [g.reshape(-1, *g.shape[2:]) for g in gradients]
        return leafwise.build_gradients(stages, gradients)

    def _is_folded(self, stages: Params) -> bool:
        """Tell whether leaves are (v, p, …) instead of (p·v, …), by two `Stacked` around them or a
        first axis that is not v·p, and never for v = 1."""
        v, p = self.plan.virtual_stages, self.plan.num_stages
        # If p is 1, (v, 1, …) has the same first dimension as (v·p, …).
        unlike = (x.shape[:1] != (v * p,) for x in jax.tree.leaves(stages))
        return v > 1 and (self.marks > 1 or any(unlike))

    def _check_stacked(self, stages: Params) -> None:
        """Raise a ValueError unless each leaf has the stages as its leading axis (p·v, …), or as
        its first two, (v, p, …), if they are folded."""
        v, p = self.plan.virtual_stages, self.plan.num_stages
        folded = self._is_folded(stages)
        for name, x in tree.arrays_with_paths(stages):
            if x.shape[:2] != (v, p) if folded else x.shape[:1] != (v * p,):
                raise ValueError(
                    f"params: leaf {name!r} must have the {v * p} stages as its leading axis ({p} "
                    f"devices along {self.axis_name!r}, virtual_stages={v}); got shape {x.shape}. "
                    "Stack the stages by optfn.distributed.stack_stages"
                )


class ListedStages(StagePlacement):
    """The placement of heterogeneous stages: their params are in buffers (v, p, longest).

    There is one buffer per dtype. If leaves are divided over further axes, each device has a buffer
    of its shards, and a whole buffer is the concatenation of the buffers of all devices.
    """

    def weights(self, stages: Params) -> buffers.Buffers:
        """Ravel the params of each stage into one buffer per dtype, (v, p, longest), and raise an
        error unless `stages` is a list of v·p of them."""
        v, p = self.plan.virtual_stages, self.plan.num_stages
        if not isinstance(stages, list | tuple):
            raise TypeError(
                "params must be a list of the stages' params, as stage_fn is a list of functions; "
                f"got {type(stages).__name__}"
            )
        if len(stages) != v * p:
            raise ValueError(
                f"params must be a list of {v * p} stages, one for each function of stage_fn; got "
                f"{len(stages)}"
            )
        if self.param_specs is not None:
            self.check_specs(stages, 0)
        lengths = buffers.find_lengths(self.shapes(stages))

        def ravel(stages: Params) -> buffers.Buffers:
            rows = [buffers.ravel(params, lengths) for params in stages]
            stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(v, p, -1), *rows)
            # Each device ravels all stages and keeps its stages: params are whole along the stage
            # axis.
            device = lax.axis_index(self.axis_name)
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, device, 1), stacked)

        return self._map_shards(ravel, self._stage_specs(stages), self.weight_specs(stages), stages)

    def shapes(self, stages: Params) -> PyTree:
        """Return the shapes of the shards that stage functions see, divided by `param_specs` except
        over the data axis, or whole without them."""

        def shard(x: Leaf, spec: P) -> jax.ShapeDtypeStruct:
            shape = NamedSharding(self.mesh, spec).shard_shape(x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree.map(shard, stages, self._stage_specs(stages))

    def weight_specs(self, stages: Params) -> P:
        """Return the PartitionSpec of the buffers, which divides them over the stage axis, and
        their length over all further axes of `param_specs`."""
        return P(None, self.axis_name, self._further_axes or None)

    gradient_specs = weight_specs

    def gather_along_data(self, weights: Params) -> Params:
        """Return the weights unchanged, because ravelling them has gathered them."""
        return weights

    def average_over_data(self, weights: Params, gradients: list[jax.Array]) -> list[jax.Array]:
        """Average a device's gradients over the data axis."""
        return list(lax.pmean(gradients, self.data_axis))

    def gradients(self, stages: Params, gradients: list[jax.Array]) -> Updates:
        """Unravel gradients from buffers (v, p, longest) into the trees of `stages`, placed by
        `param_specs`, with float0 for integer leaves."""
        p = self.plan.num_stages
        shapes = self.shapes(stages)
        names = buffers.select_inexact(buffers.find_lengths(shapes))

        def unravel(gradients: list[jax.Array]) -> list[Leaves]:
            # Give every device all stages, in one collective per dtype.
            whole = lax.all_gather(gradients, self.axis_name, axis=1, tiled=True)
            by_dtype = dict(zip(names, whole, strict=True))
            trees = []
            for s, like in enumerate(map(select_inexact_leaves, shapes)):
                row = {name: x[s // p, s % p] for name, x in by_dtype.items()}
                trees.append(buffers.unravel(row, like=like))
            return trees

        out_specs = list(map(self._inexact_specs, stages, self._stage_specs(stages)))
        found = self._map_shards(unravel, self.gradient_specs(stages), out_specs, gradients)
        specs = list(map(self._inexact_specs, stages, self._specs(stages)))
        placed = jax.tree.map(self._place_gradient, found, specs)
        structure = jax.tree.structure(stages, is_leaf=lambda x: x is not stages)
        found = list(map(leafwise.build_gradients, stages, placed))
        return jax.tree.unflatten(structure, found)

    @property
    def _further_axes(self) -> tuple[str, ...]:
        """The axes besides the data axis that `param_specs` divides leaves over, in the order of
        the mesh."""
        specs = jax.tree.leaves(self.param_specs, is_leaf=mesh_axes.is_spec)
        names = {name for spec in specs for name in mesh_axes.join_axes(*spec)} - {self.data_axis}
        return tuple(a for a in self.mesh.axis_names if a in names)

    def _specs(self, stages: Params) -> PyTree:
        """Return the PartitionSpecs of the leaves, which are `param_specs`, or if that is None a
        tree like `stages` of P()."""
        return jax.tree.map(lambda x: P(), stages) if self.param_specs is None else self.param_specs

    def _stage_specs(self, stages: Params) -> PyTree:
        """Return the PartitionSpecs that stage functions see, without the data axis: leaves are
        gathered along it."""
        restrict = functools.partial(mesh_axes.restrict_spec, names=self._further_axes)
        return jax.tree.map(restrict, self._specs(stages), is_leaf=mesh_axes.is_spec)

    def _map_shards(
        self, fn: Callable[[Any], Any], in_specs: PyTree, out_specs: PyTree, arrays: PyTree
    ) -> Any:
        """Run `fn` in a `shard_map` over all axes on each device's shards, divided by these specs,
        and return whole arrays."""
        run = meshes.shard_map(fn, self.mesh, self.mesh.axis_names, (in_specs,), out_specs)
        return run(self.reshard_explicit_axes(arrays, in_specs))

    def _place_gradient(self, x: jax.Array, spec: P) -> jax.Array:
        """Return x with the sharding of a spec, resharded along explicit axes and constrained along
        the rest."""
        x = self.reshard_explicit_axes(x, spec)
        implicit = set(self.mesh.axis_names).difference(self.mesh.explicit_axes)
        return meshes.constrain_sharding(x, self.mesh, mesh_axes.restrict_spec(spec, implicit))
