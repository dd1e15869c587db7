"""The costs of each way of sharding a model: bytes on a device, and bytes sent per step."""

import contextlib
import math
from collections.abc import Callable, Collection
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.collectives.axes import Axes, AxisName, exclude_axes, is_spec, join_axes, restrict_spec
from optfn.collectives.packets import packet_bytes
from optfn.core import numerics, tree
from optfn.core.types import Leaf, OptState, Params, PyTree
from optfn.interop.modules import check_split
from optfn.jaxprs.equations import Equations
from optfn.leaves import contents, patterns
from optfn.leaves.packed import pack
from optfn.leaves.patterns import Pattern
from optfn.optimizers.sgd import sgd
from optfn.parallel.mesh_layout import Layout
from optfn.parallel.sharding import Kind, Sharded, layout_of
from optfn.parallel.traffic import all_reduce_bytes, exchange_bytes
from optfn.sparse.tables import bytes_of_round, num_arrived
from optfn.state.inventory import whole_matrices
from optfn.state.per_worker import Exchanged, exchanged_axes
from optfn.state.placement import num_workers
from optfn.train.local_steps import LocalSteps


class MemoryPlan(NamedTuple):
    """Bytes of a training step on each device.

    params: bytes of the parameters.
    state: bytes of the optimizer's state.
    gradients: bytes of the gradient that each worker computes, before it is reduced. The gradient
      of a leaf that the update does not read, such as a frozen one, is neither computed nor sent.
    sent: bytes that each device sends in a call (a step, or a round of local steps), in a ring. It
      counts means, rows of tables, and the packets of a transform that exchanges gradients itself:
      those of its last phase if it says how many bytes they have (`optfn.parallel.traffic`), else
      those of a mean. It does not count bytes sent between the stages of a pipeline, nor in the
      update of the following leaves:
    gathered_in_update: the paths of divided matrices that the optimizer treats whole, as `muon`
      does. The update sends several times the bytes of each such leaf, and nothing if
      `sharded(..., whole=)` names it.
    """

    params: int
    state: int
    gradients: int
    sent: int
    gathered_in_update: tuple[str, ...] = ()


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
) -> MemoryPlan:
    """Return the bytes that a way of sharding a model takes, without allocating anything.

    With N workers, P bytes of params, G of gradients and S of state:

        shard       params  state  sent
        None        P       S      2(N − 1)/N·G
        "state"     P       S/N    (N − 1)/N·(G + P)
        "params"    P/N     S/N    (N − 1)/N·(G + P)

    Exceptions to this table:

    * With "params" a `Stacked` is sent P once more, because `scan_layers` gathers its layers again
      in the backward pass; and with `sharded(..., whole=)` 2P/N more, because each layer is divided
      first.
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
      local_steps: as for `make_train_step`; `sent` is then that of a round. With "state" params are
        gathered once in each step, and once more after the round.
      outer: as for `make_train_step`.

    Raises:
      TypeError: params are a model that must be split first; the error has the line that does so.
    """
    tx = core.check_transform("plan_memory: tx", tx)
    check_split("plan_memory", params)
    mesh = cast("Mesh", mesh)  # only the sizes of its axes are read
    num_workers(mesh, data_axis)  # the mesh has these axes
    params = jax.eval_shape(pack if packed else lambda x: x, params)
    divides = shard is not None or shard_tables
    layout = layout_of(shard, mesh, data_axis, tables if divides else None)
    init: Callable[[Params], OptState] = tx.init
    if local_steps > 1:
        inner, outer = map(optax.with_extra_args_support, (tx, outer or sgd(1.0)))
        init = LocalSteps(local_steps, inner, outer, layout).init
    read, state = _read_gradients(tx, params), jax.eval_shape(layout.stored_init(init), params)
    specs, grad_specs = layout.param_specs(params), layout.gradient_specs(params)
    stacked, rows = contents.stacked_axes(params), patterns.match_names(tables, params, "tables")
    exchanged = exchanged_axes(_without_unknown(state), params)
    once = packed or (isinstance(shard, Sharded) and shard.gathers_once)
    as_rows = rows if lookups and local_steps == 1 else frozenset[str]()
    sent, gradients = exchange_bytes(_shard_state(init, params, layout, as_rows), mesh), 0
    looked_up = _Rows(layout, lookups or 0, microbatches, local_steps)
    for place, p, spec, grad_spec in tree.items(params, specs, grad_specs):
        if tree.is_masked(p) or not tree.is_inexact(p):
            continue
        undivided = restrict_spec(grad_spec, exclude_axes(join_axes(*grad_spec), layout.data_axes))
        whole = _bytes_on_device(p, undivided, mesh)
        done = Axes() if str(place) in as_rows else exchanged[place.number]  # rows go to all
        workers = num_workers(mesh, exclude_axes(layout.worker_axes, done))
        if str(place) in rows:
            sent += looked_up.sent(whole, p.shape[0], workers)
            continue
        num_stacked = 0 if once or value_and_grad else stacked[place.number]
        leaf = _Leaf(layout, spec, grad_spec, p.shape, num_stacked, local_steps, str(place) in read)
        sent += leaf.sent(whole, 1 if once else microbatches, workers)
        gradients += whole * leaf.is_read
    return MemoryPlan(
        _bytes_on_device(params, specs, mesh),
        _bytes_on_device(state, layout.state_specs(state, params), mesh),
        gradients,
        round(sent),
        _gathered_in_update(state, params, grad_specs),
    )


