"""The compressor that sends every entry of a leaf in few bits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from optfn.compression import planes
from optfn.compression.compressors import ShownAsCall, show_call
from optfn.compression.segments import RowChunks
from optfn.compression.values import ValueFormat
from optfn.core import checks
from optfn.core.types import PyTree
from optfn.transforms.codes import random_bits

BITS = (8, 4, 2, 1)
# Half the distance of two values; a scale of 1.
_BIAS = {8: 1 / 254, 4: 1 / 14, 2: 1 / 3, 1: 1.0}


@dataclasses.dataclass(frozen=True, repr=False)
class Quantize(ShownAsCall):
    """See `quantize`."""

    bits: int
    chunk: int | None
    stochastic: bool

    @property
    def format(self) -> ValueFormat:
        """The encoding of a value in `bits` bits with a scale per chunk, which rounds at random if
        `stochastic`."""
        return ValueFormat(self.bits, True, self.stochastic)

    @property
    def bias(self) -> float:  # type: ignore[override]
        """Half the distance of two neighbouring values, relative to the largest, or 0 with random
        rounding."""
        return 0.0 if self.stochastic else _BIAS[self.bits]

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the step count, a uint32 zero that seeds the random bits, or () if rounding is not
        random."""
        return jnp.zeros((), jnp.uint32) if self.stochastic else ()

    def encode(self, x: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the packet of scales and codes, uint32 (words,), and the next state, which is the
        step count plus 1 if rounding is random, else ().

        The packet has the scales, then the codes in planes.
        """
        chunks, noise = RowChunks(x.shape, self.chunk), None
        scales = self.format.scales(x, chunks)
        if self.stochastic:
            # The sum of all bits makes the hash different for each leaf and worker.
            sums = chunks.map(lambda x, chunks: chunks.sum(_words_of(x)), x)
            seed = random_bits((), state + jnp.sum(sums, dtype=jnp.uint32))
            noise, state = random_bits(x.shape, seed), state + 1
        codes = self.format.encode(x, chunks.broadcast(scales), noise)
        return jnp.concatenate([_words_of(scales), planes.pack_codes(codes, self.bits)]), state

    def decode(self, packet: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 leaf of this shape, each value decoded from its code and the scale of
        its chunk."""
        chunks = RowChunks(shape, self.chunk)
        scales = lax.bitcast_convert_type(packet[: chunks.flat.count], jnp.float32)
        codes = planes.unpack_codes(packet[chunks.flat.count :], shape, self.bits)
        return self.format.decode(codes, chunks.broadcast(scales))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the packet's bytes for a leaf of this shape, 4 for the scale of each chunk, and
        the codes in whole words of 4 bytes."""
        words = planes.num_code_words(math.prod(shape), self.bits)
        return 4 * (RowChunks(shape, self.chunk).flat.count + words)


def _words_of(x: jax.Array) -> jax.Array:
    """Return the bits of 32-bit numbers as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


@show_call
def quantize(bits: int, *, chunk: int | None = 4096, stochastic: bool = False) -> Quantize:
    """Return a compressor for `exchange` that sends every entry in `bits` bits with a float32 scale
    per chunk, rounded to the nearest value or, if `stochastic`, at random.

        8, 4 bits   x/s rounded, ties to even;  s = max|x|/127 or max|x|/7
        2 bits      the nearest of ±s/3 and ±s;  s of least squared error
        1 bit       sign(x)·s, with sign(0) = 1;  s = (∑|x|)/m

    s is a float32 number for each chunk of m entries. With 2 bits, s comes from eight steps of
    Lloyd's iteration, which begins at max|x|: find the entries that are nearer to s than to s/3,
    then take the s that is best for this division, and so on. The error never increases, and is
    below ∑x² from the first step on, so the encoding is a contraction, as with 8, 4 and 1 bits. The
    best s of all would need a sort, and its error is smaller by only a thousandth in a chunk of
    thousands.

    With `stochastic=True`, x becomes one of the two values next to it, at random, so that its mean
    is x. With 1 and 2 bits s is then max|x|. Since packets are exact in the mean, you can do
    without error feedback, `exchange(…, error_feedback=0.0)`, but they are noisy: use 1 and 2 bits
    only for entries of similar magnitude.

    Args:
      bits: 8, 4, 2 or 1.
      chunk: the most entries that share a scale, ≥ 1; None: the whole leaf. A chunk is as many
        whole rows of the last axis as fit, or `chunk` entries of a longer row. The last chunk may
        be shorter.
      stochastic: whether to round at random. The random bits are a hash of the step, the entry's
        number and all bits of the leaf, so a run can be repeated bit for bit, and workers with
        equal leaves round in the same way.

    Bytes of a leaf of n entries: n·bits bits in whole 4-byte words, and 4 bytes per chunk. State: 4
    bytes per leaf if stochastic, else none.

    Source: signSGD with error feedback, Karimireddy et al. 2019, arXiv 1901.09847; stochastic:
    QSGD, Alistarh et al. 2017, arXiv 1610.02132, §3.1, with max|x| instead of the norm.

    >>> quantize(1).num_bytes((1024, 1024))
    132096
    """
    width = checks.choice("bits", checks.count("bits", bits), BITS)
    length = None if chunk is None else checks.count("chunk", chunk)
    return Quantize(width, length, checks.flag("stochastic", stochastic))
