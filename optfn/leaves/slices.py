"""Many slices of one array at a compile time that does not grow with their number.

XLA on CPU compiles each static slice together with the code that reads it, which takes about 8 ms
for each distinct start, and minutes for thousands. If the starts are known only at run time, all
slices of the same length share one piece of code.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.core.types import Leaf


def split(x: Leaf, sizes: Sequence[int]) -> list[Leaf]:
    """Return consecutive pieces of x, along its last axis."""
    edges = list(itertools.accumulate(sizes, initial=0))
    if isinstance(x, np.ndarray):
        return np.split(x, edges[1:-1], axis=-1)

    def static(x: jax.Array) -> list[jax.Array]:
        return [lax.slice_in_dim(x, a, b, axis=-1) for a, b in itertools.pairwise(edges)]

    def dynamic(x: jax.Array) -> list[jax.Array]:
        # The condition is always false, but the barrier hides that from XLA, which therefore does
        # not make the starts static again.
        starts = lax.cond(
            lax.optimization_barrier(jnp.asarray(False)),
            lambda: [jnp.int32(start + 1) for start in edges[:-1]],
            lambda: [jnp.int32(start) for start in edges[:-1]],
        )
        pairs = zip(starts, sizes, strict=True)
        return [lax.dynamic_slice_in_dim(x, start, size, axis=-1) for start, size in pairs]

    if len(sizes) < 2 or x.shape[-1] >= 2**31:
        return static(x)
    found: list[Leaf] = lax.platform_dependent(x, cpu=dynamic, default=static)
    return found
