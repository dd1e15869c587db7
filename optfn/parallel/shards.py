"""Params that are divided over devices, inside `shard_map`.

Each device gathers the params that its loss needs, and sends each shard of its gradient to the
device that keeps this shard.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optfn.collectives.axes import (
    Axes,
    Division,
    axes,
    bound_axes,
    is_spec,
    joined,
    restricted,
    without,
)
from optfn.collectives.means import mean_over_workers, mean_shard
from optfn.collectives.mesh import are_in_order, mapped
from optfn.collectives.packets import MIN_SIZE, coded_gather
from optfn.collectives.torus import gather_along
from optfn.core import tree
from optfn.core.types import Leaf, LeafKind, Params, PyTree, Updates
from optfn.parallel.mesh_layout import Layout


def _on_slices(spec: P, layout: Layout, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a function (array, step), run by each device on its slice of the array.

    Otherwise the compiler joins slices along the axes that are left to it before each collective.

    Args:
      spec: how the array is divided into slices, over axes that are left to the compiler.
      layout: how params are divided.
      fn: the function.
    """
    names = joined(*spec)
    if not names:
        return fn
    if not are_in_order(layout.mesh, bound_axes(), names):
        names = Axes(layout.mesh.axis_names)  # fn is the same along axes that divide no slice
    return mapped(fn, layout.mesh, names, (spec, P()), spec)


def slices_of(spec: P, layout: Layout) -> P:
    """Return how an array is divided into slices over the axes that no `shard_map` binds.

    A dimension that data axes divide as well stays whole: gathered slice by slice along the data
    axes, its blocks would stand in another order.
    """
    left = without(layout.mesh.axis_names, layout.data_axes)
    is_mixed = [any(a in layout.data_axes for a in axes(entry)) for entry in spec]
    return P(*(None if x else e for x, e in zip(is_mixed, restricted(spec, left), strict=True)))


def gather_shard(
    shard: jax.Array,
    divisions: Sequence[Division],
    slices: P,
    layout: Layout,
    step: jax.Array | None,
    dtype: Any = None,
) -> jax.Array:
    """Return a whole array; its gradient is the device's shard of the mean over the shard axes.

    Args:
      shard: this device's shard of the array.
      divisions: how the array is divided.
      slices: how it is divided over axes that are left to the compiler; see `slices_of`.
      layout: how params are divided.
      step: the number of the training step, for the packets that the compressors of the layout
        make; None if the array is sent as it is.
      dtype: the dtype of the result, in which the array is sent; None keeps its dtype. The gradient
        is reduced in the dtype of the shard. Packets are made from the array as it is.
    """
    forward, reduce = (None, None) if step is None else (layout.gather, layout.reduce)
    kept = shard.dtype

    @jax.custom_vjp
    @functools.partial(_on_slices, slices, layout)
    def gather(x: jax.Array, step: jax.Array | None) -> jax.Array:
        x = x if forward is not None else x.astype(dtype or kept)
        for dimension, names in divisions:
            if forward is None:
                x = gather_along(x, names, dimension)
            else:
                x = coded_gather(x, dimension, names, forward, step)
        return x.astype(dtype or kept)

    @functools.partial(_on_slices, slices, layout)
    def reduced(x: jax.Array, step: jax.Array | None) -> jax.Array:
        return mean_shard(x, divisions, layout.shard_axes, layout.mesh, reduce, step)

    def backward(step: jax.Array | None, cotangent: jax.Array) -> tuple[jax.Array, None]:
        return reduced(cotangent.astype(kept), step), None

    gather.defvjp(lambda x, step: (gather(x, step), step), backward)
    return gather(shard, step)


def mean_gradients(
    grads: Updates,
    params: Params,
    specs: PyTree,
    gradient_specs: PyTree,
    layout: Layout,
    step: jax.Array,
) -> Updates:
    """Return a device's shard of the mean gradient over the shard axes.

    Args:
      grads: the device's gradients of whole params; or those of shards, of which `gather_shard` has
        already taken the mean.
      params: the shards that a device keeps.
      specs: the PartitionSpecs of whole params.
      gradient_specs: the PartitionSpecs of whole gradients.
      layout: how params are divided.
      step: the number of the training step, for packets.
    """

    def undivided(g: Leaf, spec: P) -> Leaf:
        is_dense = tree.is_inexact(g) and not isinstance(g, LeafKind)
        return g if is_dense and not layout.divisions(spec) else None

    def reduced(g: Leaf, mean: Leaf, p: Leaf, spec: P, gradient_spec: P) -> Leaf:
        if mean is not None:
            return mean
        if isinstance(g, LeafKind) or not tree.is_inexact(g):
            return g  # rows are already at their owners
        if layout.divisions(spec) and jnp.shape(g) == jnp.shape(p):
            return g
        codec = layout.reduce if g.size >= MIN_SIZE else None
        divisions = layout.divisions(gradient_spec)

        def shard_of(g: jax.Array, step: jax.Array) -> jax.Array:
            return mean_shard(g, divisions, layout.shard_axes, layout.mesh, codec, step)

        slices = slices_of(gradient_spec, layout)
        return _on_slices(slices, layout, shard_of)(g, step)

    means = mean_over_workers(tree.map(undivided, grads, gradient_specs), layout.shard_axes)
    return tree.map(reduced, grads, means, params, specs, gradient_specs)


def gather_updated(params: Params, layout: Layout | None) -> Params:
    """Return new params, gathered if they are whole although their updates are divided.

    Outside of `shard_map`; left to the compiler, a TPU would gather them by an all-reduce.
    """
    if layout is None or not layout.shard_axes:
        return params
    specs, of_updates = layout.param_specs(params), layout.gradient_specs(params)

    def divided(x: Leaf, spec: P, of_update: P) -> P:
        is_gathered = layout.divisions(of_update) and not layout.divisions(spec)
        is_padded = layout.padded_shape(jnp.shape(x), of_update) != jnp.shape(x)
        return of_update if is_gathered and not is_padded else spec

    before = jax.tree.map(divided, params, specs, of_updates)
    if before == specs:
        return params

    def gathered(spec: P, of_update: P, x: Leaf) -> Leaf:
        for dimension, names in layout.divisions(of_update) if of_update != spec else ():
            x = gather_along(x, names, dimension)
        return x

    def run(params: Params) -> Params:
        return jax.tree.map(gathered, specs, before, params, is_leaf=is_spec)

    in_specs, out_specs = (layout.bound_specs(x) for x in (before, specs))
    names = layout.shard_axes
    whole: Params = mapped(run, layout.mesh, names, (in_specs,), out_specs)(params)
    return whole
