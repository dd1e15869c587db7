"""Row-sparse arrays: the gradient of a table of which a step touches some rows.

Arithmetic only; `optfn.sparse` is where they come from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of an array that is zero elsewhere: fluid's SelectedRows.

    A pytree whose leaves are indices and values. Repeated indices add up. It stands for an array of
    `shape` and may be added to one: params + rows. optfn's transforms know it; others see two
    arrays, and one that works on every array works on the indices too: it must not come near.

    Args:
      indices: int32 (k,), which rows; `num_rows` marks one that does not count (padding).
      values: (k, …), the rows.
      num_rows: of the array; static.
      unique: whether no index but padding is repeated, and padding is zero; static.
    """

    indices: Any
    values: Any
    num_rows: int
    unique: bool = False
    __array_ufunc__ = None  # NumPy arrays leave the sum to __radd__

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""
        return (self.num_rows, *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def map(self, fn: Callable[[Any], Any]) -> "Rows":
        """Return these rows with fn(values), for a function that keeps zero at zero."""
        return dataclasses.replace(self, values=fn(self.values))

    def astype(self, dtype: Any) -> "Rows":
        """Return these rows with values of `dtype`."""
        return self.map(lambda values: values.astype(dtype))

    def __add__(self, other: Any) -> Any:
        """Return other + self: an array, or Rows where `other` is Rows as well."""
        if isinstance(other, Rows):
            return joined(other, self)
        return add(other, self)

    __radd__ = __add__


jax.tree_util.register_dataclass(
    Rows, data_fields=["indices", "values"], meta_fields=["num_rows", "unique"]
)


def merged(rows: Rows) -> Rows:
    """Return the same with each index once, in rising order, and zeros at the end as padding."""
    if rows.unique:
        return rows
    indices = jnp.where(rows.indices < 0, rows.indices + rows.num_rows, rows.indices)
    inside = (indices >= 0) & (indices < rows.num_rows)
    indices = jnp.where(inside, indices, rows.num_rows)
    order = _order(indices, rows.num_rows)
    rising = indices[order]
    first = jnp.concatenate([jnp.ones(1, bool)[: rising.size], rising[1:] != rising[:-1]])
    place = jnp.cumsum(first) - 1
    # Padding goes to the end, its values nowhere.
    target = jnp.where(rising < rows.num_rows, place, rising.size)
    target = jnp.zeros_like(target).at[order].set(target)
    return Rows(
        jnp.full_like(indices, rows.num_rows).at[place].set(rising),
        jnp.zeros_like(rows.values).at[target].add(rows.values, mode="drop"),
        rows.num_rows,
        unique=True,
    )


def _order(indices: jax.Array, num_rows: int) -> jax.Array:
    """Return the places of `indices`, in [0, num_rows], in rising order."""
    count = indices.size
    if (num_rows + 1) * count > 2**32:
        return jnp.argsort(indices)
    # Index and place in one word: a single array sorts several times faster on CPU.
    words = indices.astype(jnp.uint32) * np.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(words) % np.uint32(max(count, 1))).astype(jnp.int32)


def dense(rows: Rows) -> jax.Array:
    """Return the array that `rows` stands for."""
    return jnp.zeros(rows.shape, rows.dtype).at[rows.indices].add(rows.values, mode="drop")


def joined(a: Rows, b: Rows) -> Rows:
    """Return the sum of two: the rows of both."""
    if a.shape != b.shape:
        raise ValueError(f"cannot add rows of arrays of shapes {a.shape} and {b.shape}")
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return Rows(
        jnp.concatenate([a.indices, b.indices]),
        jnp.concatenate([a.values.astype(dtype), b.values.astype(dtype)]),
        a.num_rows,
    )


def take(x: jax.Array, rows: Rows) -> jax.Array:
    """Return the rows of `x` that `rows` touches; zeros for padding."""
    if not rows.num_rows:
        return jnp.zeros(rows.indices.shape + x.shape[1:], x.dtype)
    return x.at[rows.indices].get(mode="fill", fill_value=0)


def put(x: jax.Array, rows: Rows, new: jax.Array) -> jax.Array:
    """Return `x` with the rows that `rows` touches, each once, set to `new`."""
    return x.at[rows.indices].set(new.astype(x.dtype), mode="drop")


def add(x: Any, rows: Rows) -> jax.Array:
    """Return x + rows in the dtype of x.

    Where the rows are wider, the sum is taken in their dtype and rounded once.
    """
    x = jnp.asarray(x)
    if rows.indices.dtype != jnp.int32:
        raise TypeError(f"the indices of rows must be int32; got {rows.indices.dtype}")
    if x.shape != rows.shape:
        raise ValueError(f"cannot add rows of an array of shape {rows.shape} to one of {x.shape}")
    wide = jnp.promote_types(x.dtype, rows.dtype)
    if wide == x.dtype:
        return x.at[rows.indices].add(rows.values.astype(x.dtype), mode="drop")
    once = merged(rows)
    return put(x, once, take(x, once).astype(wide) + once.values)


def mean_over(rows: Rows, axis_name: Any) -> Rows:
    """Return the mean of the workers' rows, as the rows of all: the table is not exchanged."""
    workers = jax.lax.axis_size(axis_name)
    return Rows(
        jax.lax.all_gather(rows.indices, axis_name, tiled=True),
        jax.lax.all_gather(rows.values, axis_name, tiled=True) / workers,
        rows.num_rows,
    )
