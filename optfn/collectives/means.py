"""Means over workers, where each worker may be a group of devices that divide its arrays."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.collectives import torus
from optfn.collectives.axes import Axes, Division, axis_size, joined, vary, without
from optfn.collectives.devices import Workers
from optfn.collectives.packets import Compressor, coded_mean_shard
from optfn.compilers import xla
from optfn.compilers.groups import map_groups, varying_axes
from optfn.core import tree
from optfn.core.types import DType, Leaf, LeafKind, PyTree, Updates


def pmean(x: jax.Array, names: Axes) -> jax.Array:
    """Return the mean over workers, in the dtype of x."""
    mean: jax.Array = lax.pmean(xla.reducible(x), names).astype(x.dtype)
    return mean


def mean_in_one(g: Sequence[jax.Array], names: Axes) -> list[jax.Array]:
    """Return the means over workers, with one all-reduce for all arrays of one dtype.

    If JAX tracks variation, arrays that vary over further axes have a separate all-reduce.
    """

    def means(arrays: list[jax.Array]) -> list[jax.Array]:
        bucket = pmean(jnp.concatenate([x.reshape(-1) for x in arrays]), names)
        found = xla.split(bucket, [x.size for x in arrays])
        return [mean.reshape(x.shape) for mean, x in zip(found, arrays, strict=True)]

    return map_groups(means, g, lambda x: (x.dtype, varying_axes(x)))


def zeros_of_mean(x: jax.Array, names: Axes) -> jax.Array:
    """Return zeros like the mean of x over workers, for the branch of a cond that has no mean."""
    return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x) - set(names))


def mean_of_all(x: Updates, metrics: PyTree, workers: Workers) -> tuple[Updates, PyTree]:
    """Return the means over workers of a tree like the params and of metrics.

    Of an array that the devices of a worker divide, each device sends its shard.

    Args:
      x: gradients of the params.
      metrics: arrays that are whole on each device, such as the loss.
      workers: the workers; their axes may be some of those of a step.
    """
    axes, group = workers
    if group is None or not axes:
        means: tuple[Updates, PyTree] = mean_over_workers((x, metrics), axes)
        return means
    # shard_map takes no arrays of dtype float0.
    arrays = tree.map(lambda g: g if tree.is_inexact(g) else None, x)
    specs = group.specs_of(arrays), P()
    mean = group.shard_map(lambda *values: mean_over_workers(values, axes), specs, specs)
    arrays, metrics = mean(arrays, metrics)
    return tree.map(lambda g, mean: g if mean is None else mean, x, arrays), metrics


# Up to this size the time of an all-reduce is latency. Joining larger arrays is not worth the copy.
SMALL_BYTES = 65536


def mean_over_workers(x: PyTree, axis_name: Axes) -> PyTree:
    """Return the mean over workers of each floating-point leaf, and the sum of each integer leaf.

    Integers of fewer than 32 bits are summed in 32 bits. The mean of a row-sparse leaf has the rows
    of all workers. Of a PRNG key, worker 0's is returned. Small leaves share one all-reduce.
    Without axes there is only one worker, and `x` is returned as it is.
    """
    if not axis_name:
        return x
    leaves, structure = jax.tree.flatten(x, is_leaf=tree.is_leaf)
    dense = ((i, x) for i, x in enumerate(leaves) if tree.is_inexact(x) and not tree.is_leaf(x))
    small = {i: a for i, x in dense if (a := jnp.asarray(x)).nbytes <= SMALL_BYTES}

    def reduce(leaf: Leaf) -> Leaf:
        if isinstance(leaf, LeafKind):
            return leaf.mean_over(axis_name)
        if tree.is_masked(leaf) or tree.is_float0(leaf):
            return leaf
        if tree.is_key(leaf):
            return mean_or_first(leaf, axis_name)
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return pmean(leaf, axis_name)
        return lax.psum(leaf.astype(sum_dtype(leaf)), axis_name)

    means = dict(zip(small, mean_in_one(list(small.values()), axis_name), strict=True))
    found = [means[i] if i in means else reduce(leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, found)


def sum_dtype(x: jax.Array) -> DType:
    """Return the dtype in which integers are summed; it has at least 32 bits."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.int32


def mean_or_first(x: PyTree, axis_name: Axes) -> PyTree:
    """Return the mean over workers of each floating-point leaf, and worker 0's of every other."""
    if not axis_name:
        return x
    is_first = lax.axis_index(axis_name) == 0

    def reduce(leaf: Leaf) -> Leaf:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return pmean(leaf, axis_name)
        if tree.is_key(leaf):
            return tree.map_key_data(reduce, leaf)
        # The remaining workers add zeros, so the sum is worker 0's value.
        return lax.psum(jnp.where(is_first, leaf, 0), axis_name).astype(leaf.dtype)

    return jax.tree.map(reduce, x)


def mean_shard(
    x: jax.Array,
    divisions: Sequence[Division],
    names: Axes,
    mesh: Mesh,
    codec: Compressor | None = None,
    step: jax.Array | None = None,
) -> jax.Array:
    """Return a device's shard of the mean of an array over the axes `names`, by reduce-scatters.

    A dimension that cannot be divided evenly is padded.

    Args:
      x: the array of each device.
      divisions: how the mean is divided, over some of `names`.
      names: the axes over which the mean is taken.
      mesh: the mesh of these axes.
      codec: the compressor that makes packets; None if arrays are sent as they are.
      step: the number of the training step, for packets.
    """
    for dimension, along in divisions:
        if codec is None:
            x = _mean_along(x, dimension, along, mesh)
        else:
            x = coded_mean_shard(x, dimension, along, codec, step)
    remaining = without(names, joined(*(along for _, along in divisions)))
    return pmean(x, remaining) if remaining else x


def _mean_along(x: jax.Array, dimension: int, names: Axes, mesh: Mesh) -> jax.Array:
    """Return a device's shard along one dimension of the mean over the axes `names`."""
    count = axis_size(names)
    if x.shape[dimension] % count:
        missing = -x.shape[dimension] % count
        x = jnp.pad(x, [(0, missing if d == dimension else 0) for d in range(x.ndim)])
    if not _is_gloo(mesh, names):
        total = torus.sum_scatter(xla.reducible(x), names, dimension)
        mean: jax.Array = (total / count).astype(x.dtype)
        return mean
    # Between CPU processes the reduce-scatter is wrong (jax issue 40830).
    shards = jnp.stack(jnp.split(x, count, dimension))
    return jnp.mean(lax.all_to_all(shards, names, 0, 0), 0)


def _is_gloo(mesh: Mesh, names: Axes) -> bool:
    """Tell whether CPU devices of several processes lie along these axes."""
    along = tuple(mesh.axis_names.index(name) for name in names)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return mesh.devices.flat[0].platform == "cpu" and bool(np.ptp(processes, axis=along).any())
