"""The params of the stages as the devices hold them, and the gradients back as the params came."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.autodiff.pullback import inexact_leaves
from optfn.leaves import tree
from optfn.pipeline import buffers
from optfn.pipeline.plan import Plan


@dataclasses.dataclass(frozen=True)
class Layout:
    """Leaves (v, p, …), the second axis along `axis_name`: chunk r of device d is stage r·p + d.

    apart: the data axis where each worker's gradients are its own; they have it in front.
    """

    mesh: Mesh
    axis_name: str
    plan: Plan
    apart: str | None

    @property
    def lead(self) -> tuple[str, ...]:
        """The axes that gradients have in front."""
        return () if self.apart is None else (self.apart,)

    def place(self, arrays: Any, spec: P) -> Any:
        """Return `arrays` as shard_map takes them: it moves nothing along explicit axes itself."""
        axes = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        explicit = {name for name, kind in axes if kind == AxisType.Explicit}
        if not explicit:
            return arrays
        known = P(*(name if name in explicit else None for name in spec))
        return jax.sharding.reshard(arrays, NamedSharding(self.mesh, known))

    def everywhere(self, arrays: Any, spec: P) -> Any:
        """Return `arrays` with all stages on every device, in at most one collective.

        Left to itself the partitioner splits them further and moves the pieces one by one.
        """
        whole = NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(self.place(arrays, spec), whole)

    def fold(self, stages: Any) -> Any:
        """Return the leaves of stacked params as (v, p, …)."""
        self._check_stages(stages)
        if self._is_folded(stages):
            return stages
        if self.plan.virtual_stages == 1:
            return jax.tree.map(lambda x: x[None], stages)
        v, p = self.plan.virtual_stages, self.plan.num_stages
        return jax.tree.map(lambda x: x.reshape(v, p, *x.shape[1:]), self.place(stages, P()))

    def _is_folded(self, stages: Any) -> bool:
        v, p = self.plan.virtual_stages, self.plan.num_stages
        leaves = jax.tree.leaves(stages)
        return v > 1 and any(x.shape[:1] != (v * p,) for x in leaves)

    def unfold(self, stages: Any, gradients: list[jax.Array]) -> Any:
        """Return the gradients (v, p, …), after the workers if any, as the params came."""
        axis = 1 if self.lead else 0
        if self._is_folded(stages):
            pass
        elif self.plan.virtual_stages == 1:
            gradients = [jnp.squeeze(g, axis) for g in gradients]
        else:
            gradients = self.place(gradients, P(*self.lead))
            gradients = [g.reshape(*g.shape[:axis], -1, *g.shape[axis + 2 :]) for g in gradients]
        return self.like(stages, gradients)

    def like(self, params: Any, gradients: list[jax.Array]) -> Any:
        """Return the tree of gradients; a leaf that is no floating-point number has a float0."""
        lead = [self.mesh.shape[axis] for axis in self.lead]
        leaves, structure = jax.tree.flatten(params)
        given = iter(gradients)
        whole = [
            next(given)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else np.zeros((*lead, *x.shape), jax.dtypes.float0)
            for x in leaves
        ]
        return jax.tree.unflatten(structure, whole)

    def pack(self, stages: Any) -> Any:
        """Return the params of unlike stages as buffers (v, p, longest), one per dtype."""
        v, p = self.plan.virtual_stages, self.plan.num_stages
        if not isinstance(stages, list | tuple):
            raise TypeError(
                "params must be the list of the stages' params where stage_fn is a list; "
                f"got {type(stages).__name__}"
            )
        if len(stages) != v * p:
            raise ValueError(f"params: {len(stages)} stages for {v * p} functions of stage_fn")
        stages = self.place(stages, P())
        lengths = buffers.sizes(stages)
        rows = [buffers.pack(own, lengths) for own in stages]
        return self.everywhere(jax.tree.map(lambda *x: jnp.stack(x).reshape(v, p, -1), *rows), P())

    def unpack(self, stages: Any, gradients: list[jax.Array]) -> Any:
        """Return the gradients of unlike stages from buffers (v, p, longest)."""
        p, lead = self.plan.num_stages, self.lead
        names = buffers.inexact(buffers.sizes(stages))
        gathered = dict(zip(names, self.everywhere(gradients, P(*lead)), strict=True))
        out = []
        for s, own in enumerate(stages):
            row = {name: x[..., s // p, s % p, :] for name, x in gathered.items()}
            unpack = partial(buffers.unpack, like=inexact_leaves(own))
            out.append(self.like(own, (jax.vmap(unpack) if lead else unpack)(row)))
        return type(stages)(out)

    def _check_stages(self, stages: Any) -> None:
        v, p = self.plan.virtual_stages, self.plan.num_stages
        leaves = jax.tree.leaves(stages)
        folded = self._is_folded(stages)
        for name, x in zip(tree.paths(stages), leaves, strict=False):
            if x.shape[:2] != (v, p) if folded else x.shape[:1] != (v * p,):
                raise ValueError(
                    f"params: leaf {name!r} of shape {x.shape} must have the {v * p} stages in "
                    f"front ({p} devices along {self.axis_name!r}, virtual_stages={v}); "
                    "stack_stages makes it so"
                )
