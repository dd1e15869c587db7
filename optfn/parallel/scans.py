"""Params that a loss gathers: all at once, or the layers of a scan one after the other.

The place for whatever finds the layers of a loss: today `scan_layers`, which a loss calls.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn.collectives.axes import Division, is_spec, join_axes
from optfn.collectives.mesh import count_devices
from optfn.collectives.packets import MIN_SIZE
from optfn.core import tree
from optfn.core.checks import show
from optfn.core.types import Leaf, Params, PyTree
from optfn.jaxprs.equations import Equations, bindings, read
from optfn.parallel.mesh_layout import Layout
from optfn.parallel.shards import compiler_slices, gather_shard


class _Shard(NamedTuple):
    """The shard of an array that a device keeps, and what is needed to gather the whole array.

    array: the shard.
    divisions: the dimensions that the shard axes divide.
    slices: how the compiler's axes divide the array; see `compiler_slices`.
    layout: how params are divided.
    step: the number of the training step, for packets.
    """

    array: jax.Array
    divisions: list[Division]
    slices: P
    layout: Layout
    step: jax.Array

    @property
    def packet_step(self) -> jax.Array | None:
        """The step, or None if the array is sent as it is: without compressors, and if small."""
        if self.layout.gather is None and self.layout.reduce is None:
            return None
        names = join_axes(*(names for _, names in self.divisions))
        size = self.array.size * count_devices(self.layout.mesh, names)
        return self.step if size >= MIN_SIZE else None

    def gather(self) -> jax.Array:
        """Gather the whole array."""
        return gather_shard(self.array, self.divisions, self.slices, self.layout, self.packet_step)

    def divide_layers(self) -> "_Shard | None":
        """Return the same array divided within each layer, by an all-to-all if it was by layers.

        A scan needs a shard of each layer. An array that is not divided by layers passes through.
        The result is None if the number of shards divides no further dimension of a layer: the scan
        then takes the whole array.
        """
        (dimension, names), *remaining = self.divisions
        if dimension > 0:
            return self
        count = count_devices(self.layout.mesh, names)
        divided = {division.dimension for division in self.divisions}
        divided |= {d for d, entry in enumerate(self.slices) if entry is not None}
        sizes = enumerate(self.array.shape)
        fitting = [d for d, n in sizes if d not in divided and n % count == 0]
        if not fitting:
            return None
        array = lax.all_to_all(self.array, names, fitting[0], 0, tiled=True)
        return self._replace(array=array, divisions=[Division(fitting[0], names), *remaining])

    def gather_layer(self, shard: jax.Array) -> jax.Array:
        """Gather a whole layer from its shards."""
        divisions = [Division(d - 1, names) for d, names in self.divisions]
        return gather_shard(shard, divisions, P(*self.slices[1:]), self.layout, self.packet_step)


# While a loss is traced: the shard that each gathered array came from, by the id of the array.
# `scan_layers` gets arrays from the loss, and can recognise them only by their identity.
_shard_of_gathered: ContextVar[Mapping[int, _Shard]] = ContextVar(
    "known", default=MappingProxyType({})
)


@contextlib.contextmanager
def gather_params(
    params: Params, specs: PyTree, tables: PyTree, layout: Layout, step: jax.Array
) -> Iterator[Params]:
    """Gather whole params from a device's shards, for a loss that is traced in this context.

    In the context, `scan_layers` finds the shards of its stacked params and gathers them layer by
    layer. XLA removes the gather of a whole array that nothing else uses. Tables stay divided,
    because a loss only looks up their rows; leaves that the shard axes do not divide pass through.

    Args:
      params: the shards that a device keeps.
      specs: the PartitionSpecs of whole params.
      tables: which leaves are tables.
      layout: how params are divided.
      step: the number of the training step, for packets.
    """
    found: dict[int, _Shard] = {}

    def gather(spec: P, is_table: bool, x: Leaf) -> Leaf:
        divisions = layout.divisions(spec)
        if not divisions or is_table:
            return x
        shard = _Shard(x, divisions, compiler_slices(spec, layout), layout, step)
        gathered = shard.gather()
        found[id(gathered)] = shard
        return gathered

    whole_params = jax.tree.map(gather, specs, tables, params, is_leaf=is_spec)
    token = _shard_of_gathered.set(found)
    try:
        yield whole_params
    finally:
        _shard_of_gathered.reset(token)


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
        raise TypeError(f"scan_layers: fn must be a function (layer, x) -> x; got {show(fn)}")
    if isinstance(stacked, list):
        raise TypeError(
            f"scan_layers: stacked is a list of {len(stacked)} layers; stack them into one tree: "
            "optfn.Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))"
        )
    # 1. The shards of the params that this step has gathered; other leaves are scanned as they are.
    leaves, structure = jax.tree.flatten(_unwrap_stacked(stacked))
    found = [x and x.divide_layers() for x in map(_shard_of_gathered.get().get, map(id, leaves))]
    shards = [leaf if x is None else x.array for leaf, x in zip(leaves, found, strict=True)]
    if len({np.shape(x)[:1] for x in shards}) > 1:
        shapes = ", ".join(str(np.shape(x)) for x in shards)
        raise ValueError(
            "scan_layers: the leading axis of each leaf of stacked must be that of the layers; got "
            f"shapes {shapes}"
        )

    # 2. Scan over the shards, and gather a layer when its turn comes.
    def body(x: PyTree, shards: list[jax.Array]) -> tuple[PyTree, None]:
        pairs = zip(shards, found, strict=True)
        layer = [shard if known is None else known.gather_layer(shard) for shard, known in pairs]
        return apply(jax.tree.unflatten(structure, layer), x), None

    apply = fn
    if any(x is not None for x in found):
        # The backward pass gathers each layer again, instead of keeping whole layers of all params.
        # The barriers of prevent_cse are for code without a loop: a scan cannot merge the passes.
        apply = functools.partial(_recompute_once, fn)
        body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, x, shards)[0]


def _recompute_once(fn: Callable[[PyTree, PyTree], PyTree], layer: PyTree, x: PyTree) -> PyTree:
    """Return fn(layer, x), without a `jax.checkpoint` around fn; any other fn runs as it is.

    The layer is recomputed anyway. The checkpoint would tie the arguments of fn together, and all
    gathers of a layer would have to end before its first product.
    """
    program = Equations(fn, layer, x)
    if [equation.primitive.name for equation in program.equations] != ["remat2"]:
        return fn(layer, x)
    (equation,) = program.equations
    inside = jex.jaxpr_as_fun(jex.ClosedJaxpr(equation.params["jaxpr"], ()))
    given = bindings(program.inputs, jax.tree.leaves((layer, x)))
    values = program.run([equation], given, {id(equation): inside})
    return jax.tree.unflatten(program.structure, read(values, program.outputs))


def _unwrap_stacked(stacked: PyTree) -> PyTree:
    """Return a tree with each `Stacked` replaced by its contents."""

    def unwrap(x: PyTree) -> PyTree:
        return _unwrap_stacked(tree.inner_tree(x)) if tree.is_transparent(x) else x

    return jax.tree.map(unwrap, stacked, is_leaf=tree.is_transparent)
