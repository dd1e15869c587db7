"""A batch before a step: arrays of foreign libraries become NumPy arrays, and text is an error."""

from typing import Protocol, TypeGuard, runtime_checkable

import jax
import numpy as np

from optfn.core import checks, tree
from optfn.core.types import Batch, Leaf
from optfn.leaves.foreign import (
    check_keys,
    has_wide_integers,
    is_known_to_jax,
    refuse_foreign_numbers,
)

# Arrays of NumPy that need no conversion, and whose numbers JAX keeps.
_READY = frozenset(map(np.dtype, ("f2", "f4", "f8", "i1", "i2", "i4", "u1", "u2", "u4", "?")))
_KNOWN = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes)


def convert_batch(batch: Batch) -> Batch:
    """Convert arrays of foreign libraries or byte orders in a batch to NumPy arrays, and raise an
    error for text or numbers that JAX would change.

    Others are in the memory of the host, such as tensors of torch or TensorFlow, and `np.asarray`
    takes them without a copy. Numbers in another byte order are converted.

    Raises:
      TypeError: a leaf is text, which cannot be put on a device, `np.asarray` cannot convert it, or
        JAX would ignore its mask or lacks its dtype.
      ValueError: a leaf has integers beyond 32 bits, which JAX would cut; or it has been donated.
    """
    try:
        leaves = jax.tree.leaves(batch)
    except ValueError:
        check_keys("the batch", batch)
        raise
    # Most batches are ready, and a step of a small model takes hardly longer than these checks.
    if all(map(_is_ready, leaves)):
        return batch
    if any(_is_tensor(x) or _is_swapped(x) for x in leaves):
        batch = tree.map_named(_convert_leaf, batch)
        leaves = jax.tree.leaves(batch)
    for i, x in enumerate(leaves):
        # Paths only for an error: to name the leaves of a batch takes longer than to check them.
        if isinstance(x, str | bytes) or (isinstance(x, np.ndarray) and x.dtype.kind in "USO"):
            path = tree.array_paths(batch)[i]
            raise TypeError(
                f"the batch must consist of arrays and numbers; leaf {path!r} is {checks.show(x)}"
            )
        if isinstance(x, jax.Array) and not _holds_data(x):
            raise ValueError(
                f"{_name_leaf(batch, i)} has been deleted: an earlier call of the step has "
                "overwritten the state that it belongs to. Put a copy into the batch, as by "
                "jnp.copy(x), or make the step with donate=False"
            )
        if _is_foreign(x):
            refuse_foreign_numbers(_name_leaf(batch, i), x)
        if has_wide_integers(x):
            raise ValueError(
                f"{_name_leaf(batch, i)} has integers from {np.min(x)} to {np.max(x)}, which "
                "JAX would cut to 32 bits without an error: map them to smaller ones, such as "
                "rows of a table by optfn.sparse.hash_ids, or set jax_enable_x64"
            )
    return batch


def _is_ready(x: Leaf) -> bool:
    """Tell whether a leaf of a batch is an array that a step takes as it is."""
    return x.dtype in _READY if type(x) is np.ndarray else _holds_data(x)


def _holds_data(x: Leaf) -> bool:
    """Tell whether a leaf is an array of JAX that still has its data, or a traced one."""
    return isinstance(x, jax.Array) and (checks.has_tracer((x,)) or not x.is_deleted())


def _name_leaf(batch: Batch, i: int) -> str:
    """Return the words that name leaf i of a batch in an error."""
    path = tree.array_paths(batch)[i]
    return f"leaf {path!r} of the batch" if path else "the batch"


def _is_swapped(x: Leaf) -> bool:
    """Tell whether the bytes of a NumPy array are in another order than this machine's."""
    return isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative


def _is_foreign(x: Leaf) -> bool:
    """Tell whether JAX would lose something of a NumPy array, or lacks its dtype."""
    if not isinstance(x, np.ndarray | np.generic):
        return False
    return isinstance(x, np.ma.MaskedArray) or not is_known_to_jax(x.dtype)


@runtime_checkable
class _Convertible(Protocol):
    """An array of any library that NumPy can take."""

    def __array__(self) -> np.ndarray: ...


def _is_tensor(x: Leaf) -> TypeGuard[_Convertible]:
    """Tell whether a leaf is an array of neither JAX nor NumPy that NumPy may convert."""
    return not isinstance(x, _KNOWN) and isinstance(x, _Convertible)


def _convert_leaf(place: tree.Place, x: Leaf) -> Leaf:
    """Return a tensor of another library as a NumPy array, and a NumPy array in the byte order of
    this machine."""
    if _is_swapped(x):
        return x.astype(x.dtype.newbyteorder("="))
    if not _is_tensor(x):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"the batch must consist of arrays that NumPy can convert; leaf {place!r} is a {kind}, "
            f"and np.asarray fails: {error}"
        ) from error
