"""Encodings of a float32 number in a packet, in 32, 16, 8, 4, 2 or 1 bits.

A `ValueFormat` turns numbers into integers of `bits` bits. If it has scales, there is one float32
scale s for each chunk of numbers. With m the number of values in a chunk:

    float32     the bits of x
    bfloat16    the bits of x rounded to 8 bits of mantissa
    8, 4 bits   x/s rounded, ties to even;  s = max|x|/127 or max|x|/7
    2 bits      the nearest of ±s/3 and ±s;  s of least squared error, see `_two_bit_scales`
    1 bit       the sign of x, + for 0, times s;  s = (∑|x|)/m

Without noise, each encoding is a contraction: the error has a smaller norm than x, unless x is 0.

With noise, x becomes one of the two values next to it, with probabilities that make the mean x.
With 1 and 2 bits s is then max|x|, and with 1 bit the values are ±s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression.segments import RowChunks
from optfn.mesh.compilers.xla import divide

# The largest integer that stands for a value, by the number of bits.
_LARGEST = {8: 127, 4: 7}
# After this many improvements of the 2-bit scale, the error is within a thousandth of the least
# one, for chunks of thousands of normal, uniform or heavy-tailed numbers.
_IMPROVEMENTS = 8


class ValueFormat(NamedTuple):
    """The encoding of a value in `bits` bits, with one scale per chunk or without."""

    bits: int
    has_scale: bool
    is_stochastic: bool = False

    def scales(self, x: jax.Array, chunks: RowChunks) -> jax.Array:
        """Return the scale of each chunk of x, float32 (count,), or an array of shape (0,) if the
        format has no scales."""
        return chunks.map(self._scales, x) if self.has_scale else jnp.zeros(0, jnp.float32)

    def _scales(self, x: jax.Array, chunks: RowChunks) -> jax.Array:
        """Return the scale of each chunk, max|x| over the largest code, but without random rounding
        mean|x| for 1 bit and the scale of `_two_bit_scales` for 2 bits."""
        counts = chunks.flat.lengths.astype(np.float32)
        if self.bits == 1 and not self.is_stochastic:
            return divide(chunks.sum(jnp.abs(x)), counts)
        if self.bits == 2 and not self.is_stochastic:
            return _two_bit_scales(x, chunks, counts)
        largest = chunks.max(jnp.abs(x))
        return divide(largest, np.float32(_LARGEST.get(self.bits, 1)))

    def encode(self, x: jax.Array, s: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Return the codes of float32 values, uint32 of the same shape, rounded at random by
        `noise` if it is given, else by the fixed rule for this number of bits.

        Args:
          x: the values.
          s: the scale of each value, in a shape that broadcasts to x; ignored if the format
            has no scales.
          noise: 32 random bits for each value, for a stochastic format.
        """
        if noise is not None:
            return self._encode_at_random(x, s, noise)
        if self.bits == 32:
            return lax.bitcast_convert_type(x, jnp.uint32)
        if self.bits == 16:
            return _bfloat16_bits(x)
        negative = (x < 0).astype(jnp.uint32)
        if self.bits == 1:
            return negative
        if self.bits == 2:
            return 2 * negative + _is_large(x, s).astype(jnp.uint32)
        # A chunk of zeros has s = 0; by 1 instead, its codes are 0 and not NaN.
        return self._encode_integers(jnp.rint(divide(x, jnp.where(s > 0, s, 1.0))))

    def _encode_integers(self, whole: jax.Array) -> jax.Array:
        """Return whole numbers, given as float32, in two's complement of `bits` bits, uint32, after
        clipping them to ± the largest code."""
        # max|x|/s may exceed the largest integer by a rounding error.
        largest = _LARGEST[self.bits]
        whole = jnp.clip(whole, -largest, largest)
        code = lax.bitcast_convert_type(whole.astype(jnp.int32), jnp.uint32)
        return code & np.uint32((1 << self.bits) - 1)

    def _encode_at_random(self, x: jax.Array, s: jax.Array, noise: jax.Array) -> jax.Array:
        """Return the codes of x/s, or of x where s is 0, each rounded at random to one of the two
        values next to it, so that the mean is exact."""
        ratio = divide(x, jnp.where(s > 0, s, 1.0))
        if self.bits > 2:
            return self._encode_integers(_round_at_random(ratio, noise))
        # Number the values 0, 1, … in increasing order, from −s to s.
        last = 2**self.bits - 1
        place = jnp.clip((ratio + 1) * np.float32(last / 2), 0, last)
        place = _round_at_random(place, noise).astype(jnp.uint32)
        return 1 - place if self.bits == 1 else jnp.where(place < 2, 3 - place, place - 2)

    def decode(self, codes: jax.Array, s: jax.Array) -> jax.Array:
        """Return the float32 values of codes, multiplied by their scales s, which are ignored in
        the formats of 32 and 16 bits without scales."""
        if self.bits == 32:
            return lax.bitcast_convert_type(codes, jnp.float32)
        if self.bits == 16:
            return lax.bitcast_convert_type(codes << np.uint32(16), jnp.float32)
        if self.bits == 1:
            return jnp.where(codes == 0, s, -s)
        if self.bits == 2:
            size = jnp.where(codes & 1 == 1, s, divide(s, np.float32(3)))
            return jnp.where(codes >= 2, -size, size)
        unused = np.uint32(32 - self.bits)
        signed = lax.bitcast_convert_type(codes << unused, jnp.int32) >> unused.astype(np.int32)
        return signed.astype(jnp.float32) * s


