"""The exchange of updates between workers, for any optimizer: compressors with error feedback.

`exchange` is the transform. `compressors` has the protocol of packets, `gathering` and `slicewise`
take the mean over workers of decoded packets, and `sending` calls these for all leaves.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.compression import agreement
from optfn.compression.bytes_sent import traffic_of
from optfn.compression.compressors import (
    BaseCompressor,
    Choice,
    LeafInExchange,
    check_choice,
    choose_compressors,
)
from optfn.compression.gathering import empty_rows
from optfn.compression.on_shards import update_on_shards
from optfn.compression.sending import Sending, exchange_densely
from optfn.core import checks, errors, leafwise, tree
from optfn.core.checks import Number
from optfn.core.traits import traits
from optfn.core.types import Leaf, Params, PyTree, Updates
from optfn.leaves import nodes, packed
from optfn.mesh.collectives.axes import Axes, AxisName, axis_size, check_axis_names, join_axes
from optfn.mesh.collectives.devices import ONE_WORKER, Devices, Workers
from optfn.mesh.collectives.means import mean_over_workers, zeros_like_mean
from optfn.mesh.collectives.packets import check_compressor
from optfn.mesh.state import per_worker
from optfn.mesh.state.per_worker import Divided, Exchanged, PerWorker
from optfn.tables.rows import Rows
from optfn.wrappers.attributes import ParamAttr, ParamAttrs, apply_to_trained, check_param_attrs


@traits(link="exchange", passes_rows=True, counts_weight=True)
class ExchangeState(NamedTuple):
    """State of `exchange` with a compressor.

    Each worker has a private residual, float32 of the leaf's shape, 4 bytes per parameter. With
    route="parts", published is the residual of the mean that the owner of each slice keeps,
    4/N bytes per parameter on each worker. Everything else is the same on all workers: the step,
    the number of workers, the states of the compressors, and `exchanged`, which marks the leaves
    that are exchanged and has no arrays.
    """

    step: jax.Array
    num_workers: jax.Array
    residual: PerWorker
    compressor: PyTree
    exchanged: Exchanged
    published: Divided | tuple[()] = ()


@traits(link="exchange")
class ExchangeDenseState(NamedTuple):
    """State of `exchange(None)`: it marks the leaves that are exchanged, and has no arrays."""

    exchanged: Exchanged


@dataclasses.dataclass(frozen=True)
class _Options(Sending):
    """The arguments of `exchange`, checked."""

    compressors: Mapping[Any, BaseCompressor | None]
    min_size: int
    group: Devices | None = None
    row_updates: bool = False
    # Whether a loop of the user calls it: a step of the library passes its workers.
    in_own_loop: bool = False

    @property
    def all_axes(self) -> Axes:
        """The axes of all devices that take part in a step."""
        return join_axes(self.axis_name, self.group and self.group.axes)

    def choose_compressors(self, params: Params) -> list[BaseCompressor | None]:
        """Return the compressor of each leaf, or None for a dense exchange if no pattern chooses
        one, it refuses the leaf, or the leaf is masked, small or wider than float32."""

        def accept(compressor: BaseCompressor | None, p: Leaf) -> BaseCompressor | None:
            if compressor is None or tree.is_masked(p):
                return None
            is_sent = agreement.is_compressible(p, self.min_size) and compressor.accepts(p.shape)
            return compressor if is_sent else None

        return list(map(accept, choose_compressors(self.compressors, params), tree.leaves(params)))

    def zeros(self, compressor: BaseCompressor, g: jax.Array) -> jax.Array | Rows:
        """Return zeros for the mean of a leaf, as Rows if the caller takes them, the route is
        "gather" without a warm-up and they cost less, else as an array like `g`."""
        rows = None
        if self.row_updates and self.route == "gather" and not self.warmup_steps:
            rows = empty_rows(compressor, g.shape, self.axis_name)
        return zeros_like_mean(g, self.axis_name) if rows is None else rows


@core.record_call
def exchange(
    compressor: Choice | None = None,
    *,
    error_feedback: Number = 1.0,
    axis_name: AxisName = "data",
    min_size: int = 1024,
    param_attrs: ParamAttrs | None = None,
    warmup_steps: int = 0,
    route: str = "gather",
) -> optax.GradientTransformationExtraArgs:
    """Average the updates of all workers, which send them compressed and keep the unsent rest for
    later, or densely where a leaf has no compressor or is small.

        residual = error_feedback·residual + update
        sent = decode(encode(residual))
        residual = residual − sent
        direction = mean over workers of sent

    Put it in front of any optimizer, as in `chain(exchange(top_k(0.05)), adamw(1e-3))`, if the link
    between your workers is slow. It replaces the dense mean of the gradients. All workers get the
    same direction, bit for bit. With `error_feedback=1` packets lose nothing: all packets so far
    and the residual add up to the sum of the updates, in float32. The direction has the dtype of
    the updates; where that is bfloat16, the rounding of the mean is not kept.

    `make_train_step` with a mesh passes it the gradients of each worker. In a step that you write,
    call it where `axis_name` is bound (shard_map, pmap, vmap). With `shard_map(check_vma=True)` JAX
    itself sums the gradient of replicated params: differentiate with respect to
    `jax.lax.pcast(params, axis_name, to="varying")` instead.

    Args:
      compressor: `top_k(...)`, `quantize(...)`, `power_sgd(...)`, or a value with the same methods.
        Or a mapping from patterns of paths to compressors: the first match counts, and leaves with
        None or without a match are exchanged densely. Or None, which is the plain mean of each leaf
        in the gradient's dtype.
      error_feedback: the factor of the residual, in [0, 1].
      axis_name: the mesh axis, or a tuple of axes, of the workers that exchange.
      min_size: leaves with fewer elements are exchanged densely; ≥ 1.
      param_attrs: attributes by patterns of paths. Leaves with trainable=False or learning_rate=0
        are not sent, and their update is −0.0.
      warmup_steps: the number of first steps with a dense mean, when the residual stays 0.
      route: how packets are sent. "gather": each worker sends its packet, of b bytes, to the N − 1
        remaining ones, (N − 1)·b bytes. "parts": each worker owns a slice of each leaf, 1/N of its
        entries in C order. Packets of slices are sent to their owners, and each owner sends the
        mean of them to all workers, in a packet again. This is 2(N − 1)/N·b bytes, for any number
        of workers. The owner keeps the residual of the mean that its packet leaves out, with the
        same error feedback. Slices are cut into chunks; if chunks divide slices evenly, residuals
        are the same as with "gather".

    All compressed leaves share one all-gather (and with route="parts" one all-to-all). All leaves
    that are exchanged densely (small ones, and those wider than float32) share one all-reduce.
    Row-sparse updates are exchanged as rows, without a residual. With packed params, the
    original leaves are cut into chunks.

    `update` takes `row_updates=True`, which `make_train_step` passes. If all workers together send
    at most one entry in 64 of a leaf, directions of `top_k` are then Rows with the same bits, which
    `apply_updates` scatters into params.

    If an update of any worker is not finite, or the extra argument `weight` is 0, the direction of
    all workers is zero, residuals and states of compressors stay as they were, and the update is
    none of the `warmup_steps`. Put `skip_nonfinite` around the chain to keep the states of the
    following transforms too. An accumulated entry that overflows is set to the largest float32
    number. `exchange(None)` is the mean of all updates, finite or not.

    State: the residual, float32 of the leaf's shape, one per worker, 4 bytes per compressed
    parameter; step and num_workers; and the states of compressors. With route="parts" also the
    residuals that owners keep, flat float32, 4/N bytes per compressed parameter on each worker.
    `exchange(None)` keeps no arrays. `init` needs no axis and returns the state of one worker, with
    the residuals of all owners as one array. `init_state` divides that array over a mesh; if each
    worker keeps it whole (pmap, vmap), the worker uses the slice that it owns. Leaves must be real.

    Raises:
      ValueError: with route="parts", a compressor needs the whole leaf, as `power_sgd` does. At
        update: an axis is not bound; or an update is already averaged, if JAX can tell.

    Sources: error feedback, Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2; slice by slice,
    with feedback on both sides, Tang et al. 2021, arXiv 2102.02888 (1-bit Adam), §3.
    """
    options = _Options(
        compressors={} if compressor is None else check_choice(compressor),
        error_feedback=checks.number("error_feedback", error_feedback, checks.UNIT),
        axis_name=check_axis_names("axis_name", axis_name),
        min_size=checks.count("min_size", min_size),
        warmup_steps=checks.count("warmup_steps", warmup_steps, low=0),
        route=checks.choice("route", route, ("gather", "parts")),
    )
    if options.route == "parts":
        for codec in options.compressors.values():
            if codec is not None:
                check_compressor('exchange: with route="parts" compressor', codec)
    attrs = check_param_attrs(param_attrs)
    if compressor is None:
        tx = core.Transform(partial(_init_dense, options), partial(_average_dense, options))
    else:
        init, update = partial(_init_residuals, options), partial(_mean_of_packets, options)
        tx = core.with_boundary("exchange", core.Unchecked(init, update, real_only="exchange"))
    return _hide_frozen(tx, attrs)


def _hide_frozen(
    tx: optax.GradientTransformationExtraArgs, attrs: ParamAttrs
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` without the leaves that are not trainable or have a rate of 0, which its state
    still lists as exchanged.

    Without the mark, a training step would average their gradients.
    """
    trained = {
        pattern: ParamAttr(trainable=attr.trainable and attr.learning_rate > 0)
        for pattern, attr in attrs.items()
    }
    masking = apply_to_trained("exchange", tx, trained)

    def init(params: Params) -> Any:
        state = masking.init(params)
        mark = state.exchanged
        whole = packed.unpack(leafwise.keep_inexact(params))
        return state._replace(exchanged=per_worker.mark_exchanged(whole, mark.axes, mark.traffic))

    return core.Transform(init, masking.update)


