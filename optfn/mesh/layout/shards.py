"""Shards of params and gradients (FSDP, ZeRO).

A device gathers the params that its loss needs, and sends each shard of its gradient to the device
that keeps this shard.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import Leaf, LeafKind, Params, PyTree, Updates
from optfn.mesh.collectives import axes as mesh_axes
from optfn.mesh.collectives.axes import Axes, Division
from optfn.mesh.collectives.gathers import all_gather_shards
from optfn.mesh.collectives.means import mean_over_axes, mean_scatter
from optfn.mesh.collectives.mesh import are_in_order, shard_map
from optfn.mesh.collectives.packets import MIN_SIZE, all_gather_packets
from optfn.mesh.compilers.groups import manual_axes
from optfn.mesh.layout.mesh_layout import Layout, ParamEntry


def _run_on_compiler_slices(
    spec: P, layout: Layout, fn: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return a function that runs fn(array, step) on each slice that the compiler's axes make, or
    `fn` itself if they divide nothing.

    The compiler's axes are the mesh axes besides data axes, such as an axis of tensor parallelism.
    Without this, the compiler would gather the slices along these axes before each collective.

    Args:
      spec: how the compiler's axes divide the array into slices; P() returns `fn` itself.
      layout: how params are divided.
      fn: the function.
    """
    names = mesh_axes.join_axes(*spec)
    if not names:
        return fn
    if not are_in_order(layout.mesh, manual_axes(), names):
        # XLA cannot nest these axes. Binding all axes is the same function: along the axes that
        # divide no slice, all devices compute the same.
        names = Axes(layout.mesh.axis_names)
    return shard_map(fn, layout.mesh, names, (spec, P()), spec)


def compiler_slices(spec: P, layout: Layout) -> P:
    """Return the spec of the compiler's axes for an array, with None for a dimension that data axes
    divide too.

    If each slice of such a dimension were gathered along the data axes, its blocks would stand in
    another order.
    """
    left = mesh_axes.exclude_axes(layout.mesh.axis_names, layout.data_axes)
    of_data = mesh_axes.restrict_spec(spec, layout.data_axes)
    of_compiler = mesh_axes.restrict_spec(spec, left)
    return P(*(None if x else y for x, y in zip(of_data, of_compiler, strict=True)))


