"""Dependence of a function's results on its arguments, read from its equations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

Flags = Sequence[bool]


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
    found = _propagate_jaxpr(closed.jaxpr, jax.tree.leaves(tuple(varying)))
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def _propagate_jaxpr(jaxpr: Jaxpr, inputs: Flags) -> Flags:
    """Propagate marks from a jaxpr's inputs to its outputs; literals are never marked."""
    marked = bindings(jaxpr.invars, inputs)

    def flags(atoms: Sequence[Atom]) -> Flags:
        return [False if isinstance(a, jex.Literal) else marked.get(a, False) for a in atoms]

    for equation in jaxpr.eqns:
        given = flags(equation.invars)
        # Marks only grow from marked operands, so other equations need no look.
        if any(given):
            marked |= bindings(equation.outvars, _propagate_equation(equation, given))
    return flags(jaxpr.outvars)


def _propagate_equation(equation: Equation, given: Flags) -> Flags:
    """Mark an equation's results: by the function that it calls,
    by its rule, or else all of them."""
    rule, inner = _RULES.get(equation.primitive.name), find_called_jaxpr(equation)
    if inner is not None:
        return _propagate_jaxpr(inner, given)
    found = rule(equation.params, given) if rule else None
    # An unknown primitive: all its results may depend on all operands.
    return [any(given)] * len(equation.outvars) if found is None else found


def _propagate_scan(params: Mapping[str, Any], given: Flags) -> Flags | None:
    """Mark the results of a scan, its carry by a fixed point;
    None if its params have an unknown form."""
    groups = count_scan_groups(params)
    if groups is None:
        return None
    num_carry = groups[1]
    consts, carry, xs = split_operands(given, groups)

    def body(carry: Flags) -> Flags:
        return _propagate_jaxpr(params["jaxpr"].jaxpr, [*consts, *carry, *xs])

    carry = _find_fixed_point(lambda carry: body(carry)[:num_carry], carry)
    return [*carry, *body(carry)[num_carry:]]


def _propagate_while(params: Mapping[str, Any], given: Flags) -> Flags:
    """Mark the carry of a while loop, by a fixed point."""
    groups = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, carry = split_operands(given, groups)

    def once(carry: Flags) -> Flags:
        # All results depend on the number of iterations.
        (condition,) = _propagate_jaxpr(params["cond_jaxpr"].jaxpr, [*cond_consts, *carry])
        if condition:
            return [True] * len(carry)
        return _propagate_jaxpr(params["body_jaxpr"].jaxpr, [*consts, *carry])

    return _find_fixed_point(once, carry)


def _propagate_cond(params: Mapping[str, Any], given: Flags) -> Flags:
    """Mark a result if any branch marks it, or if the index is marked."""
    branches = [_propagate_jaxpr(branch.jaxpr, given[1:]) for branch in params["branches"]]
    # given[0] is the index: all results depend on it.
    return [any([given[0], *flags]) for flags in zip(*branches, strict=True)]


_RULES: dict[str, Callable[[Mapping[str, Any], Flags], Flags | None]] = {
    "scan": _propagate_scan,
    "while": _propagate_while,
    "cond": _propagate_cond,
    "optimization_barrier": lambda params, given: given,
}


def _find_fixed_point(step: Callable[[Flags], Flags], carry: Flags) -> Flags:
    """Return the carry's flags after which another iteration marks no more."""
    while True:
        new = [a | b for a, b in zip(carry, step(carry), strict=True)]
        if new == carry:
            return carry
        carry = new
