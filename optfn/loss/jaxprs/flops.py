"""FLOPs of a program, counted from its equations."""

import math
from collections.abc import Callable, Iterable

import numpy as np

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.primitives import Equation, Jaxpr, Window


class UncountableError(Exception):
    """The equations of a program do not tell its FLOPs."""


def count_product_flops(equation: Equation) -> float | None:
    """Return the FLOPs of a product or a convolution, 2 for each multiply-add, or None if the
    equation is neither.

    The holes and the padding of a convolution, such as the gradient of a strided one has, do not
    count.
    """
    if (product := primitives.as_product(equation)) is not None:
        left = primitives.type_of(equation.invars[0]).shape
        summed = math.prod(left[i] for i in product.summed)
        result = primitives.type_of(equation.outvars[0]).shape
        return 2.0 * math.prod(result) * summed / product.groups
    if (x := primitives.as_convolution(equation)) is None:
        return None
    # Without the products on holes and padding.
    return math.prod(map(count_pairs, x.windows), start=2.0 * x.examples * x.features * x.inputs)


def count_flops(equations: Iterable[Equation]) -> float:
    """Return the FLOPs of equations: `count_product_flops` of a product, 0 for moved entries, and 1
    for each entry of the remaining results.

    A scan counts all its turns, a `while` one turn, and a cond its dearest branch.
    """

    def count(equation: Equation) -> float | None:
        flops = count_product_flops(equation)
        if flops is not None or primitives.find_inner_jaxprs(equation):
            return flops
        size = sum(math.prod(primitives.type_of(a).shape) for a in equation.outvars)
        return 0.0 if primitives.moves_entries(equation) else float(size)

    return _add_up(equations, count, max)


def count_model_flops(jaxpr: Jaxpr, left_out: str) -> float:
    """Return the FLOPs of the products of a program on all devices, without recomputed ones, and
    raise an UncountableError if its equations do not tell them.

    A scan counts all its turns. Products that run again in the backward pass under `jax.checkpoint`
    do not count, nor do those under the `jax.named_scope` called `left_out`. Inside `shard_map`
    each device counts.

    Raises:
      UncountableError: a kernel, a loop of an unknown number of turns, or branches with different
        products.
    """

    def count(equation: Equation) -> float | None:
        if primitives.is_recomputed(equation) or left_out in str(equation.source_info.name_stack):
            return 0.0
        if primitives.is_kernel(equation):
            raise UncountableError(f"the products of {primitives.name_of(equation)} are not known")
        loop = primitives.as_while(equation)
        if loop is not None and any(_add_up(x.eqns, count, choose) for x in loop[:2]):
            raise UncountableError("a while loop does not say how often it runs")
        return count_product_flops(equation) if loop is None else 0.0

    def choose(branches: list[float]) -> float:
        if len({*branches}) > 1:
            raise UncountableError("the branches of a cond have different products")
        return branches[0]

    return _add_up(jaxpr.eqns, count, choose)


def _add_up(
    equations: Iterable[Equation],
    count: Callable[[Equation], float | None],
    choose: Callable[[list[float]], float],
) -> float:
    """Return the sum over equations, each as often as the devices together run it. If `count` gives
    None for an equation, the equations inside of it are summed.

    Args:
      equations: the equations.
      count: returns the amount of an equation; None: the amount of the functions inside of it.
      choose: returns the amount of one of several branches.
    """
    total = 0.0
    for equation in equations:
        amount = count(equation)
        if amount is None:
            inner = [
                _add_up(jaxpr.eqns, count, choose)
                for jaxpr in primitives.find_inner_jaxprs(equation)
            ]
            are_branches = primitives.as_branches(equation) is not None
            amount = choose(inner) if are_branches else sum(inner) * primitives.count_runs(equation)
        total += amount
    return total


def count_pairs(window: Window) -> int:
    """Return how many pairs of a place of a kernel and an entry meet along a dimension, without
    places on holes or padding."""
    length, moves, kernel, stride, low, hole, apart = window
    places = np.arange(moves)[:, None] * stride + np.arange(kernel) * apart - low
    return int(np.sum((places >= 0) & (places <= (length - 1) * hole) & (places % hole == 0)))