def _is_large(x: jax.Array, s: jax.Array) -> jax.Array:
    """Tell whether |x| is nearer to s than to s/3, that is above 2s/3."""
    return jnp.abs(x) > s * np.float32(2 / 3)


def _two_bit_scales(x: jax.Array, chunks: RowChunks, counts: np.ndarray) -> jax.Array:
    """Return for each chunk a scale s so that the levels ±s/3 and ±s have a small squared error,
    found in a fixed number of steps from s = max|x|.

    This is Lloyd's iteration from s = max|x|. Let L be the entries that are nearer to s than to
    s/3, and S the others. For this division, the error is least at

        s = (∑_L |x| + ∑_S |x|/3)/(|L| + |S|/9)

    where it is ∑x² − (∑_L |x| + ∑_S |x|/3)²/(|L| + |S|/9) < ∑x². Dividing the entries again for the
    new s can only reduce the error, so after any number of steps the encoding is a contraction. A
    sort would find the least of all such errors, but takes twenty times as long.
    """
    largest = chunks.max(jnp.abs(x))
    # Measured in units of the largest entry, no sum overflows.
    x = divide(jnp.abs(x), chunks.broadcast(jnp.where(largest > 0, largest, 1.0)))
    total = chunks.sum(x)

    def improve(_: int, s: jax.Array) -> jax.Array:
        is_large = _is_large(x, chunks.broadcast(s))
        of_large = chunks.sum(jnp.where(is_large, x, 0.0))
        number = chunks.sum(is_large.astype(jnp.float32))
        return divide(3 * (2 * of_large + total), 8 * number + counts)

    ones = jnp.where(total >= 0, 1.0, total)  # NaN stays
    return largest * lax.fori_loop(0, _IMPROVEMENTS, improve, ones)


def _round_at_random(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Return ⌊x⌋ + 1 with probability x − ⌊x⌋, else ⌊x⌋, as the 32 random bits of each value in
    `noise` decide."""
    below = jnp.floor(x)
    # float32 has 24 bits: more of them could round up to 1.
    uniform = (noise >> 8).astype(jnp.float32) * np.float32(2**-24)
    return below + (uniform < x - below).astype(x.dtype)


def _bfloat16_bits(values: jax.Array) -> jax.Array:
    """Return as uint32 the bits of values rounded to bfloat16, ties to even, or truncated where
    rounding would turn a finite value into ∞."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # A finite value stays finite: one above the largest bfloat16 is truncated, not rounded up to ∞.
    finite = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F7F8000)
    return jnp.where(finite, bits + rounding, bits) >> np.uint32(16)


FLOAT32, BFLOAT16 = ValueFormat(32, False), ValueFormat(16, False)
