"""A plan of a training step: the bytes that each device keeps and sends, by way of sharding."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from optfn import core
from optfn.core import leafwise, tree
from optfn.core.types import Batch, DType, OptState, Params, PyTree
from optfn.interop.modules import check_split
from optfn.leaves import patterns
from optfn.leaves.packed import pack
from optfn.leaves.patterns import Pattern
from optfn.loss.jaxprs.equations import Equations
from optfn.loss.jaxprs.liveness import find_live
from optfn.loss.jaxprs.primitives import Jaxpr, as_collective, count_moved
from optfn.loss.scans import RecordedGather, record_gathers
from optfn.mesh.collectives.axes import Axes, AxisName, exclude_axes, join_axes, restrict_spec
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.compilers import memories
from optfn.mesh.compilers.chips import find_chip
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.layout.sharding import Kind
from optfn.mesh.state.inventory import find_whole_matrices
from optfn.plan.memory_plan import MemoryPlan
from optfn.plan.planned_loss import PlannedLoss, find_whole_gathers, plan_any_loss, plan_users_loss
from optfn.plan.update_products import count_products_sent
from optfn.train.local_steps import trace_update
from optfn.train.options import StepArguments
from optfn.train.state import TrainState
from optfn.train.step import TrainStep, find_layout


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
    state_memory: Literal["pinned_host"] | None = None,
    host_link: float | None = None,
) -> MemoryPlan:
    """Return the bytes that each device keeps and sends with a way of sharding a model, by tracing
    a step without allocating anything.

    With N workers, P bytes of params, G of gradients and S of state:

        shard       params  state  sent
        None        P       S      2(N − 1)/N·G
        "state"     P       S/N    (N − 1)/N·(G + P)
        "params"    P/N     S/N    (N − 1)/N·(G + P)

    The step is traced, and its collectives give the bytes sent. A collective that the results need
    counts as often as its loops run, although a compiler may move it out of a loop. So the bytes
    differ from this table where the step does. With "params" a leaf that a scan takes is sent P
    once more, because the backward pass gathers layers again. A leaf that N does not divide, or
    that is too small to divide (see `sharded`), is averaged by an all-reduce. With `gather=` or
    `reduce=` packets are sent.

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
        batch) -> (loss, model_state). None: a loss that scans each `Stacked`, and reads each
        further leaf once.
      batch: the batch of all devices, arrays or their shapes, as for `TrainStep.lower`. `loss_fn`
        is traced with the examples of one microbatch of a device, rounded up.
      model_state: the model state for `loss_fn`, arrays or their shapes; None: it takes none.
      state_memory: as for `make_train_step`.
      host_link: bytes a second of the link between a device and its host in one direction, for the
        seconds that moving the state takes; None: the bytes a second of the kind of the mesh's
        devices, if they are known (`Chip`).

    Raises:
      TypeError: params are a model that must be split first; the error has the line that does so.
      ValueError: `loss_fn` needs `batch`, which is missing.
    """
    tx = core.check_transform("plan_memory: tx", tx)
    check_split("plan_memory", params)
    devices = count_devices(mesh, data_axis)  # raises unless the mesh has these axes
    if isinstance(mesh, AbstractMesh):
        mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    mesh = cast("Mesh", mesh)  # a step is traced for it, and not compiled
    options = StepArguments(
        lambda *arguments: jnp.zeros(()), tx, mesh=mesh, shard=shard, data_axis=data_axis,
        tables=tables, shard_tables=shard_tables, microbatches=microbatches, packed=packed,
        local_steps=local_steps, outer=outer, reduce_dtype=reduce_dtype,
        model_state=loss_fn is not None and model_state is not None, state_memory=state_memory,
    )  # fmt: skip
    layout = find_layout(options)
    assert layout is not None
    parts = devices * microbatches * local_steps
    if loss_fn is None:
        rows = patterns.match_names(tables, params, "tables")
        ids = dict.fromkeys(rows, lookups // microbatches) if lookups else {}
        loss, model_state = plan_any_loss(layout, params, ids, rows, parts), None
    else:
        loss = plan_users_loss(loss_fn, params, model_state, batch, layout, parts)
    step = TrainStep(_with_loss(options, loss, value_and_grad))
    state, program, gathers = _trace_step(step, params, loss.batch, model_state)
    layers = {x.path: x.layer_bytes for x in gathers if x.layer_bytes is not None}
    whole = {} if loss.program is None else _find_whole(loss.program, layout, params, gathers)
    stored = jax.eval_shape(pack if packed else lambda x: x, params)
    held = {k: n for k, n in layers.items() if loss.program is not None and k not in whole}
    read, in_update = _trace_gradients(tx, stored, layout)
    sent = _count_sent(program, mesh, layout.data_axes) + in_update * local_steps
    on_host = count_host_bytes(program, state, layout)  # and the bytes that an update moves
    return MemoryPlan(
        count_bytes(state.params),
        count_bytes(state.opt_state) - on_host[0],
        _count_gradients(read, stored, layout, held, tables),
        round(sent + _count_padded(layout, stored, local_steps)),
        _find_gathered(state.opt_state, layout.mark_stacked(stored), layout),
        whole,
        *on_host,
        find_host_seconds(on_host[1], mesh, host_link) if on_host[0] else None,
    )


def _with_loss(options: StepArguments, loss: PlannedLoss, is_wrapped: bool) -> StepArguments:
    """Return options with a loss, or with its gradient as `value_and_grad`."""
    if is_wrapped:
        gradient = jax.value_and_grad(loss.fn, allow_int=True)
        return dataclasses.replace(options, loss_fn=None, value_and_grad=gradient)
    return dataclasses.replace(options, loss_fn=loss.fn, has_aux=loss.has_aux)


def _trace_step(
    step: TrainStep, params: Params, batch: Batch, model_state: PyTree
) -> tuple[TrainState, Jaxpr, list[RecordedGather]]:
    """Trace a step, and return the shapes of its state, its program, and the leaves it gathers."""
    state, examples = step.shapes(params, batch, model_state)
    with record_gathers() as gathers:
        traced = step.compiled.trace(*step.list_arguments(state, examples))
    return state, traced.jaxpr.jaxpr, gathers


def _find_whole(
    program: Equations, layout: Layout, params: Params, gathers: list[RecordedGather]
) -> Mapping[str, str]:
    """For each divided leaf that is gathered whole, return by its path the line that reads it."""
    entries = jax.tree.leaves(layout.describe(params))
    divided = [entry.path for entry in entries if layout.divisions(entry.spec)]
    return find_whole_gathers(program, tree.array_paths(params), divided, gathers)


def _count_sent(program: Jaxpr, mesh: Mesh, along: Axes) -> float:
    """Return the bytes that each device sends in the collectives of a program along data axes."""
    sent = 0.0
    for live in find_live(program):
        collective = as_collective(live.equation)
        if collective is not None and not {*along}.isdisjoint(collective.axes):
            devices = collective.group or count_devices(mesh, collective.axes)
            sent += live.times * collective.count_sent(devices, live.needed)
    return sent


def count_host_bytes(program: Jaxpr, state: TrainState, layout: Layout) -> tuple[int, int]:
    """Return the bytes of a state that the host of each device keeps, and those that a step moves
    between the two memories, in both directions.

    Args:
      program: the step, which moves arrays of a worker.
      state: the shapes of the state, as it lies on the mesh.
      layout: how the mesh divides it.
    """
    on_host = [x for x in jax.tree.leaves(state.opt_state) if memories.is_on_host(x)]
    if not on_host:
        return 0, 0
    moved = sum(live.times * count_moved(live.equation) for live in find_live(program))
    of_worker = 0.0
    for x in on_host:
        along = join_axes(*restrict_spec(x.sharding.spec, layout.worker_axes))
        of_worker += math.prod(x.shape) * x.dtype.itemsize / count_devices(layout.mesh, along)
    kept = count_bytes(on_host)
    return kept, round(moved * kept / of_worker)


def find_host_seconds(moved: int, mesh: Mesh, host_link: float | None = None) -> float | None:
    """Return the seconds of these bytes over a link to the host, or None if neither its speed is
    given nor the kind of the devices known."""
    if host_link is None and not isinstance(mesh, AbstractMesh):
        chip = find_chip(mesh.devices.flat[0].device_kind)
        host_link = None if chip is None else chip.host_link
    return None if host_link is None else moved / host_link


def _count_padded(layout: Layout, params: Params, local_steps: int) -> float:
    """Return the bytes that each device sends for leaves whose layers are padded: the compiler
    moves these (`gather_new_params`), so no equation of the step shows them."""
    n, sent = layout.num_shards, 0.0
    for entry in jax.tree.leaves(layout.describe(params)):
        padded = layout.pad_shape(entry.shape, entry.gradient_spec)
        if padded == entry.shape or entry.is_table:
            continue
        once = (n - 1) / n * math.prod(padded) * jnp.dtype(entry.dtype).itemsize
        if layout.divisions(entry.spec):
            # Gradient and params go to the devices with their layers, and the update back.
            sent += local_steps * 3 * once / n
        else:
            # New params are gathered in each step of a round, and once more after it.
            sent += once * (local_steps + 1 if local_steps > 1 else 1)
    return sent


def _count_gradients(
    read: Collection[str],
    params: Params,
    layout: Layout,
    layers: Mapping[str, int],
    tables: Pattern | None,
) -> int:
    """Return the bytes of the gradients that a device holds before they are reduced. Gradients of
    tables do not count, nor gradients that the update does not read.

    Args:
      read: the paths of the leaves whose gradients the update reads.
      params: the shapes of params as they are stored.
      layout: how params are divided.
      layers: the bytes of a layer of each leaf that only scans gather. Its gradient is reduced
        layer by layer, so a device holds one layer, and its shard of all layers.
      tables: the pattern of tables, whose gradients are rows.
    """
    total, rows = 0, patterns.match_names(tables, params, "tables")
    for entry in jax.tree.leaves(layout.describe(params)):
        if entry.path not in read or entry.path in rows:
            continue
        spec = entry.gradient_spec
        undivided = restrict_spec(spec, exclude_axes(join_axes(*spec), layout.data_axes))
        whole = math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
        whole //= count_devices(layout.mesh, join_axes(*undivided))
        layer = layers.get(entry.path)
        total += whole if layer is None else layer + whole // layout.num_shards
    return total


def _trace_gradients(
    tx: optax.GradientTransformationExtraArgs, params: Params, layout: Layout
) -> tuple[list[str], float]:
    """Trace the update and return the paths of the leaves whose gradients it reads, with the bytes
    that each device sends for its products of matrices, or if it cannot be traced the paths of all
    leaves with gradients, and 0.

    An exchange cannot be traced outside of a mesh.
    """
    named = [(str(place), p) for place, p in tree.items(params) if tree.is_inexact(p)]

    def update(arrays: list[jax.Array], state: OptState, params: Params) -> PyTree:
        grads = leafwise.build_gradients(params, arrays)
        return trace_update(tx, grads, state, params, jnp.zeros(()))

    arrays = [p for _, p in named]
    # A transform of another library may fail in any way here; its gradients then all count.
    with contextlib.suppress(Exception):
        program = Equations(update, arrays, jax.eval_shape(tx.init, params), params)
        needed = program.find_dependencies(program.outputs)
        variable_of = dict(zip([path for path, _ in named], program.inputs, strict=False))
        divided = {}
        for entry in jax.tree.leaves(layout.describe(params)):
            dimensions = [i for i, _ in layout.divisions(entry.gradient_spec)]
            if entry.path in variable_of and dimensions:
                divided[variable_of[entry.path]] = dimensions[0]
        sent = count_products_sent(program, divided, layout.num_shards)
        return [path for path, variable in variable_of.items() if variable in needed], sent
    return [path for path, _ in named], 0.0


def _find_gathered(state: OptState, params: Params, layout: Layout) -> tuple[str, ...]:
    """Return the paths of matrices that devices divide, but whose rule needs them whole.

    A leaf that is divided only along its axes of stacked layers has whole matrices.
    """
    entries = jax.tree.leaves(layout.describe(params))
    divided = {entry.path for entry in entries if any(entry.gradient_spec[entry.stacked :])}
    whole = find_whole_matrices(state, tree.paths(params))
    return tuple(path for path in whole if path in divided)


def count_bytes(values: PyTree) -> int:
    """Return the bytes of arrays on each device, from shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(values)
    )
