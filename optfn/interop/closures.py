"""The arguments that optax's transformations show: masks, labels of a partition, links."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from optfn import core
from optfn.core.types import Params
from optfn.leaves import contents


def find_closed_over(tx: Any) -> Mapping[str, Any]:
    """Return by name the values that the update of a transformation of optax closes over, such as a
    mask or labels, or {} if `tx` is no such transformation."""
    update = find_update(tx)
    return {} if update is None else inspect.getclosurevars(update).nonlocals


def find_update(tx: Any) -> Callable[..., Any] | None:
    """Return the update of a transformation as its author wrote it, or None for one of optfn and
    for an object that is no transformation.

    Functions that optax and `explain_errors` of `third_party` put around it are passed over.
    """
    if isinstance(tx, core.Transform) or not inspect.isfunction(getattr(tx, "update", None)):
        return None
    update: Callable[..., Any] = inspect.unwrap(tx.update)
    if update.__qualname__.startswith(f"{optax.with_extra_args_support.__name__}."):
        return find_update(inspect.getclosurevars(update).nonlocals["tx"])
    return update


def find_marked(marks: Any, params: Params, mark: object = True) -> frozenset[str] | None:
    """Return the paths of the leaves with a mark in a tree of marks, a prefix of the params or a
    function that returns it, or None if they cannot be told."""
    try:
        found = marks(params) if callable(marks) else marks
        spread = jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), found, params)
    except Exception:  # of any kind: a function of the user, who expects different params
        return None
    named, flags = contents.leaves_with_names(params), jax.tree.leaves(spread)
    if len(named) != len(flags):
        return None
    return frozenset(path for (path, _), flag in zip(named, flags, strict=True) if flag == mark)


def find_labels(tx: Any, params: Params) -> dict[str, str]:
    """Return by path the label of each leaf in the first `optax.partition` of `tx`, without leaves
    whose label cannot be told, or {} without a partition."""
    closed = find_closed_over(tx)
    if (labels := closed.get("param_labels")) is not None:
        marked = {label: find_marked(labels, params, label) for label in closed["transforms"]}
        return {path: str(label) for label, paths in marked.items() for path in paths or ()}
    inside = [*getattr(tx, "inner", ()), *closed.values()]
    inside += [optax.GradientTransformation(tx.init, fn) for fn in closed.get("update_fns", ())]
    parts = (x for x in inside if isinstance(x, optax.GradientTransformation))
    return next((found for x in parts if (found := find_labels(x, params))), {})
