"""Expressions that are written for XLA: a door to programs for CPUs, and what it would do twice.

XLA on CPU makes a pass over memory for each array that a program writes, and keeps in memory what
two of them read. The compilers of TPUs and GPUs make one kernel of several results and reductions,
and compute again what two kernels read; there a loop or a view in rows of another length costs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optfn.core.numerics import abs_squared

# The platforms that are behind the door; none where a test runs the plain expressions on a CPU.
BEHIND_THE_DOOR = ("cpu",)


def on_cpu(
    cpu: Callable[..., Any],
    plain: Callable[..., Any],
    *arguments: Any,
    also: tuple[str, ...] = (),
) -> Any:
    """Return cpu(*arguments) in a program for a CPU, and plain(*arguments) in any other.

    Both are traced, so a jaxpr has a cond of both; lowered for one platform, nothing of the other
    is left. They give trees of the same shapes and dtypes. `also` names further platforms that are
    behind the door.
    """
    branches = dict.fromkeys((*BEHIND_THE_DOOR, *also), cpu)
    return jax.lax.platform_dependent(*arguments, default=plain, **branches)


LANES, LONG_ROW = 8, 256


def row_norms(x: jax.Array) -> jax.Array:
    """Return the L2 norms of x[0], x[1], …, shape (len(x),)."""
    length = math.prod(x.shape[1:])
    squares = abs_squared(x)
    in_lanes = length >= LONG_ROW and length % LANES == 0
    return jnp.sqrt(on_cpu(_sums_by_lanes if in_lanes else _sums, _sums, squares))


def _sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=range(1, x.ndim))


def _sums_by_lanes(x: jax.Array) -> jax.Array:
    """Return the sum of each row of x ≥ 0, of eight elements first.

    XLA on CPU sums many long rows slowly, and keeps them in memory. Partial sums of eight elements
    avoid both; the comparison, always false, keeps XLA from summing them in one operation.
    """
    eighths = x.reshape(len(x), -1, LANES)
    partial_sums = sum(eighths[:, :, i] for i in range(LANES))
    return _sums(jnp.where(partial_sums < 0, 0, partial_sums))


def computed_once(flag: jax.Array) -> jax.Array:
    """Return a bool scalar that XLA does not compute again in each of its uses.

    The conjunction of N flags is cheap to XLA's CPU fusion, so it is fused into the update of each
    of N leaves: with 300 leaves the compiler takes minutes and gigabytes. Square roots are not
    duplicated.
    """
    return jnp.sqrt(flag.astype(jnp.float32)) > 0