def _init_dense(options: _Options, params: Params) -> ExchangeDenseState:
    """Return the state of `exchange(None)`, which marks all leaves as exchanged and has no
    arrays."""
    return ExchangeDenseState(per_worker.mark_exchanged(params, options.axis_name))


def _average_dense(
    options: _Options,
    updates: Updates,
    state: ExchangeDenseState,
    params: Params | None = None,
    **extra: Any,
) -> tuple[Updates, ExchangeDenseState]:
    """Return the plain mean of each leaf over workers, and the state unchanged, or raise an error
    if the state is of another transform or a gradient is already averaged."""
    del params
    errors.check_state("exchange", state, ExchangeDenseState)
    agreement.check_worker_gradients("exchange", leafwise.keep_inexact(updates), options.axis_name)
    workers = extra.get("workers", ONE_WORKER)._replace(axes=options.axis_name)
    return mean_over_workers(updates, (), workers)[0], state


def _init_residuals(options: _Options, params: Params) -> ExchangeState:
    """Return one worker's state with residuals of zeros for compressed leaves, masked for dense
    leaves, and for the route "parts" the residuals of all owners."""
    whole = packed.unpack(params)
    leaves, structure = tree.flatten(whole)
    pairs = list(zip(options.choose_compressors(whole), leaves, strict=True))
    masked = optax.MaskedNode()
    residuals = [masked if c is None else jnp.zeros(p.shape or 1, jnp.float32) for c, p in pairs]
    states = [() if c is None else c.init(p.shape) for c, p in pairs]
    published = [masked if c is None else jnp.zeros(p.size, jnp.float32) for c, p in pairs]
    traffic = traffic_of(pairs, options.route, options.warmup_steps)
    by_parts = options.route == "parts"
    return ExchangeState(
        core.first_step(),
        jnp.ones((), jnp.int32),
        per_worker.mark_per_worker(structure.unflatten(residuals), options.axis_name),
        structure.unflatten(states),
        per_worker.mark_exchanged(params, options.axis_name, traffic),
        per_worker.mark_divided(structure.unflatten(published), options.axis_name)
        if by_parts
        else (),
    )


