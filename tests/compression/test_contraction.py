"""No compressor keeps more than came: the error of a packet is shorter than the leaf."""

import jax
import numpy as np
import pytest
from reference_exchange import chunks

from optfn.compression.values import ValueFormat
from optfn.distributed import power_sgd, quantize, top_k

COMPRESSORS = [
    *(quantize(n, chunk=k) for n, k in ((8, 7), (4, 256), (2, 7), (2, None), (1, 256))),
    *(top_k(0.1, chunk=100, values=x) for x in ("float32", "bfloat16", "int8", "int2")),
    power_sgd(2),
]
SHAPE = (40, 25)
TINY = np.float32(1e-45)


def draws(rng):
    """Yield a leaf of each kind, with its name."""

    def one_hot(value):
        x = np.zeros(SHAPE)
        x[tuple(rng.integers(SHAPE))] = value
        return x

    yield "normal", rng.normal(size=SHAPE)
    yield "large", 1e30 * rng.normal(size=SHAPE)
    yield "cauchy", rng.standard_cauchy(SHAPE)
    yield "two degrees of freedom", rng.standard_t(2, SHAPE)
    yield "log-normal", rng.choice([-1, 1], SHAPE) * np.exp(4 * rng.normal(size=SHAPE))
    yield "some large", rng.normal(size=SHAPE) * np.where(rng.random(SHAPE) < 0.05, 1e3, 1)
    yield "constant", np.full(SHAPE, -0.3)
    yield "one-hot", one_hot(1e-3)
    yield "one-hot and noise", one_hot(1e4) + rng.normal(size=SHAPE)
    yield "zeros", np.zeros(SHAPE)
    yield "denormal", TINY * rng.integers(-100, 100, SHAPE)
    yield "one denormal", one_hot(TINY)
    yield "normal and denormal", np.where(rng.random(SHAPE) < 0.5, 1e-40, 1e-3)


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64).reshape(-1))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_is_kept_is_shorter_than_what_came(compressor):
    state = compressor.init(SHAPE)
    sent_of = jax.jit(lambda x: compressor.decode(compressor.encode(x, state)[0], SHAPE))
    for seed in range(3):
        for kind, x in draws(np.random.default_rng(seed)):
            x = x.astype(np.float32)
            kept = norm(x - np.asarray(sent_of(x), np.float64))
            # Numbers that the compiler takes for zeros come back as zeros.
            is_zero = np.abs(x).max() < np.finfo(np.float32).tiny
            assert kept <= norm(x) if is_zero else kept < norm(x), (kind, seed)


@pytest.mark.parametrize("chunk", [16, 4096])
def test_the_scale_of_two_bits_has_nearly_the_least_error(chunk):
    """The least of all: with the k largest at s and the others at s/3, for each k."""
    compressor, worst = quantize(2, chunk=chunk), []
    sent_of = jax.jit(lambda x: compressor.decode(compressor.encode(x, ())[0], x.shape))
    for _, x in draws(np.random.default_rng(0)):
        x = np.resize(x, 4096).astype(np.float32)
        if np.abs(x).max() < np.finfo(np.float32).tiny:
            continue
        sent, least = sent_of(x), 0.0
        for part in chunks(x.size, chunk):
            falling = np.sort(np.abs(x[part]).astype(np.float64))[::-1]
            of_large = np.concatenate([[0], np.cumsum(falling)])
            k = np.arange(falling.size + 1)
            gain = (2 * of_large + falling.sum()) ** 2 / (8 * k + falling.size)
            least += np.sum(falling**2) - gain.max()
        worst.append(norm(x - np.asarray(sent, np.float64)) / max(np.sqrt(least), 1e-6 * norm(x)))
    assert max(worst) < (1.005 if chunk == 4096 else 1.1)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quotient_above_the_largest_code_is_that_code(bits):
    """max|x|/s rounds up for some x, and at random it would become the next code: −max|x|."""
    largest = {8: 127, 4: 7}[bits]
    values = ValueFormat(bits, True, is_stochastic=True)
    s = np.float32(0.1)
    x = np.nextafter(np.float32(largest) * s, np.float32(np.inf))
    assert x / s > largest
    arguments = np.array([x]), np.array([s]), np.zeros(1, np.uint32)
    decoded = jax.jit(lambda x, s, noise: values.decode(values.encode(x, s, noise), s[0]))
    assert decoded(*arguments)[0] == np.float32(largest) * s
