"""Many slices of one array at a compile time that does not grow with their number.

XLA on CPU compiles each static slice together with the code that reads it, which takes about 8 ms
for each distinct start, and minutes for thousands. If the starts are known only at run time, all
slices of the same length share one piece of code.
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
        return _static_slices(starts, sizes, x)
    found: list[jax.Array] = lax.platform_dependent(
        x,
        cpu=partial(_dynamic_slices, tuple(starts), tuple(sizes)),
        default=partial(_static_slices, tuple(starts), tuple(sizes)),
    )
    return found


def split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Return consecutive pieces of x, along its last axis."""
    return pieces(x, list(accumulate(sizes, initial=0))[:-1], sizes)


def _static_slices(starts: Sequence[int], sizes: Sequence[int], x: jax.Array) -> list[jax.Array]:
    return [
        lax.slice_in_dim(x, start, start + size, axis=-1)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _dynamic_slices(starts: Sequence[int], sizes: Sequence[int], x: jax.Array) -> list[jax.Array]:
    # The condition is always false, but the barrier hides that from XLA, which therefore does not
    # make the starts static again.
    numbers = lax.cond(
        lax.optimization_barrier(jnp.asarray(False)),
        lambda: [jnp.int32(start + 1) for start in starts],
        lambda: [jnp.int32(start) for start in starts],
    )
    return [
        lax.dynamic_slice_in_dim(x, start, size, axis=-1)
        for start, size in zip(numbers, sizes, strict=True)
    ]
