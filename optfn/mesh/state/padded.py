"""Arrays of a state with padding, so that devices can divide them evenly.

On a mesh they are stored like this between steps. The update, `state_dict` and checkpoints see them
without padding.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, tree
from optfn.core.traits import traits
from optfn.core.types import Leaf, PyTree
from optfn.mesh.collectives.axes import to_axes
from optfn.mesh.state.static import get_static, set_static


@traits(transparent=True)
class Padded(NamedTuple):
    """An array with zeros at the end of one axis. It does not change the names of `state_dict`."""

    array: Leaf

    @property
    def axis(self) -> int:
        """The axis that is padded."""
        return get_static(self, "axis", 0)

    @property
    def length(self) -> int:
        """The length of that axis without padding."""
        return get_static(self, "length", 0)


def wrap_padded(x: Leaf, axis: int, size: int) -> Padded:
    """Pad an axis with zeros to a size, and return the result as a Padded that knows the axis and
    its length before."""
    return set_static(Padded(pad(x, axis, size)), axis=axis, length=int(x.shape[axis]))


def is_padded(x: object) -> TypeGuard[Padded]:
    """Tell whether `x` is a Padded."""
    return isinstance(x, Padded)


def pad(x: Leaf, axis: int, size: int) -> Leaf:
    """Pad an axis with zeros to a size, and return a NumPy array for a NumPy array and a JAX array
    otherwise."""
    widths = [(0, size - n if d == axis else 0) for d, n in enumerate(x.shape)]
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)


def pad_like(node: Padded, x: Leaf) -> Padded:
    """Pad an array as another Padded is, along the same axis to the same size."""
    return node._replace(array=pad(x, node.axis, node.array.shape[node.axis]))


def unwrap_padded(node: Padded) -> Leaf:
    """Return an array without its padding, divided on a mesh along another axis if one fits, and
    whole on every device otherwise."""
    x, axis, size = node.array, node.axis, node.length
    if isinstance(x, np.ndarray):
        return x[(slice(None),) * axis + (slice(size),)]
    lies = None if checks.is_traced(x) else x.sharding
    if not isinstance(lies, NamedSharding):
        return lax.slice_in_dim(x, 0, size, axis=axis)
    # JAX divides an array only evenly, so divide it along another axis, if possible.
    names = to_axes(lies.spec[axis]) if axis < len(lies.spec) else ()
    count = math.prod(lies.mesh.shape[name] for name in names)
    fitting = [d for d, n in enumerate(x.shape) if d != axis and n % count == 0]
    spec = P(*[None] * fitting[0], names) if fitting and names else P()
    # jitted, so that devices cut and send their shards, and none holds the whole array.
    cutting = jax.jit(
        lambda x: lax.slice_in_dim(x, 0, size, axis=axis),
        out_shardings=NamedSharding(lies.mesh, spec),
    )
    return cutting(x)


def map_padded(fn: Callable[[Padded], Leaf], state: PyTree) -> PyTree:
    """Replace each Padded of a state by `fn` of it, and return everything else unchanged."""
    return tree.replace_nodes(is_padded, fn, state)
