"""The vector-Jacobian product of a function with parameters, on floating-point leaves only."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from optfn.core import tree
from optfn.core.types import Leaf, Params, PyTree
from optfn.loss.jaxprs.equations import replace_leaves

# A random key, typed or as raw bits, or None.
Key: TypeAlias = jax.Array | None
# (weights, x, key) -> y
StageFn: TypeAlias = Callable[[Params, PyTree, Key], PyTree]
# (cotangent of y) -> (gradient of weights, cotangent of x), all as lists of inexact leaves
Pullback: TypeAlias = Callable[[Sequence[Leaf]], tuple[list[Leaf], list[Leaf]]]


def select_inexact_leaves(values: PyTree) -> list[Leaf]:
    """Return the real and complex floating-point leaves, which alone have a gradient."""
    return list(filter(tree.is_inexact, jax.tree.leaves(values)))


def replace_inexact_leaves(values: PyTree, replacements: Sequence[Leaf]) -> PyTree:
    """Return a tree with its inexact leaves replaced, in order."""
    return replace_leaves(tree.is_inexact, values, replacements)


def pullback(fn: StageFn, weights: Params, x: PyTree, key: Key) -> tuple[PyTree, Pullback]:
    """Run fn(weights, x, key), and return y and the function from the cotangent of y to (gradient
    of weights, cotangent of x), without integer leaves."""

    def run(weight_leaves: list[Leaf], x_leaves: list[Leaf]) -> tuple[list[Leaf], PyTree]:
        y = fn(
            replace_inexact_leaves(weights, weight_leaves), replace_inexact_leaves(x, x_leaves), key
        )
        return select_inexact_leaves(y), y

    # y is an auxiliary result too, because its integer leaves have no cotangent.
    leaves = map(select_inexact_leaves, (weights, x))
    _, pull, y = jax.vjp(run, *leaves, has_aux=True)
    return y, pull
