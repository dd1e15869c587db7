"""Deep Gradient Compression: workers exchange the few largest entries of what they accumulate.

The parts stand alone: `residual` is what accumulates and takes back what is not sent, `selection`
says what is sent, `wire` how it travels. `deep_gradient_compression` puts them together with the
phases and the ramp.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optfn import checks, core, numerics
from optfn.checks import Number
from optfn.compression import selection
from optfn.compression.packets import FORMATS, Wire, mean_of_sent, no_rows, rows_of_sent
from optfn.compression.residual import accumulate, num_sent, stage_of, take
from optfn.leaves import leafwise, tree
from optfn.parallel import mesh
from optfn.parallel.mesh import AxisName
from optfn.transforms.clipping import clip_factor
from optfn.transforms.moment import momentum_rule

Leaves = list[jax.Array]


class DeepGradientCompressionState(NamedTuple):
    """State of `deep_gradient_compression`; `state_specs` says where each part lies.

    local_velocity (u) and residual (v) are a worker's own: flat float32 arrays, 8 bytes per
    compressed parameter. All else is the same on all workers: the step; how many steps were skipped
    because a gradient was not finite; the number of workers; and the velocity of the leaves that
    are not compressed, 4 bytes per parameter.
    """

    step: jax.Array
    skipped: jax.Array
    num_workers: jax.Array
    velocity: Any
    local_velocity: Any
    residual: Any
    regularization: Any


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `deep_gradient_compression`, checked."""

    momentum: Any
    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    nesterov: bool
    local_grad_clip_norm: Any
    regularization: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    reduce_axis_name: AxisName
    min_size: int
    momentum_masking: bool
    wire: str
    selection: str

    def compresses(self, p: Any) -> bool:
        """Tell whether a leaf is compressed."""
        # NumPy's float64 becomes float32 where JAX has no wider floats.
        kept = numerics.accumulator_dtype(jax.dtypes.canonicalize_dtype(p.dtype))
        return bool(kept == jnp.float32 and p.size >= self.min_size)


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
    selection: str = "exact",
) -> optax.GradientTransformationExtraArgs:
    """Exchange the largest entries of what each worker accumulates, and keep the others.

    With N workers, each with its own mean gradient g, and step from 0:

        step < rampup_begin_step:  G = mean over workers of (g + reg);  u = μu + G
                                   direction = u, or G + μu with nesterov
        after it:   g = g·c/‖g‖ where ‖g‖ > c,  c = local_grad_clip_norm/√N;  g = g + reg
                    u = μu + g;  v = v + u          (nesterov: u = μ(u + g);  v = v + u + g)
                    the k = max(1, round(n·(1 − s))) largest |v| are sent; v and u are 0 there
                    direction = mean over workers of what was sent

    s is sparsity[min(⌊(step − rampup_begin_step)·len(sparsity)/rampup_step⌋, len(sparsity) − 1)].
    Nothing is lost: what was sent and what v keeps add up to what was accumulated, exactly. Leaves
    below `min_size` or wider than float32 follow plain momentum on the mean gradient in all phases,
    in one all-reduce. Where a gradient of any worker is not finite, all of them leave u, v and
    params as they are, and count it.

    It runs where `axis_name` is bound (shard_map, pmap, vmap) and takes the worker's own gradient,
    that of the mean over its own examples. With `shard_map(check_vma=True)` the gradient of
    replicated parameters is summed over workers by JAX itself: take that of
    `jax.lax.pcast(params, axis_name, to="varying")`. The direction has momentum in it: follow it by
    `scale_by_learning_rate`, not by another momentum.

    Args:
      momentum: μ, in [0, 1).
      rampup_begin_step: steps of dense momentum before, ≥ 0.
      rampup_step: steps over which the stages of `sparsity` are passed through, ≥ 1; each lasts
        rampup_step/len(sparsity), the last for ever.
      sparsity: the part that is not sent in each stage, in [0, 1). A stage in which the entries
        would take more bytes than all of the leaf is sent dense.
      nesterov: whether to look ahead.
      local_grad_clip_norm: the clip of each compressed leaf that N workers' mean would be under,
        > 0; None for none.
      regularization: a penalty added to g on each worker, such as `l2_decay(1e-4)`.
      axis_name: the mesh axis, or a tuple of axes, whose workers exchange.
      reduce_axis_name: an axis, or several, over which g is first averaged densely: the devices of
        a host, where `axis_name` goes across hosts.
      min_size: the elements from which a leaf is compressed, ≥ 1.
      momentum_masking: whether u is 0 where v was sent.
      wire: "float32", 8 bytes per entry; or "bfloat16", 4, whose rounding error stays in v.
      selection: "exact", the k largest; or "sampled", k of those that reach a bound which a sample
        of the leaf gives, a little cheaper. Some of the k largest then wait for a later step.

    State: u and v, flat float32 arrays, one each per worker, 8 bytes per compressed parameter; the
    velocity, 4 bytes per other parameter; step, skipped and num_workers. `init` needs no axis and
    gives one worker's state. Real leaves.

    `update` takes `sparse_updates=True`: where there is one stage and nothing dense, directions of
    compressed leaves then come as Rows, which `apply_updates` scatters into params.

    Raises, at update:
      ValueError: an axis is not bound, or a gradient is averaged already, where JAX knows it.

    Source: Lin et al. 2018, arXiv 1712.01887, algorithms 1 and 4, §3; fluid's
    DGCMomentumOptimizer. Both of theirs sample.
    """
    penalty = optax.identity() if regularization is None else regularization
    core.check_transform("regularization", penalty)
    options = _Options(
        checks.decay("momentum", momentum),
        checks.count("rampup_begin_step", rampup_begin_step, low=0),
        checks.count("rampup_step", rampup_step),
        _check_sparsity(sparsity),
        checks.flag("nesterov", nesterov),
        _check_clip_norm(local_grad_clip_norm),
        optax.with_extra_args_support(penalty),
        axis_name,
        reduce_axis_name,
        checks.count("min_size", min_size),
        checks.flag("momentum_masking", momentum_masking),
        checks.choice("wire", wire, FORMATS),
        checks.choice("selection", selection, ("exact", "sampled")),
    )
    if options.rampup_step * len(options.sparsity) >= 2**31:
        raise ValueError(
            "rampup_step times the stages of sparsity must fit in an int32; "
            f"got {rampup_step} times {len(options.sparsity)}"
        )
    rule = core.rule(partial(_init, options), partial(_update, options))
    return core.behind_edge("deep_gradient_compression", rule, complex_leaves=False)


