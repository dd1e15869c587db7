"""Many slices of one array, without code for each of them.

XLA on CPU compiles a slice together with what reads it, about 8 ms for each place where one
starts, minutes for thousands. Where the places are numbers that are known at run time only, all
slices of one length are one piece of code.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax


def pieces(x: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    """Return x[..., start : start + size] for each start and size; all static."""
    if len(sizes) < 2 or x.shape[-1] >= 2**31:
        return _by_slice(starts, sizes, x)
    return lax.platform_dependent(
        x,
        cpu=partial(_by_number, tuple(starts), tuple(sizes)),
        default=partial(_by_slice, tuple(starts), tuple(sizes)),
    )


def split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Return consecutive pieces of x, along its last axis."""
    return pieces(x, list(accumulate(sizes, initial=0))[:-1], sizes)


def _by_slice(starts: Sequence[int], sizes: Sequence[int], x: jax.Array) -> list[jax.Array]:
    return [
        lax.slice_in_dim(x, start, start + size, axis=-1)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _by_number(starts: Sequence[int], sizes: Sequence[int], x: jax.Array) -> list[jax.Array]:
    # A branch that is always taken, which XLA cannot know before the barrier falls.
    numbers = lax.cond(
        lax.optimization_barrier(jnp.asarray(False)),
        lambda: [jnp.int32(start + 1) for start in starts],
        lambda: [jnp.int32(start) for start in starts],
    )
    return [
        lax.dynamic_slice_in_dim(x, number, size, axis=-1)
        for number, size in zip(numbers, sizes, strict=True)
    ]
