"""Codes of a few bits in the planes of 32-bit words."""

import jax
import numpy as np
import pytest

from optfn.compression import planes


def words_of_planes(codes, bits):
    """Return the words of codes, one after the other: the p codes of a word lie one row apart."""
    rows, p = codes.reshape(-1, codes.shape[-1]), 32 // bits
    height = max(1, min(8, len(rows) // p))
    words, start = [], 0
    while start + p * height <= len(rows):
        for i in range(start, start + height):
            for j in range(rows.shape[1]):
                words.append(sum(int(rows[i + k * height, j]) << (bits * k) for k in range(p)))
        start += p * height
    last = rows[start:].reshape(-1)
    length = -(-last.size // p)
    last = np.pad(last, (0, length * p - last.size)).reshape(p, -1)
    words += [sum(int(last[k, j]) << (bits * k) for k in range(p)) for j in range(length)]
    return words


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("shape", [(7,), (1500,), (64, 96), (2, 33, 4), (50, 40), (640, 3)])
def test_codes_in_planes_of_words(shape, bits):
    """Blocks of whole rows, and then the last rows; no more words than the bits fill."""
    codes = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint32)
    words = jax.jit(lambda codes: planes.pack_codes(codes, bits))(codes)
    assert words.tolist() == words_of_planes(codes, bits)
    assert words.size == planes.num_code_words(codes.size, bits) == -(-codes.size * bits // 32)
    found = jax.jit(lambda words: planes.unpack_codes(words, shape, bits))(words)
    np.testing.assert_array_equal(found, codes)
