"""The compressors of `exchange` in NumPy, with a full sort, and their bytes.

Each takes one leaf and returns what is sent of it, computed in the dtype of the leaf: whether a
number is rounded up or down at a tie is decided in float32.
"""

import math
from functools import partial

import numpy as np

DEPTH = {"float32": 32, "bfloat16": 16, "int8": 8, "int2": 2}


def chunks(n, chunk):
    """Yield the slice of each chunk."""
    length = n if chunk is None else min(chunk, n)
    for start in range(0, n, length):
        yield slice(start, min(start + length, n))


def rounded(x, kind):
    """Return values as they come out of a packet; those of one chunk."""
    number = x.dtype.type
    if kind == "float32":
        return x
    if kind == "bfloat16":
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(x.dtype)
    if kind in ("int8", 8, 4):
        s = np.abs(x).max() / number(7 if kind == 4 else 127)
        return s * np.rint(x / s) if s else 0 * x
    if kind in ("int2", 2):
        s = np.abs(x).max()
        if not s:
            return 0 * x
        for _ in range(8):
            large = np.abs(x) > s * number(2 / 3)
            level = np.where(large, 1, number(1 / 3))  # s times this is the nearest level
            s = number(np.sum(np.abs(x) * level, dtype=float) / np.sum(level**2, dtype=float))
        is_large = np.abs(x) > s * number(2 / 3)
        return np.where(x < 0, -1, 1).astype(x.dtype) * np.where(is_large, s, s / number(3))
    s = number(np.abs(x).mean(dtype=np.float64))
    return np.where(x < 0, -s, s)


def top_k(x, density, chunk=4096, values="float32"):
    sent = np.zeros(x.size, x.dtype)
    flat = x.reshape(-1)
    for part in chunks(x.size, chunk):
        k = max(1, round(density * (part.stop - part.start)))
        chosen = part.start + np.sort(np.argsort(-np.abs(flat[part]), kind="stable")[:k])
        sent[chosen] = rounded(flat[chosen], values)
    return sent.reshape(x.shape)


def in_rows(shape, chunk):
    """Return the length of a chunk: in whole rows, unless a row is longer."""
    length = min(chunk or math.inf, math.prod(shape))
    return length if length < shape[-1] else length // shape[-1] * shape[-1]


def quantize(x, bits, chunk=4096):
    flat, chunk = x.reshape(-1), in_rows(x.shape, chunk)
    return np.concatenate([rounded(flat[part], bits) for part in chunks(x.size, chunk)]).reshape(
        x.shape
    )


def top_k_bytes(shape, density, chunk=4096, values="float32"):
    n = math.prod(shape)
    parts = [part.stop - part.start for part in chunks(n, chunk)]
    index = math.ceil(math.log2(max(parts)))
    bits = sum(max(1, round(density * m)) for m in parts) * (index + DEPTH[values])
    return 4 * math.ceil(bits / 32) + (4 * len(parts) if DEPTH[values] < 16 else 0)


def quantize_bytes(shape, bits, chunk=4096):
    n = math.prod(shape)
    return 4 * math.ceil(n * bits / 32) + 4 * len(list(chunks(n, in_rows(shape, chunk))))


# What is compared with the compressor of the same name, its `top_k_bytes` or `quantize_bytes` too.
CASES = {
    "top_k": partial(top_k, density=0.05),
    "top_k_int2": partial(top_k, density=1 / 64, chunk=1000, values="int2"),
    "top_k_int8": partial(top_k, density=0.3, chunk=None, values="int8"),
    "top_k_bfloat16": partial(top_k, density=0.01, chunk=100, values="bfloat16"),
    "top_k_one_entry": partial(top_k, density=1.0, chunk=1),
    "quantize_8": partial(quantize, bits=8),
    "quantize_4": partial(quantize, bits=4, chunk=50),
    "quantize_2": partial(quantize, bits=2, chunk=None),
    "quantize_1": partial(quantize, bits=1),
}


def power_sgd(xs, q):
    """Return what each worker sends of its matrix, the next Q̄, and the mean of what is sent.

    xs: (workers, m, n); q: (r, n).
    """
    p, triangle = np.linalg.qr(np.mean([x @ q.T for x in xs], axis=0))
    p *= np.sign(np.diag(triangle))  # as Gram and Schmidt's method has them
    own = [p.T @ x for x in xs]
    q = np.mean(own, axis=0)
    return np.stack([p @ o for o in own]), q, p @ q
