"""Encodings of numbers in 8 and 16 bits with stochastic rounding: functions of arrays.

`split_float32` and `join_float32` write a float32 number as a bfloat16 one and a remainder.

A moving average in few bits does not change if its steps are smaller than half the distance between
two codes. Stochastic rounding rounds up with the probability that makes the mean exact, so the
average changes by the right amount in expectation (Gupta et al. 2015, arXiv 1502.02551).
The random bits are a hash of the element's index and a seed, which costs a few integer operations
per element and needs no state.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optfn.mesh.compilers import xla

# The fewest elements that share a scale, in arrays that have as many.
ROW = 256


class Code(NamedTuple):
    """A dynamic 8-bit code of magnitudes in [0, 1]: eight codes to each power of two.

    Code k represents float(k + start) − smallest, where float() puts its argument into the upper 12
    bits of a float32: a number with three bits of mantissa, shifted so that code 0 is 0. Below
    `smallest` the codes are evenly spaced.
    """

    top: int  # the largest code
    start: int  # smallest, as the upper 12 bits of a float32

    @property
    def smallest(self) -> float:
        """The power of two below which the codes are evenly spaced, by an eighth of it."""
        return float(np.uint32(self.start << 20).view(np.float32))

    @property
    def largest(self) -> float:
        """The value of the largest code, just under 1."""
        return float(np.uint32((self.top + self.start) << 20).view(np.float32)) - self.smallest


SIGNED = Code(top=127, start=(127 - 16) << 3)  # for a magnitude with a sign; down to 2⁻¹⁹
UNSIGNED = Code(top=255, start=(127 - 32) << 3)  # for a magnitude alone; down to 2⁻³⁵


# Outside of a compiled step each function is one small program, not one for each operation in it.
_compiled = functools.partial(jax.jit, inline=True)


def _int_bits(x: jax.Array) -> jax.Array:
    """Return the bits of float32 numbers, int32."""
    # Of float32 alone, and signed: compilers for TPUs lay an array of 16 bits out anew to read its
    # bits, and break a kernel at arithmetic in uint32.
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 numbers with these bits, int32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@functools.partial(_compiled, static_argnums=0)
def random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return 32 random bits for each element of `shape`: a hash of its index and a uint32 seed.

    Source: the mixing constants come from Wellons' "prospector" (triple32's first two rounds).
    """
    x = xla.progression(shape, seed, 0x9E3779B1)
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


@_compiled
def to_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Round float32 to one of the two next bfloat16 numbers: away from zero if the noise and the
    16 lower bits of x add up to 2¹⁶ or more, else toward zero.

    Args:
      x: float32.
      noise: uint32 in [0, 2¹⁶), of the same shape.
    """
    upper = ((jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) >> 16).astype(jnp.uint16)
    # The noise would make a zero of a NaN whose bits are all ones, as a GPU's are.
    return jnp.where(jnp.isnan(x), jnp.nan, jax.lax.bitcast_convert_type(upper, jnp.bfloat16))


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array's scales, which is its shape without the fewest last axes that
    have ROW elements together, or () if all have fewer.

    A row is the last axes, as few as have ROW elements together, or all axes of a smaller array.
    Devices that divide the leading axes divide the scales alike. A vector is one row.
    """
    lead = len(shape)
    while lead and math.prod(shape[lead:]) < ROW:
        lead -= 1
    return shape[:lead]


@_compiled
def row_max(x: jax.Array) -> jax.Array:
    """Return the largest element of each row of x ≥ 0, in the shape of the scales, or 0 for an
    empty row."""
    lead = len(scale_shape(x.shape))
    return jnp.max(x, axis=range(lead, x.ndim), initial=0)


