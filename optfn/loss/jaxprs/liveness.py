"""The equations of a program that its results need: compilers remove the rest."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.extend.core as jex

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.dependence import Marks, find_fixed_point
from optfn.loss.jaxprs.primitives import Atom, Equation, Jaxpr, Scan, Variable


class Live(NamedTuple):
    """An equation that the results need, how often it runs, and which of its results are needed.

    A scan runs its body `length` times. Of several branches the last counts, as
    `lax.cond(condition, true, false)` takes it where the condition holds. A while loop counts one
    turn.
    """

    equation: Equation
    times: int
    needed: Marks


def find_live(jaxpr: Jaxpr) -> list[Live]:
    """Return the equations that the results or side effects of a jaxpr need, last ones first, each
    followed by those inside of it."""
    return _follow(jaxpr, [True] * len(jaxpr.outvars))[1]


def _follow(jaxpr: Jaxpr, outputs: Sequence[bool]) -> tuple[Marks, list[Live]]:
    """Return which inputs the marked outputs and side effects need, and the equations that compute
    them, with those inside, last ones first."""
    needed: set[Variable] = set()

    def need(atoms: Sequence[Atom], marks: Sequence[bool]) -> None:
        pairs = zip(atoms, marks, strict=True)
        needed.update(a for a, mark in pairs if mark and not isinstance(a, jex.Literal))

    need(jaxpr.outvars, outputs)
    found: list[Live] = []
    for equation in reversed(jaxpr.eqns):
        marks = [v in needed for v in equation.outvars]
        if any(marks) or primitives.has_side_effects(equation):
            inputs, inside = _enter(equation, marks)
            need(equation.invars, inputs)
            found += [Live(equation, 1, marks), *inside]
    return [v in needed for v in jaxpr.invars], found


def _enter(equation: Equation, marks: Marks) -> tuple[Marks, list[Live]]:
    """Return which operands the marked results of an equation need, and the equations inside, where
    an equation of an unknown kind needs all operands."""
    if (call := primitives.as_call(equation)) is not None:
        return _follow(call.body, marks)
    if (scan := primitives.as_scan(equation)) is not None:
        return _follow_scan(scan, marks)
    if primitives.is_barrier(equation) or primitives.as_collective(equation) is not None:
        return marks, []
    inner = primitives.find_inner_jaxprs(equation)
    if primitives.as_branches(equation) is not None:
        followed = [_follow(branch, marks) for branch in inner]
        used = [any(column) for column in zip(*(inputs for inputs, _ in followed), strict=True)]
        return [True, *used], followed[-1][1]
    inside = [live for jaxpr in inner for live in find_live(jaxpr)]
    return [True] * len(equation.invars), inside


def _follow_scan(scan: Scan, marks: Marks) -> tuple[Marks, list[Live]]:
    """Return which operands the marked results of a scan need, found by repeating its body until
    the carry needs no more, and the equations inside."""
    body, last = scan.body.jaxpr, scan.num_constants + scan.num_carry
    carry, results = marks[: scan.num_carry], marks[scan.num_carry :]

    def once(carry: Marks) -> Marks:
        return _follow(body, [*carry, *results])[0][scan.num_constants : last]

    carry = find_fixed_point(once, carry)
    inputs, inside = _follow(body, [*carry, *results])
    used = [*inputs[: scan.num_constants], *carry, *inputs[last:]]
    return used, [x._replace(times=x.times * scan.length) for x in inside]
