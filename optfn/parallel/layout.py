"""Where params, gradients and the state of an optimizer lie on the devices of a mesh.

A `Layout` gives each leaf its PartitionSpec. There is one class for each way of sharding, and all
else (the training step, checkpoints, plans of memory) asks the layout:

    mesh axes = data axes (the batch is split over them) + axes that are left to the compiler
    data axes = part axes (params or state are divided over them) + worker axes

Along the worker axes each group of devices has a gradient and, where its state says so, a state of
its own (`optfn.state.per_worker`).
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn import mesh as meshes
from optfn.leaves import tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree
from optfn.mesh import Axes, AxisName, axes, restricted, without
from optfn.parallel.data_parallel import put, replicate
from optfn.state import names as state_names
from optfn.state.per_worker import PerWorker, exchanges, nodes_of
from optfn.state.placement import num_workers, on_workers_of, specs_of

# "state", "params", or PartitionSpecs of params by patterns of paths.
Kind: TypeAlias = str | Mapping[str, P]


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
    data_axes: the axes over which the batch is split.
    tables: the leaves whose rows are divided over the data axes in any case.
    """

    mesh: Mesh
    data_axes: Axes
    tables: tree.Pattern | None = None

    def dense_params(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params that is no table: whole everywhere."""
        return tree.map_arrays(lambda x: P(), params)

    def dense_gradients(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf, and of its moments."""
        return self.dense_params(params)

    @property
    def part_axes(self) -> Axes:
        """The data axes over which params or state are divided."""
        return self.data_axes

    @property
    def worker_axes(self) -> Axes:
        """The data axes along which each group of devices has a gradient of its own."""
        return without(self.data_axes, self.part_axes)

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
        return self._with_spec(P(self.data_axes), paths, specs, params)

    def _with_spec(self, spec: P, paths: Collection[str], specs: PyTree, params: Params) -> PyTree:
        """Return `specs`, with that of the leaves at these paths replaced."""

        def chosen(place: tree.Place, x: Leaf, old: P) -> P:
            if tree.is_masked(x) or str(place) not in paths:
                return old
            _check_fit(str(place), jnp.shape(x), spec, self.mesh)
            return spec

        return tree.map_named(chosen, params, specs)

    def of_state(self, state: OptState, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of the state of an optimizer.

        A per-worker array is divided over the worker axes. An array of the shape of its parameter,
        or with further leading axes such as that of a history, lies as the gradient of that
        parameter does. Any other array, such as scales of blocks, is divided where the part axes
        divide it.
        """
        of_workers = specs_of(state, self.worker_axes)
        if not self.part_axes:
            return of_workers
        by_path = {
            str(place): pair for place, *pair in tree.items(params, self.of_gradients(params))
        }

        def part_of(path: str | None, x: Leaf) -> P:
            if path is None:
                return P()
            p, spec = by_path[path]
            leading = jnp.ndim(x) - jnp.ndim(p)
            if leading >= 0 and jnp.shape(x)[leading:] == jnp.shape(p):
                return P(*[None] * leading, *spec) if any(spec) else P()
            return self.divided(x) if self.divisions(spec) else P()

        owned = state_names.with_owners(state_names.named_parts(state), by_path)
        parts = jax.tree.unflatten(jax.tree.structure(state), [part_of(*pair) for pair in owned])
        return jax.tree.map(lambda own, part: own if any(own) else part, of_workers, parts)

    def divided(self, x: Leaf, stacked: int = 0) -> P:
        """Return the spec that divides the first dimension that the number of parts divides.

        Axes that count stacked layers come last, so that each device has a part of each layer. A
        leaf without such a dimension lies on every device.
        """
        shape = jnp.shape(x)
        order = [*range(stacked, len(shape)), *range(stacked)]
        fitting = [d for d in order if shape[d] and shape[d] % self.num_parts == 0]
        return P(*[None] * fitting[0], self.part_axes) if fitting else P()

    def divisions(self, spec: P) -> list[Division]:
        """Return the dimensions of an array that are divided over part axes."""
        entries = enumerate(restricted(spec, self.part_axes))
        return [Division(d, axes(entry)) for d, entry in entries if entry is not None]

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
        shapes = jax.eval_shape(init, params)
        keeps_own = bool(jax.tree.leaves(nodes_of(PerWorker, shapes)))
        if not self.worker_axes and (exchanges(shapes) or keeps_own):
            raise ValueError(
                "shard: tx exchanges gradients or keeps a state on each worker, and no axis of "
                f"workers is left: params or state are divided over all of {(*self.data_axes,)}; "
                "leave shard out"
            )
        shardings = jax.tree.map(
            lambda spec, x: meshes.sharding(self.mesh, spec, x.ndim),
            self.of_state(shapes, params), shapes, is_leaf=is_spec,
        )  # fmt: skip
        init_all = on_workers_of(init, self.mesh, self.worker_axes)
        return jax.jit(init_all, out_shardings=shardings)(params)


class Replicated(Layout):
    """Params and state are whole on every device, but for the rows of tables."""

    @property
    def part_axes(self) -> Axes:
        """None; those of the data where there are tables."""
        return Axes() if self.tables is None else self.data_axes


class ShardState(Layout):
    """Params are whole on every device, their gradients and state divided (ZeRO-1)."""

    def dense_gradients(self, params: Params) -> PyTree:
        """Return specs that divide each floating-point leaf along one dimension, if any fits."""
        stacked = tree.stacked_axes(params)

        def divided(place: tree.Place, x: Leaf) -> Leaf:
            if tree.is_masked(x):
                return x
            return self.divided(x, stacked[place.number]) if tree.is_inexact(x) else P()

        return tree.map_named(divided, params)


class ShardParams(ShardState):
    """Params, gradients and state are divided alike (FSDP)."""

    def dense_params(self, params: Params) -> PyTree:
        """Return the specs of gradients."""
        return self.dense_gradients(params)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardBySpec(Layout):
    """Params, gradients and state lie as given PartitionSpecs say.

    specs: those of params, by patterns of paths; other leaves are whole on every device.
    """

    specs: Mapping[str, P] = dataclasses.field(default_factory=dict)

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
    return Replicated(mesh, axes(axis_name)).init(init, params)


KINDS: dict[str, type[Layout]] = {"state": ShardState, "params": ShardParams}


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
    if shard is None and tables is None:
        return Replicated(mesh, axes(data_axis))
    if not isinstance(mesh, AbstractMesh):
        # Along explicit axes an update of divided moments and whole params would be an error.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    if shard is None:
        return Replicated(mesh, axes(data_axis), tables)
    if isinstance(shard, Mapping):
        _check_shard(shard, mesh)
        return ShardBySpec(mesh, axes(data_axis), tables, dict(shard))
    if shard not in KINDS:
        raise TypeError(
            'shard must be "state", "params" or a mapping from patterns to PartitionSpecs; '
            f"got {shard!r}"
        )
    return KINDS[shard](mesh, axes(data_axis), tables)


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
