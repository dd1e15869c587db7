"""Conditional updates in place that can still be differentiated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optfn.leaves.types import PyTree


def when(
    due: jax.Array, fn: Callable[..., tuple[PyTree, ...]], carry: tuple[PyTree, ...], *reads: PyTree
) -> tuple[PyTree, ...]:
    """Return fn(*carry, *reads) where `due`, a bool scalar, is true, else `carry`.

    A loop of one iteration or none: what a cond returns is new memory, what a loop carries is
    updated in place, and nothing that comes after is fused into it. Its derivative is that of the
    cond, which JAX can differentiate in both modes.

    Args:
      due: whether to run fn.
      fn: gives trees like `carry`, in the same dtypes.
      carry: trees of arrays that change in place.
      *reads: trees of arrays that fn reads; it must not close over others that are differentiated.
    """
    return _when(fn, due, carry, reads)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _when(fn: Callable[..., Any], due: jax.Array, carry: PyTree, reads: PyTree) -> PyTree:
    def body(state: PyTree) -> PyTree:
        return jnp.zeros_like(state[0]), tuple(fn(*state[1], *reads))

    return jax.lax.while_loop(lambda state: state[0], body, (due, carry))[1]


@_when.defjvp
def _when_jvp(fn: Callable[..., Any], primals: PyTree, tangents: PyTree) -> PyTree:
    due, carry, reads = primals

    def plain(carry: PyTree, reads: PyTree) -> PyTree:
        return jax.lax.cond(due, lambda c, r: tuple(fn(*c, *r)), lambda c, r: c, carry, reads)

    return jax.jvp(plain, (carry, reads), tangents[1:])