def _broadcast_scale(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat the scale of each row for its elements: return an array of `shape`."""
    inner = [1] * (len(shape) - scale.ndim)
    return jnp.broadcast_to(scale.reshape(*scale.shape, *inner), shape)


def _encode(x: jax.Array, scale: jax.Array, noise: jax.Array, code: Code) -> jax.Array:
    """Return the int32 code of x/scale·largest for x ≥ 0, rounded by the noise and at most
    `code.top`, or 0 in rows whose scale is 0."""
    factor = jnp.where(scale > 0, code.largest / scale, 0)  # a division per row, not per element
    shifted = x * _broadcast_scale(factor, x.shape) + code.smallest
    fraction = jax.lax.bitcast_convert_type(noise << 4, jnp.int32)
    bits = (_int_bits(shifted) & _SIGNLESS) + fraction  # NaN may have a sign
    return jnp.minimum((bits >> 20) - code.start, code.top)


def _decode(k: jax.Array, scale: jax.Array, code: Code) -> jax.Array:
    """Return the float32 values of int32 codes ≥ 0, where code 0 is 0 and code `top` is the
    scale."""
    magnitude = _from_bits((k + code.start) << 20)
    x = (magnitude - code.smallest) * _broadcast_scale(scale / code.largest, k.shape)
    return jnp.where(k == 0, 0, x)  # also where the scale is infinite


@_compiled
def encode_signed(x: jax.Array, scale: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the int8 codes of float32 x, whose mean over the noise is x, with magnitudes above the
    scale encoded as the scale.

    Args:
      x: float32.
      scale: float32, one for each row.
      noise: uint32 in [0, 2¹⁶), of the shape of x.
    """
    k = _encode(jnp.abs(x), scale, noise, SIGNED)
    return jnp.where(x < 0, -k, k).astype(jnp.int8)


@_compiled
def decode_signed(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 values of int8 codes, which are the magnitude that SIGNED gives |code|
    times the scale of the row, with the code's sign."""
    k = codes.astype(jnp.int32)
    magnitude = _decode(jnp.abs(k), scale, SIGNED)
    return jnp.where(k < 0, -magnitude, magnitude)


@_compiled
def encode_unsigned(x: jax.Array, scale: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the uint8 codes of float32 x in [0, scale], rounded at random by the noise, but a
    positive x never to code 0, which only x = 0 has.

    A positive number below the smallest positive code is rounded up to it, because the result is
    used as a denominator.
    """
    k = _encode(x, scale, noise, UNSIGNED)
    return jnp.where(x > 0, jnp.maximum(k, 1), 0).astype(jnp.uint8)


@_compiled
def decode_unsigned(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 values of uint8 codes, which are the magnitude that UNSIGNED gives the
    code times the scale of the row."""
    return _decode(codes.astype(jnp.int32), scale, UNSIGNED)


# The bits of infinity, of the largest number of 24 bits, of the canonical NaN, and of all but the
# sign.
_INFINITY, _TOP_24, _NAN, _SIGNLESS = 0x7F800000, 0x7F7FFF00, 0x7FC00000, 0x7FFFFFFF
_SIGN = np.int32(-(2**31))
REMAINDERS = {32: jnp.dtype(jnp.int16), 24: jnp.dtype(jnp.int8)}


def _is_nan(bits: jax.Array) -> jax.Array:
    """Tell whether the bits of a float32, int32, are a NaN."""
    return (bits & _SIGNLESS) > _INFINITY


def _round_bits(x: jax.Array, bits: int, noise: jax.Array | None) -> jax.Array:
    """Return the int32 bits of x, for bits=24 rounded to 24 bits by the noise, or to nearest
    without it, but a finite number never to ∞."""
    exact = _int_bits(x)
    if bits == 32:
        return exact
    low = 0x80 if noise is None else jax.lax.bitcast_convert_type(noise & 0xFF, jnp.int32)
    # A number that would round up to ∞ is truncated instead.
    return (exact + jnp.where((exact & _SIGNLESS) < _TOP_24, low, 0)) & ~0xFF


def split_float32(
    x: jax.Array, bits: int = 32, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return x as the nearest bfloat16 number and an integer remainder, of 16 bits if `bits` is 32.
    If it is 24, x is rounded first, and the remainder has 8 bits.

        bits(|x|) = bits(|p|)·2ᵏ + e      k = bits − 16, −2ᵏ⁻¹ ≤ e < 2ᵏ⁻¹

    p is x rounded to the nearest bfloat16, and away from zero at a tie, because e = 2ᵏ⁻¹ would be
    too large. NaN is the canonical one, with e = 0.

    Args:
      x: float32.
      bits: 32, so that `join_float32` gives x bit for bit; or 24, which rounds the bits of x at
        random to 24 first, a finite number to a finite one.
      noise: random uint32 of the shape of x, for 24 bits; None rounds to the nearest.

    Returns:
      p, bfloat16, and e, int16 or int8.
    """
    nearest = (_round_bits(x, bits, noise) + 0x8000) & ~0xFFFF
    p = jnp.where(_is_nan(_int_bits(x)), _NAN, nearest)
    narrow = _from_bits(p).astype(jnp.bfloat16)  # exact
    return narrow, remainder_beside(narrow, x, bits, noise)


def remainder_beside(
    p: jax.Array, x: jax.Array, bits: int, noise: jax.Array | None = None
) -> jax.Array:
    """Return the remainder e, int16 for 32 bits or int8 for 24, that brings `join_float32(p, e)`
    nearest to x, or 0 where p or x is NaN."""
    dtype = REMAINDERS[bits]
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    own, wanted = _int_bits(p.astype(jnp.float32)), _round_bits(x, bits, noise)
    e = jnp.clip((wanted - own) >> (32 - bits), low, high)
    e = jnp.where((own ^ wanted) >= 0, e, low)  # low where the signs differ
    return jnp.where(_is_nan(own) | _is_nan(_int_bits(x)), 0, e).astype(dtype)


def join_float32(p: jax.Array, e: jax.Array) -> jax.Array:
    """Return the float32 number that `split_float32` has split into p and e, or, if p was edited
    since, p moved by e units.

    A unit is one of the last place of float32, or of 24 bits, so the move is at most half a unit of
    p's last place.
    """
    own = _int_bits(p.astype(jnp.float32))
    moved = (own & _SIGNLESS) + (e.astype(jnp.int32) << (0 if e.dtype == jnp.int16 else 8))
    whole = jnp.clip(moved, 0, _INFINITY) | (own & _SIGN)
    return _from_bits(jnp.where(_is_nan(own), _NAN, whole))
