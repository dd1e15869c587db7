"""Third-party transformations on kinds of leaves that they do not know: `Rows` and `Stacked`.

To them `Rows` is two arrays, one of them indices, and `Stacked` a tuple. Some
transformations then fail with an error about tree structures. This module replaces that error by
one with a remedy, if the transformation accepts the same arrays without these nodes. Others scale
the indices: `optax.scale_by_schedule` gives −0.1 the dtype of the indices, which is 0. So while
such a transformation works on rows, it may return only indices that it was given, or that a
transformation of optfn inside it has returned.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core as jex
import optax

from optfn.core import checks, context, leafwise, tree
from optfn.core.types import LeafKind, OptState, Params, PyTree, Stepped, Updates

# The indices of rows that are as they should be, by id, while a third-party transformation works.
_known: ContextVar[dict[int, Any] | None] = ContextVar("known", default=None)
_CHANGED = (
    "a transformation of another library has changed the indices of a row-sparse gradient: put "
    "optfn.sparse.densify() before it"
)


def watch_rows(update: Callable[..., Stepped]) -> Callable[..., Stepped]:
    """Return an update of optfn's that raises a TypeError for rows whose indices a third-party
    transformation around it has changed, and makes the indices that it returns known."""
    if not callable(update) or hasattr(update, "watches_rows"):
        return update

    @functools.wraps(update)
    def watched(updates: Updates, *args: Any, **extra: Any) -> Stepped:
        known = _known.get()
        if known is None:
            return update(updates, *args, **extra)
        if _find_changed(updates, known):
            raise TypeError(_CHANGED)
        new, state = update(updates, *args, **extra)
        known.update(_indices_of(new))
        return new, state

    vars(watched)["watches_rows"] = True
    return watched


def _indices_of(updates: Updates) -> dict[int, Any]:
    """Return the indices of the rows among some updates by id."""
    return {id(x.indices): x.indices for _, x in _list_rows(updates)}


def _list_rows(updates: Updates) -> list[tuple[Any, Any]]:
    """Return the rows among some updates, each with its place."""
    return [(place, x) for place, x in tree.items(updates) if isinstance(x, LeafKind)]


def _find_changed(updates: Updates, known: dict[int, Any]) -> list[Any]:
    """Return the rows whose indices are not known."""
    return [x for _, x in _list_rows(updates) if id(x.indices) not in known]


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
        def apply_tx(updates: Updates) -> Stepped:
            return tx.update(updates, state, params, **extra)

        rows = _list_rows(updates)
        try:
            if not rows:
                return apply_tx(updates)
            stepped, changed = _update_rows(apply_tx, updates)
            if changed and not _gives_constants(apply_tx, updates):
                raise TypeError(_CHANGED)
            return stepped
        except (TypeError, ValueError) as error:
            sparse = [str(place) for place, _ in rows]
            if sparse and _is_traceable(lambda: apply_tx(leafwise.densify_rows(updates))):
                raise TypeError(
                    f"{argument} takes no row-sparse gradients, but the gradient of "
                    f"{tree.list_names(sparse)} is row-sparse: put optfn.sparse.densify() before it"
                ) from error
            raise

    return tx._replace(init=init, update=update)


def _update_rows(
    update: Callable[[Updates], Stepped], updates: Updates
) -> tuple[Stepped, list[Any]]:
    """Return the result of a third-party update, and the rows whose indices it has changed."""
    known = _indices_of(updates)
    with context.hold(_known, known):
        stepped = update(updates)
    return stepped, _find_changed(stepped[0], known)


def _gives_constants(update: Callable[[Updates], Stepped], updates: Updates) -> bool:
    """Tell whether the rows whose indices an update changes depend on no updates, as those of
    `optax.set_to_zero`."""
    jaxpr = jax.make_jaxpr(lambda updates: _update_rows(update, updates)[1])(updates).jaxpr
    depending = {*jaxpr.invars}
    for equation in jaxpr.eqns:
        if not depending.isdisjoint(_variables(equation.invars)):
            depending.update(equation.outvars)
    return depending.isdisjoint(_variables(jaxpr.outvars))


def _variables(atoms: Sequence[Any]) -> list[jex.Var]:
    """Return the variables among the inputs of an equation, or the outputs of a program."""
    return [x for x in atoms if isinstance(x, jex.Var)]


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
