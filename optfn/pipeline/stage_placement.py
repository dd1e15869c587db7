"""Placement of the stages' params on the mesh, and gradients in the structure of the params."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.autodiff.pullback import inexact_leaves
from optfn.leaves import mismatch, tree
from optfn.leaves.types import Leaf, Params, PyTree, Updates
from optfn.parallel.mesh import axes, restricted
from optfn.parallel.placement import num_workers
from optfn.parallel.sharding import Sharding, is_spec
from optfn.pipeline import buffers
from optfn.pipeline.plan import Plan


@dataclasses.dataclass(frozen=True)
class StagePlacement:
    """Placement of leaves (v, p, …), p along `axis_name`: chunk r of device d is stage r·p + d.

    worker_axis: the data axis, if gradients are not averaged over it: they then have the workers as
      a leading axis. Otherwise None.
    data_axis: the data axis, if there is one.
    param_specs: how the leaves of a stage lie along further axes; None for whole.
    marks: how many `Stacked` were around the params: one for each leading axis.
    """

    mesh: Mesh
    axis_name: str
    plan: Plan
    worker_axis: str | None
    data_axis: str | None = None
    param_specs: PyTree = None
    marks: int = 0

    @property
    def leading_axes(self) -> tuple[str, ...]:
        """The mesh axes of the leading axes that gradients have and params have not."""
        return () if self.worker_axis is None else (self.worker_axis,)

    def along_explicit_axes(self, arrays: PyTree, spec: PyTree) -> PyTree:
        """Return `arrays` resharded along the mesh's explicit axes.

        shard_map reshards its arguments by itself along the other axes only.

        Args:
          arrays: a tree.
          spec: how they lie: one PartitionSpec, or a tree of them.
        """
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        explicit = {name for name, kind in types if kind == AxisType.Explicit}
        if not explicit:
            return arrays

        def reshard(spec: P, part: PyTree) -> PyTree:
            placement = NamedSharding(self.mesh, restricted(spec, explicit))
            return jax.sharding.reshard(part, placement)

        return jax.tree.map(reshard, spec, arrays, is_leaf=is_spec)

    def stage_specs(self, stages: Params) -> PyTree:
        """Return how the folded leaves (v, p, …) lie, as a tree or one PartitionSpec."""
        if self.param_specs is None:
            return P(None, self.axis_name)
        structures: list[Any] = [
            jax.tree.structure(x, is_leaf=is_spec) for x in (self.param_specs, stages)
        ]
        if structures[0] != structures[1]:
            raise ValueError(
                "param_specs must be a tree like the params of a stage, of PartitionSpecs; its "
                f"paths are {tree.listed(tree.paths(self.param_specs))}, those of params "
                f"{tree.listed(tree.paths(stages))}"
            )
        front = 2 if self._is_folded(stages) else 1
        for path, x, spec in zip(
            tree.array_paths(stages), jax.tree.leaves(stages), self._leaf_specs(), strict=True
        ):  # fmt: skip
            self._check_fit(path, x.shape[front:], spec)
        return jax.tree.map(
            lambda spec: P(None, self.axis_name, *spec), self.param_specs, is_leaf=is_spec
        )

    def _check_fit(self, path: str, shape: tuple[int, ...], spec: P) -> None:
        if len(spec) > len(shape):
            raise ValueError(f"param_specs: {spec} at {path!r} has more entries than {shape}")
        for size, entry in zip(shape, spec, strict=False):
            devices = num_workers(self.mesh, axes(entry))
            if size % devices:
                raise ValueError(
                    f"param_specs: {spec} at {path!r} divides {size} of a stage's shape {shape} "
                    f"over {devices} devices"
                )

    def _leaf_specs(self) -> list[P]:
        return jax.tree.leaves(self.param_specs, is_leaf=is_spec)

    def gradient_specs(self, stages: Params) -> PyTree:
        """Return how the gradients of the inexact leaves lie, as a list or one PartitionSpec."""
        front = (*self.leading_axes, None, self.axis_name)
        if self.param_specs is None:
            return P(*front)
        pairs = zip(jax.tree.leaves(stages), self._leaf_specs(), strict=True)
        return [P(*front, *spec) for x, spec in pairs if tree.is_inexact(x)]

    def whole_along_data(self, weights: Params) -> Params:
        """Return a device's weights (v, …), those divided over the data axis gathered."""
        if self.param_specs is None or self.data_axis is None:
            return weights

        def gathered(x: jax.Array, spec: P) -> jax.Array:
            dimension = self._data_dimension(spec)
            if dimension is None:
                return x
            whole: jax.Array = lax.all_gather(x, self.data_axis, axis=dimension, tiled=True)
            return whole

        return jax.tree.map(gathered, weights, self.param_specs)

    def mean_over_data(self, weights: Params, gradients: list[jax.Array]) -> list[jax.Array]:
        """Return the means over the data axis of gradients (v, …), each device its part.

        Args:
          weights: the weights of a device.
          gradients: of the inexact leaves.
        """
        if self.param_specs is None:
            return list(lax.pmean(gradients, self.data_axis))
        pairs = zip(jax.tree.leaves(weights), self._leaf_specs(), strict=True)
        specs = [spec for x, spec in pairs if tree.is_inexact(x)]
        owners = Sharding(None, self.mesh, self.data_axis)
        dimensions = map(self._data_dimension, specs)
        return [
            lax.pmean(g, self.data_axis) if d is None else owners.mean_part(g, d)
            for g, d in zip(gradients, dimensions, strict=True)
        ]

    def _data_dimension(self, spec: P) -> int | None:
        """Return which axis of a leaf (v, …) is divided over the data axis."""
        return next((1 + d for d, e in enumerate(spec) if self.data_axis in axes(e)), None)

    def replicate_stages(self, arrays: PyTree, spec: P) -> PyTree:
        """Return `arrays` sharded by `spec`, all stages on every device, in one collective at most.

        Without the constraint the partitioner splits them further and moves the pieces one by one.
        """
        sharding = NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(self.along_explicit_axes(arrays, spec), sharding)

    # Homogeneous stages: stacked params.

    def fold(self, stages: Params) -> Params:
        """Return the leaves of stacked params as (v, p, …)."""
        self._check_stacked(stages)
        if self._is_folded(stages):
            return stages
        if self.plan.virtual_stages == 1:
            return jax.tree.map(lambda x: x[None], stages)
        v, p = self.plan.virtual_stages, self.plan.num_stages
        stages = self.along_explicit_axes(stages, P())
        return jax.tree.map(lambda x: x.reshape(v, p, *x.shape[1:]), stages)

    def unfold(self, stages: Params, gradients: list[jax.Array]) -> Updates:
        """Return gradients ([workers,] v, p, …) in the structure and shapes of `stages`."""
        axis = len(self.leading_axes)
        if self._is_folded(stages):
            pass
        elif self.plan.virtual_stages == 1:
            gradients = [jnp.squeeze(g, axis) for g in gradients]
        else:
            gradients = self.along_explicit_axes(gradients, P(*self.leading_axes))
            gradients = [g.reshape(*g.shape[:axis], -1, *g.shape[axis + 2 :]) for g in gradients]
        return self.gradient_tree(stages, gradients)

    def _is_folded(self, stages: Params) -> bool:
        v, p = self.plan.virtual_stages, self.plan.num_stages
        # On one device (v, 1, …) begins as (v·p, …) does.
        unlike = (x.shape[:1] != (v * p,) for x in jax.tree.leaves(stages))
        return v > 1 and (self.marks > 1 or any(unlike))

    def _check_stacked(self, stages: Params) -> None:
        v, p = self.plan.virtual_stages, self.plan.num_stages
        leaves = jax.tree.leaves(stages)
        folded = self._is_folded(stages)
        for name, x in zip(tree.array_paths(stages), leaves, strict=True):
            if x.shape[:2] != (v, p) if folded else x.shape[:1] != (v * p,):
                raise ValueError(
                    f"params: leaf {name!r} of shape {x.shape} must have the {v * p} stages in "
                    f"front ({p} devices along {self.axis_name!r}, virtual_stages={v}); "
                    "stack_stages makes it so"
                )

    # Heterogeneous stages: a list of params.

    def ravel(self, stages: Params) -> buffers.Buffers:
        """Return the params of heterogeneous stages as buffers (v, p, longest), one per dtype."""
        v, p = self.plan.virtual_stages, self.plan.num_stages
        if not isinstance(stages, list | tuple):
            raise TypeError(
                "params must be the list of the stages' params where stage_fn is a list; "
                f"got {type(stages).__name__}"
            )
        if len(stages) != v * p:
            raise ValueError(f"params: {len(stages)} stages for {v * p} functions of stage_fn")
        stages = self.along_explicit_axes(stages, P())
        lengths = buffers.lengths_for(stages)
        rows = [buffers.ravel(params, lengths) for params in stages]
        stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(v, p, -1), *rows)
        return self.replicate_stages(stacked, P())

    def unravel(self, stages: Params, gradients: list[jax.Array]) -> Updates:
        """Return gradients from buffers ([workers,] v, p, longest), structured like `stages`."""
        p, leading_axes = self.plan.num_stages, self.leading_axes
        names = buffers.inexact_lengths(buffers.lengths_for(stages))
        replicated = self.replicate_stages(gradients, P(*leading_axes))
        by_dtype = dict(zip(names, replicated, strict=True))
        trees = []
        for s, params in enumerate(stages):
            row = {name: x[..., s // p, s % p, :] for name, x in by_dtype.items()}
            unravel = partial(buffers.unravel, like=inexact_leaves(params))
            leaves = jax.vmap(unravel)(row) if leading_axes else unravel(row)
            trees.append(self.gradient_tree(params, leaves))
        return type(stages)(trees)

    def gradient_tree(self, params: Params, gradients: list[jax.Array]) -> Updates:
        """Return the gradients of inexact leaves as a tree like `params`, with float0 elsewhere."""
        workers = [self.mesh.shape[axis] for axis in self.leading_axes]
        leaves, structure = jax.tree.flatten(params)
        remaining = iter(gradients)

        def gradient_of(x: Leaf) -> Leaf:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return next(remaining)
            return mismatch.no_gradient((*workers, *x.shape))

        return jax.tree.unflatten(structure, [gradient_of(x) for x in leaves])