def _read_gradients(tx: optax.GradientTransformation, params: Params) -> Collection[str]:
    """Return the paths of the leaves whose gradient an update reads; all if it is not known."""
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
    with contextlib.suppress(Exception):  # outside of a mesh, an exchange cannot be traced
        program = Equations(update, arrays, jax.eval_shape(tx.init, params), params)
        needed = program.dependencies(program.outputs)
        inputs = zip(named, program.inputs, strict=False)
        return [path for (path, _), variable in inputs if variable in needed]
    return [path for path, _ in named]


def _without_unknown(state: OptState) -> OptState:
    """Return a state without the marks of exchanges of unknown bytes, which count as means."""

    def known(x: PyTree) -> PyTree:
        return None if isinstance(x, Exchanged) and x.traffic == () else x

    return jax.tree.map(known, state, is_leaf=lambda x: isinstance(x, Exchanged))


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

    def sent(self, whole: int, num_rows: int, workers: int) -> float:
        """Return the bytes that a device sends for a table.

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
        if self.local_steps > 1:  # the drift of a table is a dense array
            drift = all_reduce_bytes(whole / owners, workers)
            return float(self.local_steps * to_owners + drift)
        return float(to_owners + (workers - 1) * self.microbatches * arrived * (4 + row))


def _shard_state(
    init: Callable[[Params], OptState],
    params: Params,
    layout: Layout,
    as_rows: Collection[str],
) -> OptState:
    """Return the optimizer state for one device's shards of params, whose gradients are exchanged.

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
        shape = layout.padded_shape(x.shape, spec)
        placement = NamedSharding(layout.mesh, restrict_spec(spec, layout.inner_axes))
        return jax.ShapeDtypeStruct(placement.shard_shape(shape), x.dtype)

    return jax.eval_shape(init, tree.map_named(shard, params, layout.gradient_specs(params)))


def _gathered_in_update(state: OptState, params: Params, grad_specs: PyTree) -> tuple[str, ...]:
    """Return the paths of divided matrices that a rule treats whole."""
    stacked = contents.stacked_axes(params)
    divided = {
        str(place)
        for place, _, spec in tree.items(params, grad_specs)
        if is_spec(spec) and any(spec[stacked[place.number] :])
    }
    whole = whole_matrices(state, tree.paths(params))
    return tuple(path for path in whole if path in divided)


class _Leaf(NamedTuple):
    """A leaf of params, and how it is sent.

    layout: how params are divided.
    spec: the PartitionSpec of the leaf.
    grad_spec: the PartitionSpec of its gradient.
    shape: its shape.
    stacked: how many of its axes count layers, which are gathered one at a time.
    steps: the number of steps in a call.
    is_read: whether the update reads its gradient, which is else not reduced.
    """

    layout: Layout
    spec: P
    grad_spec: P
    shape: tuple[int, ...]
    stacked: int
    steps: int
    is_read: bool

    def sent(self, whole: float, passes: int, workers: int) -> float:
        """Return the bytes that a device sends in a call.

        Args:
          whole: the bytes of the leaf, before it is divided over the data axes.
          passes: how often the gradient of a divided leaf is reduced.
          workers: over how many workers the gradient is averaged, once in a call.
        """
        n, steps, size = self.layout.num_shards, self.steps, math.prod(self.shape)
        workers = workers if self.is_read or steps > 1 else 1  # the drift of a round is averaged
        if not self.layout.divisions(self.grad_spec):
            reduced = steps * all_reduce_bytes(whole, n) if self.is_read else 0.0
            return float(reduced + all_reduce_bytes(whole, workers))
        once = (n - 1) / n * whole
        padded_shape = self.layout.padded_shape(self.shape, self.grad_spec)
        padded = once * math.prod(padded_shape) / max(1, size)
        is_divided = bool(self.layout.divisions(self.spec))
        layers = math.prod(self.shape[: self.stacked]) if is_divided else 1
        gather, reduce = (
            packet_bytes(codec, size, n, once if is_divided else padded, layers)
            for codec in (self.layout.gather, self.layout.reduce)
        )
        reduce = reduce if self.is_read else 0.0
        if not is_divided:
            # Params are gathered in each step of a round, and once more after it.
            sent = steps * reduce + (steps + (steps > 1)) * gather
        else:
            sent = passes * reduce + self._gathers(passes) * gather
            # Gradient and params are sent to the devices with their layers, and the update back.
            if self.spec != self.grad_spec and self.is_read:
                sent += 3 * padded / n
            sent *= steps
        return float(sent + all_reduce_bytes(whole / n, workers))

    def _gathers(self, passes: int) -> float:
        """Return how often a divided leaf is gathered; an all-to-all is 1/N of a gather."""
        n = self.layout.num_shards
        if not self.stacked:
            return passes
        if all(dimension for dimension, _ in self.layout.divisions(self.spec)):
            return 2 * passes  # forwards and backwards
        if not any(size % n == 0 for size in self.shape[1:]):
            return passes  # all layers at once
        # Params are sent as shards of each layer once for all passes, gradients back in each.
        return 2 * passes + (1 + passes) / n


def _bytes_on_device(values: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes of arrays on each device."""

    def size(spec: P, x: Leaf) -> int:
        whole = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        return whole // num_workers(mesh, join_axes(*spec))

    return sum(jax.tree.leaves(jax.tree.map(size, specs, values, is_leaf=is_spec)))
