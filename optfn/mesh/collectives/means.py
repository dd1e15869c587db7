"""Means over workers: all-reduces of arrays and trees, and reduce-scatters to shards."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import DType, Leaf, LeafKind, PyTree, Updates
from optfn.mesh.collectives import torus
from optfn.mesh.collectives.axes import (
    Axes,
    Division,
    axis_size,
    exclude_axes,
    join_axes,
    mark_varying,
)
from optfn.mesh.collectives.devices import Workers
from optfn.mesh.collectives.packets import Compressor, mean_scatter_packets
from optfn.mesh.compilers import xla
from optfn.mesh.compilers.groups import map_groups, varying_axes


def pmean(x: jax.Array, names: Axes) -> jax.Array:
    """Return the mean of x over workers, in the dtype of x, although the all-reduce may add in a
    wider dtype.

    `xla.widen_for_all_reduce` says which dtype the all-reduce adds in.
    """
    shares, count = _divide_before_sum(xla.widen_for_all_reduce(x), axis_size(names))
    return (lax.psum(shares, names) / count).astype(x.dtype)


def _divide_before_sum(x: jax.Array, count: int) -> tuple[jax.Array, int]:
    """Return the summand and the divisor of the mean of x: x and `count`, but x/count and 1 for
    float16, whose sum may overflow.

    In float16 the sum of numbers that fit may be infinite, from 65,504/count on.
    """
    return (x / count, 1) if x.dtype == jnp.float16 else (x, count)


def pmean_leaves(g: Sequence[jax.Array], names: Axes) -> list[jax.Array]:
    """Return the mean over workers of each array, by one all-reduce for all arrays of the same
    dtype that vary over the same axes.

    Where JAX tracks variation, arrays that vary over different axes cannot be concatenated.
    """

    def means(arrays: list[jax.Array]) -> list[jax.Array]:
        bucket = pmean(jnp.concatenate([x.reshape(-1) for x in arrays]), names)
        found = xla.split(bucket, [x.size for x in arrays])
        return [mean.reshape(x.shape) for mean, x in zip(found, arrays, strict=True)]

    return map_groups(means, g, lambda x: (x.dtype, varying_axes(x)))


def cast_floats(x: PyTree, dtype: DType | None) -> PyTree:
    """Cast the real floating-point arrays of a tree to a dtype, or return the tree unchanged if
    `dtype` is None.

    Integers, complex numbers, rows and masked leaves stay as they are.
    """

    def cast(leaf: Leaf) -> Leaf:
        is_rows = isinstance(leaf, LeafKind)
        is_real = tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, dtype) if is_real and not is_rows else leaf

    return x if dtype is None else tree.map_arrays(cast, x)


def _cast_like(x: PyTree, like: PyTree) -> PyTree:
    """Cast each array whose leaf in `like` is a floating-point array to the dtype of that leaf, but
    no rows."""

    def cast(leaf: Leaf, before: Leaf) -> Leaf:
        is_float = tree.is_inexact(before) and not isinstance(before, LeafKind)
        return leaf.astype(before.dtype) if is_float and tree.is_array(before) else leaf

    return tree.map(cast, x, like)


def zeros_like_mean(x: jax.Array, names: Axes) -> jax.Array:
    """Return zeros of the type of `pmean(x, names)`, for the branch of a cond that skips this
    collective."""
    return mark_varying(jnp.zeros(x.shape, x.dtype), varying_axes(x) - set(names))


def mean_over_workers(
    x: Updates, metrics: PyTree, workers: Workers, dtype: DType | None = None
) -> tuple[Updates, PyTree]:
    """Average gradients and metrics over workers, and return both. Each device sends its shards of
    the gradients; without worker axes nothing is sent.

    A worker may be a shard group, whose devices divide the gradients: the all-reduce then runs
    between the devices that keep the same shard, and leaves without a gradient (float0, integers)
    are returned unchanged. If a worker is one device, this is `mean_over_axes` of both.

    Args:
      x: the gradients, a tree with the paths of the params.
      metrics: arrays that are whole on each device, such as the loss.
      workers: the workers; their axes may be a part of the axes of a step.
      dtype: the dtype for adding and sending gradients; None: the gradients' dtype. The means have
        the gradients' dtype in any case.
    """
    if dtype is not None:
        wide, metrics = mean_over_workers(cast_floats(x, dtype), metrics, workers)
        return _cast_like(wide, x), metrics
    axes, group = workers
    if group is None or not axes:
        return mean_over_axes((x, metrics), axes)
    # shard_map takes no arrays of dtype float0.
    arrays = tree.map(lambda g: g if tree.is_inexact(g) else None, x)
    specs = group.specs_of(arrays), P()
    mean = group.shard_map(lambda *values: mean_over_axes(values, axes), specs, specs)
    arrays, metrics = mean(arrays, metrics)
    return tree.map(lambda g, mean: g if mean is None else mean, x, arrays), metrics


# Up to this size the time of an all-reduce is latency, so small arrays share one. The copy into a
# common bucket would cost more than it saves for larger arrays.
SMALL_BYTES = 65536


def mean_over_axes(x: PyTree, axis_name: Axes, dtype: DType | None = None) -> PyTree:
    """Return the mean along axes of each floating-point leaf, the sum of each integer leaf, and
    masked leaves unchanged, or x unchanged without axes.

    The axes may be worker axes or shard axes. The sum of integers has at least 32 bits. The mean of
    a row-sparse leaf has the rows of all devices. A PRNG key becomes the first device's key. Leaves
    of float0 are returned unchanged. Small leaves share one all-reduce. Gradients are added and
    sent in `dtype`, or in their dtype if it is None.
    """
    if not axis_name:
        return x
    if dtype is not None:
        return _cast_like(mean_over_axes(cast_floats(x, dtype), axis_name), x)
    leaves, structure = jax.tree.flatten(x, is_leaf=tree.is_leaf)
    small: dict[int, jax.Array] = {}
    for i, leaf in enumerate(leaves):
        if tree.is_inexact(leaf) and not tree.is_leaf(leaf):
            array = jnp.asarray(leaf)
            if array.nbytes <= SMALL_BYTES:
                small[i] = array

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

    means = dict(zip(small, pmean_leaves(list(small.values()), axis_name), strict=True))
    found = [means[i] if i in means else reduce(leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, found)


def sum_dtype(x: jax.Array) -> DType:
    """Return the dtype for sums of integers or bools: the dtype of x, or int32 if it has fewer than
    32 bits."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.int32


