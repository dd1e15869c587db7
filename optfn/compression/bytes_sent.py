"""The bytes that a worker sends in an exchange."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optfn.compression.compressors import BaseCompressor
from optfn.compression.slicewise import slice_shape
from optfn.core import numerics, tree
from optfn.core.types import Leaf
from optfn.mesh.layout.traffic import all_reduce_bytes


def ramp_step(step: jax.Array, begin: int, length: int, num_ramp_steps: int) -> jax.Array:
    """Return the index of the ramp step, min(⌊(step − begin)·num_ramp_steps/length⌋, num_ramp_steps
    − 1), or 0 before `begin`."""
    # Clipped before the product, which would overflow int32 in a long run.
    since = jnp.clip(step - begin, 0, length)
    return jnp.minimum(since * num_ramp_steps // length, num_ramp_steps - 1)


@dataclasses.dataclass(frozen=True)
class DgcTraffic:
    """The bytes that a worker sends in a step.

    rampup_begin_step, rampup_step: as in `deep_gradient_compression`.
    packets: the bytes of a worker's packet in each ramp step.
    large, small: the bytes of the leaves that are compressed, and of those that are not.
    """

    rampup_begin_step: int
    rampup_step: int
    packets: tuple[int, ...]
    large: int
    small: int

    @property
    def compresses_nothing(self) -> bool:
        """Whether there are leaves and none of them is compressed."""
        return self.small > 0 and not self.large

    def bytes_sent(self, exchange: jax.Array, num_workers: jax.Array) -> jax.Array:
        """Return the bytes that a worker sends in an exchange, with large leaves whole before the
        ramp and then as packets unless whole leaves take fewer bytes."""
        begin = self.rampup_begin_step
        i = ramp_step(exchange, begin, self.rampup_step, len(self.packets))
        gathered = (num_workers - 1) * jnp.asarray(self.packets, jnp.float32)[i]
        large = all_reduce_bytes(self.large, num_workers)
        large = jnp.where(exchange < begin, large, jnp.minimum(gathered, large))
        return large + all_reduce_bytes(self.small, num_workers)


@dataclasses.dataclass(frozen=True)
class ExchangeTraffic:
    """The bytes that a worker sends in an exchange.

    gathered, reduced: the bytes of one worker's packets in the all-gather, and in all-reduces.
    dense: the bytes of all leaves, all-reduced in the first `warmup_steps` exchanges.
    slices: compressors and shapes of the leaves whose slices are sent to owners, and back.
    """

    gathered: int
    reduced: int
    dense: int
    warmup_steps: int
    slices: tuple[tuple[BaseCompressor, tuple[int, ...]], ...] = ()

    def bytes_sent(self, exchange: jax.Array, num_workers: int) -> jax.Array:
        """Return the bytes that a worker sends in an exchange: in the first `warmup_steps` for all
        leaves, dense, and then for packets and dense leaves."""
        of_slices = sum(c.num_bytes(slice_shape(p, num_workers)) for c, p in self.slices)
        # Slices go twice: to their owner as updates, and from the owner as means.
        sent_on = (num_workers - 1) * (self.gathered + 2 * of_slices)
        packets = sent_on + all_reduce_bytes(self.reduced, num_workers)
        dense = all_reduce_bytes(self.dense, num_workers)
        return jnp.where(exchange < self.warmup_steps, dense, packets)


def traffic_of(
    pairs: Sequence[tuple[BaseCompressor | None, Leaf]], route: str, warmup_steps: int
) -> ExchangeTraffic:
    """Return the traffic of leaves, which are all-reduced if their compressor is None or
    `is_reduced`, and else sent as slices for the route "parts", or gathered.

    `route` and `warmup_steps` are arguments of `exchange`.
    """
    gathered = reduced = dense = 0
    slices = []
    for compressor, p in pairs:
        # Residuals are sent, which are float32 or wider.
        whole = 0 if tree.is_masked(p) else numerics.accumulator_bytes(p)
        packet = whole if compressor is None else int(compressor.num_bytes(p.shape))
        if compressor is None or compressor.is_reduced:
            reduced += packet
        elif route == "parts":
            slices.append((compressor, tuple(p.shape)))
        else:
            gathered += packet
        dense += whole
    return ExchangeTraffic(gathered, reduced, dense, warmup_steps, tuple(slices))
