"""The shards of params that a device keeps for its loss, and `scan_layers`."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from optfn.core import checks, context, tree
from optfn.core.types import PyTree
from optfn.loss.jaxprs.sharded import LAYER
from optfn.mesh.collectives.axes import Axes, Division
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.collectives.packets import MIN_SIZE
from optfn.mesh.layout.mesh_layout import Layout, ParamEntry
from optfn.mesh.layout.shards import compiler_slices, gather_shard


class RecordedGather(NamedTuple):
    """A gather in a program that is traced.

    path: the path of the leaf.
    layer_bytes: the bytes of a layer, if a scan gathers the leaf by layers; else None.
    source: the line that needs it.
    """

    path: str
    layer_bytes: int | None
    source: source_info_util.SourceInfo


# The gathers so far, where somebody asks for them.
_recorded: ContextVar[list[RecordedGather] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def record_gathers() -> Iterator[list[RecordedGather]]:
    """Yield a list, and append to it each gather that is traced in this context, in order, in place
    of the list of an outer context."""
    found: list[RecordedGather] = []
    with context.hold(_recorded, found):
        yield found


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "step", "counts"],
    meta_fields=["divisions", "slices", "layout", "mean_axes", "path", "is_layer"],
)
@dataclasses.dataclass(frozen=True)
class LeafShard:
    """The shard of a leaf of params that a device keeps, and how the whole leaf is gathered.

    array: the shard.
    step: the number of the training step, for packets; None if the array is sent as it is.
    divisions: the dimensions that shard axes divide.
    slices: how axes that are left to the compiler divide the leaf; see `compiler_slices`.
    layout: how params are divided.
    mean_axes: the worker axes of the mean that the gather takes of the gradient.
    counts: whether this device's gradient counts in the mean, else zeros do; None if it does.
    path: the path of the leaf.
    is_layer: whether it is one layer of the leaf, in a scan.
    """

    array: jax.Array
    step: jax.Array | None
    divisions: tuple[Division, ...]
    slices: P
    layout: Layout
    mean_axes: Axes
    counts: jax.Array | None
    path: str = ""
    is_layer: bool = False

    @classmethod
    def of(
        cls,
        array: jax.Array,
        entry: ParamEntry,
        layout: Layout,
        step: jax.Array,
        counts: jax.Array | None,
    ) -> "LeafShard | None":
        """Return the LeafShard of a device's array, with the step only if it is sent in packets, or
        None if shard axes do not divide the leaf."""
        divisions = tuple(layout.divisions(entry.spec))
        if not divisions:
            return None
        size = array.size * math.prod(count_devices(layout.mesh, x.axes) for x in divisions)
        has_packets = layout.gather_compressor is not None or layout.reduce_compressor is not None
        # A packet has real numbers.
        is_sent = has_packets and size >= MIN_SIZE and not np.iscomplexobj(array)
        number = step if is_sent else None
        slices = compiler_slices(entry.spec, layout)
        return cls(array, number, divisions, slices, layout, entry.mean_axes, counts, entry.path)

    @functools.cached_property
    def _gathered(self) -> dict[Any, jax.Array]:
        return {}

    def gather(self, dtype: Any = None) -> jax.Array:
        """Gather the whole array, cast to `dtype` unless that is None, or return the array of an
        earlier call with this dtype, so that its gradient is reduced once.

        It is cast before it is sent, but packets are made of the uncast array.
        """
        # The loss may read a param in several places, and each would add a reduce-scatter.
        if dtype not in self._gathered:
            how = self.divisions, self.slices, self.layout, self.step, self.mean_axes, self.counts
            self._gathered[dtype] = gather_shard(self.array, *how, dtype)
            self._record(self._gathered[dtype])
        return self._gathered[dtype]

    def _record(self, whole: jax.Array) -> None:
        """Add a gather of this leaf to the list of `record_gathers`, or do nothing outside of its
        context."""
        recorded = _recorded.get()
        if recorded is not None:
            size = whole.size * self.array.dtype.itemsize if self.is_layer else None
            recorded.append(RecordedGather(self.path, size, source_info_util.current()))

    def whole_type(self) -> Any:
        """Return the shape and dtype of the whole array, from an abstract gather that is not
        recorded."""
        with record_gathers():  # this is none of the program's
            return jax.eval_shape(lambda shard: shard.gather(), self)

    def divide_layers(self) -> "LeafShard | None":
        """Return this array divided within each layer, after an all-to-all if its layers are
        divided, or None if the shards divide no further dimension of a layer.

        A scan needs a shard of each layer. Without one it takes the whole array.
        """
        first, *remaining = self.divisions
        if first.dimension > 0:
            return self
        dimension = self._find_layer_dimension()
        if dimension is None:
            return None
        divisions = (Division(dimension, first.axes), *remaining)
        # Parts of this device's layers go to all devices, and a shard of every layer comes back.
        array = lax.all_to_all(self.array, first.axes, dimension, 0, tiled=True)
        return dataclasses.replace(self, array=array, divisions=divisions)

    def _find_layer_dimension(self) -> int | None:
        """Return the first dimension that no axis divides yet and that the devices of the first
        division divide evenly, or None."""
        count = count_devices(self.layout.mesh, self.divisions[0].axes)
        divided = {division.dimension for division in self.divisions}
        divided |= {d for d, entry in enumerate(self.slices) if entry is not None}
        fitting = (d for d, size in enumerate(self.array.shape) if size % count == 0)
        return next((d for d in fitting if d not in divided), None)

    def group_layers(self, groups: int) -> "LeafShard | None":
        """Return this array, divided within each layer, as (groups, layers of a group, …), or None
        if an axis that is left to the compiler divides the layers."""
        if any(entry is not None for entry in self.slices[:1]):
            return None
        array = self.array.reshape(groups, -1, *self.array.shape[1:])
        divisions = tuple(Division(d + 1, names) for d, names in self.divisions)
        return dataclasses.replace(
            self, array=array, divisions=divisions, slices=P(None, *self.slices)
        )

    def layer(self, array: jax.Array) -> "LeafShard":
        """Return the shard of one layer, whose array is given, with the divisions of this array,
        which is divided within each layer."""
        divisions = tuple(Division(d - 1, names) for d, names in self.divisions)
        return dataclasses.replace(
            self, array=array, divisions=divisions, slices=P(*self.slices[1:]), is_layer=True
        )


def scan_layers(fn: Callable[[PyTree, PyTree], PyTree], stacked: PyTree, x: PyTree) -> PyTree:
    """Apply x = fn(layer, x) for the layers of stacked params in order, by `lax.scan`, and with
    shard="params" recompute each layer in the backward pass.

    This is `jax.lax.scan`, and in the loss for `make_train_step(..., shard="params")` the backward
    pass also recomputes the activations inside each layer. As in every scan over params there, a
    device never holds all layers at once: the layers are gathered one at a time, in the forward
    pass and again in the backward pass. A device keeps its shard of all layers, one whole layer,
    and x after each layer; a `jax.checkpoint` around fn changes nothing, but for one that saves
    values on the host: `optfn.recompute(fn, checkpoints=..., offload=True)`.

    Args:
      fn: a function (params of one layer, x) -> x.
      stacked: params with the layers along the leading axis of each leaf; you may cast them first.
      x: the input of the first layer, a tree of arrays.

    Returns:
      The output of the last layer, a tree like x.

    Raises:
      TypeError: `fn` is not a function, or `stacked` is a list of layers that are not stacked.
      ValueError: leaves of `stacked` differ in the number of layers, their leading axis.
    """
    checks.instance("scan_layers: fn", fn, Callable, "a function (layer, x) -> x")
    if isinstance(stacked, list):
        raise TypeError(
            f"scan_layers: stacked is a list of {len(stacked)} layers; stack them into one tree: "
            "optfn.Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))"
        )
    layers = tree.unwrap_nodes(stacked, tree.is_transparent)
    shapes = [np.shape(x) for x in jax.tree.leaves(layers)]
    if len({shape[:1] for shape in shapes}) > 1:
        raise ValueError(
            "scan_layers: the leading axis of each leaf of stacked must be that of the layers; got "
            f"shapes {', '.join(map(str, shapes))}"
        )

    def body(x: PyTree, layer: PyTree) -> tuple[PyTree, None]:
        # By this name `loss/jaxprs/sharded.py` finds the layer; elsewhere the name does nothing.
        return checkpoint_name(fn(layer, x), LAYER), None

    return lax.scan(body, x, layers)[0]
