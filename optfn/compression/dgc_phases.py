"""The phases of Deep Gradient Compression, for the compressed leaves of one worker.

A step is one of three: `skip_nonfinite_step`, `dense_momentum_step` before the ramp, and
`compressed_step` from then on. All leaves go through each of them together: the selection of a leaf
compiled once per leaf would take a minute for a large model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optfn import numerics
from optfn.checks import Number
from optfn.compression import residual
from optfn.compression.packets import PacketFormat, empty_rows, mean_of_sent, rows_of_sent
from optfn.compression.segments import Segments
from optfn.compression.selection import SampleSearch
from optfn.leaves.rows import Rows
from optfn.leaves.types import Leaf
from optfn.parallel import mesh
from optfn.parallel.mesh import AxisName
from optfn.transforms.moment import momentum_rule

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `deep_gradient_compression`, checked."""

    momentum: Number
    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    nesterov: bool
    local_grad_clip_norm: Number | None
    regularization: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    reduce_axis_name: AxisName
    min_size: int
    momentum_masking: bool
    wire: str

    def compresses(self, p: Leaf) -> bool:
        """Tell whether a leaf is compressed."""
        # NumPy's float64 becomes float32 where JAX has no wider floats.
        dtype = numerics.accumulator_dtype(jax.dtypes.canonicalize_dtype(p.dtype))
        return bool(dtype == jnp.float32 and p.size >= self.min_size)


class CompressedLeaves(NamedTuple):
    """The compressed leaves of one worker: lists of flat float32 arrays, one array per leaf."""

    gradient: Arrays
    local_velocity: Arrays
    residual: Arrays


class PhaseResult(NamedTuple):
    """What a phase gives: the direction of each leaf, flat or as Rows, and its new state."""

    direction: Sequence[jax.Array | Rows]
    local_velocity: Arrays
    residual: Arrays


def packet_formats(options: Options, sizes: Sequence[int]) -> list[PacketFormat]:
    """Return the packet format of each ramp step, for compressed leaves of these sizes."""

    def of_sparsity(sparsity: float) -> PacketFormat:
        k = tuple(residual.num_sent(n, sparsity) for n in sizes)
        return PacketFormat(tuple(sizes), k, options.wire)

    return list(map(of_sparsity, options.sparsity))


@dataclasses.dataclass(frozen=True)
class Ramp:
    """The packets of each ramp step, and the form of the directions; static.

    Args:
      options: the arguments of the transform.
      sizes: the number of elements of each compressed leaf.
      row_updates: whether the caller takes directions as Rows.
      workers: the number of workers.
    """

    options: Options
    sizes: tuple[int, ...]
    row_updates: bool
    workers: int

    @cached_property
    def formats(self) -> list[PacketFormat]:
        """The packet format of each ramp step."""
        return packet_formats(self.options, self.sizes)

    @cached_property
    def gives_rows(self) -> bool:
        """Whether directions come as Rows."""
        # All branches of a switch give the same shapes, so that all steps must be sparse, with the
        # same number of entries.
        uniform = not self.options.rampup_begin_step and len(self.formats) == 1
        return self.row_updates and uniform and not self.is_sent_dense(self.formats[0])

    def is_sent_dense(self, packet_format: PacketFormat) -> bool:
        """Tell whether the entries of a ramp step go through an all-reduce of whole leaves."""
        return packet_format.exceeds_all_reduce(self.workers)


def update_compressed(
    options: Options,
    nonfinite: jax.Array,
    step: jax.Array,
    leaves: CompressedLeaves,
    *,
    row_updates: bool,
) -> PhaseResult:
    """Run the phase of this step on all compressed leaves.

    Args:
      options: the arguments of the transform.
      nonfinite: whether a gradient of any worker is not finite; the same on all workers.
      step: the step, the same on all workers.
      leaves: the gradients in their shapes, the rest flat.
      row_updates: whether the caller takes directions as Rows.
    """
    shapes = [g.shape for g in leaves.gradient]
    sizes = tuple(g.size for g in leaves.gradient)
    ramp = Ramp(options, sizes, row_updates, mesh.axis_size(options.axis_name))
    checked = mesh.checked_axes(options.axis_name)
    flat = CompressedLeaves(
        [g.reshape(-1) for g in leaves.gradient],
        [mesh.vary(u, checked) for u in leaves.local_velocity],
        [mesh.vary(v, checked) for v in leaves.residual],
    )
    phases = [partial(skip_nonfinite_step, ramp), partial(compressed_step, ramp, step)]
    if options.rampup_begin_step:
        phases.append(partial(dense_momentum_step, ramp))
    skip, compressed, dense = range(3)
    in_ramp = step >= options.rampup_begin_step
    phase = jnp.where(nonfinite, skip, jnp.where(in_ramp, compressed, dense))
    # The phase is the same on all workers, so that collectives may stand in its branches.
    result = lax.switch(phase, phases, flat)
    directions = [d.reshape(s) for d, s in zip(result.direction, shapes, strict=True)]
    return result._replace(direction=directions)


