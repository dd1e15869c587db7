"""The phases of Deep Gradient Compression, for the compressed leaves of one worker.

Each step is one of three: `skip_step`, `take_dense_step` before the ramp, and
`take_compressed_step` from then on. Each handles all leaves together, because to compile the
selection once per leaf would take a minute for a large model.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optfn.compression import agreement, bytes_sent, gathering
from optfn.compression.compressors import LeafInExchange
from optfn.compression.k_largest import SampleSearch, num_selected
from optfn.compression.momentum_correction import MomentumCorrection
from optfn.compression.packet_format import PacketFormat
from optfn.compression.segments import Segments
from optfn.compression.values import BFLOAT16, FLOAT32
from optfn.core.checks import Number
from optfn.core.types import Leaf
from optfn.mesh.collectives.axes import Axes, axis_size, join_axes, mark_varying, vma_axes
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.collectives.gathers import GatheredPackets, all_gather
from optfn.mesh.collectives.means import zeros_like_mean
from optfn.tables.rows import Rows

# The compressed leaves of a worker; `state` is the local velocity u, and `residual` is v.
Leaves: TypeAlias = list[LeafInExchange]

# The encoding of a value for each `wire`.
VALUES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `deep_gradient_compression`, checked."""

    correction: MomentumCorrection
    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    local_grad_clip_norm: Number | None
    regularization: optax.GradientTransformationExtraArgs
    axis_name: Axes
    reduce_axis_name: Axes
    min_size: int
    wire: str
    group: Devices | None = None
    # Whether a loop of the user calls it: a step of the library passes its workers.
    in_own_loop: bool = False

    @property
    def all_axes(self) -> Axes:
        """The axes that gradients are exchanged or averaged over."""
        return join_axes(self.axis_name, self.reduce_axis_name)

    @property
    def agreeing_axes(self) -> Axes:
        """The axes of all devices that take part in a step."""
        return join_axes(self.all_axes, self.group and self.group.axes)

    def is_compressed(self, p: Leaf) -> bool:
        """Tell whether a leaf is compressed, which it is if it has at least `min_size` elements and
        accumulates in float32."""
        return agreement.is_compressible(p, self.min_size)


def packet_formats(options: Options, sizes: Sequence[int]) -> list[PacketFormat]:
    """Return for each ramp step the format of one packet with the entries of all flat compressed
    leaves of these sizes.

    Entries take whole words, which is faster: in bfloat16 a word has a value and 16 bits of an
    index.
    """
    segments, values = Segments(tuple(sizes)), VALUES[options.wire]
    counts = [num_selected(1 - s, segments.lengths) for s in options.sparsity]
    return [PacketFormat(segments, k, values, values.bits) for k in counts]


