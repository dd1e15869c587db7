"""Where params, gradients and the state of an optimizer lie on the devices of a mesh.

A `Layout` gives each leaf its PartitionSpec. There is one class for each way of sharding, and all
else (the training step, checkpoints, plans of memory) asks the layout:

    mesh axes = data axes (the batch is split over them) + axes that are left to the compiler
    data axes = worker axes + part axes (params or state are divided over them)

Along the worker axes each group of devices has a gradient and, where its state says so, a state of
its own (`optfn.state.per_worker`); the devices of a group, those along all other axes, divide it
among them.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import checks, core
from optfn import mesh as meshes
from optfn.leaves import tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree
from optfn.mesh import Axes, AxisName, axes, check_names, joined, restricted, without
from optfn.parallel.data_parallel import put, replicate
from optfn.parallel.means import Parts
from optfn.parallel.owners import Codec, check_codec
from optfn.parallel.whole import axes_of_layers, check_whole
from optfn.state import names as state_names
from optfn.state.padded import Length, Padded, cut, map_padded, pad
from optfn.state.per_worker import Exchanged, PerWorker, map_divided, nodes_of
from optfn.state.placement import num_workers, on_workers_of, specs_of


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


def is_spec(x: object) -> TypeGuard[P]:
    """Tell whether `x` is a PartitionSpec."""
    return isinstance(x, P)


class Division(NamedTuple):
    """A dimension of an array, and the mesh axes whose devices have a part of it each."""

    dimension: int
    axes: Axes


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, so that jit can hash it
class Layout:
    """Where each leaf of a training run lies.

    mesh: the mesh.
    worker_axes: the data axes along which each group of devices has a gradient of its own.
    part_axes: the data axes over which params or state are divided.
    tables: the leaves whose rows are divided over the part axes in any case.
    gather, reduce: compressors of the params that are gathered and of the gradients that are
      reduced over the part axes; None for none.
    """

    mesh: Mesh
    worker_axes: Axes
    part_axes: Axes
    tables: tree.Pattern | None = None
    gather: Codec | None = dataclasses.field(default=None, kw_only=True)
    reduce: Codec | None = dataclasses.field(default=None, kw_only=True)

    def dense_params(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params that is no table: whole everywhere."""
        return tree.map_arrays(lambda x: P(), params)

    def dense_gradients(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf, and of its moments."""
        return self.dense_params(params)

    @property
    def data_axes(self) -> Axes:
        """The axes over which the batch is split, those of the workers first."""
        return joined(self.worker_axes, self.part_axes)

    @property
    def inner_axes(self) -> Axes:
        """The axes of the devices of one worker."""
        return without(self.mesh.axis_names, self.worker_axes)

    @property
    def divides(self) -> bool:
        """Whether the devices of a worker keep parts of arrays."""
        return bool(self.part_axes)

    @property
    def num_parts(self) -> int:
        """The number of devices that share a divided leaf: the product of the part axes."""
        return num_workers(self.mesh, self.part_axes)

    def of_params(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params; masked leaves stay masked."""
        return self._with_tables(self.dense_params(params), params)

    def of_gradients(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf of params, and of its moments."""
        return self._with_tables(self.dense_gradients(params), params)

    def is_table(self, params: Params) -> PyTree:
        """Tell for each leaf of params whether its rows are divided."""
        paths = tree.matching(self.tables, params, "tables")
        return tree.map_named(
            lambda place, x: x if tree.is_masked(x) else str(place) in paths, params
        )

    def _with_tables(self, specs: PyTree, params: Params) -> PyTree:
        """Return `specs`, with those of tables in their places."""
        if self.tables is None:
            return specs
        paths = tree.matching(self.tables, params, "tables")
        return self._with_spec(P(self.part_axes), paths, specs, params)

    def _with_spec(self, spec: P, paths: Collection[str], specs: PyTree, params: Params) -> PyTree:
        """Return `specs`, with that of the leaves at these paths replaced."""

        def chosen(place: tree.Place, x: Leaf, old: P) -> P:
            if tree.is_masked(x) or str(place) not in paths:
                return old
            _check_fit(str(place), jnp.shape(x), spec, self.mesh)
            return spec

        return tree.map_named(chosen, params, specs)

    def of_state(self, state: OptState, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of the state of an optimizer of all workers.

        A per-worker array is divided over the worker axes, along its first axis. An array of the
        shape of its parameter, or with further leading axes such as that of a history, lies as the
        gradient of that parameter does. Any other array, such as scales of blocks, is divided where
        the part axes divide it.
        """
        if not self.divides:
            return specs_of(state, self.worker_axes)

        def part_of(x: Leaf, own: P, p: Leaf, spec: P) -> P:
            if len(own) == 2:  # rows of a `Divided`, one for each device
                return P(joined(*spec), own[1])
            shape = _of_one_worker(jnp.shape(x), own, self.mesh)
            padded = self.padded_shape(jnp.shape(p), spec)
            leading = _leading(shape, padded)
            if shape[leading:] == padded:
                return _over_both(own, P(*[None] * leading, *spec) if any(spec) else P())
            if padded != jnp.shape(p) and shape[: len(spec)] == padded[: len(spec)]:
                return spec  # of the same layers
            is_divided = self.divisions(spec)
            return _over_both(own, self.divided(shape)) if is_divided else own

        return self._map_state(part_of, lambda x, own: own, state, params)

    def _map_state(
        self,
        of_param: Callable[[Leaf, P, Leaf, P], Any],
        of_rest: Callable[[Leaf, P], Any],
        state: OptState,
        params: Params,
    ) -> PyTree:
        """Map the leaves of a state by the parameter that each belongs to.

        Args:
          of_param: (leaf, its spec over the workers, its parameter, the spec of its gradient).
          of_rest: (leaf, its spec over the workers) for counters and rates.
          state: the state of an optimizer.
          params: the params.
        """
        by_path = {str(k): pair for k, *pair in tree.items(params, self.of_gradients(params))}
        owned = state_names.with_owners(state_names.named_parts(state), by_path)
        of_workers = jax.tree.leaves(specs_of(state, self.worker_axes), is_leaf=is_spec)
        new = [
            of_rest(x, own) if path is None else of_param(x, own, *by_path[path])
            for (path, x), own in zip(owned, of_workers, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), new)

    def divided(self, shape: tuple[int, ...], stacked: int = 0) -> P:
        """Return the spec that divides the first dimension that the number of parts divides.

        Axes that count stacked layers come last, so that each device has a part of each layer. An
        array without such a dimension lies on every device.
        """
        order = [*range(stacked, len(shape)), *range(stacked)]
        fitting = [d for d in order if shape[d] and shape[d] % self.num_parts == 0]
        return P(*[None] * fitting[0], self.part_axes) if fitting else P()

    def divisions(self, spec: P) -> list[Division]:
        """Return the dimensions of an array that are divided over part axes."""
        entries = enumerate(restricted(spec, self.part_axes))
        return [Division(d, axes(entry)) for d, entry in entries if entry is not None]

    def padded_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """Return the shape of an array whose devices have parts of one size, by its spec."""
        sizes = list(shape)
        for dimension, names in self.divisions(spec):
            count = num_workers(self.mesh, names)
            sizes[dimension] = -(-shape[dimension] // count) * count
        return tuple(sizes)

    def stored(self, state: OptState, params: Params) -> OptState:
        """Return a state with padding where devices could not divide it else.

        Padded are arrays of the shape of their parameter, and others of as many layers, such as
        preconditioners.
        """

        def of_param(x: Leaf, own: P, p: Leaf, spec: P) -> Leaf:
            shape = self.padded_shape(jnp.shape(p), spec)
            leading = _leading(x.shape, jnp.shape(p))
            end = leading + len(spec)
            if shape == jnp.shape(p) or x.shape[leading:end] != p.shape[: len(spec)]:
                return x
            axis = len(spec) - 1  # that of the layers
            return Padded(pad(x, end - 1, shape[axis]), Length(end - 1, p.shape[axis]))

        return self._map_state(of_param, lambda x, own: x, state, params)

    def in_update(self, state: OptState) -> OptState:
        """Return a stored state as an update takes it, inside jit: without padding."""

        def without_padding(x: Padded) -> jax.Array:
            spec = P(*[None] * x.length.axis, self.part_axes)
            return meshes.constrained(cut(x), self.mesh, spec)

        return map_padded(without_padding, state)

    def parts_of(self, params: Params) -> Parts | None:
        """Return how the devices of each worker divide gradients; None where a worker is one."""
        if not (self.worker_axes and self.inner_axes):
            return None
        specs = tree.items(params, self.of_gradients(params))
        return Parts(
            self.mesh,
            self.inner_axes,
            {
                str(k): restricted(spec, self.inner_axes)
                for k, x, spec in specs
                if not tree.is_masked(x)
            },
        )

    def place(self, specs: PyTree) -> PyTree:
        """Return the NamedShardings of PartitionSpecs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def put(self, params: Params) -> Params:
        """Return copies of params, placed by their specs."""
        return jax.tree.map(
            lambda spec, x: put(x, meshes.sharding(self.mesh, spec, jnp.ndim(x))),
            self.of_params(params), params, is_leaf=is_spec,
        )  # fmt: skip

    def replicate(self, x: PyTree) -> PyTree:
        """Return copies of arrays on every device."""
        return replicate(x, self.mesh)

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        """Return the state of step 0, each leaf placed by its spec; no divided leaf is ever whole.

        Args:
          init: gives one worker's state.
          params: on the mesh.

        Raises:
          ValueError: the state has per-worker arrays, and there are no worker axes.
        """
        all_workers = self.of_all_workers(init)
        shapes = jax.eval_shape(all_workers, params)
        self._check_axes_of_exchanges(shapes)
        shardings = jax.tree.map(
            lambda spec, x: meshes.sharding(self.mesh, spec, x.ndim),
            self.of_state(shapes, params), shapes, is_leaf=is_spec,
        )  # fmt: skip
        return jax.jit(all_workers, out_shardings=shardings)(params)

    def of_all_workers(self, init: Callable[[Params], OptState]) -> Callable[[Params], OptState]:
        """Return the function from params to the stored state of all workers, by that of one."""
        in_shapes = self._in_shapes_of_params(init)
        of_workers = on_workers_of(in_shapes, self.mesh, self.worker_axes)
        return lambda params: self.stored(of_workers(params), params)

    def _check_axes_of_exchanges(self, state: OptState) -> None:
        """Raise a ValueError if a transform exchanges gradients over axes that have no workers."""
        over = joined(*(node.axes for node in nodes_of(Exchanged, state)))
        divided = [axis for axis in over if axis in self.part_axes]
        if divided:
            raise ValueError(
                f"shard: tx exchanges gradients over axis {divided[0]!r}, over which params or "
                "state are divided. No device has a whole gradient there, and its residual would "
                "be as large as one. Divide over other axes, sharded(..., axis=), or leave the "
                "exchange out"
            )
        if not self.worker_axes and jax.tree.leaves(nodes_of(PerWorker, state)):
            raise ValueError(
                "shard: tx keeps a state on each worker, and no axis of workers is left: params or "
                f"state are divided over all of {(*self.data_axes,)}; name the axes that divide "
                "them, sharded(..., axis=), or leave shard out"
            )

    def _in_shapes_of_params(
        self, init: Callable[[Params], OptState]
    ) -> Callable[[Params], OptState]:
        """Return `init` with flat per-worker arrays of divided leaves in the shape of the leaf.

        A part of a leaf is no range of the flat array.
        """

        def shaped(x: Leaf, own: P, p: Leaf, spec: P) -> Leaf:
            is_flat = any(own) and jnp.shape(x) == (jnp.size(p),)
            return jnp.reshape(x, p.shape) if is_flat and any(spec) else x

        def reshaped(params: Params) -> OptState:
            parts = self.parts_of(params)
            assert parts is not None
            state = map_divided(
                lambda node: node._replace(value=parts.in_rows(node.value)), init(params)
            )
            return self._map_state(shaped, lambda x, own: x, state, params)

        return reshaped if self.worker_axes and self.divides else init


class Replicated(Layout):
    """Params and state are whole on every device of a worker, but for the rows of tables."""


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


def _leading(shape: tuple[int, ...], of: tuple[int, ...]) -> int:
    """Return how many axes stand before those of a shape in another that ends with it, else 0."""
    extra = len(shape) - len(of)
    return extra if extra > 0 and shape[extra:] == of else 0


def _of_one_worker(shape: tuple[int, ...], own: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one worker's part of an array that is divided over workers by `own`."""
    return (shape[0] // num_workers(mesh, axes(own[0])), *shape[1:]) if any(own) else shape


def _over_both(own: P, part: P) -> P:
    """Return the spec of an array that is divided over workers, and over the parts of each."""
    if not any(own):
        return part
    first, *rest = part or (None,)
    return P(joined(own[0], first), *rest)


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


def _check_fit(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"shard: {spec} has more entries than leaf {path!r} of shape {shape} axes")
    for dimension, entry in enumerate(spec):
        count = num_workers(mesh, axes(entry))
        if shape[dimension] % count:
            raise ValueError(
                f"shard: dimension {dimension} of leaf {path!r}, of shape {shape}, must be "
                f"divisible by the {count} devices of {entry!r}"
            )