def _mean_of_packets(
    options: _Options, updates: Updates, state: ExchangeState, params: Params, **extra: Any
) -> tuple[Updates, ExchangeState]:
    """Return the means over workers as directions, and the next state, with the leaves of packed
    buffers exchanged one by one and packed again."""
    del params
    # Rows cannot be part of a flat buffer.
    has_buffers = any(map(nodes.is_packed, jax.tree.leaves(updates, is_leaf=nodes.is_packed)))
    workers: Workers = extra.get("workers", ONE_WORKER)
    group, weight = workers.group, extra.get("weight")
    row_updates = extra.get("row_updates", False) and group is None and not has_buffers
    options = dataclasses.replace(
        options, group=group, row_updates=row_updates, in_own_loop=not workers.axes
    )

    def update(updates: Updates, state: ExchangeState, _: None, weight: jax.Array | None) -> Any:
        return _mean_of_shards(options, updates, state, weight)

    # Chunks and patterns belong to leaves, so buffers are taken apart first.
    whole = packed.unpack(updates)
    tree.check_same_structure("update", "the state", state.residual.value, "updates", whole)
    _check_compressors_of_shards(whole, state.compressor, group)
    whole, new = update_on_shards(update, whole, state, None, weight, group, flat=(Divided,))
    return packed.repack(updates, whole), new


