"""The boundary: one walk over gradients and params on the way in, one over updates on the way out.

Inside it all trees have a `MaskedNode` in the place of each leaf that is not trained. To JAX a
`MaskedNode` is an empty subtree, so `jax.tree.map` skips it.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

from optfn.core import errors, numerics, tree
from optfn.core.types import DType, Leaf, LeafKind, Params, Updates

MASKED = optax.MaskedNode()


def mask_untrained(name: str, real_only: str, params: Params) -> Params:
    """Return `params` as arrays in their dtypes, masked where they are not trained, or raise a
    TypeError for a leaf that cannot be frozen either.

    They are not widened: a link of optax makes its state in the dtypes of the params that it gets.
    """
    leaves, structure = tree.flatten(params)
    leaves = list(map(tree.as_array, leaves))
    dtypes = list(map(partial(_choose_dtype, real_only), leaves, leaves))
    if None in dtypes:
        errors.check_entering(name, real_only, params, None, "parameter")
    return structure.unflatten(p if d else MASKED for p, d in zip(leaves, dtypes, strict=True))


def enter(
    name: str, real_only: str, updates: Updates, params: Params | None
) -> tuple[Updates, Params | None, Callable[[Updates], Updates]]:
    """Cast gradients and params to the params' dtypes, at least float32, mask leaves that are not
    trained, and return both with a function that casts updates back.

    Args:
      name: the name of the transformation in errors.
      real_only: the name of its link that is not defined for complex leaves, "" if all are.
      updates: the gradients.
      params: the parameters, if they are given.

    Returns:
      The gradients, the params, and a function that gives updates the dtypes of the params.

    Raises:
      ValueError: structures or shapes differ.
      TypeError: leaves are not numbers, or gradients are of the wrong kind.
    """
    leaves, structure = tree.flatten(updates)
    try:
        like = leaves if params is None else structure.flatten_up_to(params)
    # JAX's error shows whole tree structures; ours names the leaf.
    except ValueError:
        errors.check_entering(name, real_only, updates, params)
        raise
    grads, like = list(map(tree.as_array, leaves)), list(map(tree.as_array, like))
    dtypes = list(map(partial(_choose_dtype, real_only), grads, like))
    # The full check names leaves, which takes time: it runs only where something is unusual.
    if None in dtypes or any(isinstance(g, LeafKind) for g in grads):
        errors.check_entering(name, real_only, updates, params)

    def leave(new: Updates) -> Updates:
        narrow = partial(_narrow, name, new)
        return structure.unflatten(map(narrow, structure.flatten_up_to(new), grads, like))

    entering = structure.unflatten(map(_cast_or_mask, grads, dtypes))
    wide = None if params is None else structure.unflatten(map(_cast_or_mask, like, dtypes))
    return entering, wide, leave


def _choose_dtype(real_only: str, g: Leaf, p: Leaf) -> DType | None:
    """Return the dtype for computing with a leaf, float32 or wider, or None if the leaf is not
    trained.

    This test may reject a leaf that `errors.check_entering` accepts; the leaf is then masked. It
    must never accept a leaf that `errors.check_entering` rejects.
    """
    if not (tree.is_array(g) and tree.is_array(p)):
        return None
    wide_g, wide_p = numerics.wide_dtype(g.dtype), numerics.wide_dtype(p.dtype)
    if wide_g is None or wide_p is None or g.shape != p.shape:
        return None
    is_fit = not real_only if wide_p.kind == "c" else wide_g.kind != "c"
    return wide_p if is_fit else None


def _cast_or_mask(x: Leaf, dtype: DType | None) -> Leaf:
    """Return x in this dtype, or a masked leaf in its place if the dtype is None."""
    return numerics.cast(x, dtype) if dtype else MASKED


def _narrow(name: str, new: Updates, u: Leaf, g: Leaf, p: Leaf) -> Leaf:
    """Return an update in the parameter's dtype, or the update of a frozen leaf, such as −0.0 or an
    integer zero, if it is masked, and raise a ValueError if its shape is not the gradient's."""
    if tree.is_array(u) and u.shape == g.shape:
        return numerics.cast(u, p.dtype)
    if not tree.is_masked(u):
        raise errors.update_error(name, new, u, g)
    return frozen_update(g, p)


def frozen_update(g: Leaf, p: Leaf) -> Leaf:
    """Return the update of a frozen leaf, −0.0 for a floating-point parameter, an integer zero for
    an integer, and `g` itself for a masked leaf.

    −0.0 is the only number that leaves p + u = p bit for bit.
    """
    p = np.asarray(p, jnp.result_type(p)) if isinstance(p, int | float | complex) else p
    if tree.is_array(p) and not tree.is_float0(p):
        if jnp.issubdtype(p.dtype, jnp.inexact):
            return jnp.full(p.shape, numerics.negative_zero(p.dtype), p.dtype)
        return numerics.integer_zeros(jnp.shape(p), p.dtype)
    # Without params the dtype is unknown; int8 promotes no integer.
    return numerics.integer_zeros(g.shape, np.int8) if tree.is_float0(g) else g
