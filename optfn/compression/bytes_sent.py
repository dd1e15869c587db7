"""The bytes that a worker sends in an exchange."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optfn.compression.compressors import BaseCompressor
from optfn.compression.slicewise import slice_shape
from optfn.core import numerics, tree
from optfn.core.types import Leaf
from optfn.parallel.traffic import all_reduce_bytes


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
        """Return the bytes that a worker sends."""
        of_slices = sum(c.num_bytes(slice_shape(p, num_workers)) for c, p in self.slices)
        sent_on = (num_workers - 1) * (self.gathered + 2 * of_slices)
        packets = sent_on + all_reduce_bytes(self.reduced, num_workers)
        dense = all_reduce_bytes(self.dense, num_workers)
        return jnp.where(exchange < self.warmup_steps, dense, packets)


def traffic_of(
    pairs: Sequence[tuple[BaseCompressor | None, Leaf]], route: str, warmup_steps: int
) -> ExchangeTraffic:
    """Return the bytes that a worker sends for leaves with these compressors.

    `route` and `warmup_steps` are those of `exchange`.
    """
    gathered = reduced = dense = 0
    slices = []
    for compressor, p in pairs:
        whole = 0 if tree.is_masked(p) else numerics.accumulated_bytes(p)
        packet = whole if compressor is None else int(compressor.num_bytes(p.shape))
        if compressor is None or compressor.is_reduced:
            reduced += packet
        elif route == "parts":
            slices.append((compressor, tuple(p.shape)))
        else:
            gathered += packet
        dense += whole
    return ExchangeTraffic(gathered, reduced, dense, warmup_steps, tuple(slices))
