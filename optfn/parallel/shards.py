"""Params that are divided over devices, inside `shard_map`.

Each device gathers the params that its loss needs, and sends each shard of its gradient to the
device that keeps this shard.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import collectives
from optfn.compilers import xla
from optfn.core import tree
from optfn.core.checks import shown
from optfn.core.types import Leaf, LeafKind, Params, PyTree, Updates
from optfn.jaxprs.equations import Equations, bindings, read
from optfn.mesh import (
    Axes,
    are_in_order,
    axes,
    bound_axes,
    joined,
    mapped,
    pmean,
    restricted,
    without,
)
from optfn.parallel.layout import Division, Layout, is_spec
from optfn.parallel.means import mean_over_workers
from optfn.parallel.owners import MIN_SIZE, Codec, coded_gather, coded_mean_shard, current_step
from optfn.state.padded import pad
from optfn.state.placement import num_workers


def mean_shard(
    x: jax.Array,
    divisions: Sequence[Division],
    names: Axes,
    mesh: Mesh,
    codec: Codec | None = None,
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
    count = num_workers(mesh, names)
    if x.shape[dimension] % count:
        x = pad(x, dimension, -(-x.shape[dimension] // count) * count)
    if not _is_gloo(mesh, names):
        total = collectives.sum_scatter(xla.widen_for_all_reduce(x), names, dimension)
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


def _slices(spec: P, layout: Layout) -> P:
    """Return how an array is divided into slices over the axes that no `shard_map` binds.

    A dimension that data axes divide as well stays whole: gathered slice by slice along the data
    axes, its blocks would stand in another order.
    """
    left = without(layout.mesh.axis_names, layout.data_axes)
    is_mixed = [any(a in layout.data_axes for a in axes(entry)) for entry in spec]
    return P(*(None if x else e for x, e in zip(is_mixed, restricted(spec, left), strict=True)))


def _gather(
    shard: jax.Array, divisions: Sequence[Division], slices: P, layout: Layout, is_coded: bool
) -> jax.Array:
    """Return a whole array; its gradient is the device's shard of the mean over the shard axes.

    Args:
      shard: this device's shard of the array.
      divisions: how the array is divided.
      slices: how it is divided over axes that are left to the compiler; see `_slices`.
      layout: how params are divided.
      is_coded: whether the compressors of the layout, if it has some, encode what is sent.
    """

    forward, reduce = (layout.gather, layout.reduce) if is_coded else (None, None)
    step = None if forward is None and reduce is None else current_step()

    @jax.custom_vjp
    @functools.partial(_on_slices, slices, layout)
    def gather(x: jax.Array, step: jax.Array | None) -> jax.Array:
        for dimension, names in divisions:
            if forward is None:
                x = collectives.gather_along(x, names, dimension)
            else:
                x = coded_gather(x, dimension, names, forward, step)
        return x

    @functools.partial(_on_slices, slices, layout)
    def reduced(x: jax.Array, step: jax.Array | None) -> jax.Array:
        return mean_shard(x, divisions, layout.shard_axes, layout.mesh, reduce, step)

    def backward(step: jax.Array | None, cotangent: jax.Array) -> tuple[jax.Array, None]:
        return reduced(cotangent, step), None

    gather.defvjp(lambda x, step: (gather(x, step), step), backward)
    return gather(shard, step)


class _Shard(NamedTuple):
    """The shard of an array that a device keeps, and how the whole array is gathered."""

    array: jax.Array
    divisions: list[Division]
    slices: P
    layout: Layout

    @property
    def is_coded(self) -> bool:
        """Whether the array is large enough for the compressors of the layout."""
        names = joined(*(names for _, names in self.divisions))
        return self.array.size * num_workers(self.layout.mesh, names) >= MIN_SIZE

    def whole(self) -> jax.Array:
        """Return the whole array."""
        return _gather(self.array, self.divisions, self.slices, self.layout, self.is_coded)

    def divide_layers(self) -> "_Shard | None":
        """Return the same array divided within each layer, if it is divided by layers.

        The result is None if the number of shards divides no dimension of a layer that is whole.
        """
        (dimension, names), *remaining = self.divisions
        if dimension > 0:
            return self
        count = num_workers(self.layout.mesh, names)
        divided = {division.dimension for division in self.divisions}
        divided |= {d for d, entry in enumerate(self.slices) if entry is not None}
        sizes = enumerate(self.array.shape)
        fitting = [d for d, n in sizes if d not in divided and n % count == 0]
        if not fitting:
            return None
        array = lax.all_to_all(self.array, names, fitting[0], 0, tiled=True)
        return self._replace(array=array, divisions=[Division(fitting[0], names), *remaining])

    def layer(self, shard: jax.Array) -> jax.Array:
        """Return a whole layer, gathered from its shards on the devices."""
        divisions = [Division(d - 1, names) for d, names in self.divisions]
        return _gather(shard, divisions, P(*self.slices[1:]), self.layout, self.is_coded)


# From the id of a gathered array to the shard it came from, while a loss is traced.
_known: ContextVar[Mapping[int, _Shard]] = ContextVar("known", default=MappingProxyType({}))


@contextlib.contextmanager
def whole(params: Params, specs: PyTree, tables: PyTree, layout: Layout) -> Iterator[Params]:
    """Gather whole params from a device's shards, while a loss is traced in this context.

    `scan_layers` finds the shards of its stacked params, and gathers them layer by layer. Tables
    are only looked up, so they remain divided.

    Args:
      params: the shards that a device keeps.
      specs: the PartitionSpecs of whole params.
      tables: which leaves are tables.
      layout: how params are divided.
    """
    found: dict[int, _Shard] = {}

    def gathered(spec: P, is_table: bool, x: Leaf) -> Leaf:
        divisions = layout.divisions(spec)
        if not divisions or is_table:
            return x
        shard = _Shard(x, divisions, _slices(spec, layout), layout)
        gathered = shard.whole()
        found[id(gathered)] = shard
        return gathered

    whole_params = jax.tree.map(gathered, specs, tables, params, is_leaf=is_spec)
    token = _known.set(found)
    try:
        yield whole_params
    finally:
        _known.reset(token)


def mean_gradients(
    grads: Updates, params: Params, specs: PyTree, gradient_specs: PyTree, layout: Layout
) -> Updates:
    """Return a device's shard of the mean gradient over the shard axes.

    Args:
      grads: the device's gradients of whole params; or those of shards, of which `_gather` has
        already taken the mean.
      params: the shards that a device keeps.
      specs: the PartitionSpecs of whole params.
      gradient_specs: the PartitionSpecs of whole gradients.
      layout: how params are divided.
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

        def shard_of(g: jax.Array, step: jax.Array | None) -> jax.Array:
            return mean_shard(g, divisions, layout.shard_axes, layout.mesh, codec, step)

        slices = _slices(gradient_spec, layout)
        return _on_slices(slices, layout, shard_of)(g, current_step())

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
            x = collectives.gather_along(x, names, dimension)
        return x

    def run(params: Params) -> Params:
        return jax.tree.map(gathered, specs, before, params, is_leaf=is_spec)

    in_specs, out_specs = (layout.bound_specs(x) for x in (before, specs))
    names = layout.shard_axes
    whole: Params = mapped(run, layout.mesh, names, (in_specs,), out_specs)(params)
    return whole


