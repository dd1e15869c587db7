"""Dependence of a function's results on its arguments, read from its equations.

A walk carries a mark from the arguments to the results, and a `Marking` says what the marks mean:
a bool (`find_dependent_leaves`), or the leaves that a value mixes (`mixtures.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

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

T = TypeVar("T")


class Marking(NamedTuple, Generic[T]):
    """The meaning of marks. A mark never shrinks when the marks that it comes from grow.

    none: the mark of a constant.
    join: returns the mark of a value that is one of several.
    of_equation: returns the mark of the results of an equation without a function inside.
    marks_constants: whether the results of an equation of constants may have a mark.
    """

    none: T
    join: Callable[[Sequence[T]], T]
    of_equation: Callable[[Equation, Sequence[T]], T]
    marks_constants: bool = False


# An unknown primitive: all its results may depend on all operands.
_DEPENDENCE: Marking[bool] = Marking(False, any, lambda equation, given: any(given))


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
    return mark_results(_DEPENDENCE, fn, args, jax.tree.leaves(tuple(varying)))


def mark_results(
    marking: Marking[T], fn: Callable[..., PyTree], args: Sequence[PyTree], marks: Sequence[T]
) -> PyTree:
    """Return a tree like fn(*args) with the mark of each leaf.

    Args:
      marking: the meaning of marks.
      fn, args: as for `find_dependent_leaves`.
      marks: the mark of each leaf of the arguments, in order.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = _MarkWalk(marking).mark_jaxpr(closed.jaxpr, marks)
    return jax.tree.unflatten(jax.tree.structure(shape), found)


class _MarkWalk(Generic[T]):
    """A walk along the equations of a jaxpr with the marks of one marking."""

    def __init__(self, marking: Marking[T]) -> None:
        self.marking = marking
        self._rules: dict[str, Callable[[Mapping[str, Any], Sequence[T]], Sequence[T] | None]] = {
            "scan": self._mark_scan,
            "while": self._mark_while,
            "cond": self._mark_cond,
            "optimization_barrier": lambda params, given: given,
        }

    def mark_jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[T]) -> Sequence[T]:
        """Propagate marks from a jaxpr's inputs to its outputs; literals are never marked."""
        none = self.marking.none
        marked = bindings(jaxpr.invars, inputs)

        def marks(atoms: Sequence[Atom]) -> Sequence[T]:
            return [none if isinstance(a, jex.Literal) else marked.get(a, none) for a in atoms]

        for equation in jaxpr.eqns:
            given = marks(equation.invars)
            # Most marks only grow from marked operands, so other equations need no look.
            if self.marking.marks_constants or any(mark != none for mark in given):
                marked |= bindings(equation.outvars, self._mark_equation(equation, given))
        return marks(jaxpr.outvars)

    def _mark_equation(self, equation: Equation, given: Sequence[T]) -> Sequence[T]:
        """Mark an equation's results: by the function that it calls,
        by its rule, or else all of them alike."""
        rule, inner = self._rules.get(equation.primitive.name), find_called_jaxpr(equation)
        if inner is not None:
            return self.mark_jaxpr(inner, given)
        found = rule(equation.params, given) if rule else None
        if found is None:
            return [self.marking.of_equation(equation, given)] * len(equation.outvars)
        return found

    def _mark_scan(self, params: Mapping[str, Any], given: Sequence[T]) -> Sequence[T] | None:
        """Mark the results of a scan, its carry by a fixed point;
        None if its params have an unknown form."""
        groups = count_scan_groups(params)
        if groups is None:
            return None
        num_carry = groups[1]
        consts, carry, xs = split_operands(given, groups)

        def body(carry: Sequence[T]) -> Sequence[T]:
            return self.mark_jaxpr(params["jaxpr"].jaxpr, [*consts, *carry, *xs])

        carry = self._find_fixed_point(lambda carry: body(carry)[:num_carry], carry)
        return [*carry, *body(carry)[num_carry:]]

    def _mark_while(self, params: Mapping[str, Any], given: Sequence[T]) -> Sequence[T]:
        """Mark the carry of a while loop, by a fixed point."""
        groups = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, consts, carry = split_operands(given, groups)

        def once(carry: Sequence[T]) -> Sequence[T]:
            (condition,) = self.mark_jaxpr(params["cond_jaxpr"].jaxpr, [*cond_consts, *carry])
            new = self.mark_jaxpr(params["body_jaxpr"].jaxpr, [*consts, *carry])
            # All results depend on the number of iterations.
            return [self.marking.join([condition, mark]) for mark in new]

        return self._find_fixed_point(once, carry)

    def _mark_cond(self, params: Mapping[str, Any], given: Sequence[T]) -> Sequence[T]:
        """Give a result the marks of all branches and of the index, on which it depends."""
        branches = [self.mark_jaxpr(branch.jaxpr, given[1:]) for branch in params["branches"]]
        return [self.marking.join([given[0], *marks]) for marks in zip(*branches, strict=True)]

    def _find_fixed_point(
        self, step: Callable[[Sequence[T]], Sequence[T]], carry: Sequence[T]
    ) -> Sequence[T]:
        """Return the carry's marks after which another iteration marks no more."""
        while True:
            new = [self.marking.join(pair) for pair in zip(carry, step(carry), strict=True)]
            if new == carry:
                return carry
            carry = new
