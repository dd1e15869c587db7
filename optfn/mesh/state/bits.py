"""The stored form of arrays: a dtype that NumPy lacks is stored as bits, with a list of such
dtypes.

NumPy saves an array of bfloat16 as raw bytes, and one of float8_e5m2 as a dtype that it cannot read
again. So `encode_arrays` gives their bits as unsigned integers, and `DTYPES`, a JSON text as bytes,
names the dtype of each array of such integers: {"params/w": "bfloat16", "params/ids": "uint16"}.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from optfn.core.types import DType, Leaf

# The key of the list of dtypes in a mapping of `state_dict`.
DTYPES = "dtypes"


def encode_arrays(arrays: Mapping[str, Leaf]) -> dict[str, Any]:
    """Return arrays by name, host arrays of a dtype that NumPy lacks as their bits, and the list of
    dtypes as `DTYPES` if one is needed."""
    bits = {name: view_as_bits(x) for name, x in arrays.items()}
    return {**list_dtypes(arrays), **bits}


def list_dtypes(arrays: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Return {DTYPES: the list of dtypes of the arrays that are stored as integers that may be
    bits}, or {} if there are none."""
    found = {name: x.dtype.name for name, x in arrays.items() if _may_be_bits(view_as_bits(x))}
    return {DTYPES: np.frombuffer(json.dumps(found).encode(), np.uint8)} if found else {}


class DecodedArrays(Mapping[str, Any]):
    """Arrays by name, as `encode_arrays` got them. Each is read when it is asked for.

    Integers that may be bits, and that the list lacks, because a mapping has none or the array got
    another name, become raw bytes: their dtype is unknown.

    Raises:
      ValueError: the list is damaged.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping
        self._dtypes: dict[str, str] = {}
        if DTYPES in mapping:
            self._dtypes = json.loads(np.asarray(mapping[DTYPES]).tobytes())

    def __getitem__(self, name: str) -> Any:
        x = self._mapping[name]
        # Bits are read in the order of this machine.
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        if name == DTYPES or not _may_be_bits(x):
            return x
        dtype = np.dtype(f"V{x.itemsize}")
        if name in self._dtypes:
            dtype = jnp.dtype(self._dtypes[name])
            if bits_dtype(dtype) != x.dtype or not (is_foreign(dtype) or dtype == x.dtype):
                raise ValueError(f"{name!r} is {x.dtype}, but the list of dtypes says {dtype}")
        return x.view(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __contains__(self, name: object) -> bool:  # Mapping's would read the array
        return name in self._mapping


def is_foreign(dtype: DType) -> bool:
    """Tell whether NumPy does not know a dtype itself, such as bfloat16, float8 and int4."""
    return np.dtype(dtype).isbuiltin == 2


def is_raw(dtype: DType) -> bool:
    """Tell whether a dtype is raw bytes, which do not say their dtype."""
    return np.dtype(dtype).kind == "V" and not is_foreign(dtype)


def bits_dtype(dtype: DType) -> np.dtype:
    """Return the unsigned integer dtype of the same size."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def view_as_bits(x: Leaf) -> Leaf:
    """Return a host array of a dtype that NumPy lacks as its bits in unsigned integers, else the
    array itself."""
    return x.view(bits_dtype(x.dtype)) if isinstance(x, np.ndarray) and is_foreign(x.dtype) else x


def _may_be_bits(x: Leaf) -> bool:
    """Tell whether an array on the host has unsigned integers of at most two bytes, which may be
    the bits of `view_as_bits`."""
    return isinstance(x, np.ndarray) and x.dtype.kind == "u" and x.dtype.itemsize <= 2


def convert_dtype(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, str]:
    """Return a copy of an array in another dtype, floats rounded, and "", or if its kind or a value
    would be lost, the array and the reason.

    Raw bytes are read as the dtype if that has their size.
    """
    if is_raw(array.dtype) and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype)
    elif is_raw(array.dtype):
        return array, (
            f"has {array.dtype.itemsize} bytes for each number and nothing names their dtype, "
            f"but the template has {dtype}. Load the whole result of state_dict, which lists "
            f"dtypes as {DTYPES!r}, or view the array as its dtype"
        )
    # A float would be cut to an integer without a word.
    if _rank(array.dtype) > _rank(dtype):
        return array, f"has dtype {array.dtype}, but the template has {dtype}"
    with np.errstate(all="ignore"):
        made = array.astype(dtype)
    if array.dtype == dtype or not array.size:
        return made, ""
    lost = _find_lost(array, made)
    if not lost.any():
        return made, ""
    number = array[lost].flat[0]
    return array, f"has {number} in {array.dtype}, which the template's {dtype} cannot hold"


def _rank(dtype: np.dtype) -> int:
    """Return the position of a dtype's kind among bools, integers, floats and complex numbers."""
    kinds = (np.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return [jnp.issubdtype(dtype, kind) for kind in kinds].index(True)


def _find_lost(array: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Return a mask of the lost values: integers that change, and finite floats beyond the
    range."""
    lost: np.ndarray
    if jnp.issubdtype(array.dtype, jnp.inexact):
        lost = np.isfinite(array) & ~np.isfinite(made)
        info = jnp.finfo(made.dtype)
        if info.bits < 8:  # without infinity: the largest number is in its place
            lost |= np.abs(array) > float(info.max) * (1 + float(info.eps) / 2)
        return lost
    if is_foreign(array.dtype) or array.dtype == np.bool_:
        array = array.astype(np.int8)
    if jnp.issubdtype(made.dtype, jnp.integer):
        # NumPy compares Python's integers with integers of any dtype exactly.
        low, high = int(jnp.iinfo(made.dtype).min), int(jnp.iinfo(made.dtype).max)
        lost = (array < low) | (array > high)
    else:
        real = np.real(made).astype(np.float64)
        lost = (np.abs(real) > 2.0**53) | (real != array.astype(np.float64))
    return lost
