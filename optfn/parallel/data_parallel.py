"""A training step on several workers: the batch is split, the loss is the mean over workers.

Everything stands in one `shard_map`. An optimizer gets the mean gradient, the same on all workers;
one whose state says that it exchanges by itself (`per_worker.exchanges`) gets each worker's own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.leaves import tree
from optfn.leaves.rows import Rows, mean_over
from optfn.leaves.types import Batch, Leaf, OptState, PyTree, Updates
from optfn.parallel.mesh import AxisName, axes, sharding
from optfn.parallel.per_worker import exchanges, own_leaves
from optfn.parallel.placement import num_workers, specs_of


def on_workers(
    step: Callable[[Any, Any], tuple[Any, Any]], mesh: Mesh, data_axis: AxisName
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return the step of all workers, (state, batch) -> (state, metrics), from that of one.

    Args:
      step: what a worker does with its part; it sees the axis.
      mesh: the workers.
      data_axis: the mesh axes over which the batch is split.
    """

    def whole(state: Any, batch: Batch) -> tuple[Any, Any]:
        placed = state._replace(
            step=P(),
            params=jax.tree.map(lambda x: P(), state.params),
            opt_state=specs_of(state.opt_state, data_axis),
        )
        split = jax.tree.map(lambda x: batch_spec(x, data_axis), batch)
        # check_vma would sum the gradient of replicated parameters over workers by itself.
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(placed, split), out_specs=(placed, P()), check_vma=False
        )
        return run(state, batch)

    return whole


def batch_spec(x: Leaf, data_axis: AxisName) -> P:
    """Return how an array of a batch is split: along its leading axis; a scalar is not."""
    return P(axes(data_axis)) if jnp.ndim(x) else P()


def mean_over_workers(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over workers of each floating-point leaf, the sum of each integer.

    That of row-sparse leaves is the rows of all workers.
    """

    def reduce(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Rows):
            return mean_over(leaf, axes(axis_name))
        if tree.is_masked(leaf) or getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return leaf
        leaf = jnp.asarray(leaf)
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return (lax.pmean if inexact else lax.psum)(leaf, axes(axis_name))

    return jax.tree.map(reduce, x, is_leaf=tree.is_leaf)


def for_optimizer(
    grads: Updates, opt_state: OptState, axis_name: AxisName
) -> tuple[Updates, dict[str, Any]]:
    """Return the gradients as the optimizer takes them, and what else its update needs to know.

    Leaves whose gradients a transform exchanges by itself stay each worker's own; the others are
    averaged. Wrappers that judge gradients have to know the axis then.
    """
    if not exchanges(opt_state):
        return mean_over_workers(grads, axis_name), {}
    leaves, structure = tree.flatten(grads)
    own = own_leaves(opt_state, grads)
    averaged = [
        g if is_own else mean_over_workers(g, axis_name)
        for g, is_own in zip(leaves, own, strict=True)
    ]
    return structure.unflatten(averaged), {"axis_name": axis_name}


def replicate(x: PyTree, mesh: Mesh) -> PyTree:
    """Return copies of arrays, the same in all processes, on every device of the mesh."""
    return jax.tree.map(lambda leaf: _put(leaf, sharding(mesh, P(), jnp.ndim(leaf))), x)


def split(batch: Batch, mesh: Mesh, data_axis: AxisName) -> Batch:
    """Return a batch on the mesh, split along its leading axis.

    Args:
      batch: arrays of all examples, the same in every process; or global arrays, which stay as
        they are (`jax.make_array_from_process_local_data` makes them from each process's own).
      mesh: the workers.
      data_axis: the mesh axes over which it is split.

    Raises:
      ValueError: a leading axis cannot be split evenly; the error names the leaf.
    """
    workers = num_workers(mesh, data_axis)
    leaves, structure = jax.tree.flatten(batch)

    def place(i: int, x: Leaf) -> Leaf:
        if jnp.ndim(x) and np.shape(x)[0] % workers:
            raise ValueError(
                f"the leading axis of the batch is split over {workers} workers; "
                f"{_leaf_of(batch, i)} has shape {np.shape(x)}"
            )
        placement = NamedSharding(mesh, batch_spec(x, data_axis))
        if isinstance(x, jax.core.Tracer):
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        if isinstance(x, jax.Array) and placement.is_fully_addressable:
            return jax.device_put(x, placement)
        return _put(x, placement)

    return jax.tree.unflatten(structure, [place(i, x) for i, x in enumerate(leaves)])


def _put(x: Leaf, placement: NamedSharding) -> jax.Array:
    """Return a copy of an array on the devices of `placement`, of which others may hold a part."""
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=placement)(x)
    host = np.asarray(x).astype(jnp.result_type(x), copy=False)
    # Each device's part is a fresh array, which no one else holds: the step overwrites it.
    return jax.make_array_from_callback(host.shape, placement, lambda part: host[part].copy())


def _leaf_of(batch: Batch, i: int) -> str:
    path = tree.paths(batch)[i]
    return f"leaf {path!r}" if path else "it"
