"""Packing of small integers and masks into 32-bit words, without gaps.

All fields of a packet form one stream of bits, the lowest bit of a word first. Each field is packed
into whole words by itself, as digits, the widest groups of bits that divide an entry and a word
evenly: for 12-bit indices a digit has 4 bits, and a word has 8 digits. Then its words are shifted
to the end of the field before. Digits of all fields together would be narrower, and the compilers
of TPUs take seconds for a value of 32 bits in digits of 4.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.mesh.collectives.axes import mark_varying
from optfn.mesh.compilers.groups import varying_axes


def num_words(widths: Sequence[int], counts: Sequence[int]) -> int:
    """Return how many 32-bit words hold fields with these bits per entry and these counts of
    entries, rounded up to a whole word."""
    return -(-sum(w * n for w, n in zip(widths, counts, strict=True)) // 32)


def pack_fields(fields: Sequence[jax.Array], widths: Sequence[int]) -> jax.Array:
    """Return fields packed in order into uint32 words (words,), without gaps and with zeros at the
    end of the last word, or no words without entries.

    Args:
      fields: flat uint32 arrays; entries are below 2^width.
      widths: the bits of an entry of each field, 0 to 32; a field of width 0 takes no space.
    """
    stream, end = None, 0  # `end`: the number of bits so far
    for x, width in zip(fields, widths, strict=True):
        if width and x.size:
            words, start = _shift_up(_pack_field(x, width), end % 32), end // 32
            end += width * x.size
            words = words[: -(-end // 32) - start]
            stream = words if stream is None else _overlap(stream, words, start)
    return jnp.zeros(0, jnp.uint32) if stream is None else stream


def _overlap(stream: jax.Array, words: jax.Array, start: int) -> jax.Array:
    """Return a stream extended by `words` from its word `start` on, where a word that both have
    becomes the bitwise or of the two."""
    shared = stream.size - start
    if not shared:
        return jnp.concatenate([stream, words])
    both = stream[start:] | words[:shared]
    return jnp.concatenate([stream[:start], both, words[shared:]])


def _pack_field(x: jax.Array, width: int) -> jax.Array:
    """Return entries of `width` bits packed without gaps into whole uint32 words, with zeros at the
    end of the last word."""
    # No digit of this width crosses the end of an entry or of a word, so that packing needs only
    # reshapes and shifts.
    digit = math.gcd(32, width)
    digits = _split_digits(x, width, digit)
    # Unconditional, a pad of nothing would still copy the digits in some programs.
    if missing := -digits.size % (32 // digit):
        digits = jnp.pad(digits, (0, missing))
    return _join_digits(digits, 32, digit)


def _shift_up(words: jax.Array, by: int) -> jax.Array:
    """Return a stream of words with `by` < 32 zero bits put in front, and so one word longer, or
    unchanged if `by` is 0."""
    if not by:
        return words
    low = jnp.pad(words << np.uint32(by), (0, 1))
    return low | jnp.pad(words >> np.uint32(32 - by), (1, 0))


def unpack_fields(
    words: jax.Array, widths: Sequence[int], counts: Sequence[int]
) -> list[jax.Array]:
    """Return each field that `pack_fields` has packed, uint32 (counts[i],), where a field of width
    0 becomes zeros."""
    fields, start = [], 0
    for width, count in zip(widths, counts, strict=True):
        end = start + width * count
        own = words[start // 32 : -(-end // 32)]
        fields.append(_unpack_field(_shift_down(own, start % 32), width, count))
        start = end
    return fields


def _unpack_field(words: jax.Array, width: int, count: int) -> jax.Array:
    """Return the `count` entries that `_pack_field` has packed, or zeros if their width is 0."""
    if not width or not count:
        return jnp.zeros(count, jnp.uint32)
    digit = math.gcd(32, width)
    return _join_digits(_split_digits(words, 32, digit)[: count * width // digit], width, digit)


def _shift_down(words: jax.Array, by: int) -> jax.Array:
    """Return a stream of words without its first `by` < 32 bits, as long as before with zeros at
    the end, or unchanged if `by` is 0."""
    if not by:
        return words
    next_words = jnp.pad(words[1:], (0, 1))
    return words >> np.uint32(by) | next_words << np.uint32(32 - by)


def _shifts(width: int, digit: int) -> np.ndarray:
    """Return the offset of each digit within `width` bits, uint32 (1, width/digit)."""
    return np.arange(0, width, digit, dtype=np.uint32)[None]


def _split_digits(x: jax.Array, width: int, digit: int) -> jax.Array:
    """Split integers of `width` bits into flat digits of `digit` bits, the lowest digit first."""
    if width == digit:
        return x
    mask = np.uint32((1 << digit) - 1)
    return ((x[:, None] >> _shifts(width, digit)) & mask).reshape(-1)


def _join_digits(digits: jax.Array, width: int, digit: int) -> jax.Array:
    """Return integers of `width` bits joined from flat digits of `digit` bits, the lowest digit
    first, which undoes `_split_digits`."""
    if width == digit:
        return digits
    groups = digits.reshape(-1, width // digit) << _shifts(width, digit)
    return jnp.sum(groups, axis=1, dtype=jnp.uint32)


def count_ones(words: jax.Array) -> jax.Array:
    """Return the number of set bits of each word, int32."""
    return lax.population_count(words).astype(jnp.int32)


def nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
    """Return the position of the n-th set bit of each word, counted from 0, or 31 if the word has
    no such bit.

    It takes five bisections.
    """
    at = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        low = count_ones(word & np.uint32((1 << width) - 1))
        above = n >= low
        n = jnp.where(above, n - low, n)
        word = jnp.where(above, word >> np.uint32(width), word)
        at += jnp.where(above, width, 0)
    return at


def first_bits(words: jax.Array, n: jax.Array) -> jax.Array:
    """Return words with all but their first n set bits cleared, where a word with at most n set
    bits is unchanged."""
    below = (np.uint32(1) << nth_bit(words, n).astype(jnp.uint32)) - np.uint32(1)
    return jnp.where(n < count_ones(words), words & below, words)


def find_positions(
    words: jax.Array, ends: jax.Array, number: jax.Array, first: jax.Array | np.ndarray, most: int
) -> jax.Array:
    """Return the position of the set bit of each rank in `number`; ranks count from 0 over all
    words. Where there is no such bit, the position is within the words, and means nothing.

    Args:
      words: uint32, flat.
      ends: the number of set bits up to the end of each word.
      number: the numbers of the bits, int32, flat.
      first: for each bit, the first word that may have it.
      most: the number of words, from `first` on, that may have it; static.
    """
    steps, last = most.bit_length(), words.size - 1

    def halve(i: jax.Array, word: jax.Array) -> jax.Array:
        ahead = 1 << (steps - 1 - i)
        end = ends[jnp.minimum(word + (ahead - 1), last).astype(jnp.uint32)]
        return jnp.where(end <= number, word + ahead, word)

    # The carry of a loop must vary over the same mesh axes from the start.
    start = mark_varying(jnp.broadcast_to(jnp.int32(first), number.shape), varying_axes(ends))
    at = jnp.minimum(lax.fori_loop(0, steps, halve, start), last).astype(jnp.uint32)
    word = words[at]
    rank = number - (ends[at] - count_ones(word))
    return at.astype(jnp.int32) * 32 + jnp.minimum(nth_bit(word, rank), 31)
