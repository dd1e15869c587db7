"""Differentiable updates in place, in several passes over memory or under a condition."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optfn.core import checks
from optfn.core.types import PyTree
from optfn.leaves.groups import map_groups
from optfn.leaves.xla import on_cpu
from optfn.mesh import varying_axes


def in_passes(
    fns: Sequence[Callable[..., tuple[PyTree, ...]]],
    carry: tuple[PyTree, ...],
    *reads: PyTree,
    also: tuple[str, ...] = (),
) -> tuple[PyTree, ...]:
    """Return the carry after each of `fns`, in a program for a CPU one pass after the other.

    There only the carry is passed from one pass over the arrays to the next, and it is updated in
    place; see `when`. All other platforms get the plain expressions, which they fuse themselves,
    but for those that `also` names.
    """
    if not checks.is_traced((carry, reads)):
        return _run(fns, carry, reads)
    closed, *arguments = _closed(fns, carry, reads)
    return _in_passes(closed, also, *arguments)


def when(
    due: jax.Array,
    fns: Sequence[Callable[..., tuple[PyTree, ...]]],
    carry: tuple[PyTree, ...],
    *reads: PyTree,
) -> tuple[PyTree, ...]:
    """Return the carry after each of `fns` where `due`, a bool scalar, is true, else `carry`.

    Each function gets (*carry, *reads) and runs in a loop of one iteration or none. The results of
    a cond would be new memory, but the carry of a loop is updated in place, and nothing after the
    loop is fused into it. One loop waits for the other, so an array that one function reads may be
    overwritten by the next. The derivative is that of a cond, which JAX can differentiate in both
    modes.

    Args:
      due: whether to run them.
      fns: each gives trees like `carry`, in the same dtypes.
      carry: trees of arrays that change in place.
      *reads: trees of arrays that the functions read, all integers among them. They may close over
        others, such as a hyper-parameter that is differentiated.
    """
    if not checks.is_traced((due, carry, reads)):
        return _run(fns, carry, reads) if due else carry  # eager: there is no loop to compile
    closed, *arguments = _closed(fns, carry, reads)
    return _when(closed, due, *arguments)


Fns: TypeAlias = tuple[Callable[..., Any], ...]


def _closed(
    fns: Sequence[Callable[..., Any]], carry: PyTree, reads: PyTree
) -> tuple[Fns, PyTree, PyTree, PyTree]:
    """Return `fns` with what they close over as arguments, carry, reads, and these constants."""
    converted = [jax.closure_convert(fn, *carry, *reads) for fn in fns]
    return tuple(fn for fn, _ in converted), carry, reads, [own for _, own in converted]


def _run(
    fns: Sequence[Callable[..., Any]], carry: PyTree, reads: PyTree, owns: PyTree = None
) -> PyTree:
    """Return the carry after each of `fns`; `owns` are the constants of each."""
    for fn, own in zip(fns, owns or [()] * len(fns), strict=True):
        carry = tuple(fn(*carry, *reads, *own))
    return carry


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _in_passes(fns: Fns, also: tuple[str, ...], *arguments: PyTree) -> PyTree:
    def in_loops(*arguments: PyTree) -> PyTree:
        # The barrier hides from XLA that the condition is always true.
        return _in_loops(fns, jax.lax.optimization_barrier(jnp.asarray(True)), *arguments)

    return on_cpu(in_loops, partial(_run, fns), *arguments, also=also)


@partial(_in_passes.defjvp, symbolic_zeros=True)
def _in_passes_jvp(fns: Fns, also: tuple[str, ...], primals: PyTree, tangents: PyTree) -> PyTree:
    return _jvp(partial(_run, fns), primals, tangents)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _when(fns: Fns, due: jax.Array, *arguments: PyTree) -> PyTree:
    return _in_loops(fns, due, *arguments)


@partial(_when.defjvp, symbolic_zeros=True)
def _when_jvp(fns: Fns, primals: PyTree, tangents: PyTree) -> PyTree:
    due, *rest = primals

    def in_cond(*arguments: PyTree) -> PyTree:
        return jax.lax.cond(due, lambda: _run(fns, *arguments), lambda: arguments[0])

    return _jvp(in_cond, rest, tangents[1:])


def _in_loops(fns: Fns, due: jax.Array, carry: PyTree, reads: PyTree, constants: PyTree) -> PyTree:
    """Return the carry after a loop of one iteration, or none, for each of `fns`."""
    left = jnp.where(due, len(fns), 0)  # carried from loop to loop, which orders them
    for i, (fn, own) in enumerate(zip(fns, constants, strict=True)):

        def body(state: PyTree, fn: Callable[..., Any] = fn, own: PyTree = own) -> PyTree:
            left, carry = state
            return _less_one(left), tuple(fn(*_variant(left, (*carry, *reads, *own))))

        def is_next(state: PyTree, turn: int = len(fns) - i) -> jax.Array:
            return state[0] == turn

        left, carry = jax.lax.while_loop(is_next, body, (left, carry))
    return carry


def _jvp(fn: Callable[..., PyTree], primals: PyTree, tangents: PyTree) -> PyTree:
    """Return `fn` and its derivative along the tangents that are not zero."""
    leaves = jax.tree.leaves(primals)
    structure: Any = jax.tree.structure(primals)
    directions = jax.tree.leaves(tangents, is_leaf=_is_zero)
    varied = [i for i, direction in enumerate(directions) if not _is_zero(direction)]

    def plain(*values: jax.Array) -> PyTree:
        # The other leaves are constants: the square root at an accumulator of 0 has no derivative.
        given = dict(zip(varied, values, strict=True))
        return fn(*structure.unflatten([given.get(i, x) for i, x in enumerate(leaves)]))

    return jax.jvp(plain, [leaves[i] for i in varied], [directions[i] for i in varied])


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _variant(left: jax.Array, values: PyTree) -> PyTree:
    """Return `values` behind a barrier that the counter of the loop passes too.

    Otherwise XLA would hoist computations that are invariant in the loop. There is one barrier
    for each set of mesh axes over which values vary, since all results of a barrier vary over the
    same axes.
    """
    leaves, structure = jax.tree.flatten(values)

    def passed(group: list[jax.Array]) -> list[jax.Array]:
        return jax.lax.optimization_barrier([left, *group])[1:]

    return jax.tree.unflatten(structure, map_groups(passed, leaves, varying_axes))


def _less_one(left: jax.Array) -> jax.Array:
    """Return left − 1, computed by a sort, so that XLA on CPU keeps the loop multi-threaded.

    From jaxlib 0.12 on, XLA on CPU runs a loop with an unknown number of iterations on one core,
    however large its arrays are, unless the loop has a sort in it.
    """
    return jax.lax.sort(jnp.stack([left, left - 1]))[0]
