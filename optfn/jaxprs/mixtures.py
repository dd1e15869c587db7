"""Which leaves the results of a function mix, read from its equations.

A rule on the elements of a leaf does the same to a buffer of several leaves. A rule with a norm, a
mean or a product of a leaf does not: it mixes elements, by a primitive such as `reduce_sum` or
`dot_general`. optfn's own code knows where each leaf of a buffer begins, so its mixes do not count:
the innermost line of an equation outside of JAX tells whose code it is.
"""

import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import jax
from jax.extend import source_info_util

from optfn.core.types import PyTree
from optfn.jaxprs.dependence import Marking, mark_results
from optfn.jaxprs.equations import Equation, type_of

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Primitives that mix the elements of an operand. Others, such as slices and reshapes, count as
# elementwise: to accuse a right rule is worse than to miss a wrong one.
_MIXING = {
    "reduce", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "argmax", "argmin", "dot_general", "ragged_dot_general", "sort", "top_k",
    "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window",
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "conv_general_dilated", "fft",
    "cholesky", "qr", "geqrf", "geqp3", "householder_product", "svd", "eigh", "eig", "lu", "schur",
    "hessenberg", "tridiagonal", "triangular_solve", "tridiagonal_solve", "custom_linear_solve",
}  # fmt: skip

# The bit of a group that was mixed along some axes of a leaf; leaf i has bit i + 1.
_BY_AXIS = 1


class Mixture(NamedTuple):
    """What a value has of the leaves; a group of them is an integer with a bit for each.

    leaves: the leaves of which it may have elements, each in its place.
    mixes: the groups of leaves that have been mixed into it, each with the line that did it.
    """

    leaves: int
    mixes: dict[int, str]

    def find_partial(self, buffer: Sequence[int]) -> str:
        """Return the line of a mix that is another one in a buffer of these leaves, "" without.

        It is of some of the leaves, or of the rows or columns of one.
        """
        for group, line in self.mixes.items():
            mixed = [i for i in buffer if group & _bit(i)]
            if mixed and (mixed != buffer or group & _BY_AXIS):
                return line
        return ""


def _bit(i: int) -> int:
    """Return the group of leaf i alone."""
    return 2 << i


def find_mixtures(
    fn: Callable[..., PyTree], args: Sequence[PyTree], leaves: Sequence[int]
) -> PyTree:
    """Return a tree like fn(*args), with a `Mixture` in the place of each leaf.

    Args:
      fn: a function of trees of arrays; it is traced, not run.
      args: arrays or ShapeDtypeStructs.
      leaves: a number for each leaf of the arguments, in order; a parameter, its gradient and all
        that belongs to it have the same number.
    """

    def run(*args: PyTree) -> PyTree:
        # JAX keeps the equations of jitted functions, with the lines of their first caller.
        with jax.disable_jit():
            return fn(*args)

    return mark_results(_MIXTURES, run, args, [Mixture(_bit(i), {}) for i in leaves])


def _mark_equation(equation: Equation, given: Sequence[Mixture]) -> Mixture:
    """Return the mixture of an equation's results; if it mixes, it has no leaf's elements."""
    leaves, mixes = reduce(_combine, given)
    if equation.primitive.name not in _MIXING:
        return Mixture(leaves, mixes)
    line = source_info_util.summarize(equation.source_info)
    if not leaves or not line or line.startswith(_PACKAGE):
        return Mixture(0, mixes)
    has_axes = any(type_of(x).ndim > 1 for x in equation.invars)
    by_axis = _BY_AXIS if has_axes and type_of(equation.outvars[0]).ndim else 0
    return Mixture(0, {leaves | by_axis: line} | mixes)


def _combine(a: Mixture, b: Mixture) -> Mixture:
    """Return the mixture of a function of two values.

    Disjoint groups become one: in a global norm the squares of one leaf after the other are added.
    A group that overlaps stays apart: a norm of a leaf that a global norm has scaled is still a
    norm of the leaf.
    """
    if not (a.mixes and b.mixes):
        return Mixture(a.leaves | b.leaves, a.mixes or b.mixes)
    alone, mixes = dict(b.mixes), {}
    for group, line in a.mixes.items():
        disjoint = [other for other in alone if not other & group & ~_BY_AXIS]
        for other in disjoint:
            del alone[other]
        mixes[reduce(int.__or__, disjoint, group)] = line
    return Mixture(a.leaves | b.leaves, mixes | alone)


def _join(values: Sequence[Mixture]) -> Mixture:
    """Return the mixture of a value that is one of several."""
    mixes: dict[int, str] = {}
    for value in reversed(values):  # the line of the first of them is kept
        mixes |= value.mixes
    return Mixture(reduce(int.__or__, (value.leaves for value in values)), mixes)


_MIXTURES = Marking(Mixture(0, {}), _join, _mark_equation)
