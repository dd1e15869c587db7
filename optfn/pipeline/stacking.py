"""The parameters of a pipeline: one tree whose leaves have the stages as their leading axis."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optfn.core import checks, tree
from optfn.core.types import Leaf, Params
from optfn.leaves.nodes import Stacked


class PipelineParams(NamedTuple):
    """Parameters of a pipeline whose stages and loss share some, such as a tied embedding.

    stages: the params of the stages, as `stack_stages` returns them, or a list of them for
      heterogeneous stages.
    shared: a tree that stage functions and the loss get as the keyword `shared`, if they have a
      parameter of that name. Its gradient is the sum of theirs.
    """

    stages: Params
    shared: Params


def stack_stages(
    params: Sequence[Params],
    *,
    virtual_stages: int = 1,
    mesh: Mesh | None = None,
    axis_name: str = "stage",
) -> Params:
    """Stack the params of homogeneous stages in the model's order, place them if a mesh is given,
    and raise a ValueError if stages differ or do not fit it.

    Args:
      params: one tree per stage, p·v of them, with the same structure, shapes and dtypes.
      virtual_stages: v ≥ 1, the number of stages on each device. If v > 1, leaves are folded to
        (v, p, …), which can be sharded by device: stage r·p + d of the model is chunk r on device
        d. The pipeline also takes unfolded leaves (p·v, …), but then every step moves the weights
        to their devices and back.
      mesh: if given, each stage is placed on its device, and an optimizer state made from the
        result is placed like it. Without it, all arrays are on one device until the first step
        moves them to the mesh. A jitted step is compiled for the shardings of its arguments, so it
        then compiles a second time at the second call, and no more; with `mesh` it compiles once.
      axis_name: the axis of `mesh` for the stages.

    Returns:
      A tree with leaves of shape (p·v, …), or (v, p, …), in a `Stacked` for each leading axis, so
      that rules with a norm per tensor treat each stage as a separate tree. `stacked["w"]` is the
      leaf. Stage functions get plain trees.

    Raises:
      ValueError: there are no stages; stages differ (pass those to the pipeline as a list); the
        number of stages is not a multiple of `virtual_stages` or does not fit the mesh; or the mesh
        has no axis `axis_name`.
    """
    params = list(params)
    v = checks.count("virtual_stages", virtual_stages)
    if not params:
        raise ValueError("params must be a sequence of at least one stage; got none")
    if len(params) % v:
        raise ValueError(
            f"params: the number of stages, {len(params)}, must be a multiple of virtual_stages={v}"
        )
    for i, stage in enumerate(params[1:], 1):
        _check_homogeneous(params[0], stage, i)

    def stack(*leaves: Leaf) -> jax.Array:
        x = jnp.stack(leaves)
        # Stage r·p + d goes to [r, d], so the second axis divides the chunks by device.
        return x.reshape(v, len(params) // v, *x.shape[1:]) if v > 1 else x

    stacked = Stacked(jax.tree.map(stack, *params))
    stacked = Stacked(stacked) if v > 1 else stacked
    if mesh is None:
        return stacked
    if axis_name not in mesh.axis_names:
        raise ValueError(f"axis_name {axis_name!r} is not an axis of the mesh {mesh.axis_names}")
    if len(params) != mesh.shape[axis_name] * v:
        raise ValueError(
            f"params: {len(params)} stages do not fit axis {axis_name!r}, which has "
            f"{mesh.shape[axis_name]} devices with virtual_stages={v} stages each. A stage may "
            "consist of several layers"
        )
    # Placed here, because a step that had to move the stages would be compiled a second time.
    spec = PartitionSpec(None, axis_name) if v > 1 else PartitionSpec(axis_name)
    return jax.device_put(stacked, NamedSharding(mesh, spec))


def _check_homogeneous(first: Params, stage: Params, i: int) -> None:
    """Raise a ValueError unless stage i has the structure of the first, and the same shapes and
    dtypes except in masked leaves."""
    hint = "if your stages differ, pass the pipeline a list of functions and a list of params"
    tree.check_same_structure("stack_stages", f"params[{i}]", stage, "params[0]", first)
    for place, a, b in tree.items(first, stage):
        if tree.is_masked(a):
            continue
        if jnp.shape(a) != jnp.shape(b) or jnp.result_type(a) != jnp.result_type(b):
            raise ValueError(
                f"params[{i}]: leaf {place!r} is {jnp.result_type(b)}{list(jnp.shape(b))}, but "
                f"in params[0] it is {jnp.result_type(a)}{list(jnp.shape(a))}; {hint}"
            )


def unwrap_stacked(stages: Params) -> tuple[Params, int]:
    """Return params without the `Stacked` nodes around them, and the count of these nodes, which
    may be 0."""
    count = 0
    while isinstance(stages, Stacked):
        stages, count = stages.layers, count + 1
    return stages, count


def wrap_stacked(stages: Params, count: int) -> Params:
    """Put params into `count` nested `Stacked` nodes."""
    for _ in range(count):
        stages = Stacked(stages)
    return stages


def unstack_stages(stacked: Params, *, virtual_stages: int | None = None) -> list[Params]:
    """Return the stages' trees as a list in the model's order, the inverse of `stack_stages`, or
    raise a ValueError unless leaves have the same leading axes.

    Args:
      stacked: a tree with leaves of shape (stages, …), or (v, p, …) if `virtual_stages` = v > 1. A
        list or tuple of heterogeneous stages is not stacked; use it directly.
      virtual_stages: as in `stack_stages`. None: leaves in two `Stacked`, as `stack_stages` returns
        them for v > 1, have v first; leaves without them have the stages first. Pass 1 if each
        stage is a `Stacked` itself.

    Returns:
      A list with one tree per stage.

    Raises:
      ValueError: the tree has no leaves, or the leading axes of its leaves differ.
    """
    stacked, count = unwrap_stacked(stacked)
    if virtual_stages is None:
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(stacked)} if count > 1 else set()
        virtual_stages = min(sizes, default=(1,))[0]
    v = checks.count("virtual_stages", virtual_stages)
    axes = 2 if v > 1 else 1
    leading = {jnp.shape(x)[:axes] for x in jax.tree.leaves(stacked)}
    if len(leading) != 1 or len(min(leading)) != axes or (v > 1 and min(leading)[0] != v):
        axes_needed = f"({v}, p)" if v > 1 else "(p,)"
        raise ValueError(
            f"stacked: with virtual_stages={v} all leaves must have the same leading axes, "
            f"{axes_needed}; got {tree.list_names(sorted(map(str, leading))) or 'no leaves'}"
        )
    shape = min(leading)
    return [jax.tree.map(partial(_take_stage, index), stacked) for index in np.ndindex(shape)]


def _take_stage(index: tuple[int, ...], x: Leaf) -> Leaf:
    """Return entry `index` of the leading axes of an array, which every device gets if its mesh has
    explicit axes."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if sharding is None or not sharding.mesh.explicit_axes:
        return x[index]
    # Indexing along an explicit axis needs an output sharding. Here all devices get the stage.
    out = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(index) :]))
    return x.at[index].get(out_sharding=out)
