"""Dependence of a function's results on its arguments, read from its equations.

A walk carries bools from the arguments to the results: whether a value may depend on a marked one.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.extend.core as jex

from optfn.core.types import PyTree
from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import bindings
from optfn.loss.jaxprs.primitives import Atom, Equation, Jaxpr, Scan, While

Marks: TypeAlias = list[bool]


def find_dependent_leaves(
    fn: Callable[..., PyTree], args: Sequence[PyTree], varying: Sequence[PyTree]
) -> PyTree:
    """Trace fn(*args) without running it, and return a tree of bools like its result, true for each
    leaf that may depend on a marked leaf.

    Args:
      fn: a function of trees of arrays; it is traced, not run.
      args: arrays or ShapeDtypeStructs.
      varying: for each argument a tree of bools like it, the marks.

    Returns:
      A tree of bools like the result. A result whose dependence is unknown counts as dependent.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = _mark_jaxpr(closed.jaxpr, jax.tree.leaves(tuple(varying)))
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def _mark_jaxpr(jaxpr: Jaxpr, inputs: Sequence[bool]) -> Marks:
    """Return for each output of a jaxpr whether it may depend on a marked input, which literals and
    constants do not."""
    marked = bindings(jaxpr.invars, inputs)

    def marks(atoms: Sequence[Atom]) -> Marks:
        return [not isinstance(a, jex.Literal) and marked.get(a, False) for a in atoms]

    for equation in jaxpr.eqns:
        given = marks(equation.invars)
        if any(given):
            marked |= bindings(equation.outvars, _mark_equation(equation, given))
    return marks(jaxpr.outvars)


def _mark_equation(equation: Equation, given: Marks) -> Marks:
    """Mark the results of an equation with a marked operand by the functions inside of it, one by
    one for a barrier, and otherwise all of them."""
    if (call := primitives.as_call(equation)) is not None:
        return _mark_jaxpr(call.body, given)
    if (scan := primitives.as_scan(equation)) is not None:
        return _mark_scan(scan, given)
    if (loop := primitives.as_while(equation)) is not None:
        return _mark_while(loop, given)
    if (branches := primitives.as_branches(equation)) is not None:
        of_branches = [_mark_jaxpr(branch, given[1:]) for branch in branches]
        # All results depend on the index.
        return [given[0] or any(marks) for marks in zip(*of_branches, strict=True)]
    return given if primitives.is_barrier(equation) else [True] * len(equation.outvars)


def _mark_scan(scan: Scan, given: Marks) -> Marks:
    """Mark the results of a scan by running marks through its body until the marks of the carry no
    longer change."""
    constants, carry, elements = scan.split(given)

    def body(carry: Marks) -> Marks:
        return _mark_jaxpr(scan.body.jaxpr, [*constants, *carry, *elements])

    carry = find_fixed_point(lambda carry: body(carry)[: scan.num_carry], list(carry))
    return [*carry, *body(carry)[scan.num_carry :]]


def _mark_while(loop: While, given: Marks) -> Marks:
    """Mark the carry of a while loop until the marks no longer change, and all of it if the
    condition may depend on a marked value."""
    of_condition, of_body, carry = loop.split(given)

    def once(carry: Marks) -> Marks:
        (condition,) = _mark_jaxpr(loop.condition, [*of_condition, *carry])
        new = _mark_jaxpr(loop.body, [*of_body, *carry])
        # All results depend on the number of iterations.
        return [condition or mark for mark in new]

    return find_fixed_point(once, list(carry))


def find_fixed_point(step: Callable[[Marks], Marks], carry: Marks) -> Marks:
    """Add the marks of step(carry) to the carry's marks until a step adds no more, and return
    them."""
    while True:
        new = [a or b for a, b in zip(carry, step(carry), strict=True)]
        if new == carry:
            return carry
        carry = new
