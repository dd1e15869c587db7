"""Which leaves an optimizer updates by their own gradient alone, read from its equations."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optfn.jaxprs.dependence import depends
from optfn.leaves import tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates
from optfn.leaves.updates import apply_updates
from optfn.state import names as state_names
from optfn.state.per_worker import exchanges

_LOSS = "the loss"


def refusal(path: str, why: str) -> ValueError:
    """Return the error for a leaf that cannot be updated in the backward pass."""
    return ValueError(
        f"update_in_backward: leaf {path!r} cannot be updated in the backward pass: {why}"
    )


def owners_of(params: Params, opt_state: OptState) -> list[str | None]:
    """Return the path of the parameter that each array of (params, opt_state) belongs to."""
    shapes = {path: x.shape for path, x in tree.arrays_with_paths(params)}
    parts = state_names.named_entries(opt_state)
    owned = state_names.entries_by_param(parts, shapes)
    of_state = [path if path is None or x.ndim or not shapes[path] else None for path, x in owned]
    return [*shapes, *of_state]


def check_independent(
    tx: optax.GradientTransformationExtraArgs,
    params: Params,
    opt_state: OptState,
    owners: Sequence[str | None],
    selected: Collection[str],
) -> None:
    """Raise a ValueError unless the update of each selected leaf depends on no other leaf.

    Neither may another leaf, or a counter or rate that leaves share, depend on a selected one.

    Args:
      tx: the optimizer.
      params: the params.
      opt_state: the state of tx for them.
      owners: as `owners_of` returns them.
      selected: the paths of the leaves.
    """
    if exchanges(opt_state):
        raise ValueError(
            "update_in_backward: tx exchanges gradients by itself, those of all leaves together "
            "after the backward pass"
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, opt_state))
    sizes = {path: x.shape for path, x in tree.arrays_with_paths(shapes[0])}
    marks: dict[str | None, int] = {name: 1 << k for k, name in enumerate([*sizes, _LOSS])}
    marks[None] = 0
    of_state = list(state_names.named_entries(shapes[1]))
    for i, (name, x) in enumerate(of_state, len(sizes)):
        owner = owners[i]
        _check_layers(name, x, None if owner is None else sizes[owner], owner in selected)
    names = [*sizes, *(name for name, _ in of_state)]
    found = _dependence(tx, shapes, [marks[owner] for owner in owners], marks[_LOSS])
    for name, mark, owner in zip(names, found, owners, strict=True):
        others = (other for other, bit in marks.items() if mark & bit and other != owner)
        for other in others:
            if owner in selected or other in selected:
                raise ValueError(
                    f"update_in_backward: the new {name!r} depends on {other!r}, so that one of "
                    "them cannot be updated before the backward pass has ended. Leave out norms "
                    "over all leaves (clip_by_global_norm, record_metrics), guards "
                    "(skip_nonfinite) and transforms of the loss"
                )


def _dependence(
    tx: optax.GradientTransformationExtraArgs,
    shapes: tuple[Params, OptState],
    of_arrays: list[int],
    of_loss: int,
) -> list[int]:
    """Return on which marked leaves each array of the next params and state depends.

    Args:
      tx: the optimizer.
      shapes: those of params and state.
      of_arrays: the mark of each array of them.
      of_loss: that of the loss.
    """

    def update(params: Params, state: OptState, grads: Updates, loss: jax.Array) -> PyTree:
        updates, state = tx.update(grads, state, params, **extra_arguments(grads, loss))
        return apply_updates(params, updates), state

    def gradients(values: Params) -> Updates:
        return tree.map(lambda p, x: x if tree.is_inexact(p) else None, params, values)

    params, opt_state = shapes
    of_params, of_state = jax.tree.unflatten(jax.tree.structure(shapes), of_arrays)
    loss: Any = jax.ShapeDtypeStruct((), jnp.float32)
    found = depends(
        update,
        (params, opt_state, gradients(params), loss),
        (of_params, of_state, gradients(of_params), of_loss),
    )
    return jax.tree.leaves(found)


def _check_layers(name: str, x: Leaf, of: tuple[int, ...] | None, is_selected: bool) -> None:
    """Raise a ValueError unless an array of the state can be cut into layers, or is a number."""
    if of is None and (x.ndim or tree.is_key(x)):
        why = "is no number, and belongs to no single leaf"
    elif of is not None and is_selected and x.shape[-len(of) :] != of:
        why = f"has the shape {x.shape}, without the axes {of} of its leaf"
    else:
        return
    raise ValueError(f"update_in_backward: tx keeps {name!r}, which {why}")


def extra_arguments(grads: Updates, loss: jax.Array) -> dict[str, Any]:
    """Return the further arguments of an update, as a training step gives them."""
    return {"value": loss, "grad": grads, "value_fn": _no_value_fn}


def _no_value_fn(params: Params) -> jax.Array:
    raise ValueError(
        "update_in_backward: tx evaluates the loss again (value_fn), on params that the backward "
        "pass has changed"
    )
