"""Integers of a few bits each, without gaps in 32-bit words.

All fields of a packet form one stream of bits, the lowest bit of a word first. It is built of
digits: the widest groups of bits of which every field and a word consist of a whole number. 12-bit
indices and 2-bit values have digits of 2 bits, of which a word holds 16.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optfn.leaves import slices


def num_words(widths: Sequence[int], counts: Sequence[int]) -> int:
    """Return the number of words that fields of so many entries of so many bits take."""
    return -(-sum(w * n for w, n in zip(widths, counts, strict=True)) // 32)


def pack(fields: Sequence[jax.Array], widths: Sequence[int]) -> jax.Array:
    """Return the words of several fields, one after the other.

    Args:
      fields: flat uint32 arrays, each entry below 2^width.
      widths: for each field the bits of an entry, 0 to 32; a field of width 0 takes no space.
    """
    digit = math.gcd(32, *widths)
    digits = [_split(x, width, digit) for x, width in zip(fields, widths, strict=True) if width]
    stream = digits[0] if len(digits) == 1 else jnp.concatenate(digits)
    per_word = 32 // digit
    if stream.size % per_word:
        stream = jnp.pad(stream, (0, -stream.size % per_word))
    return _join(stream, 32, digit)


def unpack(words: jax.Array, widths: Sequence[int], counts: Sequence[int]) -> list[jax.Array]:
    """Return the fields that were packed, in so many entries each."""
    digit = math.gcd(32, *widths)
    lengths = [n * width // digit for n, width in zip(counts, widths, strict=True)]
    stream = _split(words, 32, digit)
    parts = [stream[: lengths[0]]] if len(lengths) == 1 else slices.split(stream, lengths)
    return [
        _join(part, width, digit) if width else jnp.zeros(n, jnp.uint32)
        for part, width, n in zip(parts, widths, counts, strict=True)
    ]


def _shifts(width: int, digit: int) -> np.ndarray:
    return np.arange(0, width, digit, dtype=np.uint32)


def _split(x: jax.Array, width: int, digit: int) -> jax.Array:
    """Return the digits of integers of so many bits, the lowest first."""
    if width == digit:
        return x
    mask = np.uint32((1 << digit) - 1)
    return ((x[:, None] >> _shifts(width, digit)) & mask).reshape(-1)


def _join(digits: jax.Array, width: int, digit: int) -> jax.Array:
    """Return the integers of so many bits that are made of digits."""
    if width == digit:
        return digits
    groups = digits.reshape(-1, width // digit) << _shifts(width, digit)
    return jnp.sum(groups, axis=1, dtype=jnp.uint32)