def _check_sparsity(sparsity: Any) -> tuple[float, ...]:
    if isinstance(sparsity, str) or not isinstance(sparsity, Sequence) or not sparsity:
        raise TypeError(
            "sparsity must be a sequence of numbers, one for each stage of the ramp, such as "
            f"(0.75, 0.999); got {sparsity!r} of type {type(sparsity).__name__}"
        )
    for s in sparsity:
        if not checks.is_host_number(s):
            raise TypeError(f"sparsity must hold Python numbers, they shape the program; got {s!r}")
        checks.number("sparsity", s, low=0.0, high=1.0, high_open=True)
    return tuple(map(float, sparsity))


def _check_clip_norm(norm: Any) -> Any:
    if norm is None:
        return None
    return checks.positive("local_grad_clip_norm", norm)


def _init(options: _Options, params: Any) -> DeepGradientCompressionState:
    def dense(p: Any) -> Any:
        return optax.MaskedNode() if options.compresses(p) else p

    def flat(p: Any) -> Any:
        return jnp.zeros(p.size, jnp.float32) if options.compresses(p) else optax.MaskedNode()

    return DeepGradientCompressionState(
        core.first_step(),
        core.first_step(),
        jnp.ones((), jnp.int32),
        leafwise.zeros_like(tree.map_arrays(dense, params)),
        tree.map_arrays(flat, params),
        tree.map_arrays(flat, params),
        options.regularization.init(params),
    )