def skip_nonfinite_step(ramp: Ramp, leaves: CompressedLeaves) -> PhaseResult:
    """Give zero directions, and leave the state as it is."""
    g, u, v = leaves
    if ramp.gives_rows:
        return PhaseResult(empty_rows(ramp.formats[0], ramp.workers), u, v)
    return PhaseResult([mesh.zeros_of_mean(x, ramp.options.axis_name) for x in g], u, v)


def dense_momentum_step(ramp: Ramp, leaves: CompressedLeaves) -> PhaseResult:
    """Apply momentum to the mean gradient, with u as the velocity."""
    options = ramp.options
    axes = mesh.axes(options.axis_name)
    rule = partial(momentum_rule, momentum=options.momentum, nesterov=options.nesterov)
    pairs = [rule(lax.pmean(g, axes), u) for g, u, _ in zip(*leaves, strict=True)]
    directions = [direction for direction, _ in pairs]
    if mesh.checked_axes(axes):
        # u is the same on all workers in this phase, which JAX cannot know.
        directions = [lax.pmax(direction, axes) for direction in directions]
    return PhaseResult(directions, [u for _, u in pairs], leaves.residual)


def compressed_step(ramp: Ramp, step: jax.Array, leaves: CompressedLeaves) -> PhaseResult:
    """Accumulate, send the selected entries, and keep the others in the residual."""
    options = ramp.options
    rule = partial(residual.add_to_residual, momentum=options.momentum, nesterov=options.nesterov)
    pairs = [rule(g, u, v) for g, u, v in zip(*leaves, strict=True)]
    leaves = leaves._replace(local_velocity=[u for u, _ in pairs], residual=[v for _, v in pairs])

    # The passes over whole leaves are one program for all ramp steps; only k differs.
    search = SampleSearch(Segments(ramp.sizes))
    counts = [search.counts(np.array(packet_format.k, np.int32)) for packet_format in ramp.formats]
    i = residual.ramp_step(step, options.rampup_begin_step, options.rampup_step, len(counts))
    of_step = jax.tree.map(lambda *each: jnp.asarray(np.array(each))[i], *counts)
    words = search.candidates(leaves.residual, of_step)

    def send(of_ramp_step: int, leaves: CompressedLeaves) -> PhaseResult:
        selected = search.extract(leaves.residual, words, counts[of_ramp_step])
        return _exchange(ramp, ramp.formats[of_ramp_step], selected, leaves)

    return lax.switch(i, [partial(send, n) for n in range(len(counts))], leaves)


def _exchange(
    ramp: Ramp,
    packet_format: PacketFormat,
    selected: tuple[jax.Array, jax.Array],
    leaves: CompressedLeaves,
) -> PhaseResult:
    """Return the mean of what all workers send, and the state after sending."""
    values, indices = selected
    dense = ramp.is_sent_dense(packet_format)
    sent = values if dense else packet_format.rounded(values)
    # Unsigned, so that JAX adds no code per leaf that tests for negative indices.
    places = packet_format.split(indices.astype(jnp.uint32))
    # An entry that has overflowed is dropped: ∞ − ∞ would stay in the residual as NaN.
    remainders = packet_format.split(jnp.where(jnp.isfinite(sent), values - sent, 0.0))
    subtract = partial(residual.subtract_sent, momentum_masking=ramp.options.momentum_masking)
    parts = zip(leaves.local_velocity, leaves.residual, places, remainders, strict=True)
    pairs = [subtract(*part) for part in parts]
    exchange: Callable[..., Sequence[jax.Array | Rows]] = mean_of_sent
    if dense:
        exchange = _mean_by_all_reduce
    elif ramp.gives_rows:
        exchange = rows_of_sent
    means = exchange(sent, indices, packet_format, ramp.options.axis_name)
    return PhaseResult(means, [u for u, _ in pairs], [v for _, v in pairs])


def _mean_by_all_reduce(
    values: jax.Array, indices: jax.Array, packet_format: PacketFormat, axis_name: AxisName
) -> Arrays:
    """Return the means of `mean_of_sent` through an all-reduce of whole leaves."""
    parts = packet_format.sizes, packet_format.split(values), packet_format.split(indices)
    return [
        lax.pmean(jnp.zeros(n, jnp.float32).at[i].set(x), mesh.axes(axis_name))
        for n, x, i in zip(*parts, strict=True)
    ]