def _check_compressors_of_shards(updates: Updates, states: PyTree, group: Devices | None) -> None:
    """Raise a ValueError if the compressor of a leaf that `group` divides keeps arrays for the
    whole leaf, and check nothing without a group."""
    if group is None:
        return
    leaf_states = tree.flatten(updates)[1].flatten_up_to(states)
    for place, spec in tree.items(group.specs_of(updates)):
        has_arrays = any(map(jnp.ndim, jax.tree.leaves(leaf_states[place.number])))
        if not tree.is_masked(spec) and any(spec) and has_arrays:
            raise ValueError(
                f"exchange: the compressor of leaf {place!r} keeps arrays for the whole leaf (as "
                "power_sgd does), but the leaf is divided over devices, which exchange only their "
                "shards. Choose another compressor for this leaf, or do not divide it"
            )


def _mean_of_shards(
    options: _Options, whole: Updates, state: ExchangeState, weight: jax.Array | None
) -> tuple[Updates, ExchangeState]:
    """Return means and the next state for whole leaves or a device's shards, or zero means and
    unchanged residuals if any worker's update is not finite or the update has no weight.

    Dense leaves share one mean, and compressed leaves are sent as packets.
    """
    agreement.check_worker_gradients("exchange", whole, options.axis_name)
    # 1. Workers agree whether they skip the exchange, and on the step: both decide branches.
    skip, _, step = agreement.agree(whole, state.step, weight, options.all_axes)

    leaves, structure = tree.flatten(whole)
    residuals = tree.leaves(state.residual.value)
    states = structure.flatten_up_to(state.compressor)
    numbers = _find_compressed(whole, state.residual.value)
    # 2. Dense leaves get their means, by one all-reduce for all.
    directions = exchange_densely(leaves, numbers, skip, options.axis_name)
    published = _owner_residuals(whole, state, options.axis_name)
    if numbers and options.in_own_loop:
        agreement.warn_of_equal_gradients("exchange", whole, step, options.axis_name)
    if numbers:
        # Chosen again from paths, because the state has arrays only; `init` chose the same.
        known = choose_compressors(options.compressors, whole)
        compressors = [c for i in numbers if (c := known[i]) is not None]
        # 3. Compressed leaves send residual + update. Their residuals keep the difference between
        # this sum and the packets.
        large = [leaves[i] for i in numbers]
        zeros = zip(numbers, map(options.zeros, compressors, large), strict=True)
        pending = [LeafInExchange(zero, residuals[i], states[i], published[i]) for i, zero in zeros]
        sent = options.send(compressors, skip, step, large, pending)
        for i, leaf in zip(numbers, sent, strict=True):
            directions[i], residuals[i], states[i], published[i] = leaf
    return structure.unflatten(directions), ExchangeState(
        jnp.where(skip, step, core.next_step(step)),
        jnp.asarray(axis_size(options.axis_name), jnp.int32),
        state.residual._replace(value=structure.unflatten(residuals)),
        structure.unflatten(states),
        state.exchanged,
        state.published._replace(value=structure.unflatten(published))
        if isinstance(state.published, Divided)
        else (),
    )


def _owner_residuals(updates: Updates, state: ExchangeState, axis_name: Axes) -> list[Leaf]:
    """Return for each leaf the residual that this worker keeps as the owner of a slice, or None for
    each leaf if the route is "gather".

    Raises:
      ValueError: the size of an array fits neither one slice nor all slices.
    """
    if not isinstance(state.published, Divided):
        return [None] * len(tree.leaves(updates))
    workers = axis_size(axis_name)
    for place, g, x in tree.items(updates, state.published.value):
        if not (tree.is_masked(x) or tree.is_leaf(g) or x.shape == (g.size,)):
            agreement.check_state_of_leaf("exchange", place, x, (-(-g.size // workers),))
    return tree.leaves(state.published.value)


def _find_compressed(updates: Updates, residuals: PyTree) -> list[int]:
    """Return the indices of the compressed leaves, the dense arrays that have a residual, and raise
    a ValueError if a residual does not have its leaf's shape.

    `init` gave a residual to each leaf that has a compressor, and a masked leaf to each dense one.

    Raises:
      ValueError: a residual has not the shape of its leaf, because it was made for different
        params, or has a row for each worker.
    """
    numbers = []
    for i, (place, g, residual) in enumerate(tree.items(updates, residuals)):
        if not (tree.is_leaf(g) or tree.is_masked(residual)):
            # A scalar gets an axis: a PerWorker is divided along its first one.
            agreement.check_state_of_leaf("exchange", place, residual, g.shape or (1,))
            numbers.append(i)
    return numbers
