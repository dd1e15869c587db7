"""Deep Gradient Compression: workers exchange the few largest entries of their residuals.

`deep_gradient_compression` is the transform. `dgc_phases` has the phases of a step and the ramp for
compressed leaves, and `momentum_correction` the momentum and its masking. As for all compressors,
`k_largest` finds the entries to send, `packet_format` encodes them, and `gathers` takes their mean
over workers.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optfn import core
from optfn.compression import agreement, on_shards
from optfn.compression.bytes_sent import DgcTraffic
from optfn.compression.compressors import LeafInExchange
from optfn.compression.dgc_phases import VALUES, Options, packet_formats, update_compressed
from optfn.compression.momentum_correction import MomentumCorrection
from optfn.core import checks, leafwise, numerics, tree
from optfn.core.checks import Number
from optfn.core.traits import traits
from optfn.core.types import Leaf, Params, PyTree, Updates
from optfn.mesh.collectives.axes import AxisName, axis_size, check_axis_names, to_axes
from optfn.mesh.collectives.devices import ONE_WORKER, Workers
from optfn.mesh.collectives.means import pmean, pmean_leaves
from optfn.mesh.state.per_worker import Exchanged, PerWorker, mark_exchanged, mark_per_worker
from optfn.transforms.clipping import clip_factor

_NAME = "deep_gradient_compression"  # in errors


@traits(link="dgc", passes_rows=True, counts_weight=True, goes_on=("skipped",))
class DeepGradientCompressionState(NamedTuple):
    """State of `deep_gradient_compression`.

    Each worker has a private local_velocity (u) and residual (v): flat float32 arrays, 8 bytes per
    compressed parameter. Everything else is the same on all workers: the step; the number of steps
    that were skipped because a gradient was not finite; the number of workers; the velocity of the
    leaves that are not compressed, 4 bytes per parameter; the state of the penalty; and
    `exchanged`, which marks the leaves that are exchanged, compressed or not, and has no arrays.
    """

    step: jax.Array
    skipped: jax.Array
    num_workers: jax.Array
    velocity: PyTree
    local_velocity: PerWorker
    residual: PerWorker
    regularization: PyTree
    exchanged: Exchanged


@core.transform()
def deep_gradient_compression(
    momentum: Number,
    *,
    rampup_begin_step: int = 0,
    rampup_step: int = 1,
    sparsity: Sequence[float] = (0.999,),
    nesterov: bool = False,
    local_grad_clip_norm: Number | None = None,
    regularization: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
    reduce_axis_name: AxisName = None,
    min_size: int = 16384,
    momentum_masking: bool = True,
    wire: str = "float32",
) -> core.Unchecked:
    """Exchange only the largest entries of a leaf's accumulated gradients and keep the rest for
    later, but average small leaves, and all leaves before `rampup_begin_step`, densely.

    With N workers, each with the mean gradient g of its examples, and steps counted from 0:

        step < rampup_begin_step:  G = mean over workers of (g + reg);  u = μu + G
                                   direction = u, or G + μu with nesterov
        after it:   g = g·c/‖g‖ where ‖g‖ > c,  c = local_grad_clip_norm/√N;  g = g + reg
                    u = μu + g;  v = v + u          (nesterov: u = μ(u + g);  v = v + u + g)
                    the k = max(1, round(n·(1 − s))) largest |v| are sent; v and u are 0 there
                    direction = mean over workers of the entries sent, 0 elsewhere

    s is sparsity[min(⌊(step − rampup_begin_step)·len(sparsity)/rampup_step⌋, len(sparsity) − 1)].
    Nothing is lost: the entries sent and the residual add up to the accumulated v, exactly.
    Leaves that are smaller than `min_size` or wider than float32 follow plain momentum on the mean
    gradient in all phases, and share one all-reduce. If the gradient of any worker is not finite,
    all workers leave u, v and params unchanged, and count the step as skipped. They leave them
    unchanged too where the extra argument `weight` is 0.

    `make_train_step` with a mesh runs it as it needs to be. Elsewhere, call it where `axis_name` is
    bound (shard_map, pmap, vmap), and pass the gradient of each worker's examples. With
    `shard_map(check_vma=True)` JAX itself sums the gradient of replicated parameters over workers:
    differentiate with respect to `jax.lax.pcast(params, axis_name, to="varying")` instead. The
    direction already includes momentum, so only `scale_by_learning_rate` should follow.

    Args:
      momentum: μ, in [0, 1).
      rampup_begin_step: the number of dense momentum steps before compression, ≥ 0.
      rampup_step: the number of steps of the whole sparsity ramp, ≥ 1. Each of its ramp steps
        lasts rampup_step/len(sparsity) steps; the last one never ends.
      sparsity: the fraction of entries that is not sent in each ramp step, in [0, 1). If the
        selected entries take more bytes than whole leaves, an all-reduce sends these instead.
      nesterov: whether to use Nesterov momentum.
      local_grad_clip_norm: c > 0. In each compressed step each of the N workers clips its mean
        gradient of a compressed leaf to the norm c/√N, and adds the penalty after it. In fluid the
        limit of this gradient is c·√N, because the loss is divided by N before the clip: pass c·N
        for fluid's trajectory. None does not clip.
      regularization: a penalty added to g on each worker, such as `l2_decay(1e-4)`.
      axis_name: the mesh axis, or a tuple of axes, of the workers that exchange.
      reduce_axis_name: an axis, or several, to average g over densely first, such as the axis of
        the devices of a host if `axis_name` is the axis of the hosts.
      min_size: leaves with fewer elements are not compressed; ≥ 1. If this leaves no leaf,
        `TrainStep.init` warns.
      momentum_masking: whether u becomes 0 where v was sent (momentum factor masking). The denser
        the exchange, the more momentum this removes: with sparsity 0 the rule is plain SGD. Pass
        False if the final sparsity is below about 0.98; see `dgc_momentum`.
      wire: the dtype of values in a packet: "float32", 8 bytes per entry; or "bfloat16", 4 bytes,
        whose rounding error stays in v.

    State: u and v, flat float32 arrays, one each per worker, 8 bytes per compressed parameter; the
    velocity, 4 bytes per uncompressed parameter; step, skipped and num_workers. `init` needs no
    axis and returns the state of one worker. Leaves must be real.

    `update` takes `row_updates=True`. If `sparsity` has one entry, `rampup_begin_step` is 0 and
    packets are smaller than whole leaves, it then returns the directions of compressed leaves as
    Rows, which `apply_updates` scatters into params.

    Raises, at update:
      ValueError: an axis is not bound; or a gradient is already averaged, if JAX can tell.

    Source: Lin et al. 2018, arXiv 1712.01887, algorithms 1 and 4, §3; fluid's
    DGCMomentumOptimizer. The original implementations of both select from a sample.
    """
    penalty = optax.identity() if regularization is None else regularization
    core.check_transform("regularization", penalty)
    norm = local_grad_clip_norm
    options = Options(
        MomentumCorrection(
            checks.decay("momentum", momentum),
            checks.flag("nesterov", nesterov),
            checks.flag("momentum_masking", momentum_masking),
        ),
        checks.count("rampup_begin_step", rampup_begin_step, low=0),
        checks.count("rampup_step", rampup_step),
        _check_sparsity(sparsity),
        None if norm is None else checks.positive("local_grad_clip_norm", norm),
        optax.with_extra_args_support(penalty),
        check_axis_names("axis_name", axis_name),
        check_axis_names("reduce_axis_name", reduce_axis_name, optional=True),
        checks.count("min_size", min_size),
        checks.choice("wire", wire, tuple(VALUES)),
    )
    # `ramp_step` multiplies the two in int32.
    if options.rampup_step * len(options.sparsity) >= 2**31:
        raise ValueError(
            "rampup_step times the length of sparsity must fit in an int32; "
            f"got {rampup_step} times {len(options.sparsity)}"
        )
    return core.Unchecked(partial(_init_state, options), partial(_accumulate_and_send, options))


def _check_sparsity(sparsity: Sequence[float]) -> tuple[float, ...]:
    """Return the sparsities as a tuple of floats, or raise a TypeError unless they are a non-empty
    sequence of Python numbers, and a ValueError unless each is in [0, 1)."""
    if isinstance(sparsity, str) or not isinstance(sparsity, Sequence) or not sparsity:
        raise TypeError(
            "sparsity must be a sequence of numbers, one for each step of the ramp, such as "
            f"(0.75, 0.999); got {checks.show(sparsity)}"
        )
    for s in sparsity:
        if not checks.is_host_number(s):
            raise TypeError(
                "sparsity must consist of Python numbers, because they decide the shapes of "
                f"packets; got {s!r}"
            )
        checks.number("sparsity", s, checks.BELOW_ONE)
    return tuple(map(float, sparsity))


def _init_state(options: Options, params: Params) -> DeepGradientCompressionState:
    """Return one worker's state at step 0, which has zeros as u and v of each compressed leaf and
    as velocity of each dense leaf, and the state of the penalty."""

    def dense(p: Leaf) -> Leaf:
        return optax.MaskedNode() if options.is_compressed(p) else p

    def flat(p: Leaf) -> Leaf:
        return jnp.zeros(p.size, jnp.float32) if options.is_compressed(p) else optax.MaskedNode()

    return DeepGradientCompressionState(
        core.first_step(),
        core.first_step(),
        jnp.ones((), jnp.int32),
        leafwise.zeros_like(tree.map_arrays(dense, params)),
        mark_per_worker(tree.map_arrays(flat, params), options.axis_name),
        mark_per_worker(tree.map_arrays(flat, params), options.axis_name),
        options.regularization.init(params),
        mark_exchanged(params, options.all_axes, _traffic(options, params)),
    )


def _traffic(options: Options, params: Params) -> DgcTraffic:
    """Return the bytes that one worker sends, as a packet of the large leaves in each ramp step,
    and as whole leaves where large or small ones are sent dense."""
    leaves = tree.arrays(params)
    large = [p for p in leaves if options.is_compressed(p)]
    small = [p for p in leaves if not options.is_compressed(p)]
    return DgcTraffic(
        options.rampup_begin_step,
        options.rampup_step,
        tuple(packet.num_bytes for packet in packet_formats(options, [p.size for p in large])),
        sum(map(numerics.accumulator_bytes, large)),
        sum(map(numerics.accumulator_bytes, small)),
    )


def _accumulate_and_send(
    options: Options,
    updates: Updates,
    state: DeepGradientCompressionState,
    params: Params,
    **extra: Any,
) -> tuple[Updates, DeepGradientCompressionState]:
    """Run the update of one worker on whole arrays, or on the shards of each device if the worker
    has several devices, which return no Rows even with `row_updates`."""
    workers: Workers = extra.get("workers", ONE_WORKER)
    group, weight = workers.group, extra.get("weight")
    options = dataclasses.replace(options, group=group, in_own_loop=not workers.axes)
    updates = leafwise.densify_rows(updates)  # row-sparse gradients are treated like dense ones
    row_updates = extra.get("row_updates", False) and group is None
    run = partial(_accumulate_and_send_shards, options, row_updates)
    return on_shards.update_on_shards(run, updates, state, params, weight, group)


def _accumulate_and_send_shards(
    options: Options,
    row_updates: bool,
    updates: Updates,
    state: DeepGradientCompressionState,
    params: Params,
    weight: jax.Array | None,
) -> tuple[Updates, DeepGradientCompressionState]:
    """Return directions and the next state by sending compressed leaves and averaging dense ones,
    or zeros and unchanged moments if any worker's gradient is not finite or the update has no
    weight.

    Dense leaves take the momentum of their mean, and compressed leaves send their largest entries,
    or all entries before the ramp. A step whose gradient is not finite counts in `skipped`, not in
    `step`.
    """
    for axis_name in (options.axis_name, options.reduce_axis_name):
        agreement.check_worker_gradients(_NAME, updates, axis_name)
    _check_state(options, updates, state)
    skip, nonfinite, step = agreement.agree(updates, state.step, weight, options.agreeing_axes)
    compressing = ~skip & (step >= options.rampup_begin_step)
    # 1. Each worker has another gradient: the mean over its inner axes, clipped, plus the penalty.
    g = _average_and_clip(options, updates, state.residual.value, compressing)
    g, regularization = options.regularization.update(g, state.regularization, params)

    directions, structure = tree.flatten(g)
    trees = state.velocity, state.local_velocity.value, state.residual.value
    velocity, u, v = map(tree.leaves, trees)
    # A leaf is masked in `velocity` if it is compressed, and in `residual` if it is not.
    small = [i for i, x in enumerate(velocity) if not tree.is_masked(x)]
    large = [i for i, x in enumerate(v) if not tree.is_masked(x)]
    # All small leaves share one all-reduce: on a slow link latency counts more than bytes.
    # 2. Small leaves: momentum on the mean over workers, the same on all of them.
    means = pmean_leaves([directions[i] for i in small], options.axis_name)
    for i, mean in zip(small, means, strict=True):
        mean, new = options.correction.average(mean, velocity[i])
        directions[i], velocity[i] = jnp.where(skip, 0.0, mean), jnp.where(skip, velocity[i], new)
    # 3. Large leaves: u and v take the gradient, and the largest entries of v are sent.
    if large and options.in_own_loop:
        agreement.warn_of_equal_gradients(_NAME, updates, step, options.axis_name)
    if large:
        leaves = [LeafInExchange(directions[i], v[i], u[i]) for i in large]
        leaves = update_compressed(options, skip, step, leaves, row_updates=row_updates)
        for i, leaf in zip(large, leaves, strict=True):
            directions[i], v[i], u[i], _ = leaf
    return structure.unflatten(directions), DeepGradientCompressionState(
        # A skipped step does not count: the ramp goes by exchanges.
        jnp.where(skip, step, core.next_step(step)),
        jnp.where(nonfinite, core.next_step(state.skipped), state.skipped),
        jnp.asarray(axis_size(options.axis_name), jnp.int32),
        structure.unflatten(velocity),
        state.local_velocity._replace(value=structure.unflatten(u)),
        state.residual._replace(value=structure.unflatten(v)),
        optax.tree.where(skip, state.regularization, regularization),
        state.exchanged,
    )


def _check_state(options: Options, updates: Updates, state: DeepGradientCompressionState) -> None:
    """Raise a ValueError unless velocities and residuals have the tree of the updates, and the
    state of each unmasked leaf has the shape of one worker's state.

    A compressed leaf's state is checked in its residual, and a dense leaf's in its velocity.
    """
    u, v = state.local_velocity.value, state.residual.value
    for values in (state.velocity, u, v):
        tree.check_same_structure("update", "the state", values, "updates", updates)
    for place, g, velocity, residual in tree.items(updates, state.velocity, v):
        if not tree.is_masked(g):
            # Of a group, g is a shard, whose size does not tell: the state does.
            is_flat = (
                options.is_compressed(g) if options.group is None else not tree.is_masked(residual)
            )
            found, shape = (residual, (g.size,)) if is_flat else (velocity, g.shape)
            agreement.check_state_of_leaf("update", place, found, shape)


def _average_and_clip(
    options: Options, updates: Updates, residuals: PyTree, compressing: jax.Array
) -> Updates:
    """Average the leaves over `reduce_axis_name`, if given, and then, if `compressing` and with a
    `local_grad_clip_norm`, clip each compressed leaf to this norm over √N."""
    reduce_axes, c = options.reduce_axis_name, options.local_grad_clip_norm
    if c is not None:
        # The norm of a sum of N independent gradients grows by √N (§3.2 of the paper), so each
        # worker's share is 1/√N.
        c = c * axis_size(options.axis_name) ** -0.5

    def local(place: tree.Place, g: Leaf, residual: Leaf) -> Leaf:
        if tree.is_masked(g):
            return g
        g = pmean(g, to_axes(reduce_axes)) if reduce_axes else g
        if c is None or tree.is_masked(residual):
            return g
        divided = () if options.group is None else options.group.axes_of(place)
        # Each device has a shard of the leaf; the norm counts all of them.
        squares = numerics.sum_of_squares(g)
        norm = jnp.sqrt(lax.psum(squares, divided) if divided else squares)
        return g * jnp.where(compressing, clip_factor(norm, c), 1.0)

    return tree.map_named(local, updates, residuals)
