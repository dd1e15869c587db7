"""The edge of a rule: one walk over gradients and params on the way in, one over updates out.

Behind it all trees have `MaskedNode` in the same places: leaves that are not trained. To JAX that
is an empty subtree, so `jax.tree.map` leaves them out.
"""

from collections.abc import Callable

import optax

from optfn.leaves import numerics, tree
from optfn.leaves.types import DType, Leaf, OneLeaf, Params, PyTree, Updates

MASKED = optax.MaskedNode()


def masked(name: str, real_only: str, params: Params) -> Params:
    """Return `params` as arrays, masked where they are not trained."""
    leaves, structure = tree.flatten(params)
    leaves = [tree.as_array(p) for p in leaves]
    kept = [p if _wide(p, p, real_only) else MASKED for p in leaves]
    if any(p is MASKED for p in kept):
        _check(name, real_only, params, None, "parameter")
    return structure.unflatten(kept)


def entered(
    name: str, real_only: str, updates: Updates, params: Params | None
) -> tuple[Updates, Params | None, Callable[[Updates], Updates]]:
    """Return gradients and params in float32 or wider, masked where they are not trained.

    Args:
      name: the name of the transformation in errors.
      real_only: the part of it that is not defined for complex leaves, "" if there is none.
      updates: the gradients.
      params: the parameters, if they are given.

    Returns:
      The gradients, the params, and a function that gives updates the dtypes of the params.

    Raises:
      ValueError: structures or shapes differ.
      TypeError: leaves are not numbers, or gradients are of the wrong kind.
    """
    leaves, structure = tree.flatten(updates)
    grads = [tree.as_array(g) for g in leaves]
    try:
        like = grads if params is None else structure.flatten_up_to(params)
    except ValueError:
        _check(name, real_only, updates, params)
        raise
    like = like if params is None else [tree.as_array(p) for p in like]
    dtypes = [_wide(g, p, real_only) for g, p in zip(grads, like, strict=True)]
    if None in dtypes or any(isinstance(g, OneLeaf) for g in grads):
        _check(name, real_only, updates, params)

    def widened(values: list[Leaf]) -> PyTree:
        pairs = zip(values, dtypes, strict=True)
        return structure.unflatten(numerics.cast(x, d) if d else MASKED for x, d in pairs)

    def left(new: Updates) -> Updates:
        found = structure.flatten_up_to(new)
        if any(map(tree.is_masked, found)):
            from optfn.leaves import frozen

            return structure.unflatten(frozen.with_frozen(found, grads, like))
        return structure.unflatten(
            numerics.cast(u, p.dtype) for u, p in zip(found, like, strict=True)
        )

    return widened(grads), None if params is None else widened(like), left


def _wide(g: Leaf, p: Leaf, real_only: str) -> DType | None:
    """Return the dtype in which to compute with a leaf, None unless both are fit to train it."""
    if not (tree.is_array(g) and tree.is_array(p)):
        return None
    of_g, of_p = numerics.wide_dtype(g.dtype), numerics.wide_dtype(p.dtype)
    if of_g is None or of_p is None or g.shape != p.shape:
        return None
    is_fit = not real_only if of_p.kind == "c" else of_g.kind != "c"
    return of_p if is_fit else None


def _check(name: str, real_only: str, updates: Updates, params: Params | None, *kind: str) -> None:
    from optfn.leaves import mismatch

    mismatch.check_entering(name, real_only, updates, params, *kind)