def _update(
    options: _Options,
    updates: Any,
    state: Any,
    params: Any,
    *,
    sparse_updates: bool = False,
    **extra: Any,
) -> tuple[Any, DeepGradientCompressionState]:
    del extra
    updates = leafwise.densify(updates)  # rows add up in the residual, and are selected as others
    _check_local(options, updates)
    _check_state(options, updates, state)
    bad, step = _agree(options, updates, state.step)
    g = _local_gradient(options, updates, ~bad & (step >= options.rampup_begin_step))
    g, regularization = options.regularization.update(g, state.regularization, params)

    leaves, structure = tree.flatten(g)
    velocity, u, v = (
        tree.flatten(x)[0] for x in (state.velocity, state.local_velocity, state.residual)
    )
    small = [i for i, x in enumerate(velocity) if not tree.is_masked(x)]
    large = [i for i, x in enumerate(v) if not tree.is_masked(x)]
    direction: list[Any] = [optax.MaskedNode()] * len(leaves)

    new = _dense_leaves(options, bad, _at(leaves, small), _at(velocity, small))
    for column, values in zip((direction, velocity), new, strict=True):
        _put(column, small, values)
    if large:
        phase = jnp.where(bad, 0, jnp.where(step >= options.rampup_begin_step, 1, 2))
        own = (_at(column, large) for column in (leaves, u, v))
        kept = _compressed_leaves(options, sparse_updates, phase, step, *own)
        for column, values in zip((direction, u, v), kept, strict=True):
            _put(column, large, values)

    return structure.unflatten(direction), DeepGradientCompressionState(
        jnp.where(bad, step, core.next_step(step)),
        jnp.where(bad, core.next_step(state.skipped), state.skipped),
        jnp.asarray(mesh.axis_size(options.axis_name), jnp.int32),
        structure.unflatten(velocity),
        structure.unflatten(u),
        structure.unflatten(v),
        regularization,
    )


def _at(column: list[Any], at: list[int]) -> list[Any]:
    return [column[i] for i in at]


def _put(column: list[Any], at: list[int], values: list[Any]) -> None:
    for i, value in zip(at, values, strict=True):
        column[i] = value


def _check_local(options: _Options, updates: Any) -> None:
    """Raise unless the axes are bound and each gradient is the worker's own, as far as is known."""
    name = "deep_gradient_compression"
    for axis_name in (options.axis_name, options.reduce_axis_name):
        mesh.check_axis(name, mesh.axes(axis_name))
        checked = set(mesh.checked_axes(axis_name))
        for i, g in enumerate(tree.flatten(updates)[0]):
            if tree.is_masked(g) or checked <= mesh.varying_axes(g):
                continue
            raise ValueError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} is the same on all workers of "
                f"axis {axis_name!r}: it is summed or averaged already, and there is nothing to "
                "compress. Inside shard_map take the gradient of jax.lax.pcast(params, "
                f'{axis_name!r}, to="varying"), or pass check_vma=False'
            )


def _check_state(options: _Options, updates: Any, state: DeepGradientCompressionState) -> None:
    for kept in (state.velocity, state.local_velocity, state.residual):
        tree.check_same_structure("update", "the state", kept, "updates", updates)
    columns = (tree.flatten(x)[0] for x in (updates, state.velocity, state.residual))
    for i, (g, velocity, v) in enumerate(zip(*columns, strict=True)):
        if tree.is_masked(g):
            continue
        large = options.compresses(g)
        kept, want = (v, (g.size,)) if large else (velocity, g.shape)
        if tree.is_masked(kept) or jnp.shape(kept) != want:
            raise ValueError(
                f"update: the state of leaf {tree.paths(updates)[i]!r} has shape "
                f"{getattr(kept, 'shape', None)}, not {want}: it was made for other params, or is "
                "not laid out over the workers (see init_state and state_specs)"
            )