def mean_or_first(x: PyTree, axis_name: Axes) -> PyTree:
    """Return the mean over workers of each floating-point leaf and worker 0's value of each integer
    or key, or x unchanged without axes."""
    if not axis_name:
        return x
    is_first = lax.axis_index(axis_name) == 0

    def reduce(leaf: Leaf) -> Leaf:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            # A mask may have the largest number there is, whose sum would be infinite. A power of
            # two changes no bit of the mean.
            count = axis_size(axis_name)
            scale = 0.5 ** (count - 1).bit_length()
            total = lax.psum(xla.widen_for_all_reduce(leaf) * scale, axis_name)
            return (total / (count * scale)).astype(leaf.dtype)
        if tree.is_key(leaf):
            return map_key_data(reduce, leaf)
        # The remaining workers add zeros, so the sum is worker 0's value.
        return lax.psum(jnp.where(is_first, leaf, 0), axis_name).astype(leaf.dtype)

    return jax.tree.map(reduce, x)


def mean_scatter(
    x: jax.Array,
    divisions: Sequence[Division],
    names: Axes,
    mesh: Mesh,
    compressor: Compressor | None = None,
    step: jax.Array | None = None,
    dtype: DType | None = None,
) -> jax.Array:
    """Return this device's shard, as `divisions` say, of the mean of x over the axes `names`, which
    is sent in packets if a compressor is given.

    There is a reduce-scatter for each divided dimension, and an all-reduce over the axes that
    divide nothing. Without a compressor, a dimension that its number of shards does not divide is
    padded with zeros.

    Args:
      x: the array of each device.
      divisions: how the mean is divided, over some of `names`.
      names: the axes of the mean.
      mesh: the mesh of these axes.
      compressor: encodes the slices that are sent; None sends them as they are.
      step: the number of the training step, for the compressor.
      dtype: the dtype for adding and sending a real array without a compressor; None: the dtype of
        x. The mean has the dtype of x.
    """
    given = x.dtype
    if compressor is None:
        x = cast_floats(x, dtype)
    for dimension, along in divisions:
        if compressor is None:
            x = _mean_scatter_along(x, dimension, along, mesh)
        else:
            x = mean_scatter_packets(x, dimension, along, compressor, step)
    remaining = exclude_axes(names, join_axes(*(along for _, along in divisions)))
    if remaining:
        x = pmean(cast_floats(x, dtype), remaining)
    return x.astype(given)


def _mean_scatter_along(x: jax.Array, dimension: int, names: Axes, mesh: Mesh) -> jax.Array:
    """Return this device's shard along a dimension of the mean over devices, after padding x with
    zeros if their number does not divide the dimension."""
    count = axis_size(names)
    if x.shape[dimension] % count:
        missing = -x.shape[dimension] % count
        x = jnp.pad(x, [(0, missing if d == dimension else 0) for d in range(x.ndim)])
    if not _is_gloo(mesh, names):
        shares, number = _divide_before_sum(xla.widen_for_all_reduce(x), count)
        total = torus.reduce_scatter_along(shares, names, dimension)
        return (total / number).astype(x.dtype)
    # Between CPU processes, JAX's reduce-scatter returns wrong values (jax issue 40830): exchange
    # the slices and take the mean here.
    shards = jnp.stack(jnp.split(x, count, dimension))
    return jnp.mean(lax.all_to_all(shards, names, 0, 0), 0)


def _is_gloo(mesh: Mesh, names: Axes) -> bool:
    """Tell whether devices along these axes are CPUs of several processes, so that gloo runs the
    collective, which is never so for an AbstractMesh."""
    if isinstance(mesh, AbstractMesh):  # of a plan
        return False
    along = tuple(mesh.axis_names.index(name) for name in names)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return mesh.devices.flat[0].platform == "cpu" and bool(np.ptp(processes, axis=along).any())


def map_key_data(fn: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Return the key, of the same implementation, whose data are `fn` of the data of `key`."""
    data = fn(jax.random.key_data(key))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
