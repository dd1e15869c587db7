"""Third-party transformations on kinds of leaves that they do not know: `Rows` and `Stacked`.

To them `Rows` is two arrays, one of them indices, and `Stacked` a tuple. Some
transformations then fail with an error about tree structures. This module replaces that error by
one with a remedy, if the transformation accepts the same arrays without these nodes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from optfn.core import checks, leafwise, tree
from optfn.core.types import LeafKind, OptState, Params, PyTree, Stepped, Updates


def convert_transform(argument: str, tx: Any, factory: str) -> optax.GradientTransformation:
    """Return `tx`, or the transformation that it makes, as MultiSteps does, or raise a TypeError
    for anything else."""
    if isinstance(tx, optax.MultiSteps):
        # MultiSteps.gradient_transformation() drops extra arguments.
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if hasattr(tx, "gradient_transformation"):
        tx = tx.gradient_transformation()
    if factory and checks.is_host_number(tx):
        raise TypeError(
            f"{argument} must be a gradient transformation, not the number {tx!r}. "
            f"Did you mean {factory}({tx!r})?"
        )
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a gradient transformation, such as optfn.adam(1e-3), "
            f"optfn.clip_by_norm(1.0) or optfn.l2_decay(1e-4); got {checks.show(tx)}"
        )
    return tx


def explain_errors(argument: str, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a third-party transformation with clearer errors about Rows and Stacked, and with its
    further errors unchanged.

    Raises, at init and update:
      TypeError: it takes no row-sparse gradients.
      ValueError: it holds a tree, such as labels, that does not match stacked params.
    """

    @functools.wraps(tx.init)
    def init(params: Params) -> OptState:
        try:
            return tx.init(params)
        except (TypeError, ValueError) as error:
            nodes = jax.tree.leaves(params, is_leaf=_is_stacked)
            inner = tree.unwrap_nodes(params, _is_stacked)
            # Only if the same call succeeds without the nodes is the cause known.
            if any(map(_is_stacked, nodes)) and _is_traceable(lambda: tx.init(inner)):
                raise ValueError(
                    f"{argument}: a tree of labels, or a mask, does not match stacked params. Put "
                    "it into an optfn.Stacked, like the params, or pass a function of params"
                ) from error
            raise

    @functools.wraps(tx.update)
    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        def update_dense() -> PyTree:
            return tx.update(leafwise.densify_rows(updates), state, params, **extra)

        try:
            return tx.update(updates, state, params, **extra)
        except (TypeError, ValueError) as error:
            sparse = [str(place) for place, x in tree.items(updates) if isinstance(x, LeafKind)]
            if sparse and _is_traceable(update_dense):
                raise TypeError(
                    f"{argument} takes no row-sparse gradients, but the gradient of "
                    f"{tree.list_names(sparse)} is row-sparse: put optfn.sparse.densify() before it"
                ) from error
            raise

    return tx._replace(init=init, update=update)


def _is_stacked(x: object) -> bool:
    """Tell whether `x` is a `Stacked`, whose module imports this one: among the nodes that add no
    word to paths, it alone has layouts of its leaves."""
    return tree.is_transparent(x) and hasattr(x, "leaf_layouts")


def _is_traceable(fn: Callable[[], PyTree]) -> bool:
    """Tell whether `fn` can be traced, without a TypeError or ValueError."""
    try:
        jax.eval_shape(fn)
    except (TypeError, ValueError):
        return False
    return True
