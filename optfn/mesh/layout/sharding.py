"""The ways of sharding: which shards of params and state each device of a mesh keeps.

A way of sharding is a class below with a `name`, listed in `KINDS`. Nothing else knows the names.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeGuard, cast

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.core import checks, tree
from optfn.core.types import DType, Leaf, OptState, Params, PyTree
from optfn.leaves import contents, patterns
from optfn.leaves.patterns import Pattern
from optfn.loss.jaxprs.primitives import NESTS_AXES_IN_ANY_ORDER
from optfn.mesh.collectives import axes as mesh_axes
from optfn.mesh.collectives import packets
from optfn.mesh.collectives.axes import Axes, AxisName
from optfn.mesh.collectives.means import SMALL_BYTES
from optfn.mesh.collectives.mesh import are_in_order, count_devices
from optfn.mesh.layout.as_placed import AsPlaced
from optfn.mesh.layout.mesh_layout import Layout, Replicated, check_fit
from optfn.mesh.layout.specs import (
    Specs,
    assign_specs,
    check_specs,
    check_workers_are_whole,
    list_specs,
)
from optfn.mesh.layout.whole import find_layer_axes


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The choice of how params and state are divided, as `sharded` returns it."""

    kind: str | Specs
    axis: Axes | None = None
    whole: Pattern | None = None
    gather_once: bool = False
    gather: packets.Compressor | None = None
    reduce: packets.Compressor | None = None
    reduce_dtype: DType | None = None

    def __repr__(self) -> str:
        """Return the call of `sharded` that makes it, without default arguments."""
        options = [field.name for field in dataclasses.fields(self)[1:]]
        given = [f"{name}={getattr(self, name)!r}" for name in options if getattr(self, name)]
        return f"sharded({', '.join([repr(self.kind), *given])})"

    @property
    def is_gathered_once(self) -> bool:
        """Whether params are gathered once in a step, because this is asked for, or because packets
        send params that would else be whole.

        Params that are sent in packets are exact only in the shards that devices keep. So a kind
        whose params would be whole on each device divides them too, and gathers them once.
        """
        if self.gather is None or not _is_kind(self.kind):
            return self.gather_once
        return self.gather_once or KINDS[self.kind].keeps_params


def check_reduce_dtype(name: str, dtype: object) -> DType | None:
    """Return a real floating-point dtype as a NumPy dtype, or None for None, and raise a TypeError
    for anything else.

    Raises:
      TypeError: it is not a real floating-point dtype.
    """
    if dtype is None:
        return None
    try:
        found = np.dtype(cast("DType", dtype))
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f'{name} must be None or a real floating-point dtype such as "float32"; got {dtype!r}'
        )
    return found


