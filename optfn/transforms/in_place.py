"""Differentiable updates in place, in several passes over memory or under a condition."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
from jax.custom_derivatives import SymbolicZero

from optfn.core import checks
from optfn.core.types import PyTree
from optfn.mesh.compilers import xla


def run_in_passes(
    fns: Sequence[Callable[..., tuple[PyTree, ...]]],
    carry: tuple[PyTree, ...],
    *reads: PyTree,
    due: jax.Array | None = None,
) -> tuple[PyTree, ...]:
    """Return the carry after all of `fns` in order, each run in a separate pass over the arrays on
    a CPU, and all in one program elsewhere.

    In passes only the carry is passed from one to the next, and it is updated in place; see
    `run_if`. GPUs and TPUs get the plain expressions, which they fuse themselves. Only with `due` a
    TPU gets a loop too, one for all functions, so that the arrays are not touched where nothing is
    due. On a GPU the host would have to read the condition of a loop.

    Args:
      fns: as for `run_if`.
      carry: as for `run_if`.
      *reads: as for `run_if`.
      due: where this is false, the functions give their carry, and a CPU or TPU does not run them.
    """
    if not checks.is_traced((carry, reads)):
        return _run(fns, carry, reads)
    closed, *arguments = _close_over(fns, carry, reads)
    return _run_in_passes(closed, due, *arguments)


def run_if(
    due: jax.Array,
    fns: Sequence[Callable[..., tuple[PyTree, ...]]],
    carry: tuple[PyTree, ...],
    *reads: PyTree,
) -> tuple[PyTree, ...]:
    """Return the carry after each of `fns` if `due`, a bool scalar, is true, else `carry`
    unchanged.

    Each function gets (*carry, *reads) and runs in a loop of one iteration or none, which updates
    the carry in place. Each loop waits for the one before, so an array that one function reads may
    be overwritten by the next. The derivative is taken of a cond, which JAX can differentiate in
    both modes.

    Args:
      due: whether to run them.
      fns: each gives trees like `carry`, in the same dtypes.
      carry: trees of arrays that change in place.
      *reads: trees of arrays that the functions read, all integers among them. They may close over
        further arrays, such as a hyper-parameter that is differentiated.
    """
    if not checks.is_traced((due, carry, reads)):
        return _run(fns, carry, reads) if due else carry  # eager: there is no loop to compile
    closed, *arguments = _close_over(fns, carry, reads)
    return _run_if(closed, due, *arguments)


Fns: TypeAlias = tuple[Callable[..., Any], ...]


def _close_over(
    fns: Sequence[Callable[..., Any]], carry: PyTree, reads: PyTree
) -> tuple[Fns, PyTree, PyTree, PyTree]:
    """Return functions that take the arrays that `fns` close over as arguments, then the carry, the
    reads and a list of these arrays for each function."""
    converted = [jax.closure_convert(fn, *carry, *reads) for fn in fns]
    return tuple(fn for fn, _ in converted), carry, reads, [own for _, own in converted]


def _run(
    fns: Sequence[Callable[..., Any]], carry: PyTree, reads: PyTree, owns: PyTree = None
) -> PyTree:
    """Return the carry after each of `fns` in order, called with the carry, the reads and, if
    `owns` is given, its constants."""
    for fn, own in zip(fns, owns or [()] * len(fns), strict=True):
        carry = tuple(fn(*carry, *reads, *own))
    return carry


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_in_passes(fns: Fns, due: jax.Array | None, *arguments: PyTree) -> PyTree:
    """Run the functions in loops on a CPU, in one loop on a TPU if `due` is given, and plainly
    elsewhere, with the derivative of the plain functions."""

    # XLA would inline a loop with a known count, and fuse the passes again.
    in_loops = partial(_run_in_loops, fns, xla.hide_constant(True) if due is None else due)
    in_one_loop = None if due is None else partial(_run_in_one_loop, fns, due)
    return xla.call_for_platform(in_loops, partial(_run, fns), *arguments, tpu=in_one_loop)


@partial(_run_in_passes.defjvp, symbolic_zeros=True)
def _run_in_passes_jvp(fns: Fns, primals: PyTree, tangents: PyTree) -> PyTree:
    """Return result and derivative of the plain functions, because a loop of unknown length has no
    reverse derivative."""
    return _jvp(partial(_run, fns), primals[1:], tangents[1:])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(fns: Fns, due: jax.Array, *arguments: PyTree) -> PyTree:
    """Return the carry after the functions in loops of one iteration if `due`, else unchanged, with
    the derivative of a cond."""
    return _run_in_loops(fns, due, *arguments)


@partial(_run_if.defjvp, symbolic_zeros=True)
def _run_if_jvp(fns: Fns, primals: PyTree, tangents: PyTree) -> PyTree:
    """Return result and derivative of a cond, in place of the loops, that runs the functions if
    `due`, and else returns the carry."""
    due, *rest = primals

    def run_in_cond(*arguments: PyTree) -> PyTree:
        return jax.lax.cond(due, lambda: _run(fns, *arguments), lambda: arguments[0])

    return _jvp(run_in_cond, rest, tangents[1:])


def _run_in_loops(
    fns: Fns, due: jax.Array, carry: PyTree, reads: PyTree, constants: PyTree
) -> PyTree:
    """Return the carry after each of `fns`, each run in a separate loop of one iteration, if `due`,
    else the carry unchanged."""

    def body(fn: Callable[..., Any], carry: PyTree, read: PyTree) -> PyTree:
        reads, own = read
        return tuple(fn(*carry, *reads, *own))

    bodies = [partial(body, fn) for fn in fns]
    return xla.run_in_place(bodies, due, carry, [(reads, own) for own in constants])


def _run_in_one_loop(
    fns: Fns, due: jax.Array, carry: PyTree, reads: PyTree, constants: PyTree
) -> PyTree:
    """Return the carry after each of `fns`, all run in one loop of one iteration, if `due`, else
    the carry unchanged."""

    def run_all(*arrays: PyTree) -> PyTree:
        *values, owns = arrays
        return _run(fns, tuple(values[: len(carry)]), values[len(carry) :], owns)

    return _run_in_loops((run_all,), due, carry, reads, [(constants,)])


def _jvp(fn: Callable[..., PyTree], primals: PyTree, tangents: PyTree) -> PyTree:
    """Return `fn` at `primals` and its derivative along the tangents that are not symbolic zeros,
    with the remaining primals as constants."""
    leaves = jax.tree.leaves(primals)
    structure: Any = jax.tree.structure(primals)
    directions = jax.tree.leaves(tangents, is_leaf=_is_zero)
    varied = [i for i, direction in enumerate(directions) if not _is_zero(direction)]

    def plain(*values: jax.Array) -> PyTree:
        # The remaining leaves are constants: the square root at an accumulator of 0 has no
        # derivative.
        given = dict(zip(varied, values, strict=True))
        return fn(*structure.unflatten([given.get(i, x) for i, x in enumerate(leaves)]))

    return jax.jvp(plain, [leaves[i] for i in varied], [directions[i] for i in varied])


def _is_zero(x: Any) -> bool:
    """Tell whether a tangent is a symbolic zero."""
    return isinstance(x, SymbolicZero)
