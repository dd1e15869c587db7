"""The bytes that the products of an update send, where devices divide their operands.

An update is left to the compiler, which divides the products of whole matrices as GSPMD does:

* Operands that are divided along the dimensions they are summed over give partial sums, which an
  all-reduce adds up.
* Of two operands that are divided otherwise, the right one is gathered, and the result is divided
  as the left one.
"""

import math
from collections.abc import Mapping
from typing import Any

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import Equations
from optfn.loss.jaxprs.primitives import Atom, Contraction, Equation, Variable


def count_products_sent(program: Equations, divided: Mapping[Variable, int], devices: int) -> float:
    """Return the bytes that each device sends for the products of matrices of a program, in a ring.

    Args:
      program: the update of an optimizer.
      divided: the dimension of an input that devices divide.
      devices: how many devices divide it.
    """
    along: dict[Any, int] = dict(divided)
    sent = 0.0
    for equation in program.equations:
        (result, *others) = equation.outvars
        product = primitives.as_product(equation)
        if product is not None:
            dimension, moved = _divide_product(equation, product, along)
            sent += (devices - 1) / devices * moved
        else:
            dimension = None if others else _divide_result(equation, along)
        if dimension is not None:
            along[result] = dimension
    return sent


def _divide_result(equation: Equation, along: Mapping[Any, int]) -> int | None:
    """Return the divided dimension of the result of an equation, because an operand of as many
    entries is divided, or None otherwise. A reshape divides it as far as it keeps the dimension."""
    order, shape = primitives.as_transpose(equation), primitives.type_of(equation.outvars[0]).shape
    for atom in equation.invars:
        dimension, old = _dimension(atom, along), primitives.type_of(atom).shape
        if dimension is None or math.prod(old) != math.prod(shape):
            continue
        if order is not None:
            return order.index(dimension)
        before = math.prod(old[:dimension])
        kept = (i for i, n in enumerate(shape) if n == old[dimension])
        return next((i for i in kept if math.prod(shape[:i]) == before), None)
    return None


def _divide_product(
    equation: Equation, product: Contraction, along: Mapping[Any, int]
) -> tuple[int | None, float]:
    """Return the divided dimension of the result of a product, None if it has none, and the bytes
    of the gathered array, or twice the bytes of the summed one, that all devices together hold."""
    left, right = (_dimension(atom, along) for atom in equation.invars)
    places = _list_places(equation, product)
    if left in product.summed or (left is None and right in product.summed_right):
        return None, 2.0 * _bytes(equation.outvars[0])
    if left is None:
        return (None if right is None else places[1].index(right)), 0.0
    result = places[0].index(left)
    is_gathered = right is not None and right != places[1][result]
    return result, _bytes(equation.invars[1]) if is_gathered else 0.0


def _list_places(
    equation: Equation, product: Contraction
) -> tuple[list[int | None], list[int | None]]:
    """Return for each dimension of a product's result the dimension of the left and of the right
    operand that it is, None where it is none of that operand."""
    ranks = [len(primitives.type_of(atom).shape) for atom in equation.invars[:2]]
    batch, batch_right = product.batch
    free = [i for i in range(ranks[0]) if i not in (*product.summed, *batch)]
    free_right = [i for i in range(ranks[1]) if i not in (*product.summed_right, *batch_right)]
    return (
        [*batch, *free, *[None] * len(free_right)],
        [*batch_right, *[None] * len(free), *free_right],
    )


def _dimension(atom: Atom, along: Mapping[Any, int]) -> int | None:
    """Return the dimension of an atom that devices divide, None for a literal or a whole array."""
    return along.get(atom) if isinstance(atom, Variable) else None


def _bytes(atom: Atom) -> int:
    """Return the bytes of an array."""
    aval = primitives.type_of(atom)
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
