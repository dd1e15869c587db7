"""The vector-Jacobian product of a function with parameters, on floating-point leaves only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (weights, x, key) -> y
StageFn = Callable[[Any, Any, Any], Any]


def floats(tree: Any) -> list[Any]:
    """Return the leaves of `tree` that have a gradient."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def with_floats(tree: Any, new: list[Any]) -> Any:
    """Return `tree` with `new` in place of its `floats`."""
    leaves, structure = jax.tree.flatten(tree)
    given = iter(new)
    return jax.tree.unflatten(
        structure, [next(given) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
    )


def pullback(fn: StageFn, weights: Any, x: Any, key: Any) -> tuple[Any, Callable[..., Any]]:
    """Return y, and (cotangent of y) -> (gradient of weights, cotangent of x)."""

    def of_floats(w: list[Any], a: list[Any]) -> tuple[list[Any], Any]:
        y = fn(with_floats(weights, w), with_floats(x, a), key)
        return floats(y), y

    _, pull, y = jax.vjp(of_floats, floats(weights), floats(x), has_aux=True)
    return y, pull
