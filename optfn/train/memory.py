"""A plan of a training step: the bytes that each device keeps and sends, by way of sharding."""

import contextlib
import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.collectives.axes import Axes, AxisName, exclude_axes, is_spec, join_axes, restrict_spec
from optfn.collectives.mesh import count_devices
from optfn.collectives.packets import packet_bytes
from optfn.core import numerics, tree
from optfn.core.types import Batch, DType, Leaf, OptState, Params, PyTree
from optfn.interop.modules import check_split
from optfn.jaxprs.equations import Equations
from optfn.leaves import contents, patterns
from optfn.leaves.packed import pack
from optfn.leaves.patterns import Pattern
from optfn.optimizers.sgd import sgd
from optfn.parallel.mesh_layout import Layout
from optfn.parallel.sharding import Kind, Sharded, check_reduce_dtype, layout_of
from optfn.parallel.traffic import all_reduce_bytes, exchange_bytes
from optfn.sparse.tables import bytes_of_round, num_arrived
from optfn.state.inventory import find_whole_matrices
from optfn.state.per_worker import Exchanged, find_exchange_axes
from optfn.train.local_steps import LocalSteps
from optfn.train.loss_gathers import LeafGathers, find_gathers
from optfn.train.memory_plan import MemoryPlan


def plan_memory(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh | AbstractMesh,
    *,
    shard: Kind | None = None,
    data_axis: AxisName = "data",
    tables: Pattern | None = None,
    shard_tables: bool = False,
    lookups: int | None = None,
    microbatches: int = 1,
    packed: bool = False,
    value_and_grad: bool = False,
    local_steps: int = 1,
    outer: optax.GradientTransformation | None = None,
    reduce_dtype: DType | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Batch = None,
    model_state: PyTree = None,
) -> MemoryPlan:
    """Return the bytes that a way of sharding a model takes, without allocating anything.

    With N workers, P bytes of params, G of gradients and S of state:

        shard       params  state  sent
        None        P       S      2(N − 1)/N·G
        "state"     P       S/N    (N − 1)/N·(G + P)
        "params"    P/N     S/N    (N − 1)/N·(G + P)

    Exceptions to this table:

    * With "params" a `Stacked`, or with `loss_fn` each leaf that a scan takes, is sent P once more,
      because the backward pass gathers layers again. With `sharded(..., whole=)`, or if devices
      divide the layers, each layer is divided first, which takes 2P/N more.
    * With `sharded(kind, axis=)` N is the number of devices that divide a leaf. If the remaining
      axes of `data_axis` have W workers, each device also sends 2(W − 1)/W of its shard of G.
    * A leaf that N does not divide, or that is too small to divide (see `sharded`), counts whole,
      and is averaged by an all-reduce.
    * If N does not divide the L layers of a leaf in `sharded(..., whole=)`, S and the bytes sent
      for "state" count ⌈L/N⌉·N layers. For "params" 3/N of the padded bytes are sent in addition.
    * With `gather=` or `reduce=` P or G are the bytes of their packets.

    Activations and the batch are not counted.

    Args:
      tx: an optimizer, however wrapped.
      params: arrays or ShapeDtypeStructs.
      mesh: a mesh, or a `jax.sharding.AbstractMesh` of devices that you do not have yet.
      shard: as for `make_train_step`.
      data_axis: as for `make_train_step`.
      tables: as for `make_train_step`; with `shard` or `shard_tables` their rows are divided.
      shard_tables: as for `make_train_step`.
      lookups: n, how many ids a device looks up in each table in a step; None: rows are not
        counted. With rows of b bytes, the gradients of whole tables take (N − 1)·n·(b + 4) bytes.
        If the rows are divided, each owner is asked for c ids, forward and backward, which takes
        2(N − 1)·c·(b + 4) bytes. c is somewhat more than n/N if all ids are different, and less if
        some are repeated.
      microbatches: as for `make_train_step`. With "params" each of them gathers params and reduces
        gradients, unless you use `sharded(..., gather_once=True)`.
      packed: as for `make_train_step`.
      value_and_grad: whether you pass a `value_and_grad` to the step, which sees whole params.
      local_steps: as for `make_train_step`; `sent` then counts a round. With "state" params are
        gathered once in each step, and once more after the round.
      outer: as for `make_train_step`.
      reduce_dtype: as for `make_train_step`; G counts in this dtype where gradients are sent.
      loss_fn: (params, batch) -> loss, or (loss, aux); with `model_state` (params, model_state,
        batch) -> (loss, model_state). It is traced, to find which leaves a scan gathers layer by
        layer, and which lines gather a leaf whole. None: each `Stacked` counts as scanned once, and
        each other leaf as gathered whole; its gradient counts whole.
      batch: the batch of all devices, arrays or their shapes, as for `TrainStep.lower`. `loss_fn`
        is traced with the examples of one microbatch of a device, rounded up.
      model_state: the model state for `loss_fn`, arrays or their shapes; None: it takes none.

    Raises:
      TypeError: params are a model that must be split first; the error has the line that does so.
      ValueError: `loss_fn` needs `batch`, which is missing.
    """
    tx = core.check_transform("plan_memory: tx", tx)
    check_split("plan_memory", params)
    mesh = cast("Mesh", mesh)  # only the sizes of its axes are read
    count_devices(mesh, data_axis)  # raises unless the mesh has these axes
    params = jax.eval_shape(pack if packed else lambda x: x, params)
    divided_tables = tables if shard is not None or shard_tables else None
    dtype = check_reduce_dtype("plan_memory: reduce_dtype", reduce_dtype)
    layout = layout_of(shard, mesh, data_axis, divided_tables, tx, dtype)
    init = _choose_init(tx, local_steps, outer or sgd(1.0), layout)
    read = _find_read_gradients(tx, params)
    state = jax.eval_shape(layout.make_padded_init(init), params)
    specs, grad_specs = layout.param_specs(params), layout.gradient_specs(params)
    stacked = contents.count_stacked_axes(layout.mark_stacked(params))
    rows = patterns.match_names(tables, params, "tables")
    exchanged = find_exchange_axes(_drop_unknown(state), params)
    once = packed or (isinstance(shard, Sharded) and shard.is_gathered_once)
    as_rows = rows if lookups and local_steps == 1 else frozenset[str]()
    sent, gradients = exchange_bytes(_shard_state(init, params, layout, as_rows), mesh), 0
    looked_up = _Rows(layout, lookups or 0, microbatches, local_steps)
    gathers: dict[str, LeafGathers] = {}
    if loss_fn is not None and not (once or value_and_grad):
        parts = count_devices(mesh, layout.data_axes) * microbatches * local_steps
        batch = jax.tree.map(functools.partial(_take_part, parts), batch)
        arguments = [batch] if model_state is None else [model_state, batch]
        gathers = find_gathers(loss_fn, params, arguments, layout)
    for place, p, spec, grad_spec in tree.items(params, specs, grad_specs):
        if tree.is_masked(p) or not tree.is_inexact(p):
            continue
        undivided = restrict_spec(grad_spec, exclude_axes(join_axes(*grad_spec), layout.data_axes))
        whole = _count_bytes(p, undivided, mesh)
        # `exchange_bytes` has counted the workers of an exchange; rows go to all workers.
        done = Axes() if str(place) in as_rows else exchanged[place.number]
        workers = count_devices(mesh, exclude_axes(layout.worker_axes, done))
        if str(place) in rows:
            sent += looked_up.count_sent(whole, p.shape[0], workers)
            continue
        num_stacked = 0 if once or value_and_grad else stacked[place.number]
        leaf_gathers = gathers.get(str(place), _SCANNED if num_stacked else _WHOLE)
        num_stacked = max(num_stacked, 1) if leaf_gathers.scans else 0
        widths = tuple(_widen(p.dtype, x) for x in (layout.reduce_dtype, dtype))
        leaf = _Leaf(
            layout, spec, grad_spec, p.shape, num_stacked, leaf_gathers, local_steps,
            str(place) in read, *widths,
        )  # fmt: skip
        sent += leaf.count_sent(whole, 1 if once else microbatches, workers)
        held = leaf.count_held(whole) if str(place) in gathers else whole
        gradients += held if leaf.is_read else 0
    return MemoryPlan(
        _count_bytes(params, specs, mesh),
        _count_bytes(state, layout.state_specs(state, params), mesh),
        gradients,
        round(sent),
        _find_gathered(state, layout.mark_stacked(params), grad_specs),
        {path: x.whole for path, x in gathers.items() if x.whole is not None},
    )