@dataclasses.dataclass(frozen=True)
class Ramp:
    """The packet formats of the ramp, and the form of the directions. All of its fields are static.

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
        """Whether directions are Rows: the caller takes them, there is no dense phase, the ramp has
        one step, and packets take no more bytes than whole leaves."""
        # All branches of a switch return the same shapes, so all steps must be sparse, with the
        # same number of entries.
        uniform = not self.options.rampup_begin_step and len(self.formats) == 1
        return self.row_updates and uniform and not self.is_sent_dense(self.formats[0])

    def is_sent_dense(self, packet_format: PacketFormat) -> bool:
        """Tell whether entries are sent by an all-reduce of whole leaves, because packets of this
        format would take more bytes.

        The bytes of a worker: (N − 1)·packet for packets, 2·(N − 1)/N·4·n for whole leaves.
        """
        return packet_format.num_bytes * self.workers > 8 * sum(self.sizes)


def update_compressed(
    options: Options, skip: jax.Array, step: jax.Array, leaves: Leaves, *, row_updates: bool
) -> Leaves:
    """Return the compressed leaves after this step, which does nothing if `skip`, takes dense
    momentum before `rampup_begin_step`, and else sends the largest entries.

    Args:
      options: the arguments of the transform.
      skip: whether the exchange is skipped; the same on all workers.
      step: the step, the same on all workers.
      leaves: the leaves; gradients have their shapes, and everything else is flat.
      row_updates: whether the caller takes directions as Rows.

    Returns:
      The leaves with directions of the shapes of the gradients.
    """
    sizes = tuple(leaf.residual.size for leaf in leaves)
    ramp = Ramp(options, sizes, row_updates, axis_size(options.axis_name))
    checked = vma_axes(options.axis_name)

    def flatten(leaf: LeafInExchange) -> LeafInExchange:
        residual, state = mark_varying(leaf.residual, checked), mark_varying(leaf.state, checked)
        return LeafInExchange(leaf.direction.reshape((-1,)), residual, state)

    flat = list(map(flatten, leaves))
    phases = [partial(skip_step, ramp)]
    if options.rampup_begin_step:
        phases.append(partial(take_dense_step, ramp))
    phases.append(partial(take_compressed_step, ramp, step))  # `plan_memory` counts the last one
    skipped, dense, compressed = 0, 1, len(phases) - 1
    in_ramp = step >= options.rampup_begin_step
    phase = jnp.where(skip, skipped, jnp.where(in_ramp, compressed, dense))

    def reshape(leaf: LeafInExchange, like: LeafInExchange) -> LeafInExchange:
        return leaf._replace(direction=leaf.direction.reshape(like.direction.shape))

    # The phase is the same on all workers, so its branches may contain collectives.
    return list(map(reshape, lax.switch(phase, phases, flat), leaves))


def skip_step(ramp: Ramp, leaves: Leaves) -> Leaves:
    """Return the leaves with directions of zeros, as Rows of padding if the ramp gives Rows, and
    with u and v unchanged."""
    if ramp.gives_rows:
        return _replace_directions(leaves, _empty_rows(ramp.formats[0], ramp.workers))
    axes = ramp.options.axis_name
    return _replace_directions(leaves, [zeros_like_mean(leaf.direction, axes) for leaf in leaves])


def _replace_directions(leaves: Leaves, directions: Sequence[jax.Array | Rows]) -> Leaves:
    """Return the leaves with these directions."""
    return list(map(lambda leaf, x: leaf._replace(direction=x), leaves, directions))


def take_dense_step(ramp: Ramp, leaves: Leaves) -> Leaves:
    """Return the leaves after a step of momentum on the mean gradient of all workers, with u as the
    velocity and the residual v unchanged."""
    options, axes = ramp.options, ramp.options.axis_name

    def step(leaf: LeafInExchange) -> LeafInExchange:
        mean = lax.pmean(leaf.direction, axes)
        direction, u = options.correction.average(mean, leaf.state)
        if vma_axes(axes):
            # In this phase u is the same on all workers, but JAX cannot know that.
            direction = lax.pmax(direction, axes)
        return leaf._replace(direction=direction, state=u)

    return list(map(step, leaves))


def take_compressed_step(ramp: Ramp, step: jax.Array, leaves: Leaves) -> Leaves:
    """Accumulate the gradients in u and v, send the k largest |v| of each leaf, with the k of the
    current ramp step, and keep the rest in v."""
    options = ramp.options
    leaves = list(map(options.correction.accumulate, leaves))
    # All ramp steps share one program for the passes over whole leaves; only the counts differ.
    search = SampleSearch(Segments(ramp.sizes))
    counts = [search.counts(packet_format.k) for packet_format in ramp.formats]
    i = bytes_sent.ramp_step(step, options.rampup_begin_step, options.rampup_step, len(counts))
    current = jax.tree.map(lambda *each: jnp.asarray(np.array(each))[i], *counts)
    # i is traced here; only `extract` needs static counts, so only this is compiled per ramp step.
    words = search.candidates([leaf.residual for leaf in leaves], current)

    def send(n: int, leaves: Leaves) -> Leaves:
        """Exchange the entries of ramp step n."""
        entries = search.extract([leaf.residual for leaf in leaves], words, counts[n])
        return _exchange_entries(ramp, ramp.formats[n], *entries, leaves)

    return lax.switch(i, [partial(send, n) for n in range(len(counts))], leaves)


def _exchange_entries(
    ramp: Ramp, packet_format: PacketFormat, values: jax.Array, index: jax.Array, leaves: Leaves
) -> Leaves:
    """Exchange the selected entries, as whole leaves if that takes fewer bytes, and return leaves
    with their means as directions and only their rounding errors in v.

    An entry that overflows is dropped. With momentum masking, u becomes 0 where entries are sent.
    """
    dense = ramp.is_sent_dense(packet_format)
    sent = values if dense else packet_format.round_values(values)
    # Drop an entry that has overflowed: ∞ − ∞ would stay in the residual as NaN.
    remainder = jnp.where(jnp.isfinite(sent), values - sent, 0.0)
    # With unsigned indices JAX adds no code per leaf that tests for negative ones.
    places = packet_format.split(index.astype(jnp.uint32))
    clear_sent = ramp.options.correction.clear_sent
    kept = list(map(clear_sent, leaves, places, packet_format.split(remainder)))
    axes = ramp.options.axis_name
    zeros = [jnp.zeros(n, jnp.float32) for n in ramp.sizes]
    # An all-reduce needs whole arrays: the entries are scattered into zeros.
    if dense:
        entries = zip(zeros, places, packet_format.split(sent), strict=True)
        means = [lax.pmean(zero.at[i].set(x), axes) for zero, i, x in entries]
        return _replace_directions(kept, means)
    packet = packet_format.encode(sent, index)
    if ramp.gives_rows:
        return _replace_directions(kept, _average_as_rows(packet, packet_format, axes))
    means = GatheredPackets.of(packet, axes).mean(zeros, packet_format.add_to)
    return _replace_directions(kept, means)


def _average_as_rows(packet: jax.Array, packet_format: PacketFormat, axis_name: Axes) -> list[Rows]:
    """Gather the packets of all workers and return for each leaf their mean as Rows of one entry
    each, with k rows per worker and repeated indices unmerged.

    This makes no array of the size of a leaf.
    """
    packets = all_gather(packet, axis_name)
    workers = packets.shape[0]
    values, index = jax.vmap(packet_format.decode)(packets)

    def rows(size: int, index: jax.Array, values: jax.Array) -> Rows:
        return Rows(index.reshape(-1), values.reshape(-1), size, parts=workers)

    columns = map(packet_format.split, (index.astype(jnp.int32), values / workers))
    return list(map(rows, packet_format.segments.sizes, *columns))


def _empty_rows(packet_format: PacketFormat, workers: int) -> list[Rows]:
    """For each leaf return Rows that are all padding, in the shapes of the Rows that
    `_average_as_rows` returns."""
    counts = zip(packet_format.segments.sizes, packet_format.k.tolist(), strict=True)
    return [gathering.padding_rows(workers * k, size, parts=workers) for size, k in counts]
