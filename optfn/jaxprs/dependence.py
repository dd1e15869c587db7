"""Dependence of a function's results on its arguments, read from its equations.

A walk carries bools from the arguments to the results: whether a value may depend on a marked one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex

from optfn.core.types import PyTree
from optfn.jaxprs.equations import (
    Atom,
    Equation,
    Jaxpr,
    bindings,
    count_scan_groups,
    find_called_jaxpr,
    split_operands,
)

Marks: TypeAlias = list[bool]


def find_dependent_leaves(
    fn: Callable[..., PyTree], args: Sequence[PyTree], varying: Sequence[PyTree]
) -> PyTree:
    """Mark each leaf of fn(*args) that may depend on a marked leaf;
    unknown dependence counts as such.

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
    """Propagate marks from a jaxpr's inputs to its outputs; literals are never marked."""
    marked = bindings(jaxpr.invars, inputs)

    def marks(atoms: Sequence[Atom]) -> Marks:
        return [not isinstance(a, jex.Literal) and marked.get(a, False) for a in atoms]

    for equation in jaxpr.eqns:
        given = marks(equation.invars)
        if any(given):
            marked |= bindings(equation.outvars, _mark_equation(equation, given))
    return marks(jaxpr.outvars)


def _mark_equation(equation: Equation, given: Marks) -> Marks:
    """Mark an equation's results: by the function that it calls,
    by its rule, or else all of them."""
    rule, inner = _RULES.get(equation.primitive.name), find_called_jaxpr(equation)
    if inner is not None:
        return _mark_jaxpr(inner, given)
    found = rule(equation.params, given) if rule else None
    return [True] * len(equation.outvars) if found is None else found


def _mark_scan(params: Mapping[str, Any], given: Marks) -> Marks | None:
    """Mark the results of a scan, its carry by a fixed point;
    None if its params have an unknown form."""
    groups = count_scan_groups(params)
    if groups is None:
        return None
    num_carry = groups[1]
    consts, carry, xs = split_operands(given, groups)

    def body(carry: Marks) -> Marks:
        return _mark_jaxpr(params["jaxpr"].jaxpr, [*consts, *carry, *xs])

    carry = _find_fixed_point(lambda carry: body(carry)[:num_carry], list(carry))
    return [*carry, *body(carry)[num_carry:]]


def _mark_while(params: Mapping[str, Any], given: Marks) -> Marks:
    """Mark the carry of a while loop, by a fixed point."""
    groups = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, carry = split_operands(given, groups)

    def once(carry: Marks) -> Marks:
        (condition,) = _mark_jaxpr(params["cond_jaxpr"].jaxpr, [*cond_consts, *carry])
        new = _mark_jaxpr(params["body_jaxpr"].jaxpr, [*consts, *carry])
        # All results depend on the number of iterations.
        return [condition or mark for mark in new]

    return _find_fixed_point(once, list(carry))


def _mark_cond(params: Mapping[str, Any], given: Marks) -> Marks:
    """Give a result the marks of all branches and of the index, on which it depends."""
    branches = [_mark_jaxpr(branch.jaxpr, given[1:]) for branch in params["branches"]]
    return [given[0] or any(marks) for marks in zip(*branches, strict=True)]


def _find_fixed_point(step: Callable[[Marks], Marks], carry: Marks) -> Marks:
    """Return the carry's marks after which another iteration marks no more."""
    while True:
        new = [a or b for a, b in zip(carry, step(carry), strict=True)]
        if new == carry:
            return carry
        carry = new


_RULES: Mapping[str, Callable[[Mapping[str, Any], Marks], Marks | None]] = {
    "scan": _mark_scan,
    "while": _mark_while,
    "cond": _mark_cond,
    "optimization_barrier": lambda params, given: given,
}
