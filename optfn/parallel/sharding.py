"""The ways of sharding: which parts of params and state the devices of a mesh keep."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import checks, core
from optfn.leaves import tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree
from optfn.mesh import Axes, AxisName, axes, check_names, joined, without
from optfn.parallel.layout import Layout, Replicated
from optfn.parallel.owners import Codec, check_codec
from optfn.parallel.whole import axes_of_layers, check_whole
from optfn.state.placement import num_workers


@dataclasses.dataclass(frozen=True)
class Sharded:
    """How params and state are divided; see `sharded`."""

    kind: "str | Mapping[str, P]"
    axis: Axes | None = None
    whole: tree.Pattern | None = None
    gather_once: bool = False
    gather: Codec | None = None
    reduce: Codec | None = None

    @property
    def gathers_once(self) -> bool:
        """Whether the params that a loss sees are gathered once in a step."""
        return self.gather_once or (self.kind == "state" and self.gather is not None)


def sharded(
    kind: str | Mapping[str, P],
    *,
    axis: AxisName = None,
    whole: tree.Pattern | None = None,
    gather: Codec | None = None,
    reduce: Codec | None = None,
    gather_once: bool = False,
) -> Sharded:
    """Return a way of sharding, for the argument `shard` of `make_train_step`.

    Args:
      kind: "state", "params", or a mapping from patterns of paths to PartitionSpecs of params.
      axis: the mesh axis, or axes, over which params or state are divided, some of `data_axis`.
        None: all of them; of a mapping those that its PartitionSpecs name. Along the others each
        group of devices is a worker: gradients are averaged over them, or exchanged, or every
        `local_steps`.
      whole: the leaves of a `Stacked` that are divided along the axis of layers, so that each
        matrix lies whole on one device; a pattern of paths. For rules that treat matrices whole,
        such as `muon`: each device then updates its own matrices, and sends nothing for it.
      gather: a compressor for the params that are gathered, such as `quantize(8)`; None sends them
        as they are. The loss sees the decoded params, on all devices the same, and each device
        keeps its part exact: state.params, which with "state" is then divided as well, and gathered
        once a step.
      reduce: a compressor for the gradients that are reduced, such as `quantize(4,
        stochastic=True)`: without feedback, for which each device would have to keep a whole
        gradient, rounding that is right in the mean is best. Its noise is a hash of the gradient.
      gather_once: with `microbatches`, whether params are gathered and gradients reduced once for
        all of them, at the cost of the memory of whole params and gradients.

    Leaves of fewer than 1,024 elements, and those that no dimension of divides, are exact. With N
    devices that divide a leaf, and packets of b bytes of its parts, each sends (N − 1)·b instead of
    (N − 1)/N of the leaf.

    Raises:
      TypeError: `gather` or `reduce` is not a compressor.
      ValueError: one that cannot send slices, as `power_sgd`; or `whole`, `gather` or `reduce`
        beside PartitionSpecs, which say themselves how each leaf is divided; or packets beside
        `whole`, whose layers may be padded.

    Source of packets: ZeRO++, Wang et al. 2023, arXiv 2306.10209.

    >>> from optfn.distributed import sharded
    >>> sharded("params", axis="fast").axis
    ('fast',)
    """
    names = check_names("sharded: axis", axis, optional=True)
    codecs = {
        name: codec and check_codec(f"sharded: {name}", codec)
        for name, codec in (("gather", gather), ("reduce", reduce))
    }
    if any(codecs.values()) and (isinstance(kind, Mapping) or whole is not None):
        raise ValueError(
            'sharded: gather and reduce are for "state" and "params" without whole=: arrays that '
            "lie by PartitionSpecs are divided over other axes too, along which the compiler sends "
            "them, and layers that are whole may be padded"
        )
    once = checks.flag("sharded: gather_once", gather_once)
    return Sharded(kind, names or None, check_whole(whole, kind), once, **codecs)


# "state", "params", PartitionSpecs of params by patterns of paths, or the result of `sharded`.
Kind: TypeAlias = str | Mapping[str, P] | Sharded


@dataclasses.dataclass(frozen=True, eq=False)
class ShardState(Layout):
    """Params are whole on every device, their gradients and state divided (ZeRO-1).

    whole: the leaves that are divided along an axis of layers, so that each matrix is whole.
    """

    whole: tree.Pattern | None = None

    def dense_gradients(self, params: Params) -> PyTree:
        """Return specs that divide each floating-point leaf along one dimension, if any fits.

        A leaf that `whole` selects is divided by layers, also where it needs padding for it.

        Raises:
          ValueError: it needs padding, and there are worker axes.
        """
        return self._divided(params, self._check_padding)

    def _divided(self, params: Params, by_layers: Callable[[str, int], bool]) -> PyTree:
        """Return specs; `by_layers` tells of (path, number of layers) whether these are divided."""
        stacked = tree.stacked_axes(params)
        axes_of = axes_of_layers(self.whole, self.tables, params, self.num_parts)

        def divided(place: tree.Place, x: Leaf) -> Leaf:
            if tree.is_masked(x):
                return x
            axis = axes_of.get(str(place))
            if axis is not None and by_layers(str(place), x.shape[axis]):
                return P(*[None] * axis, self.part_axes)
            return self.divided(jnp.shape(x), stacked[place.number]) if tree.is_inexact(x) else P()

        return tree.map_named(divided, params)

    def _check_padding(self, path: str, layers: int) -> bool:
        """Return True; raise a ValueError if layers cannot be padded."""
        if layers % self.num_parts and self.worker_axes:
            raise ValueError(
                f"whole: the {layers} layers of leaf {path!r} must be divisible by the "
                f"{self.num_parts} devices of each worker; only without axes of workers are they "
                "padded"
            )
        return True


class ShardParams(ShardState):
    """Params, gradients and state are divided alike (FSDP).

    Params are never padded: a leaf whose layers N does not divide is divided along another
    dimension, and goes to its layers and back in each update.
    """

    def dense_params(self, params: Params) -> PyTree:
        """Return the specs of gradients, where these need no padding."""
        return self._divided(params, lambda path, n: n % self.num_parts == 0)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardBySpec(Layout):
    """Params, gradients and state lie as given PartitionSpecs say.

    specs: those of params, by patterns of paths; other leaves are whole on every device.
    """

    specs: Mapping[str, P] = dataclasses.field(default_factory=dict)

    @property
    def divides(self) -> bool:
        """Whether the devices of a worker keep parts of arrays."""
        return True

    def dense_params(self, params: Params) -> PyTree:
        """Return the spec of the first pattern that matches each leaf."""
        specs = super().dense_params(params)
        for pattern, spec in reversed(list(self.specs.items())):
            paths = tree.matching(pattern, params, "shard")
            specs = self._with_spec(spec, paths, specs, params)
        return specs


def init_state(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
) -> OptState:
    """Return the state of step 0 on a mesh: per-worker arrays sharded, the rest replicated.

    Each device stores only its worker's part of the per-worker arrays. In a run of several
    processes, each process must call it with the same params.

    Args:
      tx: an optimizer, however wrapped.
      params: the parameters, arrays on the host or replicated over the mesh.
      mesh: a mesh, such as `data_mesh()`.
      axis_name: the mesh axes of the workers, for per-worker arrays that do not name their own.
    """
    num_workers(mesh, axis_name)  # it has these axes
    init = core.check_transform("init_state: tx", tx).init
    return Replicated(mesh, axes(axis_name), Axes()).init(init, params)


KINDS: dict[str, type[ShardState]] = {"state": ShardState, "params": ShardParams}


def layout_of(
    shard: Kind | None,
    mesh: Mesh,
    data_axis: AxisName,
    tables: tree.Pattern | None = None,
) -> Layout:
    """Return the layout that arguments of a training step ask for, checked against the mesh.

    Of an `AbstractMesh`, only the sizes of the axes are read.

    Raises:
      TypeError: `shard` is neither of the names nor a mapping from patterns to PartitionSpecs.
      ValueError: a spec names an axis that the mesh does not have, or one twice.
    """
    way = shard if isinstance(shard, Sharded) else Sharded(shard or {})
    divides = shard is not None or tables is not None
    specs = dict(way.kind) if isinstance(way.kind, Mapping) else {}
    _check_shard(specs, mesh)
    parts = Axes(way.axis or axes(data_axis)) if divides else Axes()
    if specs and way.axis is None and tables is None:
        named = joined(*itertools.chain.from_iterable(specs.values()))
        parts = Axes(name for name in parts if name in named)
    unknown = without(parts, axes(data_axis))
    if unknown:
        raise ValueError(
            f"sharded: axis {unknown[0]!r} must be one of data_axis, {(*axes(data_axis),)}"
        )
    workers = without(data_axis, parts)
    _check_workers_are_whole(specs, workers)
    if divides and not isinstance(mesh, AbstractMesh):
        # Along explicit axes an update of divided moments and whole params would be an error.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    if shard is None:
        return Replicated(mesh, workers, parts, tables)
    if isinstance(way.kind, Mapping):
        return ShardBySpec(mesh, workers, parts, tables, specs)
    if way.kind not in KINDS:
        raise TypeError(
            'shard must be "state", "params" or a mapping from patterns to PartitionSpecs, or '
            f"sharded(...) of one of these; got {way.kind!r}"
        )
    # Params that are sent in packets are exact in parts only.
    kind = "params" if way.gathers_once else way.kind
    codecs = {"gather": way.gather, "reduce": way.reduce}
    return KINDS[kind](mesh, workers, parts, tables, way.whole, **codecs)


def _check_shard(specs: Mapping[str, P], mesh: Mesh) -> None:
    for pattern, spec in specs.items():
        if not isinstance(pattern, str | re.Pattern) or not isinstance(spec, P):
            raise TypeError(
                f"shard must map patterns of paths to PartitionSpecs; got {pattern!r}: {spec!r}"
            )
        names = [a for entry in spec for a in axes(entry)]
        missing = [a for a in names if a not in mesh.shape]
        if len(set(names)) < len(names):
            raise ValueError(f"shard: {spec} for {pattern!r} must name each mesh axis once at most")
        if missing:
            raise ValueError(
                f"shard: the mesh has no axis {missing[0]!r} for {pattern!r}; its axes are "
                f"{mesh.axis_names}"
            )


def _check_workers_are_whole(specs: Mapping[str, P], workers: Axes) -> None:
    """Raise a ValueError if a spec divides a leaf over the axes of workers."""
    for pattern, spec in specs.items():
        over_workers = [name for name in joined(*spec) if name in workers]
        if over_workers:
            raise ValueError(
                f"shard: {spec} for {pattern!r} divides over {over_workers[0]!r}, along which "
                "devices are workers, each with whole leaves; name it in sharded(..., axis=)"
            )