def sharded(
    kind: str | Specs,
    *,
    axis: AxisName = None,
    whole: Pattern | None = None,
    gather: packets.Compressor | None = None,
    reduce: packets.Compressor | None = None,
    gather_once: bool = False,
    reduce_dtype: DType | None = None,
) -> Sharded:
    """Return the choice of how devices divide params and state, as `shard` of `make_train_step`, or
    raise an error if its options do not fit together.

    You need it if `shard="params"` or `shard="state"` alone does not say enough: which axes of the
    mesh divide, which matrices stay whole, or how many bits are sent.

    Args:
      kind: "state", "params", or the PartitionSpecs of params, as a tree or by patterns of paths
        (`shard` of `make_train_step`).
      axis: the mesh axis, or axes, that divide params or state; some of `data_axis`.
        None: all of them, or with PartitionSpecs the axes that they name. Along the remaining data
        axes each group of devices is a worker; workers average or exchange their gradients in each
        step or every `local_steps`.
      whole: a pattern of paths of stacked leaves (in a `Stacked`, or with the attribute
        `ParamAttr(stacked=1)` in `tx`), which are divided along the axis of layers,
        so that each matrix is whole on one device. Rules that treat matrices whole, such as
        `muon`, then update them without sending anything.
      gather: a compressor that keeps every entry, such as `quantize(8)`, for the params that are
        gathered; None sends them as they are. The loss sees decoded params, the same on all
        devices, and each device keeps its exact shard of them in `state.params`. With "state",
        params are then divided as well, and gathered once per step.
      reduce: a compressor for the gradients that are reduced, such as `quantize(4,
        stochastic=True)`. There is no error feedback, because each device would have to keep a
        whole gradient for it, so choose a rounding whose mean is exact; for `top_k` and
        `quantize(1)` you get a warning. Its random bits are a hash of the step and the gradient, so
        that a gradient that comes again is rounded in another way.
      gather_once: with `microbatches`, whether params are gathered, and gradients reduced, only
        once for all of them. This takes the memory of whole params and gradients. With "state",
        params are then divided as well.
      reduce_dtype: the dtype for adding and sending gradients over `axis`, such as "float32" for
        bfloat16 params; None: the `reduce_dtype` of the step. It does not change the packets of
        `reduce`.

    Leaves of at most 64 KB, or of that much a layer, stay whole on each device, the smallest first,
    as long as a device keeps at most a hundredth more than its shards (with more than 100 devices,
    a ten-thousandth of params): for biases and norms, the time of a collective is latency. Their
    gradients are averaged by an all-reduce. Leaves of fewer than 1,024 elements, and leaves without
    a dimension that can be divided, are sent as they are. With N devices that divide a leaf, and
    packets of b bytes for one shard, each device sends (N − 1)·b bytes instead of (N − 1)/N of the
    leaf.

    Raises:
      TypeError: `gather` or `reduce` is not a compressor, or `reduce_dtype` is not a real
        floating-point dtype.
      ValueError: a compressor cannot send slices, such as `power_sgd`; or `gather` leaves entries
        out, as `top_k` does; or `whole`, `gather` or `reduce` is given with PartitionSpecs, which
        already say how each leaf is divided; or `gather` or `reduce` is given with `whole`, whose
        layers may be padded.

    Source of packets: ZeRO++, Wang et al. 2023, arXiv 2306.10209.

    >>> from optfn.distributed import sharded
    >>> sharded("params", axis="fast").axis
    ('fast',)
    """
    names = mesh_axes.check_axis_names("sharded: axis", axis, optional=True)
    if gather is not None:
        packets.check_param_compressor("sharded: gather", gather)
    if reduce is not None:
        packets.check_gradient_compressor("sharded: reduce", reduce)
    has_packets = gather is not None or reduce is not None
    if has_packets and (not isinstance(kind, str) or whole is not None):
        raise ValueError(
            f"sharded: gather and reduce need the kind {_list_kinds()}, without whole=. With "
            "PartitionSpecs the compiler sends arrays along other axes too, and layers that whole= "
            "keeps together may be padded"
        )
    once = checks.flag("sharded: gather_once", gather_once)
    if whole is not None and not _is_kind(kind):
        raise ValueError(
            f"sharded: whole= needs the kind {_list_kinds()}, which choose how leaves are "
            f"divided; got {checks.show(kind)}. To keep matrices whole by a PartitionSpec, divide "
            "only the axis of layers, as P('data') does"
        )
    patterns.check_pattern("sharded: whole", whole)
    dtype = check_reduce_dtype("sharded: reduce_dtype", reduce_dtype)
    return Sharded(kind, names or None, whole, once, gather, reduce, dtype)


# "state", "params", PartitionSpecs of params, or the result of `sharded`.
Kind: TypeAlias = str | Specs | Sharded


@dataclasses.dataclass(frozen=True, eq=False)
class ShardState(Layout):
    """The layout that keeps params whole on every device, and divides gradients and state (ZeRO-1).

    It is the base of the ways that divide a leaf along a dimension that fits. They inherit how
    gradients and state are divided, and say how params are (`dense_param_specs`, `keeps_params`).

    name: the name of the way of sharding, as the `shard` of a step.
    keeps_params: whether each device keeps whole params.
    whole: the leaves that are divided along an axis of layers, so that each matrix stays whole.
    """

    name: ClassVar[str] = "state"
    keeps_params: ClassVar[bool] = True

    whole: Pattern | None = None

    def dense_gradient_specs(self, params: Params) -> PyTree:
        """Return specs that divide each leaf of `whole` by layers and each further large
        floating-point leaf along one dimension that fits, and P() for the rest.

        A leaf that `whole` selects is divided by layers even if it needs padding. Integers, small
        leaves, and leaves without a dimension that the shards divide get P(), and masked leaves are
        returned unchanged.

        Raises:
          ValueError: a leaf needs padding, and there are worker axes.
        """
        return self._divide_leaves(params, self._check_padding)

    def _divide_leaves(self, params: Params, by_layers: Callable[[str, int], bool]) -> PyTree:
        """Return the spec that divides each leaf by layers or else along the first dimension that
        fits, and P() for integers, small leaves and those where none fits.

        Masked leaves are returned unchanged.

        by_layers(path, number of layers) tells whether a leaf that `whole` selects is divided by
        layers. Otherwise it is divided along a dimension that fits.
        """
        marked = self.mark_stacked(params)
        stacked = contents.count_stacked_axes(marked)
        axes_of = find_layer_axes(self.whole, self.tables, marked, self.num_shards)
        small = find_small_leaves(marked, self.num_shards)

        def choose_spec(place: tree.Place, x: Leaf) -> Leaf:
            if tree.is_masked(x):
                return x
            axis = axes_of.get(str(place))
            if axis is not None and by_layers(str(place), x.shape[axis]):
                return P(*[None] * axis, self.shard_axes)
            if place.number in small or not tree.is_inexact(x):
                return P()
            return self.spec_of_shape(jnp.shape(x), stacked[place.number])

        return tree.map_named(choose_spec, params)

    def _check_padding(self, path: str, layers: int) -> bool:
        """Return True, so that a leaf is divided by layers, or raise a ValueError if its layers
        need padding and there are worker axes."""
        if layers % self.num_shards and self.worker_axes:
            raise ValueError(
                f"whole: the {layers} layers of leaf {path!r} must be divisible by the "
                f"{self.num_shards} devices of each worker; they are padded only if the mesh has "
                "no worker axes"
            )
        return True