def _agree(options: _Options, updates: Any, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return whether any worker's gradient is not finite, and the step: the same on all workers."""
    leaves = [g.reshape(-1) for g in tree.flatten(updates)[0] if not tree.is_masked(g)]
    bad = jnp.asarray(False)
    if leaves:
        # One pass over each leaf into bits, and one reduction of those of all leaves.
        bad = jnp.any(jnp.concatenate([selection.pack(~jnp.isfinite(g)) for g in leaves]) > 0)
    axes = mesh.axes(options.axis_name) + mesh.axes(options.reduce_axis_name)
    flags = jnp.stack([bad.astype(jnp.int32), step])
    bad, step = lax.pmax(mesh.vary(flags, mesh.checked_axes(axes)), axes)
    return bad > 0, step


def _local_gradient(options: _Options, updates: Any, sparse: jax.Array) -> Any:
    """Return the gradients averaged within a host, those of compressed leaves clipped."""
    inside, c = mesh.axes(options.reduce_axis_name), options.local_grad_clip_norm
    if c is not None:
        c = c * mesh.axis_size(options.axis_name) ** -0.5

    def local(g: jax.Array) -> jax.Array:
        g = lax.pmean(g, inside) if inside else g
        if c is None or not options.compresses(g):
            return g
        return g * jnp.where(sparse, clip_factor(numerics.norm(g), c), 1.0)

    return tree.map_arrays(local, updates)


def _dense_leaves(
    options: _Options, bad: jax.Array, g: Leaves, velocity: Leaves
) -> tuple[Leaves, Leaves]:
    """Return directions and velocities of plain momentum on the mean, in one all-reduce."""
    means = mesh.mean_in_one(g, options.axis_name)
    rule = partial(momentum_rule, momentum=options.momentum, nesterov=options.nesterov)
    pairs = [rule(mean, old) for mean, old in zip(means, velocity, strict=True)]
    directions = [jnp.where(bad, 0.0, u) for u, _ in pairs]
    kept = zip(pairs, velocity, strict=True)
    return directions, [jnp.where(bad, old, new) for (_, new), old in kept]


def _compressed_leaves(
    options: _Options,
    sparse_updates: bool,
    phase: jax.Array,
    step: jax.Array,
    g: Leaves,
    u: Leaves,
    v: Leaves,
) -> tuple[list[Any], Leaves, Leaves]:
    """Return directions, u and v of the compressed leaves: phase 0 skips, 1 is sparse, 2 dense."""
    axes = mesh.axes(options.axis_name)
    checked = mesh.checked_axes(axes)
    shapes = [x.shape for x in g]
    forms = [_form(options, tuple(x.size for x in g), s) for s in options.sparsity]
    workers = mesh.axis_size(options.axis_name)
    # Rows have one shape, so that there may be one kind of step only.
    alike = not options.rampup_begin_step and len(forms) == 1
    as_rows = sparse_updates and alike and not forms[0].exceeds_all_reduce(workers)
    flat = [x.reshape(-1) for x in g]
    u, v = ([mesh.vary(x, checked) for x in column] for column in (u, v))

    def skip(g: Leaves, u: Leaves, v: Leaves) -> tuple[list[Any], Leaves, Leaves]:
        if as_rows:
            return no_rows(forms[0], workers), u, v
        others = [mesh.varying_axes(x) - set(axes) for x in g]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in g]
        return [mesh.vary(z, over) for z, over in zip(zeros, others, strict=True)], u, v

    def dense(g: Leaves, u: Leaves, v: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        rule = partial(momentum_rule, momentum=options.momentum, nesterov=options.nesterov)
        pairs = [rule(lax.pmean(x, axes), old) for x, old in zip(g, u, strict=True)]
        # All workers have the same u here; where JAX checks what varies, it has to be told.
        directions = [lax.pmax(d, axes) if checked else d for d, _ in pairs]
        return directions, [new for _, new in pairs], v

    def sparse(g: Leaves, u: Leaves, v: Leaves) -> tuple[list[Any], Leaves, Leaves]:
        rule = partial(accumulate, momentum=options.momentum, nesterov=options.nesterov)
        pairs = [rule(*leaf) for leaf in zip(g, u, v, strict=True)]
        columns = [a for a, _ in pairs], [b for _, b in pairs]
        return _exchange(options, step, forms, as_rows, *columns)

    # The phase is the same on all workers, so that collectives may stand in its branches.
    phases = [skip, sparse] + ([dense] if options.rampup_begin_step else [])
    direction, u, v = lax.switch(phase, phases, flat, u, v)
    return [d.reshape(shape) for d, shape in zip(direction, shapes, strict=True)], u, v


def _form(options: _Options, sizes: tuple[int, ...], sparsity: float) -> Wire:
    """Return the form of the packets of one stage."""
    return Wire(sizes, tuple(num_sent(n, sparsity) for n in sizes), options.wire)


def _exchange(
    options: _Options,
    step: jax.Array,
    forms: Sequence[Wire],
    as_rows: bool,
    u: Leaves,
    v: Leaves,
) -> tuple[list[Any], Leaves, Leaves]:
    """Return the mean of what the workers send in this stage of the ramp, and u and v after it."""
    search = selection.Search(forms[0].sizes)
    stages = [form.k for form in forms]
    stage = stage_of(step, options.rampup_begin_step, options.rampup_step, len(stages))
    # The passes over everything are the same code in all stages; only k differs.
    k, rank, room = (
        jnp.asarray(np.array(table, np.int32))[stage]
        for table in (stages, [search.rank(k) for k in stages], [search.room(k) for k in stages])
    )
    words = selection.candidates(v, k, rank, room, search)

    def send(form: Wire, u: Leaves, v: Leaves) -> tuple[list[Any], Leaves, Leaves]:
        if options.selection == "exact":
            values, indices = selection.extract(v, words, form.k, search.room(form.k))
        else:
            # Any number that is another one in each step.
            shift = (step.astype(jnp.uint32) * np.uint32(2654435761)) >> np.uint32(1)
            values, indices = selection.some(v, words, form.k, shift.astype(jnp.int32))
        mean: Callable[..., list[Any]] = rows_of_sent if as_rows else mean_of_sent
        sent = form.rounded(values)
        if form.exceeds_all_reduce(mesh.axis_size(options.axis_name)):
            sent, mean = values, _dense_means
        # Unsigned indices: JAX need not ask which are negative, in code for each leaf.
        places = form.split(indices.astype(jnp.uint32))
        # What has overflowed is gone; ∞ − ∞ would stay.
        kept = form.split(jnp.where(jnp.isfinite(sent), values - sent, 0.0))
        parts = zip(u, v, places, kept, strict=True)
        pairs = [take(*leaf, momentum_masking=options.momentum_masking) for leaf in parts]
        means = mean(sent, indices, form, options.axis_name)
        return means, [a for a, _ in pairs], [b for _, b in pairs]

    return lax.switch(stage, [partial(send, form) for form in forms], u, v)


def _dense_means(values: jax.Array, indices: jax.Array, form: Wire, axis_name: AxisName) -> Leaves:
    """Return the means of what was sent, through an all-reduce of whole leaves."""
    parts = zip(form.sizes, form.split(values), form.split(indices), strict=True)
    return [
        lax.pmean(jnp.zeros(n, jnp.float32).at[i].set(x), mesh.axes(axis_name)) for n, x, i in parts
    ]
