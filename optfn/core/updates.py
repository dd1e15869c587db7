"""Updates added to parameters."""

import jax.numpy as jnp

from optfn.core import leafwise, tree
from optfn.core.types import Leaf, LeafKind, Params, Updates


def apply_updates(params: Params, updates: Updates) -> Params:
    """Return params + updates, each leaf in its parameter's dtype and unchanged if masked or
    without an update for an integer, or raise an error if they do not fit.

    The sum is computed in the wider of the two dtypes and rounded once. A row-sparse update is
    scattered into the parameter, in place if that is donated. A float0 as the update of an integer
    changes nothing.

    Args:
      params: a tree of arrays.
      updates: the updates that `tx.update` returned, with the same structure and shapes.

    Raises:
      ValueError: structures or shapes differ, or a parameter has no update.
      TypeError: the update of a real parameter is complex.
    """
    tree.check_same_structure("apply_updates", "updates", updates, "params", params)

    def add(place: tree.Place, p: Leaf, u: Leaf) -> Leaf:
        if tree.is_masked(p) or tree.is_float0(u):
            return p
        p = jnp.asarray(p)
        if tree.is_masked(u) or tree.shape_of(u) != p.shape:
            came = f"has shape {tree.shape_of(u)}" if not tree.is_masked(u) else "is missing"
            raise ValueError(
                f"apply_updates: the update of leaf {place!r} {came}; "
                f"the parameter has shape {p.shape}"
            )
        if isinstance(u, LeafKind):
            u.check(f"apply_updates: the update of {place!r}")
            return u.add_to(p)
        u = jnp.asarray(u)
        if jnp.iscomplexobj(u) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"apply_updates: the update of leaf {place!r} is complex; "
                f"the parameter has dtype {p.dtype}"
            )
        wide = p.dtype
        are_inexact = tree.is_inexact(p) and tree.is_inexact(u)
        if are_inexact and jnp.finfo(u.dtype).bits > jnp.finfo(wide).bits:
            wide = u.dtype
        total = leafwise.cast(p, wide) + leafwise.cast(u, wide)
        return leafwise.cast(total, p.dtype)

    return tree.map_named(add, params, updates)