def find_small_leaves(params: Params, count: int) -> set[int]:
    """Return the indices of the leaves not worth dividing over `count` devices, the smallest of at
    most 64 KB a layer, up to a hundredth of a device's shards.

    The time of the collective of such a leaf would be latency. With more than 100 devices the limit
    is a ten-thousandth of params. Integers and masked leaves are left out.
    """
    stacked = contents.count_stacked_axes(params)
    sizes: dict[int, int] = {}
    layers: dict[int, int] = {}
    for place, x in tree.items(params):
        if tree.is_inexact(x) and not tree.is_masked(x):
            shape, number = jnp.shape(x), place.number
            sizes[number] = math.prod(shape) * jnp.result_type(x).itemsize
            layers[number] = math.prod(shape[: stacked[number]])
    small = (n for n in sizes if sizes[n] <= SMALL_BYTES * layers[n])
    # The smallest first: within the limit they are the most collectives.
    chosen = sorted(small, key=sizes.__getitem__)
    totals = itertools.accumulate(sizes[number] for number in chosen)
    # S bytes of params give shards of S/N, so the limit is S/N/100. From N = 100 on it is S/10,000,
    # or on a large mesh nothing would stay whole.
    most = sum(sizes.values()) / min(count, 100) / 100
    return {number for number, total in zip(chosen, totals, strict=True) if total <= most}


class ShardParams(ShardState):
    """Params are divided as `ShardState` divides gradients and state (FSDP).

    Params are never padded. If N does not divide the layers of a leaf that `whole` selects, the
    leaf is divided along another dimension, and each update sends it to the devices of its layers
    and back.
    """

    name = "params"
    keeps_params = False

    def dense_param_specs(self, params: Params) -> PyTree:
        """Return the specs that `dense_gradient_specs` gives, except that leaves whose layers would
        need padding are divided along a dimension that fits."""
        return self._divide_leaves(params, lambda path, n: n % self.num_shards == 0)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardBySpec(Layout):
    """Params, gradients and state are divided by given PartitionSpecs.

    specs: the specs of params, as a tree or by patterns of paths; leaves without a spec are whole
      on every device.
    """

    specs: Specs = None

    @property
    def is_divided(self) -> bool:
        """Whether the devices of a worker keep shards of arrays: here always True."""
        return True

    def dense_param_specs(self, params: Params) -> PyTree:
        """Return the given spec of each leaf, P() for one without, and masked leaves unchanged, or
        raise a ValueError if a spec does not fit its leaf."""
        chosen = assign_specs(self.specs, params)

        def choose_spec(place: tree.Place, x: Leaf) -> Leaf:
            if tree.is_masked(x):
                return x
            spec = chosen.get(str(place), P())
            check_fit(str(place), jnp.shape(x), spec, self.mesh, "shard")
            return spec

        return tree.map_named(choose_spec, params)


def init_state(
    tx: optax.GradientTransformation, params: Params, mesh: Mesh, *, axis_name: AxisName = "data"
) -> OptState:
    """Return the state of `tx.init` on a mesh, with the arrays that workers keep for themselves
    sharded over the workers and the rest replicated.

    You need it only if you write a `shard_map`; `TrainStep.init` does the same. Each device stores
    only the per-worker arrays of its worker. In a run of several processes, each
    process must call it with the same params.

    Args:
      tx: an optimizer, however wrapped.
      params: the parameters, arrays on the host or replicated over the mesh.
      mesh: a mesh, such as `data_mesh()`.
      axis_name: the mesh axes of the workers, for per-worker arrays that name none.
    """
    count_devices(mesh, axis_name)  # it has these axes
    init = core.check_transform("init_state: tx", tx).init
    return Replicated(mesh, mesh_axes.to_axes(axis_name), Axes()).init(init, params)


