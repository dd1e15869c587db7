"""The compressor that sends every entry of a leaf in few bits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from optfn import checks
from optfn.compression import bits as packing
from optfn.compression.chunks import Chunks, chunks_of
from optfn.compression.compressors import ShownAsCall, shown
from optfn.compression.values import ValueFormat, scaled
from optfn.leaves.types import PyTree

BITS = (8, 4, 2, 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Quantize(ShownAsCall):
    """See `quantize`."""

    bits: int
    chunk: int | None

    @property
    def format(self) -> ValueFormat:
        """The encoding of a value."""
        return scaled(self.bits)

    def _chunks(self, size: int) -> Chunks:
        return chunks_of([size], self.chunk)[0]

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return (): there is no state."""
        return ()

    def encode(self, x: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the packet, uint32 (words,): scales, then codes."""
        chunks, flat = self._chunks(x.size), x.reshape(-1)
        scales = chunks.map(self.format.scales, flat, chunks.lengths)
        codes = self.format.encode(flat, chunks.spread(scales))
        words = packing.pack([codes], [self.bits])
        return jnp.concatenate([lax.bitcast_convert_type(scales, jnp.uint32), words]), state

    def decode(self, packet: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the leaf of the values nearest to its own."""
        size = math.prod(shape)
        chunks = self._chunks(size)
        scales = lax.bitcast_convert_type(packet[: chunks.count], jnp.float32)
        (codes,) = packing.unpack(packet[chunks.count :], [self.bits], [size])
        return self.format.decode(codes, chunks.spread(scales)).reshape(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the packet for a leaf of this shape."""
        size = math.prod(shape)
        return 4 * (self._chunks(size).count + packing.num_words([self.bits], [size]))


@shown
def quantize(bits: int, *, chunk: int | None = 4096) -> Quantize:
    """Send every entry in few bits: a compressor for `exchange`.

        8, 4 bits   x/s rounded, ties to even;  s = max|x|/127 or max|x|/7
        2 bits      the nearest of ±s/3 and ±s;  s = max|x|
        1 bit       sign(x)·s, with sign(0) = 1;  s = (∑|x|)/m

    s is one float32 number for each chunk of m entries.

    Args:
      bits: 8, 4, 2 or 1.
      chunk: the number of consecutive entries that share a scale, ≥ 1; None for the whole leaf.
        The last chunk of a leaf may be shorter.

    Bytes of a leaf of n entries: n·bits bits in whole 4-byte words, and 4 bytes a chunk. No state.

    Source: signSGD with error feedback, Karimireddy et al. 2019, arXiv 1901.09847.

    >>> quantize(1).num_bytes((1024, 1024))
    132096
    """
    width = checks.choice("bits", checks.count("bits", bits), BITS)
    return Quantize(width, None if chunk is None else checks.count("chunk", chunk))
