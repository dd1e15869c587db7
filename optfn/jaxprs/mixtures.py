"""Which leaves the results of a function mix, read from its equations.

A rule on the elements of a leaf does the same to a buffer of several leaves. A rule with a norm, a
mean or a product of a leaf does not: it mixes elements, by a primitive such as `reduce_sum` or
`dot_general`. optfn's own code knows where each leaf of a buffer begins, so its mixes do not count:
the innermost line of an equation outside of JAX tells whose code it is.

A mask or a label may choose the rule of a leaf by its axes or its path, and a buffer has others. So
a mixture also tells the rule: the operations on the elements, which a leaf and its buffer must have
in common, the transforms of optfn, and the numbers of a state, such as a rate.
"""

import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from optfn.core.types import PyTree
from optfn.jaxprs.dependence import Marking, mark_results
from optfn.jaxprs.equations import Equation, type_of

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TRANSFORMS = f"{_PACKAGE}transforms{os.sep}"
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

# Primitives that move or cast elements, and are others for arrays of other shapes.
_MOVING = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "gather", "optimization_barrier", "pad", "reshape",
    "rev", "scatter", "slice", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip

# The bit of a group that was mixed along some axes of a leaf; leaf i has bit i + 1.
_BY_AXIS = 1


class Mixture(NamedTuple):
    """What a value has of the leaves; a group of them is an integer with a bit for each.

    leaves: the leaves of which it may have elements, each in its place.
    mixes: the groups of leaves that have been mixed into it, each with the line that did it.
    operations: what code outside of optfn has done to the elements: primitives with their literals.
    sources: by name, the numbers of a state that have been read, and the files of optfn's
      transforms that have run.
    is_made_by_optfn: whether it has arrays that optfn has made, such as zeros for a frozen leaf.
    """

    leaves: int
    mixes: dict[int, str]
    operations: frozenset[tuple[str, ...]] = frozenset()
    sources: frozenset[str] = frozenset()
    is_made_by_optfn: bool = False

    @property
    def has_elements(self) -> bool:
        """Whether the value has elements of leaves, or those that optfn has put in their place."""
        return bool(self.leaves) or self.is_made_by_optfn

    def has_rule_in(self, buffer: "Mixture") -> bool:
        """Tell whether the rule of this leaf is one of the rules of a buffer.

        Code outside of optfn has one rule for a buffer; optfn may have one for each leaf in it, and
        gives zeros to a frozen leaf, whatever the rule.
        """
        if self.is_made_by_optfn and not self.leaves and not self.operations:
            return True
        is_same = self.operations == buffer.operations and self.sources <= buffer.sources
        return is_same and self.has_elements == buffer.has_elements

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
    fn: Callable[..., PyTree], args: Sequence[PyTree], sources: Sequence[int | str]
) -> PyTree:
    """Return a tree like fn(*args), with a `Mixture` in the place of each leaf.

    Args:
      fn: a function of trees of arrays; it is traced, not run.
      args: arrays or ShapeDtypeStructs.
      sources: for each leaf of the arguments, in order, its number, which a parameter, its gradient
        and all that belongs to it have in common; or the name of a number of a state.
    """

    def run(*args: PyTree) -> PyTree:
        # JAX keeps the equations of jitted functions, with the lines of their first caller.
        with jax.disable_jit():
            return fn(*args)

    return mark_results(_MIXTURES, run, args, [_mark_source(x) for x in sources])


def _mark_source(source: int | str) -> Mixture:
    if isinstance(source, str):
        return Mixture(0, {}, sources=frozenset([source]))
    return Mixture(_bit(source), {})


def _mark_equation(equation: Equation, given: Sequence[Mixture]) -> Mixture:
    """Return the mixture of an equation's results; if it mixes, it has no leaf's elements."""
    mixture = reduce(_combine, given, _MIXTURES.none)
    name, line = equation.primitive.name, source_info_util.summarize(equation.source_info)
    is_array = any(type_of(x).ndim for x in equation.outvars)
    if not line or line.startswith(_PACKAGE):
        # A number that optfn has mixed from a leaf is no element; a product of matrices has them.
        is_number = name in _MIXING and not is_array
        made = mixture.is_made_by_optfn or is_array
        leaves = 0 if is_number else mixture.leaves
        sources = mixture.sources | _find_transform(line)
        return mixture._replace(leaves=leaves, sources=sources, is_made_by_optfn=made)
    if name not in _MIXING:
        if name in _MOVING or not mixture.has_elements:
            return mixture
        return mixture._replace(operations=mixture.operations | {_list_operation(equation)})
    if not mixture.leaves:
        return Mixture(0, mixture.mixes)
    has_axes = any(type_of(x).ndim > 1 for x in equation.invars)
    by_axis = _BY_AXIS if has_axes and is_array else 0
    return Mixture(0, {mixture.leaves | by_axis: line} | mixture.mixes)


def _find_transform(line: str) -> set[str]:
    """Return the file of a line; none if it is not in `transforms/`."""
    # Not the function: the catch-up of Adam has another one for rows, which a buffer has not.
    file = line.partition(":")[0]
    return {file} if file.startswith(_TRANSFORMS) else set()


def _list_operation(equation: Equation) -> tuple[str, ...]:
    """Return the primitive of an equation and its literals, such as a rate."""
    literals = [str(x.val) for x in equation.invars if isinstance(x, jex.Literal)]
    return (equation.primitive.name, *literals)


def _combine(a: Mixture, b: Mixture) -> Mixture:
    """Return the mixture of a function of two values.

    Disjoint groups become one: in a global norm the squares of one leaf after the other are added.
    A group that overlaps stays apart: a norm of a leaf that a global norm has scaled is still a
    norm of the leaf.
    """
    joined = _join([a, b])
    if not (a.mixes and b.mixes):
        return joined
    alone, mixes = dict(b.mixes), {}
    for group, line in a.mixes.items():
        disjoint = [other for other in alone if not other & group & ~_BY_AXIS]
        for other in disjoint:
            del alone[other]
        mixes[reduce(int.__or__, disjoint, group)] = line
    return joined._replace(mixes=mixes | alone)


def _join(values: Sequence[Mixture]) -> Mixture:
    """Return the mixture of a value that is one of several."""
    mixes: dict[int, str] = {}
    for value in reversed(values):  # the line of the first of them is kept
        mixes |= value.mixes
    return Mixture(
        leaves=reduce(int.__or__, (value.leaves for value in values)),
        mixes=mixes,
        operations=frozenset().union(*(value.operations for value in values)),
        sources=frozenset().union(*(value.sources for value in values)),
        is_made_by_optfn=any(value.is_made_by_optfn for value in values),
    )


_MIXTURES = Marking(Mixture(0, {}), _join, _mark_equation, marks_constants=True)