KINDS: dict[str, type[ShardState]] = {kind.name: kind for kind in (ShardState, ShardParams)}


def _is_kind(kind: object) -> TypeGuard[str]:
    """Tell whether `kind` is the name of a way of sharding, "state" or "params"."""
    return isinstance(kind, str) and kind in KINDS


def _list_kinds() -> str:
    """Return the names of the ways of sharding in quotes, for errors."""
    return " or ".join(f'"{name}"' for name in KINDS)


def layout_of(
    shard: Kind | None,
    mesh: Mesh,
    data_axis: AxisName,
    tables: Pattern | None = None,
    tx: optax.GradientTransformation | None = None,
    reduce_dtype: DType | None = None,
    partitioner: str = "shard_map",
) -> Layout:
    """Return the layout that the arguments of a training step choose, or raise a TypeError if
    `shard` is no choice and a ValueError if axes do not fit the mesh.

    Only the sizes of the axes are read, so the mesh can be an `AbstractMesh`. Of `tx` only the
    `stacked` axes in the attributes of parameters are read.

    Raises:
      TypeError: `shard` is neither one of the names, nor PartitionSpecs in one of their forms.
      ValueError: a spec names an axis that the mesh does not have, or names an axis twice.
    """
    way = shard if isinstance(shard, Sharded) else Sharded({} if shard is None else shard)
    divides = shard is not None or tables is not None
    dtype = reduce_dtype if way.reduce_dtype is None else way.reduce_dtype
    specs = {} if _is_kind(way.kind) else way.kind
    check_specs(specs, mesh)
    along = _choose_shard_axes(way, specs, data_axis, tables) if divides else Axes()
    of_compiler = mesh_axes.to_axes(data_axis) if partitioner == "compiler" else Axes()
    workers = mesh_axes.exclude_axes(data_axis, (*along, *of_compiler))
    check_workers_are_whole(specs, workers)
    _check_order(mesh, workers, along)
    if divides and not of_compiler and not isinstance(mesh, AbstractMesh):
        # With explicit axes, JAX would refuse an update of divided moments and whole params.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    if shard is None and of_compiler:
        return AsPlaced(mesh, workers, along, compiler_axes=of_compiler)
    if shard is None:
        return Replicated(mesh, workers, along, tables, reduce_dtype=dtype)
    common: dict[str, Any] = {"tx": tx, "reduce_dtype": dtype, "compiler_axes": of_compiler}
    if not _is_kind(way.kind):
        return ShardBySpec(mesh, workers, along, tables, way.kind, **common)
    # Params that are gathered once in a step are divided between steps: the layout of "params".
    kind = ShardParams if way.is_gathered_once else KINDS[way.kind]
    common |= {"gather_compressor": way.gather, "reduce_compressor": way.reduce}
    return kind(mesh, workers, along, tables, way.whole, **common)


def _choose_shard_axes(
    way: Sharded, specs: Specs, data_axis: AxisName, tables: Pattern | None
) -> Axes:
    """Return the axes that divide params or state: the given `axis=`, else the axes of the specs,
    else all data axes. Raise a ValueError for an axis that is not in `data_axis`.

    Data axes that no PartitionSpec names are left for workers, unless there are tables.
    """
    along = Axes(way.axis or mesh_axes.to_axes(data_axis))
    listed = list_specs(specs)
    if listed and way.axis is None and tables is None:
        named = mesh_axes.join_axes(*itertools.chain.from_iterable(listed.values()))
        along = Axes(name for name in along if name in named)
    known = mesh_axes.to_axes(data_axis)
    if unknown := mesh_axes.exclude_axes(along, known):
        raise ValueError(f"sharded: axis {unknown[0]!r} must be one of data_axis, {(*known,)}")
    return along


def _check_order(mesh: Mesh, workers: Axes, along: Axes) -> None:
    """Raise a ValueError if XLA would end the process, because worker axes do not precede shard
    axes in a mesh with further axes, else do nothing."""
    others = mesh_axes.exclude_axes(mesh.axis_names, (*workers, *along))
    aborts = not (NESTS_AXES_IN_ANY_ORDER or are_in_order(mesh, workers, along))
    if others and aborts:
        raise ValueError(
            f"mesh: XLA needs the axes {(*workers,)}, along which devices are workers, before the "
            f"axes {(*along,)}, which divide params or state, if the mesh has further axes; its "
            f"axes are {mesh.axis_names}. Make it with the axes {(*workers, *along, *others)}"
        )
