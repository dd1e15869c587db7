"""Arrays of random numbers."""

import numpy as np


def normal(seed, *shape, scale=1.0):
    """Return float32 numbers of a normal distribution; `seed` is an integer, or several."""
    return np.asarray(scale * np.random.default_rng(seed).normal(size=shape), np.float32)


def weights(seed, *shape):
    """Return such numbers of the size of a layer's weights."""
    return normal(seed, *shape, scale=0.3)
