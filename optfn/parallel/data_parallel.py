"""A training step on several workers: the batch is split, the loss is the mean over workers.

The whole step runs in one `shard_map`. An optimizer takes the mean gradient, the same on all
workers. An optimizer whose state says that it exchanges gradients by itself
(`per_worker.exchanges`) takes each worker's own gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import checks
from optfn.leaves import tree
from optfn.leaves.rows import Rows, mean_over
from optfn.leaves.types import Batch, DType, Leaf, OptState, PyTree, Updates
from optfn.mesh import AxisName, axes, mean_in_one, pmean, sharding, without
from optfn.state.per_worker import exchanged_axes, exchanges
from optfn.state.placement import num_workers, specs_of


def on_workers(
    step: Callable[[PyTree, Batch], tuple[PyTree, PyTree]], mesh: Mesh, data_axis: AxisName
) -> Callable[[PyTree, Batch], tuple[PyTree, PyTree]]:
    """Return the step of all workers, (state, batch) -> (state, metrics), from that of one worker.

    Args:
      step: the step of one worker on its part of the batch; the names of the axes are bound.
      mesh: the mesh of the workers.
      data_axis: the mesh axes over which the batch is split.
    """

    def global_step(state: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        replicated = jax.tree.map(lambda x: P(), state)
        placed = replicated._replace(opt_state=specs_of(state.opt_state, data_axis))
        split = jax.tree.map(lambda x: batch_spec(x, data_axis), batch)
        # With check_vma, JAX itself would sum the gradient of replicated parameters over workers.
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(placed, split), out_specs=(placed, P()), check_vma=False
        )
        return run(state, batch)

    return global_step


# Up to this size latency dominates an all-reduce; joining larger arrays is not worth the copy.
_SMALL_BYTES = 65536


def batch_spec(x: Leaf, data_axis: AxisName) -> P:
    """Return the PartitionSpec of an array of a batch: split along its leading axis, if any."""
    return P(axes(data_axis)) if jnp.ndim(x) else P()


def mean_over_workers(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over workers of each floating-point leaf, and the sum of each integer leaf.

    Integers of fewer than 32 bits are summed in 32. The mean of a row-sparse leaf consists of the
    rows of all workers, that of a key is worker 0's. Small leaves share an all-reduce. Without axes
    there is one worker, and `x` comes back.
    """
    if not axes(axis_name):
        return x
    leaves, structure = jax.tree.flatten(x, is_leaf=tree.is_leaf)
    small = {i: jnp.asarray(leaf) for i, leaf in enumerate(leaves) if _is_small(leaf)}

    def reduce(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Rows):
            return mean_over(leaf, axes(axis_name))
        if tree.is_masked(leaf) or getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return leaf
        if tree.is_key(leaf):
            return mean_or_first(leaf, axis_name)
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return pmean(leaf, axis_name)
        return lax.psum(leaf.astype(sum_dtype(leaf)), axes(axis_name))

    means = dict(zip(small, mean_in_one(list(small.values()), axis_name), strict=True))
    found = [means[i] if i in means else reduce(leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, found)


def sum_dtype(x: jax.Array) -> DType:
    """Return the dtype in which to add up integers: one of at least 32 bits."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.int32


def _is_small(leaf: Leaf) -> bool:
    """Tell whether a leaf is a floating-point array, or number, of few bytes."""
    return (
        tree.is_inexact(leaf)
        and not isinstance(leaf, Rows)
        and jnp.asarray(leaf).nbytes <= _SMALL_BYTES
    )


def mean_or_first(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over workers of each floating-point leaf, and worker 0's of all others."""
    if not axes(axis_name):
        return x
    is_first = lax.axis_index(axes(axis_name)) == 0

    def reduce(leaf: Leaf) -> Leaf:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return pmean(leaf, axis_name)
        if tree.is_key(leaf):
            return tree.on_key_data(reduce, leaf)
        # One worker's number and zeros: their sum is that number.
        return lax.psum(jnp.where(is_first, leaf, 0), axes(axis_name)).astype(leaf.dtype)

    return jax.tree.map(reduce, x)


def for_optimizer(
    grads: Updates, opt_state: OptState, axis_name: AxisName, metrics: PyTree = None
) -> tuple[Updates, PyTree, dict[str, Any]]:
    """Return the gradients that the optimizer takes, the metrics, and arguments of its update.

    A leaf that a transform exchanges by itself is averaged over the other axes only; all other
    leaves, and the metrics, over all axes of the workers. The extra argument is then the axis name,
    by which wrappers such as `skip_nonfinite` combine the workers' gradients.
    """
    if not axes(axis_name) or not exchanges(opt_state):
        return *mean_over_workers((grads, metrics), axis_name), {}
    leaves, structure = tree.flatten(grads)
    remaining = [without(axis_name, done) for done in exchanged_axes(opt_state, grads)]
    for names in dict.fromkeys([axes(axis_name), *remaining]):
        numbers = [i for i, own in enumerate(remaining) if own == names]
        of_all = metrics if names == axes(axis_name) else None
        means, of_all = mean_over_workers(([leaves[i] for i in numbers], of_all), names)
        metrics = of_all if names == axes(axis_name) else metrics
        for i, mean in zip(numbers, means, strict=True):
            leaves[i] = mean
    return structure.unflatten(leaves), metrics, {"axis_name": axis_name}


def replicate(x: PyTree, mesh: Mesh) -> PyTree:
    """Return copies of arrays on every device of the mesh; all processes must pass the same."""

    def place(leaf: Leaf) -> jax.Array:
        if tree.is_key(leaf):
            return tree.on_key_data(place, leaf)
        return put(leaf, sharding(mesh, P(), jnp.ndim(leaf)))

    return jax.tree.map(place, x)


def split_batch(batch: Batch, mesh: Mesh, data_axis: AxisName, local_steps: int = 1) -> Batch:
    """Return a batch on the mesh, split along its leading axis.

    Args:
      batch: arrays of all examples, the same in every process; or global arrays, which are not
        copied (`jax.make_array_from_process_local_data` makes them of the part of each process).
      mesh: the mesh of the workers.
      data_axis: the mesh axes over which it is split.
      local_steps: into how many equal parts each worker splits its own.

    Raises:
      ValueError: a leading axis cannot be split evenly; the error names the leaf.
    """
    workers = num_workers(mesh, data_axis)
    leaves, structure = jax.tree.flatten(batch)

    def place(i: int, x: Leaf) -> Leaf:
        if jnp.ndim(x) and np.shape(x)[0] % (workers * local_steps):
            parts = f"the {workers} workers" + (
                f" times {local_steps} local steps" if local_steps > 1 else ""
            )
            raise ValueError(
                f"the leading axis of the batch must be divisible by {parts}; "
                f"{_leaf_of(batch, i)} has shape {np.shape(x)}"
            )
        placement = NamedSharding(mesh, batch_spec(x, data_axis))
        if checks.is_traced(x):
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        if isinstance(x, jax.Array) and placement.is_fully_addressable:
            return jax.device_put(x, placement)
        return put(x, placement)

    return jax.tree.unflatten(structure, [place(i, x) for i, x in enumerate(leaves)])


def put(x: Leaf, placement: NamedSharding) -> jax.Array:
    """Return a copy of an array on the devices of `placement`, also those of other processes."""
    if checks.is_traced(x):
        traced: jax.Array = x
        return traced
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        copied: jax.Array = jax.jit(jnp.copy, out_shardings=placement)(x)
        return copied
    host = np.asarray(x).astype(jnp.result_type(x), copy=False)
    # Each device gets a copy of its part, because the step overwrites it.
    return jax.make_array_from_callback(host.shape, placement, lambda part: host[part].copy())


def _leaf_of(batch: Batch, i: int) -> str:
    path = tree.paths(batch)[i]
    return f"leaf {path!r}" if path else "it"
