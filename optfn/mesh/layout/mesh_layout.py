"""How params, gradients and optimizer state are divided over the devices of a mesh.

A `Layout` gives each leaf its PartitionSpec. Each way of sharding is a class, in `sharding`, and
everything else (the training step, checkpoints, plans of memory) asks the layout:

    mesh axes = data axes (the batch is split over them) + axes that are left to the compiler
    data axes = worker axes + shard axes (params or state are divided over them)

Along the worker axes, each shard group is a worker. It has a private gradient and, if the optimizer
declares it (`optfn.mesh.state.per_worker`), a private state. The devices of the group lie along all
remaining axes, and divide this gradient and state among them.

If the step is left to the compiler, there are no workers: all devices are one, along all axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import DType, Leaf, OptState, Params, PyTree
from optfn.leaves import contents, patterns
from optfn.leaves.patterns import Pattern
from optfn.mesh.collectives import axes as mesh_axes
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Axes, Division
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.collectives.means import SMALL_BYTES
from optfn.mesh.collectives.packets import Compressor
from optfn.mesh.layout.data_parallel import copy_to_devices, replicate
from optfn.mesh.state import per_worker
from optfn.mesh.state.inventory import Entry, inventory, map_entries
from optfn.mesh.state.padded import Padded, map_padded, unwrap_padded, wrap_padded
from optfn.mesh.state.placement import (
    place_on_host,
    spec_over_workers,
    specs_over_workers,
    widen_init,
)
from optfn.wrappers.attributes import mark_stacked_params


@dataclasses.dataclass(frozen=True)
class ParamEntry:
    """The facts about a leaf of params on a mesh, as `inventory.Entry` has them of a state.

    path: the path of the leaf.
    shape, dtype: of the whole leaf.
    spec: how the leaf is divided.
    gradient_spec: how its gradient and its moments are divided.
    arriving_spec: how its gradient leaves the loss: like a divided leaf, whose gather has reduced
      it so, else as `gradient_spec` says.
    stacked: the number of leading axes that count layers.
    is_table: whether its rows are divided, and the loss only looks them up.
    mean_axes: the worker axes of the mean that the gather of the leaf takes of its gradient, in the
      backward pass; without any, the step averages the gradient after the loss.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DType
    spec: P
    gradient_spec: P
    arriving_spec: P
    stacked: int
    is_table: bool
    mean_axes: Axes


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, so that jit can hash it
class Layout:
    """How each leaf of a training run is divided over a mesh.

    mesh: the mesh.
    worker_axes: the data axes of the workers, each a shard group with a private gradient.
    shard_axes: the data axes that divide params or state.
    tables: the leaves whose rows are divided over the shard axes, whatever the way of sharding.
    gather_compressor, reduce_compressor: for the params that are gathered, and for the gradients
      that are reduced, over the shard axes; None sends arrays as they are.
    tx: the optimizer, whose attributes of parameters say which leading axes count layers.
    reduce_dtype: the dtype for adding and sending gradients over the shard axes; None: the
      gradients' dtype.
    compiler_axes: the data axes if the compiler divides the loss over them; none if each device
      runs the loss on its examples, inside `shard_map`.
    mean_axes: the worker axes of the mean that the loss takes of the gradients of large divided
      leaves (`ParamEntry.mean_axes`); none if the step averages all gradients after the loss.
    mean_dtype: the dtype for adding and sending these gradients over `mean_axes`; None: the
      gradients' dtype.
    state_memory: the memory of the large arrays of the optimizer's state; None: the device's.
    """

    mesh: Mesh
    worker_axes: Axes
    shard_axes: Axes
    tables: Pattern | None = None
    gather_compressor: Compressor | None = dataclasses.field(default=None, kw_only=True)
    reduce_compressor: Compressor | None = dataclasses.field(default=None, kw_only=True)
    tx: optax.GradientTransformation | None = dataclasses.field(default=None, kw_only=True)
    reduce_dtype: DType | None = dataclasses.field(default=None, kw_only=True)
    compiler_axes: Axes = dataclasses.field(default=Axes(), kw_only=True)
    mean_axes: Axes = dataclasses.field(default=Axes(), kw_only=True)
    mean_dtype: DType | None = dataclasses.field(default=None, kw_only=True)
    state_memory: str | None = dataclasses.field(default=None, kw_only=True)
    # The results of `describe`, by structure, shapes and dtypes of params.
    _described: dict[Any, PyTree] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def dense_param_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params as if it were no table, here P(), which
        keeps it whole, and masked leaves unchanged."""
        return tree.map_arrays(lambda x: P(), params)

    def dense_gradient_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf's gradient and moments, as if it were no table.
        Here it is the leaf's spec."""
        return self.dense_param_specs(params)

    def mark_stacked(self, params: Params) -> Params:
        """Put the leaves that the attributes of `tx` call stacked into a `Stacked`, and return
        packed params, or all params without `tx`, unchanged."""
        return mark_stacked_params(self.tx, params)

    @property
    def data_axes(self) -> Axes:
        """The axes that split the batch: the compiler's axes if it divides the loss, else the
        worker axes and then the shard axes."""
        return self.compiler_axes or mesh_axes.join_axes(self.worker_axes, self.shard_axes)

    @property
    def inner_axes(self) -> Axes:
        """The axes of the devices of one worker: all axes of the mesh but the worker axes."""
        return mesh_axes.exclude_axes(self.mesh.axis_names, self.worker_axes)

    @property
    def is_divided(self) -> bool:
        """Whether the devices of a worker keep shards of arrays, here whether there are shard
        axes."""
        return bool(self.shard_axes)

    @property
    def num_shards(self) -> int:
        """The number of devices that share a divided leaf, which is the product of the sizes of the
        shard axes."""
        return meshes.count_devices(self.mesh, self.shard_axes)

    def follow(self, params: Params) -> "Layout":
        """Return the layout for these params, which is here this layout, whatever the params
        are."""
        return self

    def describe(self, params: Params) -> PyTree:
        """Return a tree like params with a ParamEntry for each array and masked leaves unchanged,
        or raise a ValueError if a spec does not fit its leaf.

        All questions about a leaf are answered from it. It is made once for params of the same
        structure, shapes and dtypes.

        Raises:
          ValueError: the devices do not divide the rows of a table, or a spec does not fit a leaf.
        """
        leaves, structure = jax.tree.flatten(params)
        key = structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in self._described:
            self._described[key] = self._make_entries(params)
        return self._described[key]

    def _make_entries(self, params: Params) -> PyTree:
        """Make the ParamEntry of each array of params for `describe`, and return masked leaves
        unchanged."""
        stacked = contents.count_stacked_axes(self.mark_stacked(params))
        tables = patterns.match_names(self.tables, params, "tables")

        def make(place: tree.Place, x: Leaf, spec: P, gradient_spec: P) -> Leaf:
            if tree.is_masked(x):
                return x
            path, shape, dtype = str(place), jnp.shape(x), jnp.result_type(x)
            if path in tables:
                spec = gradient_spec = P(self.shard_axes)  # by rows
                check_fit(path, shape, spec, self.mesh, "tables")
            layers = stacked[place.number]
            size = math.prod(shape[layers:]) * dtype.itemsize
            mean_axes = Axes() if path in tables else self._choose_mean_axes(size, spec)
            arriving = spec if self.divisions(spec) else gradient_spec
            return ParamEntry(
                path, shape, dtype, spec, gradient_spec, arriving, layers, path in tables, mean_axes
            )

        specs = self.dense_param_specs(params), self.dense_gradient_specs(params)
        return tree.map_named(make, params, *specs)

    def _choose_mean_axes(self, size: int, spec: P) -> Axes:
        """Return `mean_axes` if a device keeps more than 64 KB a layer of a divided leaf, else no
        axes.

        Over these worker axes the gather of the leaf averages its gradient. The step averages small
        gradients by one all-reduce.

        Args:
          size: the bytes of a layer of the leaf.
          spec: how the leaf is divided.
        """
        divisions = self.divisions(spec)
        if not (self.mean_axes and divisions):
            return Axes()
        along = mesh_axes.join_axes(*(names for _, names in divisions))
        devices = meshes.count_devices(self.mesh, along)
        return self.mean_axes if size > SMALL_BYTES * devices else Axes()

    def param_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params, and masked leaves unchanged."""
        return jax.tree.map(lambda entry: entry.spec, self.describe(params))

    def gradient_specs(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient, and of the moments, of each leaf of params, and
        masked leaves unchanged."""
        return jax.tree.map(lambda entry: entry.gradient_spec, self.describe(params))

    def _entry_of_path(self, params: Params) -> dict[str, ParamEntry]:
        """Return a dict from the path of each leaf of params to its ParamEntry, without masked
        leaves."""
        return {entry.path: entry for entry in jax.tree.leaves(self.describe(params))}

    def state_specs(self, state: OptState, params: Params) -> PyTree:
        """Return the spec of each array of the state of all workers, divided over them if
        per-worker, and like its parameter's gradient where shapes fit.

        A per-worker array is divided over the worker axes, along its first axis. An array with the
        shape of its parameter, or of its leading axes as scales of rows have, is divided like the
        gradient of that parameter, also behind further leading axes such as a history's. An
        array of another shape is divided along its first dimension that the shard axes divide.
        """
        if not self.is_divided:
            return specs_over_workers(state, self.worker_axes)
        per_worker.check_wrappers("the optimizer", state)
        owners = self._entry_of_path(params)

        def state_spec(entry: Entry, x: Leaf) -> P:
            over = spec_over_workers(self.worker_axes, entry, x)
            if entry.param is None:
                return over
            p, spec = owners[entry.param], owners[entry.param].gradient_spec
            # 1. x lies on the mesh as the arrays of N workers along its first axis, (N·d, …), with
            #    over = P(worker axes); or once, (d, …), the same for all workers, with over = P().
            # 2. The array of a `Divided` has a row for each device of a worker, (devices, N·n).
            if len(over) == 2:
                return P(mesh_axes.join_axes(*spec), over[1])
            # 3. One worker has an array of `shape`, (d, …), and a gradient of shape `padded`, which
            #    its devices divide by `spec`.
            shape = _worker_shape(jnp.shape(x), over, self.mesh)
            padded = self.pad_shape(p.shape, spec)
            leading = _count_leading(shape, padded)
            # 4. x is like the gradient, behind leading axes that are whole: a device keeps the same
            #    shard of x as of the gradient.
            if shape[leading:] == padded:
                return _join_specs(over, P(*[None] * leading, *spec))
            # 5. x has only the padded layers in common with it: a device keeps its layers' entries.
            if padded != p.shape and shape[: len(spec)] == padded[: len(spec)]:
                return spec
            # 6. x has a number for each index of leading axes, such as the scale of a row: a device
            #    keeps the numbers of its shard.
            if shape == padded[: len(shape)]:
                return _join_specs(over, P(*spec[: len(shape)]))
            # 7. x has another shape, such as a number per column: if the gradient is divided, so is
            #    x, along any dimension that fits; else it is whole on each device of a worker.
            return _join_specs(over, self.spec_of_shape(shape)) if self.divisions(spec) else over

        return map_entries(state_spec, state, owners)

    def spec_of_shape(self, shape: tuple[int, ...], stacked: int = 0) -> P:
        """Return the spec that divides the first dimension whose size is a multiple of the number
        of shards, or P() if there is none.

        With P() the array is whole on every device. The leading `stacked` axes, which count layers,
        come last, so that each device has a shard of each layer.
        """
        order = [*range(stacked, len(shape)), *range(stacked)]
        fitting = [d for d in order if shape[d] and shape[d] % self.num_shards == 0]
        return P(*[None] * fitting[0], self.shard_axes) if fitting else P()

    def divisions(self, spec: P) -> list[Division]:
        """Return the dimensions that a spec divides over shard axes, each with these axes."""
        return mesh_axes.divisions_of(spec, self.shard_axes)

    def average_later(self) -> "Layout":
        """Return a copy of this layout without `mean_axes`, so that the step averages all gradients
        after the loss, or itself if it has none."""
        return dataclasses.replace(self, mean_axes=Axes()) if self.mean_axes else self

    def pad_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """Return an array's shape, with divided dimensions rounded up so that all shards have one
        size."""
        sizes = list(shape)
        for dimension, names in self.divisions(spec):
            count = meshes.count_devices(self.mesh, names)
            sizes[dimension] = -(-shape[dimension] // count) * count
        return tuple(sizes)

    def pad_state(self, state: OptState, params: Params) -> OptState:
        """Wrap each array of a state whose layers devices cannot divide evenly in a Padded, with
        zeros at the end.

        Arrays of the shape of their parameter are padded, and so are arrays with the same number of
        layers, such as preconditioners.
        """
        owners = self._entry_of_path(params)

        def pad(entry: Entry, x: Leaf) -> Leaf:
            if entry.param is None:
                return x
            p, spec = owners[entry.param], owners[entry.param].gradient_spec
            shape = self.pad_shape(p.shape, spec)
            leading = _count_leading(x.shape, p.shape)
            end = leading + len(spec)
            if shape == p.shape or x.shape[leading:end] != p.shape[: len(spec)]:
                return x
            return wrap_padded(x, end - 1, shape[len(spec) - 1])  # along the axis of layers

        return map_entries(pad, state, owners)

    def unpad_state(self, state: OptState) -> OptState:
        """Replace each Padded of a stored state by its array without padding, constrained to be
        divided along that axis, and return all else unchanged."""

        def unpad_leaf(x: Padded) -> jax.Array:
            spec = P(*[None] * x.axis, self.shard_axes)
            return meshes.constrain_sharding(unwrap_padded(x), self.mesh, spec)

        return map_padded(unpad_leaf, state)

    def group_of(self, params: Params) -> Devices | None:
        """Return the shard group of a worker, with the specs of its gradients, or None without
        worker axes or if the mesh has no axes beside them."""
        if not (self.worker_axes and self.inner_axes):
            return None
        by_path = (
            (entry.path, mesh_axes.restrict_spec(entry.gradient_spec, self.inner_axes))
            for entry in jax.tree.leaves(self.describe(params))
        )
        return Devices(self.mesh, self.inner_axes, tuple(by_path))

    def keep_shard_axes(self, specs: PyTree) -> PyTree:
        """Return specs with their shard axes alone, as a `shard_map` over these axes takes them,
        and None for a dimension without any."""
        restrict = functools.partial(mesh_axes.restrict_spec, names=self.shard_axes)
        return jax.tree.map(restrict, specs, is_leaf=mesh_axes.is_spec)

    def shardings(self, specs: PyTree, arrays: PyTree) -> PyTree:
        """Return the NamedSharding on the mesh of each array by its spec, which gets an entry for
        each axis if the mesh has explicit axes."""
        return jax.tree.map(
            lambda spec, x: meshes.make_sharding(self.mesh, spec, jnp.ndim(x)),
            specs, arrays, is_leaf=mesh_axes.is_spec,
        )  # fmt: skip

    def shapes(self, specs: PyTree, arrays: PyTree) -> PyTree:
        """Return a ShapeDtypeStruct of each array, with its placement on the mesh by its spec."""
        return jax.tree.map(
            lambda placement, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
            self.shardings(specs, arrays), arrays,
        )  # fmt: skip

    def make_shardings(self, specs: PyTree) -> PyTree:
        """Return the NamedSharding on the mesh of each PartitionSpec of a tree, whose entries it
        does not change."""
        make = functools.partial(NamedSharding, self.mesh)
        return jax.tree.map(make, specs, is_leaf=mesh_axes.is_spec)

    def in_memory(self, shardings: PyTree, state: OptState) -> PyTree:
        """Return the shardings of an optimizer's state with `state_memory` for large arrays, but
        for those that are padded, and unchanged without one."""
        return shardings if self.state_memory is None else place_on_host(shardings, state)

    def place_params(self, params: Params) -> Params:
        """Copy each leaf of params to the mesh, divided by its spec, and return traced leaves
        unchanged."""
        placements = self.shardings(self.param_specs(params), params)
        return jax.tree.map(lambda placement, x: copy_to_devices(x, placement), placements, params)

    def replicate(self, x: PyTree) -> PyTree:
        """Copy arrays whole to every device of the mesh, and return traced arrays unchanged."""
        return replicate(x, self.mesh)

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        """Run `init` in jit, and return the state of all workers, padded and placed by its specs,
        or raise a ValueError if its exchanges do not fit the axes.

        Each device makes only its shards of divided leaves, so no device ever has a whole one.

        Args:
          init: returns the state of one worker.
          params: the params, placed on the mesh.

        Raises:
          ValueError: the state has per-worker arrays, and there are no worker axes.
        """
        all_workers = self.init_of_all_workers(init)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        shapes = jax.eval_shape(all_workers, like if self.compiler_axes else params)
        self._check_axes_of_exchanges(shapes)
        specs = self.state_specs(shapes, params)
        run: Callable[[Params], OptState] = all_workers
        if self.compiler_axes:
            run = meshes.hide_explicit_axes(all_workers, self.mesh, specs)
        placement = self.in_memory(self.shardings(specs, shapes), shapes)
        return jax.jit(run, out_shardings=placement)(params)

    def init_of_all_workers(
        self, init: Callable[[Params], OptState]
    ) -> Callable[[Params], OptState]:
        """Return an `init` of the padded state of all workers, from that of one worker."""
        widened = widen_init(self._reshape_to_leaves(init), self.mesh, self.worker_axes)
        return lambda params: self.pad_state(widened(params), params)

    def _check_axes_of_exchanges(self, state: OptState) -> None:
        """Raise a ValueError if a transform exchanges over shard axes or keeps per-worker arrays
        without worker axes, or does either in a step of the compiler."""
        divided = [axis for axis in per_worker.join_exchange_axes(state) if axis in self.shard_axes]
        if self.compiler_axes and (
            per_worker.has_exchange(state) or per_worker.has_per_worker_state(state)
        ):
            raise ValueError(
                "tx exchanges gradients itself, or keeps a state on each worker, as dgc_momentum "
                'does, which cannot be combined with partitioner="compiler": there are no workers, '
                "only the mean gradient. Leave the exchange out"
            )
        if divided:
            raise ValueError(
                f"shard: tx exchanges gradients over axis {divided[0]!r}, over which params or "
                "state are divided. No device has a whole gradient there, and the residual of the "
                "exchange would be as large as one. Divide over other axes, "
                "shard=sharded(..., axis=), or leave the exchange out"
            )
        if not self.worker_axes and any(x.kept == "per_worker" for x in inventory(state)):
            raise ValueError(
                "shard: tx keeps its own state on each worker, but no worker axis is left, since "
                f"params or state are divided over all data axes, {(*self.data_axes,)}. Name the "
                "axes that divide them, shard=sharded(..., axis=), or leave shard out"
            )

    def _reshape_to_leaves(
        self, init: Callable[[Params], OptState]
    ) -> Callable[[Params], OptState]:
        """Wrap `init` so that flat per-worker arrays get the shape of their leaf, which specs can
        divide, or return it unchanged without worker axes or shards.

        A shard of a leaf is not a contiguous range of the flat array.
        """

        def init_in_shapes(params: Params) -> OptState:
            state, group = init(params), self.group_of(params)
            if group is None:  # each worker is one device
                return state
            flatten, owners = group.flatten_shards, self._entry_of_path(params)

            def shape(entry: Entry, x: Leaf) -> Leaf:
                if entry.param is None or entry.kept != "per_worker":
                    return x
                p = owners[entry.param]
                is_flat = jnp.shape(x) == (math.prod(p.shape),)
                return jnp.reshape(x, p.shape) if is_flat and any(p.gradient_spec) else x

            state = per_worker.map_divided(
                lambda node: node._replace(value=flatten(node.value)), state
            )
            return map_entries(shape, state, owners)

        return init_in_shapes if self.worker_axes and self.is_divided else init


class Replicated(Layout):
    """The layout that keeps params and state whole on every device of a worker. Only rows of tables
    are divided."""


def _count_leading(shape: tuple[int, ...], of: tuple[int, ...]) -> int:
    """Return how many leading axes `shape` has in front of `of`, or 0 if it does not end with
    `of`."""
    extra = len(shape) - len(of)
    return extra if extra > 0 and shape[extra:] == of else 0


def _worker_shape(shape: tuple[int, ...], over: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one worker's part of an array of `shape`, which `over` divides over
    workers, or `shape` unchanged if `over` is P()."""
    if not any(over):
        return shape
    return (shape[0] // meshes.count_devices(mesh, mesh_axes.to_axes(over[0])), *shape[1:])


def _join_specs(over: P, spec: P) -> P:
    """Return the spec of an array that is divided over workers by `over` and within each by `spec`,
    or `spec` unchanged if `over` is P(), and P() if neither divides it: JAX returns arrays with P()
    from a step, and would compile the next one again for P(None)."""
    if not any(over):
        return spec if any(spec) else P()
    first, *remaining = spec or (None,)
    return P(mesh_axes.join_axes(over[0], first), *remaining)


def check_fit(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh, argument: str) -> None:
    """Raise a ValueError if a spec has more entries than a leaf has axes, or does not divide an
    axis evenly. The error names the leaf, its shape and the spec."""
    if len(spec) > len(shape):
        raise ValueError(
            f"{argument}: {spec} has more entries than leaf {path!r} has axes; its shape is {shape}"
        )
    for dimension, entry in enumerate(spec):
        count = meshes.count_devices(mesh, mesh_axes.to_axes(entry))
        if shape[dimension] % count:
            raise ValueError(
                f"{argument}: dimension {dimension} of leaf {path!r}, which has shape {shape}, "
                f"must be divisible by the {count} devices along {entry!r}; its spec is {spec}, "
                f"and the axes of the mesh have the sizes {dict(mesh.shape)}"
                + (". Add rows that are never looked up" if argument == "tables" else "")
            )