def gather_shard(
    shard: jax.Array,
    divisions: Sequence[Division],
    slices: P,
    layout: Layout,
    step: jax.Array | None,
    mean_axes: Axes,
    counts: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Gather a whole array from its shards, and in the backward pass average its cotangents over
    devices and return this device's shard of the mean.

    The backward pass reduce-scatters the cotangents of all devices of a shard group, and averages
    the shard over `mean_axes`.

    Args:
      shard: this device's shard of the array.
      divisions: how the array is divided.
      slices: how the compiler's axes divide it; see `compiler_slices`.
      layout: how params are divided.
      step: the number of the training step, for the compressors of the layout; None sends the
        array as it is.
      mean_axes: the worker axes of a further mean of the gradient, in the layout's `mean_dtype`.
      counts: whether this device's cotangent counts in the mean, else zeros do; None if it does.
      dtype: the dtype of the result; the array is sent in it. None keeps the shard's. Packets are
        made of the array as it is, and the gradient is reduced in the dtype of the shard.
    """
    forward, reduce = (
        (None, None) if step is None else (layout.gather_compressor, layout.reduce_compressor)
    )
    kept, sent = shard.dtype, dtype or shard.dtype

    # The transpose of an all-gather would sum cotangents, and send them as they are. Here they are
    # averaged, and may be packets.
    @functools.partial(_run_on_compiler_slices, slices, layout)
    def run(x: jax.Array, step: jax.Array | None) -> jax.Array:
        if forward is None:
            return all_gather_shards(x.astype(sent), divisions)
        for dimension, names in divisions:
            x = all_gather_packets(x, dimension, names, forward, step)
        return x.astype(sent)

    @functools.partial(_run_on_compiler_slices, slices, layout)
    def scatter(x: jax.Array, step: jax.Array | None) -> jax.Array:
        names, mesh, dtype = layout.shard_axes, layout.mesh, layout.reduce_dtype
        mean = mean_scatter(x, divisions, names, mesh, reduce, step, dtype)
        return mean_over_axes(mean, mean_axes, layout.mean_dtype)

    @jax.custom_vjp
    def gather(x: jax.Array, step: jax.Array | None, counts: jax.Array | None) -> jax.Array:
        return run(x, step)

    def backward(
        kept_back: tuple[jax.Array | None, jax.Array | None], cotangent: jax.Array
    ) -> tuple[jax.Array, None, None]:
        step, counts = kept_back
        if counts is not None:
            cotangent = jnp.where(counts, cotangent, jnp.zeros_like(cotangent))
        return scatter(cotangent.astype(kept), step), None, None

    gather.defvjp(lambda x, *rest: (run(x, rest[0]), rest), backward)
    return gather(shard, step, counts)


def scatter_gradients(
    grads: Updates, params: Params, entries: PyTree, layout: Layout, step: jax.Array
) -> Updates:
    """Average gradients over the shard axes, and return this device's shard of each, or all of it
    if its leaf is undivided, and rows and reduced shards unchanged.

    Rows of tables, integers, and gradients that already have the shape of the shard are returned
    unchanged: the backward pass of `gather_shard` has taken the mean of the last. The gradient of a
    leaf that is not divided is averaged by an all-reduce.

    Args:
      grads: the device's gradients, of whole params or of shards.
      params: the shards that a device keeps.
      entries: a ParamEntry for each leaf of the whole params.
      layout: how params are divided.
      step: the number of the training step, for packets.
    """

    def select_whole(g: Leaf, entry: ParamEntry) -> Leaf:
        if isinstance(g, LeafKind) or not tree.is_inexact(g):
            return None
        return None if layout.divisions(entry.arriving_spec) else g

    def scatter(g: Leaf, mean: Leaf, p: Leaf, entry: ParamEntry) -> Leaf:
        if mean is not None:
            return mean
        if isinstance(g, LeafKind) or not tree.is_inexact(g):
            return g  # the owners already have the rows
        if layout.divisions(entry.spec) and jnp.shape(g) == jnp.shape(p):
            return g
        is_sent = g.size >= MIN_SIZE and not jnp.iscomplexobj(g)
        compressor = layout.reduce_compressor if is_sent else None
        divisions = layout.divisions(entry.arriving_spec)

        def take_shard(g: jax.Array, step: jax.Array) -> jax.Array:
            return mean_scatter(g, divisions, names, layout.mesh, compressor, step, dtype)

        slices = compiler_slices(entry.arriving_spec, layout)
        return _run_on_compiler_slices(slices, layout, take_shard)(g, step)

    names, dtype = layout.shard_axes, layout.reduce_dtype
    # One call for all whole leaves, so that the small ones share an all-reduce.
    means = mean_over_axes(tree.map(select_whole, grads, entries), names, dtype)
    return tree.map(scatter, grads, means, params, entries)


def gather_new_params(params: Params, layout: Layout | None) -> Params:
    """Gather each new param that is whole in the layout, but whose update is divided evenly
    (ZeRO-1).

    All params are returned unchanged without a layout or shard axes, or if the step is left to the
    compiler. Padded params are too: their gather is left to the compiler. This runs outside of
    `shard_map`. On a TPU the compiler would make the gather an all-reduce of the whole array.
    """
    if layout is None or not layout.shard_axes or layout.compiler_axes:
        return params
    specs, of_updates = layout.param_specs(params), layout.gradient_specs(params)

    def spec_before(x: Leaf, spec: P, of_update: P) -> P:
        is_gathered = layout.divisions(of_update) and not layout.divisions(spec)
        is_padded = layout.pad_shape(jnp.shape(x), of_update) != jnp.shape(x)
        return of_update if is_gathered and not is_padded else spec

    before = jax.tree.map(spec_before, params, specs, of_updates)
    if before == specs:
        return params

    def gather(spec: P, of_update: P, x: Leaf) -> Leaf:
        return x if of_update == spec else all_gather_shards(x, layout.divisions(of_update))

    def run(params: Params) -> Params:
        return jax.tree.map(gather, specs, before, params, is_leaf=mesh_axes.is_spec)

    in_specs, out_specs = (layout.keep_shard_axes(x) for x in (before, specs))
    return shard_map(run, layout.mesh, layout.shard_axes, (in_specs,), out_specs)(params)
