"""Means over workers, where each worker may be a group of devices that divide its arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import DType, Leaf, LeafKind, OptState, PyTree, Updates
from optfn.mesh import Axes, mean_in_one, pmean, without
from optfn.state.per_worker import exchanged_axes, exchanges
from optfn.workers import Workers


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
    mean = group.mapped(lambda *values: mean_over_workers(values, axes), specs, specs)
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


def optimizer_inputs(
    grads: Updates, opt_state: OptState, workers: Workers, metrics: PyTree = None
) -> tuple[Updates, PyTree, dict[str, Any]]:
    """Return the gradients that the optimizer takes, the metrics, and arguments of its update.

    If a transform exchanges a leaf itself, over some axes, that leaf is averaged only over the
    remaining ones. Everything else is averaged over all worker axes. If there is an
    exchange, the extra argument is `workers`, with whom wrappers such as `skip_nonfinite` agree.
    """
    axes = workers.axes
    if not axes or not exchanges(opt_state):
        return *mean_of_all(grads, metrics, workers), {}
    remaining = [without(axes, done) for done in exchanged_axes(opt_state, grads)]
    for names in dict.fromkeys([axes, *remaining]):

        def select(place: tree.Place, g: Leaf, names: Axes = names) -> Leaf:
            return g if remaining[place.number] == names else None

        some = tree.map_named(select, grads)
        of_all = metrics if names == axes else None
        means, of_all = mean_of_all(some, of_all, workers._replace(axes=names))
        metrics = of_all if names == axes else metrics
        grads = tree.map(lambda g, mean: g if mean is None else mean, grads, means)
    return grads, metrics, {"workers": workers}
