"""The costs of each way of sharding a model: bytes on a device, and bytes sent in a step."""

from itertools import compress
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.leaves import tree
from optfn.leaves.types import Leaf, Params, PyTree
from optfn.mesh import AxisName, axes, restricted, without
from optfn.parallel.layout import Kind, is_spec, layout_of
from optfn.state.per_worker import exchanged_axes
from optfn.state.placement import num_workers, on_workers_of


class MemoryPlan(NamedTuple):
    """Bytes of a training step on each device.

    params: of the parameters.
    state: of the optimizer's state.
    gradients: of the gradient that each worker computes, before it is reduced.
    sent: by each device in a step, in a ring, for the means that the step takes. The packets of
      a transform that exchanges gradients by itself are not counted.
    """

    params: int
    state: int
    gradients: int
    sent: int


def plan_memory(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh | AbstractMesh,
    *,
    shard: Kind | None = None,
    data_axis: AxisName = "data",
) -> MemoryPlan:
    """Return the bytes that a way of sharding a model takes; nothing is allocated.

    With N workers, P bytes of params, G of gradients and S of state:

        shard       params  state  sent
        None        P       S      2(N − 1)/N·G
        "state"     P       S/N    (N − 1)/N·(G + P)
        "params"    P/N     S/N    (N − 1)/N·(G + P), and P once more for a `Stacked`, whose layers
                                   `scan_layers` gathers again in the backward pass

    A leaf that cannot be divided by N counts whole, and goes through an all-reduce. Activations and
    the batch come on top.

    Args:
      tx: an optimizer, however wrapped.
      params: arrays or ShapeDtypeStructs.
      mesh: a mesh, or a `jax.sharding.AbstractMesh` of devices that are not there.
      shard: as for `make_train_step`.
      data_axis: as for `make_train_step`.
    """
    tx = core.check_transform("plan_memory: tx", tx)
    mesh = cast("Mesh", mesh)  # only the sizes of its axes are read
    num_workers(mesh, data_axis)  # the mesh has these axes
    params = jax.eval_shape(lambda x: x, params)
    state = jax.eval_shape(tx.init, params)
    layout = layout_of(shard, mesh, data_axis)
    all_workers = on_workers_of(tx.init, mesh, layout.worker_axes)
    kept, of_state = jax.eval_shape(all_workers, params), layout.of_state(state, params)
    specs, grad_specs = layout.of_params(params), layout.of_gradients(params)
    leaves = jax.tree.leaves(params)
    of_params, of_grads = (jax.tree.leaves(x, is_leaf=is_spec) for x in (specs, grad_specs))
    present = [not tree.is_masked(x) for x in tree.flatten(params)[0]]
    facts = tree.stacked_axes(params), exchanged_axes(state, params)
    columns = leaves, of_params, of_grads, *(compress(fact, present) for fact in facts)
    others = set(mesh.axis_names) - set(axes(data_axis))
    sent, gradients = 0.0, 0
    for p, spec, grad_spec, stacked, exchanged in zip(*columns, strict=True):
        if tree.is_inexact(p):
            gathers = 2 if stacked else 1
            averaged = without(data_axis, exchanged)
            sent += _sent(p, spec, grad_spec, mesh, averaged, gathers)
            gradients += _bytes_on_device(p, restricted(grad_spec, others), mesh)
    return MemoryPlan(
        _bytes_on_device(params, specs, mesh),
        _bytes_on_device(kept, of_state, mesh),
        gradients,
        round(sent),
    )


def _bytes_on_device(values: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes of arrays on each device."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    return sum(
        int(np.prod(x.shape, dtype=np.int64)) * jnp.dtype(x.dtype).itemsize
        // num_workers(mesh, tuple(axis for entry in spec for axis in axes(entry)))
        for x, spec in pairs
    )  # fmt: skip


def _sent(p: Leaf, spec: P, grad_spec: P, mesh: Mesh, data_axis: AxisName, gathers: int) -> float:
    """Return the bytes that a device sends for a leaf.

    Args:
      p: the leaf.
      spec: how it lies.
      grad_spec: how its gradient lies.
      mesh: the mesh.
      data_axis: the axes of the workers.
      gathers: how often it is gathered if it is sharded.
    """
    workers = num_workers(mesh, data_axis)
    others = set(mesh.axis_names) - set(axes(data_axis))
    once = (workers - 1) / workers * _bytes_on_device(p, restricted(grad_spec, others), mesh)

    def is_divided(spec: P) -> bool:
        return any(restricted(spec, axes(data_axis)))

    if not is_divided(grad_spec):
        return 2 * once
    return once * (1 + (gathers if is_divided(spec) else 1))
