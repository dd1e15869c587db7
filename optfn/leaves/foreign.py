"""Values that JAX would misread, or refuses without a name: trees and arrays of NumPy."""

import jax
import numpy as np

from optfn.core import tree
from optfn.core.types import PyTree


def check_arrays(noun: str, values: PyTree) -> None:
    """Raise a TypeError that names the leaf unless JAX accepts the tree, and its NumPy arrays
    without a change.

    Args:
      noun: a noun for a leaf in the error, as in "TrainStep.init: parameter".
      values: the tree.
    """
    check_keys(noun, values)
    for place, x in tree.items(values):
        if isinstance(x, np.ndarray | np.generic):
            refuse_foreign_numbers(f"{noun} {place!r}", x)


def check_integers(noun: str, values: PyTree) -> None:
    """Raise a ValueError that names the leaf if a NumPy array in a tree has integers that JAX would
    cut to 32 bits."""
    for place, x in tree.items(values):
        if has_wide_integers(x):
            raise ValueError(
                f"{noun} {place!r} has integers from {np.min(x)} to {np.max(x)}, which JAX would "
                "cut to 32 bits without an error: set jax_enable_x64"
            )


def has_wide_integers(x: object) -> bool:
    """Tell whether `x` is a NumPy array with integers that do not fit into the 32 bits that JAX
    keeps."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or not x.size:
        return False
    kept = jax.dtypes.canonicalize_dtype(x.dtype)
    if kept == x.dtype:
        return False
    return int(np.min(x)) < np.iinfo(kept).min or int(np.max(x)) > np.iinfo(kept).max


def check_keys(noun: str, values: PyTree) -> None:
    """Raise a TypeError if a dict in a tree has keys that JAX cannot sort, such as 1 and "b"."""
    try:
        jax.tree.structure(values)
    except ValueError:
        for node in jax.tree.leaves(values, is_leaf=_has_mixed_keys):
            if _has_mixed_keys(node):
                keys = ", ".join(repr(key) for key in node)
                raise TypeError(
                    f"{noun}: JAX sorts the keys of dicts, so all keys of a dict must be of one "
                    f"type, such as str; got {keys}"
                ) from None
        raise


def _has_mixed_keys(x: object) -> bool:
    """Tell whether `x` is a dict whose keys cannot be sorted."""
    if isinstance(x, dict):
        try:
            sorted(x)
        except TypeError:
            return True
    return False


def refuse_foreign_numbers(noun: str, x: np.ndarray | np.generic) -> None:
    """Raise a TypeError if a NumPy array has a mask, a byte order that is not this machine's, or a
    dtype that JAX does not have.

    Args:
      noun: the array, for the error.
      x: the array.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{noun} is a masked array, and JAX would ignore the mask: pass x.filled(0.0), or "
            "x.data and x.mask as two arrays"
        )
    if not x.dtype.isnative:
        raise TypeError(
            f"{noun} has dtype {x.dtype.str}, in another byte order than this machine's: pass "
            'x.astype(x.dtype.newbyteorder("="))'
        )
    if not is_known_to_jax(x.dtype):
        raise TypeError(
            f"{noun} has dtype {x.dtype}, which JAX does not have: convert it, as in "
            "x.astype(np.float32)"
        )


def is_known_to_jax(dtype: np.dtype) -> bool:
    """Tell whether JAX has arrays of a dtype, or of one that it takes in its place."""
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.isbuiltin == 2 or dtype == jax.dtypes.float0  # 2: of ml_dtypes, as bfloat16
