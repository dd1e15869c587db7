"""Batches as a step takes them: arrays of other libraries become NumPy's, text is an error."""

import jax
import numpy as np

from optfn import checks
from optfn.leaves import tree
from optfn.leaves.types import Batch, Leaf

_KNOWN = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes)


def as_arrays(batch: Batch) -> Batch:
    """Return a batch of arrays and numbers.

    An array of another library that lies in the memory of the host, such as a tensor of torch or
    TensorFlow, becomes NumPy's by `np.asarray`, which does not copy it.

    Raises:
      TypeError: a leaf is text, which no device holds, or an array that NumPy does not take.
    """
    leaves, structure = jax.tree.flatten(batch)
    if any(map(_is_foreign, leaves)):
        names = tree.array_paths(batch)
        leaves = [_converted(name, x) for name, x in zip(names, leaves, strict=True)]
        batch = jax.tree.unflatten(structure, leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, str | bytes) or (isinstance(x, np.ndarray) and x.dtype.kind in "USO"):
            path = tree.array_paths(batch)[i]
            raise TypeError(
                f"the batch must hold arrays and numbers; leaf {path!r} is {checks.shown(x)}"
            )
    return batch


def _is_foreign(x: Leaf) -> bool:
    return not isinstance(x, _KNOWN) and hasattr(type(x), "__array__")


def _converted(name: str, x: Leaf) -> Leaf:
    if not _is_foreign(x):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"the batch must hold arrays on the host; leaf {name!r} is a {kind} that NumPy does "
            f"not take ({error})"
        ) from error