def _take_part(parts: int, x: Leaf) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a part of an array's examples; a scalar has no parts."""
    shape = jnp.shape(x)
    first = [-(-shape[0] // parts)] if shape else []
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return jax.ShapeDtypeStruct((*first, *shape[1:]), dtype)


def _choose_init(
    tx: optax.GradientTransformation,
    local_steps: int,
    outer: optax.GradientTransformation,
    layout: Layout,
) -> Callable[[Params], OptState]:
    """Return the optimizer's `init`; with several local steps, the `init` of a round."""
    if local_steps == 1:
        return tx.init
    inner, outer = map(optax.with_extra_args_support, (tx, outer))
    return LocalSteps(local_steps, inner, outer, layout).init


def _find_read_gradients(tx: optax.GradientTransformation, params: Params) -> Collection[str]:
    """Return the paths of leaves whose gradients the update reads, by tracing it;
    of all leaves if it cannot be traced.

    An exchange cannot be traced outside of a mesh.
    """
    named = [(str(place), p) for place, p in tree.items(params) if tree.is_inexact(p)]
    extended = optax.with_extra_args_support(tx)

    def update(arrays: list[jax.Array], state: OptState, params: Params) -> PyTree:
        remaining = iter(arrays)

        def gradient(p: Leaf) -> Leaf:
            return next(remaining) if tree.is_inexact(p) else numerics.float0_zeros(p.shape)

        grads, loss = jax.tree.map(gradient, params), jnp.zeros(())
        extra = {"value": loss, "grad": grads, "value_fn": lambda params: loss}
        return extended.update(grads, state, params, **extra)

    arrays = [p for _, p in named]
    # A transform of another library may fail in any way here; its gradients then all count.
    with contextlib.suppress(Exception):
        program = Equations(update, arrays, jax.eval_shape(tx.init, params), params)
        needed = program.find_dependencies(program.outputs)
        inputs = zip(named, program.inputs, strict=False)
        return [path for (path, _), variable in inputs if variable in needed]
    return [path for path, _ in named]


def _drop_unknown(state: OptState) -> OptState:
    """Drop the marks of exchanges that do not say how many bytes they send.

    The leaves of such an exchange then count as means.
    """

    def drop(x: PyTree) -> PyTree:
        return None if isinstance(x, Exchanged) and x.traffic == () else x

    return jax.tree.map(drop, state, is_leaf=lambda x: isinstance(x, Exchanged))


# What counts for a `Stacked`, and for another leaf, if the loss is not given.
_SCANNED, _WHOLE = LeafGathers(1, None), LeafGathers(0, "")


class _Rows(NamedTuple):
    """The rows of tables that a device looks up in a call.

    layout: where the rows of tables are.
    lookups: how many ids a device looks up in a step.
    microbatches: the number of microbatches, which look up rows one after another.
    local_steps: the number of steps in a call.
    """

    layout: Layout
    lookups: int
    microbatches: int
    local_steps: int

    def count_sent(self, whole: int, num_rows: int, workers: int) -> float:
        """Return the bytes that a device sends in a call for the rows of a table, or for its mean.

        A divided table sends ids and rows to their owners and back; of a whole one, workers gather
        the rows of all gradients. A round of local steps averages the table as a dense array.

        Args:
          whole: the bytes of the table.
          num_rows: the number of its rows.
          workers: over how many workers gradients are averaged.
        """
        row, owners = whole // max(1, num_rows), self.layout.num_shards
        ids = self.lookups // self.microbatches
        to_owners, arrived = 0, ids
        if self.layout.tables is not None and ids:
            to_owners = self.microbatches * bytes_of_round(ids, owners, row)
            arrived = num_arrived(ids, owners, num_rows)
        if self.local_steps > 1:  # the pseudo-gradient of a table is a dense array
            averaged = all_reduce_bytes(whole / owners, workers)
            return float(self.local_steps * to_owners + averaged)
        return float(to_owners + (workers - 1) * self.microbatches * arrived * (4 + row))


def _shard_state(
    init: Callable[[Params], OptState],
    params: Params,
    layout: Layout,
    as_rows: Collection[str],
) -> OptState:
    """Return the shapes of the optimizer's state if params had the shapes of one device's gradient
    shards.

    An exchange of shards declares its packets in this state. Leaves in `as_rows` are masked.

    Args:
      init: the function that makes the optimizer's state.
      params: the shapes of params.
      layout: how params are divided.
      as_rows: the paths of leaves whose gradients are sent as rows.
    """

    def shard(place: tree.Place, x: Leaf, spec: P) -> Leaf:
        if tree.is_masked(x):
            return x
        if str(place) in as_rows:
            return optax.MaskedNode()
        shape = layout.pad_shape(x.shape, spec)
        placement = NamedSharding(layout.mesh, restrict_spec(spec, layout.inner_axes))
        return jax.ShapeDtypeStruct(placement.shard_shape(shape), x.dtype)

    return jax.eval_shape(init, tree.map_named(shard, params, layout.gradient_specs(params)))


def _find_gathered(state: OptState, params: Params, grad_specs: PyTree) -> tuple[str, ...]:
    """Return the paths of matrices that devices divide, but whose rule needs them whole.

    A leaf that is divided only along its axes of stacked layers has whole matrices.
    """
    stacked = contents.count_stacked_axes(params)
    divided = set()
    for place, _, spec in tree.items(params, grad_specs):
        if is_spec(spec) and any(spec[stacked[place.number] :]):
            divided.add(str(place))
    whole = find_whole_matrices(state, tree.paths(params))
    return tuple(path for path in whole if path in divided)


class _Leaf(NamedTuple):
    """A leaf of params, and how it is sent.

    layout: how params are divided.
    spec: the PartitionSpec of the leaf.
    grad_spec: the PartitionSpec of its gradient.
    shape: its shape.
    stacked: how many of its axes count layers, which are gathered one at a time.
    gathers: what the loss gathers of it.
    steps: the number of steps in a call.
    is_read: whether the update reads the gradient. If not, XLA removes it with its reduction.
    over_shards: the bytes of the gradient where shards are reduced, for a byte of the leaf.
    over_workers: likewise where the gradient is averaged over the workers.
    """

    layout: Layout
    spec: P
    grad_spec: P
    shape: tuple[int, ...]
    stacked: int
    gathers: LeafGathers
    steps: int
    is_read: bool
    over_shards: float
    over_workers: float

    def count_sent(self, whole: float, passes: int, workers: int) -> float:
        """Return the bytes that a device sends in a call to gather a leaf and to reduce its
        gradient.

        Args:
          whole: the bytes of the leaf, before it is divided over the data axes.
          passes: how often the gradient of a divided leaf is reduced.
          workers: over how many workers the gradient is averaged, once in a call.
        """
        n, steps, size = self.layout.num_shards, self.steps, math.prod(self.shape)
        averaged = whole * (self.over_workers if steps == 1 else 1)
        if not self.is_read and steps == 1:
            workers = 1  # nothing is averaged; a round averages the pseudo-gradient in any case
        if not self.layout.divisions(self.grad_spec):
            each = all_reduce_bytes(whole * self.over_shards, n)
            reduced = steps * each if self.is_read else 0.0
            return float(reduced + all_reduce_bytes(averaged, workers))
        once = (n - 1) / n * whole
        padded_shape = self.layout.pad_shape(self.shape, self.grad_spec)
        padded = once * math.prod(padded_shape) / max(1, size)
        is_divided = bool(self.layout.divisions(self.spec))
        layers = math.prod(self.shape[: self.stacked]) if is_divided else 1
        exact = once if is_divided else padded
        gather, reduce = (
            packet_bytes(codec, size, n, width * exact, layers)
            for codec, width in (
                (self.layout.gather_compressor, 1),
                (self.layout.reduce_compressor, self.over_shards),
            )
        )
        reduce = reduce if self.is_read else 0.0
        if not is_divided:
            # Params are gathered in each step of a round, and once more after it.
            gathers = steps + 1 if steps > 1 else 1
            sent = steps * reduce + gathers * gather
        else:
            sent = passes * reduce + self._count_gathers(passes) * gather
            # Gradient and params are sent to the devices with their layers, and the update back.
            if self.spec != self.grad_spec and self.is_read:
                sent += 3 * padded / n
            sent *= steps
        return float(sent + all_reduce_bytes(averaged / n, workers))

    def count_held(self, whole: int) -> int:
        """Return the bytes of the gradient that a device holds at once, of `whole` bytes.

        The backward pass of a scan reduces the gradient of each layer before it computes the next,
        so a device holds one layer, and its shard of all layers.
        """
        if not self.gathers.scans or self.gathers.whole is not None or not self._is_layered():
            return whole
        return whole // math.prod(self.shape[: self.stacked]) + whole // self.layout.num_shards

    def _is_layered(self) -> bool:
        """Tell whether a scan can gather one layer at a time: devices divide a layer, or could."""
        n = self.layout.num_shards
        inside = all(dimension for dimension, _ in self.layout.divisions(self.spec))
        return inside or any(size % n == 0 for size in self.shape[1:])

    def _count_gathers(self, passes: int) -> float:
        """Return how often a divided leaf is gathered in a step:
        once per pass, or layer by layer twice per pass.

        A scan gathers it layer by layer, and again in the backward pass. If it is divided by
        layers, an all-to-all, 1/N of a gather, divides each layer first.
        """
        n = self.layout.num_shards
        whole = passes if self.gathers.whole is not None else 0.0
        scans = self.gathers.scans
        if all(dimension for dimension, _ in self.layout.divisions(self.spec)):
            return whole + scans * 2 * passes  # forwards and backwards
        if not self._is_layered():
            return whole + scans * passes  # all layers at once
        # Params are sent as shards of each layer once for all passes, gradients back in each.
        return whole + scans * (2 * passes + (1 + passes) / n)


def _widen(given: DType, reduced: DType | None) -> float:
    """Return the bytes of a dtype that gradients are reduced in, for a byte of their own dtype."""
    if reduced is None or not jnp.issubdtype(given, jnp.floating):
        return 1.0
    return jnp.dtype(reduced).itemsize / jnp.dtype(given).itemsize


def _count_bytes(values: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes of arrays on each device, divided by the axes of their PartitionSpecs."""

    def size(spec: P, x: Leaf) -> int:
        whole = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        return whole // count_devices(mesh, join_axes(*spec))

    return sum(jax.tree.leaves(jax.tree.map(size, specs, values, is_leaf=is_spec)))
