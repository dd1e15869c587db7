"""How params, gradients and optimizer state are divided over the devices of a mesh.

A `Layout` gives each leaf its PartitionSpec. Each way of sharding is a class, in `sharding`, and
everything else (the training step, checkpoints, plans of memory) asks the layout:

    mesh axes = data axes (the batch is split over them) + axes that are left to the compiler
    data axes = worker axes + part axes (params or state are divided over them)

Along the worker axes, each group of devices is a worker. It has its own gradient and, if the
optimizer declares it (`optfn.state.per_worker`), its own state. The devices of a group lie along
all other axes, and divide this gradient and state among them.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import mesh as meshes
from optfn.core import tree
from optfn.core.types import Leaf, OptState, Params, PyTree
from optfn.mesh import Axes, axes, joined, restricted, without
from optfn.parallel.data_parallel import placed_copy, replicate
from optfn.parallel.owners import Codec
from optfn.state import names as state_names
from optfn.state.padded import Padded, cut, map_padded, padded
from optfn.state.per_worker import Exchanged, PerWorker, map_divided, nodes_of
from optfn.state.placement import num_workers, on_workers_of, specs_of
from optfn.workers import Group


def is_spec(x: object) -> TypeGuard[P]:
    """Tell whether `x` is a PartitionSpec."""
    return isinstance(x, P)


class Division(NamedTuple):
    """A dimension of an array, and the mesh axes over which it is divided."""

    dimension: int
    axes: Axes


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, so that jit can hash it
class Layout:
    """How each leaf of a training run is divided over a mesh.

    mesh: the mesh.
    worker_axes: the data axes along which each group of devices has its own gradient.
    shard_axes: the data axes over which params or state are divided.
    tables: the leaves whose rows are divided over the part axes, whatever the way of sharding.
    gather, reduce: compressors for the params that are gathered, and for the gradients that are
      reduced, over the part axes; None sends them as they are.
    """

    mesh: Mesh
    worker_axes: Axes
    shard_axes: Axes
    tables: tree.Pattern | None = None
    gather: Codec | None = dataclasses.field(default=None, kw_only=True)
    reduce: Codec | None = dataclasses.field(default=None, kw_only=True)

    def dense_params(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params, tables aside; here they are whole."""
        return tree.map_arrays(lambda x: P(), params)

    def dense_gradients(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf, and of its moments."""
        return self.dense_params(params)

    @property
    def data_axes(self) -> Axes:
        """The axes over which the batch is split, worker axes first."""
        return joined(self.worker_axes, self.shard_axes)

    @property
    def inner_axes(self) -> Axes:
        """The axes of the devices of one worker."""
        return without(self.mesh.axis_names, self.worker_axes)

    @property
    def divides(self) -> bool:
        """Whether the devices of a worker keep parts of arrays."""
        return bool(self.shard_axes)

    @property
    def num_shards(self) -> int:
        """The number of devices that share a divided leaf: the product of the part axes."""
        return num_workers(self.mesh, self.shard_axes)

    def param_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params; masked leaves stay masked."""
        return self._with_tables(self.dense_params(params), params)

    def gradient_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf of params, and of its moments."""
        return self._with_tables(self.dense_gradients(params), params)

    def is_table(self, params: Params) -> PyTree:
        """Tell for each leaf of params whether its rows are divided."""
        paths = tree.matching(self.tables, params, "tables")
        return tree.map_named(
            lambda place, x: x if tree.is_masked(x) else str(place) in paths, params
        )

    def _with_tables(self, specs: PyTree, params: Params) -> PyTree:
        """Return `specs`, with the leaves that are tables replaced by the specs of tables."""
        if self.tables is None:
            return specs
        paths = tree.matching(self.tables, params, "tables")
        return self._with_spec(P(self.shard_axes), paths, specs, params, "tables")

    def _with_spec(
        self,
        spec: P,
        paths: Collection[str],
        specs: PyTree,
        params: Params,
        argument: str = "shard",
    ) -> PyTree:
        """Return `specs`, with `spec` for the leaves at these paths."""

        def chosen(place: tree.Place, x: Leaf, old: P) -> P:
            if tree.is_masked(x) or str(place) not in paths:
                return old
            _check_fit(str(place), jnp.shape(x), spec, self.mesh, argument)
            return spec

        return tree.map_named(chosen, params, specs)

    def state_specs(self, state: OptState, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of the optimizer state of all workers.

        A per-worker array is divided over the worker axes, along its first axis. An array with the
        shape of its parameter, also with further leading axes such as that of a history, is divided
        like the gradient of that parameter. Any other array, such as scales of blocks, is divided
        along its first dimension that the part axes divide.
        """
        if not self.divides:
            return specs_of(state, self.worker_axes)

        def part_of(x: Leaf, own: P, p: Leaf, spec: P) -> P:
            if len(own) == 2:  # the rows of a `Divided`, one per device
                return P(joined(*spec), own[1])
            shape = _of_one_worker(jnp.shape(x), own, self.mesh)
            padded = self.padded_shape(jnp.shape(p), spec)
            leading = _leading(shape, padded)
            if shape[leading:] == padded:
                return _over_both(own, P(*[None] * leading, *spec) if any(spec) else P())
            if padded != jnp.shape(p) and shape[: len(spec)] == padded[: len(spec)]:
                return spec  # an array with the same layers
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
        """Map the leaves of a state, each together with the parameter that it belongs to.

        Args:
          of_param: a function of (leaf, its spec over the workers, its parameter, the spec of the
            parameter's gradient).
          of_rest: a function of (leaf, its spec over the workers), for counters and rates.
          state: the state of an optimizer.
          params: the params.
        """
        by_path = {str(k): pair for k, *pair in tree.items(params, self.gradient_specs(params))}
        owned = state_names.entries_by_param(state_names.named_entries(state), by_path)
        of_workers = jax.tree.leaves(specs_of(state, self.worker_axes), is_leaf=is_spec)
        new = [
            of_rest(x, own) if path is None else of_param(x, own, *by_path[path])
            for (path, x), own in zip(owned, of_workers, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), new)

    def divided(self, shape: tuple[int, ...], stacked: int = 0) -> P:
        """Return the spec that divides an array along the first dimension that N divides.

        N is the number of parts. Axes that count stacked layers come last, so that each device has
        a part of each layer. An array without such a dimension is whole on every device.
        """
        order = [*range(stacked, len(shape)), *range(stacked)]
        fitting = [d for d in order if shape[d] and shape[d] % self.num_shards == 0]
        return P(*[None] * fitting[0], self.shard_axes) if fitting else P()

    def divisions(self, spec: P) -> list[Division]:
        """Return the dimensions of an array that are divided over part axes."""
        entries = enumerate(restricted(spec, self.shard_axes))
        return [Division(d, axes(entry)) for d, entry in entries if entry is not None]

    def padded_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """Return the shape of an array, padded so that all devices have parts of one size."""
        sizes = list(shape)
        for dimension, names in self.divisions(spec):
            count = num_workers(self.mesh, names)
            sizes[dimension] = -(-shape[dimension] // count) * count
        return tuple(sizes)

    def stored(self, state: OptState, params: Params) -> OptState:
        """Return a state with padding where devices could not divide it otherwise.

        Arrays of the shape of their parameter are padded, and so are others with the same number of
        layers, such as preconditioners.
        """

        def of_param(x: Leaf, own: P, p: Leaf, spec: P) -> Leaf:
            shape = self.padded_shape(jnp.shape(p), spec)
            leading = _leading(x.shape, jnp.shape(p))
            end = leading + len(spec)
            if shape == jnp.shape(p) or x.shape[leading:end] != p.shape[: len(spec)]:
                return x
            axis = len(spec) - 1  # the axis of layers
            return padded(x, end - 1, shape[axis])

        return self._map_state(of_param, lambda x, own: x, state, params)

    def unpadded(self, state: OptState) -> OptState:
        """Return a stored state without padding, as an update takes it inside jit."""

        def without_padding(x: Padded) -> jax.Array:
            spec = P(*[None] * x.axis, self.shard_axes)
            return meshes.constrained(cut(x), self.mesh, spec)

        return map_padded(without_padding, state)

    def group_of(self, params: Params) -> Group | None:
        """Return the devices of a worker, which divide gradients; None if it is one device."""
        if not (self.worker_axes and self.inner_axes):
            return None
        specs = tree.items(params, self.gradient_specs(params))
        return Group(
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
            lambda spec, x: placed_copy(x, meshes.sharding(self.mesh, spec, jnp.ndim(x))),
            self.param_specs(params), params, is_leaf=is_spec,
        )  # fmt: skip

    def replicate(self, x: PyTree) -> PyTree:
        """Return copies of arrays on every device."""
        return replicate(x, self.mesh)

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        """Return the state of step 0, each leaf placed by its spec.

        Divided leaves are made in parts: no device ever has a whole one.

        Args:
          init: returns the state of one worker.
          params: the params, placed on the mesh.

        Raises:
          ValueError: the state has per-worker arrays, and there are no worker axes.
        """
        all_workers = self.stored_init(init)
        shapes = jax.eval_shape(all_workers, params)
        self._check_axes_of_exchanges(shapes)
        shardings = jax.tree.map(
            lambda spec, x: meshes.sharding(self.mesh, spec, x.ndim),
            self.state_specs(shapes, params), shapes, is_leaf=is_spec,
        )  # fmt: skip
        return jax.jit(all_workers, out_shardings=shardings)(params)

    def stored_init(self, init: Callable[[Params], OptState]) -> Callable[[Params], OptState]:
        """Return the function from params to the stored state of all workers.

        Args:
          init: the function from params to the state of one worker.
        """
        in_shapes = self._in_shapes_of_params(init)
        of_workers = on_workers_of(in_shapes, self.mesh, self.worker_axes)
        return lambda params: self.stored(of_workers(params), params)

    def _check_axes_of_exchanges(self, state: OptState) -> None:
        """Raise a ValueError if a transform exchanges gradients over axes that have no workers."""
        over = joined(*(node.axes for node in nodes_of(Exchanged, state)))
        divided = [axis for axis in over if axis in self.shard_axes]
        if divided:
            raise ValueError(
                f"shard: tx exchanges gradients over axis {divided[0]!r}, over which params or "
                "state are divided. No device has a whole gradient there, and the residual of the "
                "exchange would be as large as one. Divide over other axes, "
                "shard=sharded(..., axis=), or leave the exchange out"
            )
        if not self.worker_axes and jax.tree.leaves(nodes_of(PerWorker, state)):
            raise ValueError(
                "shard: tx keeps its own state on each worker, but no worker axis is left, since "
                f"params or state are divided over all data axes, {(*self.data_axes,)}. Name the "
                "axes that divide them, shard=sharded(..., axis=), or leave shard out"
            )

    def _in_shapes_of_params(
        self, init: Callable[[Params], OptState]
    ) -> Callable[[Params], OptState]:
        """Return `init` whose flat per-worker arrays of divided leaves have the leaf's shape.

        A part of a leaf is not a contiguous range of the flat array.
        """

        def shaped(x: Leaf, own: P, p: Leaf, spec: P) -> Leaf:
            is_flat = any(own) and jnp.shape(x) == (jnp.size(p),)
            return jnp.reshape(x, p.shape) if is_flat and any(spec) else x

        def reshaped(params: Params) -> OptState:
            state, group = init(params), self.group_of(params)
            if group is None:  # each worker is one device
                return state
            in_rows = group.rows
            state = map_divided(lambda node: node._replace(value=in_rows(node.value)), state)
            return self._map_state(shaped, lambda x, own: x, state, params)

        return reshaped if self.worker_axes and self.divides else init


class Replicated(Layout):
    """Params and state are whole on every device of a worker, but for the rows of tables."""


def _leading(shape: tuple[int, ...], of: tuple[int, ...]) -> int:
    """Return how many leading axes `shape` has in front of `of`; 0 if it does not end with `of`."""
    extra = len(shape) - len(of)
    return extra if extra > 0 and shape[extra:] == of else 0


def _of_one_worker(shape: tuple[int, ...], own: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one worker's part of an array; `own` is its spec over the workers."""
    return (shape[0] // num_workers(mesh, axes(own[0])), *shape[1:]) if any(own) else shape


def _over_both(own: P, part: P) -> P:
    """Return the spec of an array that is divided over workers, and over the parts of each."""
    if not any(own):
        return part
    first, *rest = part or (None,)
    return P(joined(own[0], first), *rest)


def _check_fit(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh, argument: str) -> None:
    if len(spec) > len(shape):
        raise ValueError(
            f"{argument}: {spec} has more entries than leaf {path!r} has axes; its shape is {shape}"
        )
    for dimension, entry in enumerate(spec):
        count = num_workers(mesh, axes(entry))
        if shape[dimension] % count:
            raise ValueError(
                f"{argument}: dimension {dimension} of leaf {path!r}, which has shape {shape}, "
                f"must be divisible by the {count} devices along {entry!r}"
                + (". Add rows that are never looked up" if argument == "tables" else "")
            )
