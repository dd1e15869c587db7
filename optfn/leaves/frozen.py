"""The updates of leaves that are not trained."""

import jax.numpy as jnp
import numpy as np

from optfn.core import numerics, tree
from optfn.core.types import Leaf, Updates
from optfn.leaves import mismatch


def untrained_update(name: str, new: Updates, u: Leaf, g: Leaf, p: Leaf) -> Leaf:
    """Return the update of a leaf that is not trained; raise if a rule returned an unfit one.

    Args:
      name: the name of the transformation.
      new: the updates that its rule returned.
      u: the one of them that is not an array like the gradient.
      g: the gradient.
      p: the parameter.
    """
    if not tree.is_masked(u):
        raise mismatch.update_error(name, new, u, g)
    return frozen_update(g, p)


def frozen_update(g: Leaf, p: Leaf) -> Leaf:
    """Return the update of a frozen leaf: −0.0, an integer zero, or a masked leaf.

    −0.0 is the only number that leaves p + u = p bit for bit.
    """
    p = np.asarray(p, jnp.result_type(p)) if isinstance(p, int | float | complex) else p
    if tree.is_array(p) and not tree.is_float0(p):
        if jnp.issubdtype(p.dtype, jnp.inexact):
            return jnp.full(p.shape, -0.0, p.dtype)
        return numerics.integer_zeros(jnp.shape(p), p.dtype)
    # Without params the dtype is unknown; int8 is the one that promotes no integer.
    return numerics.integer_zeros(g.shape, np.int8) if tree.is_float0(g) else g
