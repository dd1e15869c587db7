"""Conditional updates in place that can still be differentiated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

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
      *reads: trees of arrays that fn reads, all integers among them. It may close over others,
        such as a hyper-parameter that is differentiated.
    """
    closed, constants = jax.closure_convert(fn, *carry, *reads)
    return _when(closed, due, carry, (*reads, *constants))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _when(fn: Callable[..., Any], due: jax.Array, carry: PyTree, reads: PyTree) -> PyTree:
    def body(state: PyTree) -> PyTree:
        return jnp.zeros_like(state[0]), tuple(fn(*state[1], *reads))

    return jax.lax.while_loop(lambda state: state[0], body, (due, carry))[1]


@partial(_when.defjvp, symbolic_zeros=True)
def _when_jvp(fn: Callable[..., Any], primals: PyTree, tangents: PyTree) -> PyTree:
    due, carry, reads = primals
    leaves = jax.tree.leaves((carry, reads))
    structure: Any = jax.tree.structure((carry, reads))
    directions = jax.tree.leaves(tangents[1:], is_leaf=_is_zero)
    varied = [i for i, direction in enumerate(directions) if not _is_zero(direction)]

    def plain(*values: jax.Array) -> PyTree:
        # What does not vary is a constant: the root of an accumulator that is 0 has no derivative.
        given = dict(zip(varied, values, strict=True))
        carry, reads = structure.unflatten([given.get(i, x) for i, x in enumerate(leaves)])
        return jax.lax.cond(due, lambda: tuple(fn(*carry, *reads)), lambda: carry)

    return jax.jvp(plain, [leaves[i] for i in varied], [directions[i] for i in varied])


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)
