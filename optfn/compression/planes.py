"""Codes of a few bits in the planes of 32-bit words, row by row.

A word has p = 32/bits codes, of p consecutive rows, so that no entry leaves its column and every
device packs whole rows at a time. Rows (R, C) are cut into blocks of p·s rows, s = 8 or, of a leaf
with fewer rows, R/p. A block is p planes of s rows, and becomes s rows of words: bits b·j to b·j +
b − 1 of a word are the code of plane j. The rows after the last block are one row of codes, which
is cut into p planes of equal length, padded with zeros.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The rows that a tile of a TPU has.
_TILE = 8


def num_code_words(size: int, bits: int) -> int:
    """Return ⌈size·bits/32⌉, the number of words of `size` codes."""
    return -(-size * bits // 32)


def _blocks(shape: tuple[int, ...], bits: int) -> tuple[int, int, int, int]:
    """Return how the rows of an array are cut into whole blocks, as (blocks, planes, rows of a
    plane, columns), which leaves out the rows after the last block."""
    rows, planes = math.prod(shape[:-1]), 32 // bits
    height = max(1, min(_TILE, rows // planes))
    return rows // (planes * height), planes, height, shape[-1] if shape else 1


def _bit_offsets(bits: int) -> np.ndarray:
    """Return the bit offset of each plane in a word, (1, planes, 1, 1)."""
    return np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, 1, 1)


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Return codes of `bits` bits packed into flat uint32 words, block by block in planes, with the
    rows after the last block packed by themselves and padded with zeros.

    Args:
      codes: uint32, below 2^bits, of any shape.
      bits: 8, 4, 2 or 1.
    """

    def words(blocks: jax.Array) -> jax.Array:
        shifted = blocks << _bit_offsets(bits)
        # The planes have no bit in common; `or` needs no carry.
        return lax.reduce(shifted, np.uint32(0), lax.bitwise_or, (1,)).reshape(-1)

    _, planes, _, columns = blocks = _blocks(codes.shape, bits)
    if codes.size == math.prod(blocks):
        return words(codes.reshape(blocks))
    rows, end = codes.reshape(-1, columns), math.prod(blocks[:3])
    last = rows[end:].reshape(-1)
    last = jnp.pad(last, (0, -last.size % planes)).reshape(1, planes, 1, -1)
    return jnp.concatenate([words(rows[:end].reshape(blocks)), words(last)])


def unpack_codes(words: jax.Array, shape: tuple[int, ...], bits: int) -> jax.Array:
    """Return the uint32 codes of this shape that `pack_codes` has packed into `words`."""
    blocks, _, height, columns = _blocks(shape, bits)
    end, size = blocks * height * columns, math.prod(shape)

    def codes(words: jax.Array, *shape: int) -> jax.Array:
        return (words.reshape(shape) >> _bit_offsets(bits)) & np.uint32((1 << bits) - 1)

    rows = codes(words[:end], blocks, 1, height, columns)
    if rows.size < size:
        last = codes(words[end:], 1, 1, 1, -1).reshape(-1)[: size - rows.size]
        # Joined row by row, a compiler chooses between the two once a row, and not once an entry.
        rows = jnp.concatenate([x.reshape(-1, columns) for x in (rows, last)])
    return rows.reshape(shape)