def scan_layers(fn: Callable[[PyTree, PyTree], PyTree], stacked: PyTree, x: PyTree) -> PyTree:
    """Apply the layers of stacked params one after the other: x = fn(layer, x) for each.

    Use it in the loss for `make_train_step(..., shard="params")`, so that a device never holds all
    layers at once: the layers are gathered one at a time, in the forward pass and again in the
    backward pass. A device then keeps its shard of all layers, one whole layer, and x after each
    layer; activations inside a layer are recomputed in the backward pass, so that a
    `jax.checkpoint` around fn changes nothing. Otherwise this is `jax.lax.scan`.

    Args:
      fn: a function (params of one layer, x) -> x.
      stacked: params with the layers along the leading axis of each leaf. Pass leaves of the
        params as the loss gets them: a leaf that you cast first is gathered whole.
      x: the input of the first layer, a tree of arrays.

    Returns:
      The output of the last layer, a tree like x.

    Raises:
      TypeError: `fn` is not a function, or `stacked` is a list of layers that are not stacked.
      ValueError: leaves of `stacked` differ in the number of layers, their leading axis.
    """
    if not callable(fn):
        raise TypeError(f"scan_layers: fn must be a function (layer, x) -> x; got {shown(fn)}")
    if isinstance(stacked, list):
        raise TypeError(
            f"scan_layers: stacked is a list of {len(stacked)} layers; stack them into one tree: "
            "optfn.Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))"
        )
    leaves, structure = jax.tree.flatten(_unmarked(stacked))
    found = [x and x.divide_layers() for x in map(_known.get().get, map(id, leaves))]
    shards = [leaf if x is None else x.array for leaf, x in zip(leaves, found, strict=True)]
    if len({np.shape(x)[:1] for x in shards}) > 1:
        shapes = ", ".join(str(np.shape(x)) for x in shards)
        raise ValueError(
            "scan_layers: the leading axis of each leaf of stacked must be that of the layers; got "
            f"shapes {shapes}"
        )

    def body(x: PyTree, shards: list[jax.Array]) -> tuple[PyTree, None]:
        pairs = zip(shards, found, strict=True)
        layer = [shard if known is None else known.layer(shard) for shard, known in pairs]
        return apply(jax.tree.unflatten(structure, layer), x), None

    apply = fn
    if any(x is not None for x in found):
        apply = functools.partial(_recomputed_once, fn)
        body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, x, shards)[0]


def _recomputed_once(fn: Callable[[PyTree, PyTree], PyTree], layer: PyTree, x: PyTree) -> PyTree:
    """Return fn(layer, x), without a `jax.checkpoint` around fn, whose layer is recomputed anyway.

    It would keep the arguments of fn together: all gathers would end before the first product.
    """
    program = Equations(fn, layer, x)
    if [equation.primitive.name for equation in program.equations] != ["remat2"]:
        return fn(layer, x)
    (equation,) = program.equations
    inside = jex.jaxpr_as_fun(jex.ClosedJaxpr(equation.params["jaxpr"], ()))
    given = bindings(program.inputs, jax.tree.leaves((layer, x)))
    values = program.run([equation], given, {id(equation): inside})
    return jax.tree.unflatten(program.structure, read(values, program.outputs))


def _unmarked(stacked: PyTree) -> PyTree:
    """Return a tree with each `Stacked` replaced by its contents."""

    def unmarked(x: PyTree) -> PyTree:
        return _unmarked(tree.inner_tree(x)) if tree.is_transparent(x) else x

    return jax.tree.map(unmarked, stacked, is_leaf=tree.is_transparent)
