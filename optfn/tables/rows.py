"""Row-sparse arrays and their arithmetic: the gradient of a table.

A step that reads few rows of a table has a gradient of few rows; `gradient.py` computes it.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks, numerics
from optfn.core.tree import is_array
from optfn.core.types import Arrays, Leaf, LeafKind, Scalars
from optfn.mesh.collectives.torus import all_gather_along

# Indices are int32, and the number of rows is the index of padding.
MOST_ROWS = 2**31 - 1


def check_num_rows(subject: str, num_rows: int) -> None:
    """Raise a ValueError that begins with `subject` if `num_rows` exceeds 2³¹ − 1, too many for
    int32."""
    if num_rows > MOST_ROWS:
        raise ValueError(
            f"{subject} {num_rows:,} rows, and indices are int32: a table has at most "
            f"{MOST_ROWS:,}. Divide it into several tables, or hash its ids (optfn.sparse.hash_ids)"
        )


@dataclasses.dataclass(frozen=True)
class Rows(LeafKind):
    """Some rows of an array that is zero elsewhere: the gradient of an embedding table.

    It is SelectedRows in fluid, and a pytree whose leaves are indices and values. Repeated indices
    add up. It represents an array of `shape` and can be added to one: params + rows. The transforms
    of optfn accept it. To third-party code it looks like two arrays, one of them indices, so put
    `densify` before their transforms.

    Args:
      indices: int32 (k,), the index of each row; `num_rows` marks padding, which is ignored.
        Integers in a list or of another width are converted.
      values: (k, …), the rows, floating point.
      num_rows: the number of rows of the array, ≥ 0; static.
      unique: whether no index but padding is repeated, and padding is zero; static.
      parts: the number of blocks of equal length that the rows consist of. Within a block the
        indices increase and are not repeated. The blocks are added in order, so that all devices
        get the same bits; static.
      view: the shape of the array, if `values` are the rows of a reshaped array; static.

    Raises:
      TypeError: indices are not integers, values are not floating point, or num_rows is not a
        Python integer.
      ValueError: indices are not (k,), values are not (k, …), or num_rows < 0.
    """

    indices: jax.Array
    values: jax.Array
    num_rows: int
    unique: bool = False
    parts: int = 1
    view: tuple[int, ...] | None = None
    __array_ufunc__ = None  # makes NumPy arrays call __radd__

    def __post_init__(self) -> None:
        checks.count("Rows: num_rows", self.num_rows, low=0)
        indices, values = (x if is_array(x) else np.asarray(x) for x in (self.indices, self.values))
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"Rows: indices must be int32; got dtype {indices.dtype}")
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(f"Rows: values must be floating point; got dtype {values.dtype}")
        if len(indices.shape) != 1 or values.shape[:1] != indices.shape:
            raise ValueError(
                "Rows: indices must have shape (k,) and values (k, …); "
                f"got {indices.shape} and {values.shape}"
            )
        if indices.dtype != jnp.int32 and isinstance(indices, np.ndarray | jax.Array):
            indices = indices.astype(jnp.int32)
        vars(self).update(indices=indices, values=values)  # the dataclass is frozen

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the rows represent."""
        return (self.num_rows, *self.values.shape[1:]) if self.view is None else self.view

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "Rows":
        """Return these rows with values fn(values), for an elementwise fn with fn(0) = 0."""
        return _unflatten(_flatten_with_keys(self)[1], (self.indices, fn(self.values)))

    def reshape(self, shape: tuple[int, ...]) -> "Rows":
        """Return the rows of the array reshaped to `shape`, which must have as many elements and is
        not checked."""
        return dataclasses.replace(self, view=shape)

    def check(self, subject: str) -> None:
        """Raise a TypeError unless the indices are int32, and a ValueError unless the shapes of
        indices and values fit and `num_rows` is at most 2³¹ − 1.

        The errors begin with `subject`.
        """
        if self.indices.dtype != jnp.int32:
            raise TypeError(
                f"{subject} has indices of dtype {self.indices.dtype}; they must be int32. Perhaps "
                "a transform of another library has scaled them: put optfn.sparse.densify() before "
                "it"
            )
        check_num_rows(f"{subject} has", self.num_rows)
        if self.indices.ndim != 1 or self.values.shape[:1] != self.indices.shape:
            raise ValueError(
                f"{subject} has indices of shape {self.indices.shape} and values of shape "
                f"{self.values.shape}; they must be (k,) and (k, …)"
            )

    def merge(self) -> "Rows":
        """Return each index once, in rising order, with its rows added up and zero padding in freed
        places, or rows marked `unique` unchanged."""
        return self if self.unique else _merge(self)

    def dense(self) -> jax.Array:
        """Return the array that the rows represent:
        zeros with the rows added, repeated ones summed."""
        return self.add_to(jnp.zeros(self.shape, self.dtype))

    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p + self in the dtype of p, in place if p is donated, or raise a ValueError if
        shapes differ and a TypeError unless indices are int32.

        Where the rows have a wider dtype, the sum is taken in that dtype and rounded once.
        """
        p = jnp.asarray(p)
        if self.indices.dtype != jnp.int32:
            raise TypeError(f"the indices of rows must be int32; got {self.indices.dtype}")
        if p.shape != self.shape:
            raise ValueError(
                f"cannot add rows of an array of shape {self.shape} to one of {p.shape}"
            )
        wide = numerics.promote(p.dtype, self.dtype)
        if wide == p.dtype:
            narrow = self.map(lambda values: values.astype(p.dtype))
            return _add_blocks(_view_rows(p, self), narrow).reshape(p.shape)
        once = self.merge()
        return put_rows(p, take_rows(p, once).astype(wide) + once.values, once)

    def apply_to_rows(
        self, rule: Callable[..., Any], accumulators: Arrays, params: Arrays, scalars: Scalars
    ) -> Any:
        """Apply a rule to each distinct row and the same rows of the arrays, and return the update
        as Rows, and any accumulators with only those rows changed."""
        once = self.merge()
        rows = (take_rows(x, once) for x in (*accumulators, *params))
        result = rule(once.values, *rows, **scalars)
        if not accumulators:
            return once.map(lambda values: result)
        u, *new = result
        return once.map(lambda values: u), *(
            put_rows(x, y, once) for x, y in zip(accumulators, new, strict=True)
        )

    def sum_leading(self) -> "Rows":
        """Return the sum over the leading axis of indices and values, which counts leaves, by
        joining the rows of all leaves."""
        values = self.values.reshape(-1, *self.values.shape[2:])
        return self._replace_rows(self.indices.reshape(-1), values)

    def mean_over(self, axes: tuple[Hashable, ...]) -> "Rows":
        """Gather the rows of all workers, and return them divided by the number of workers, so that
        they add up to the mean."""
        indices = all_gather_along(self.indices, axes, 0)
        values = all_gather_along(self.values, axes, 0)
        return self._replace_rows(indices, values / jax.lax.axis_size(axes))

    def __add__(self, other: Leaf) -> Leaf:
        """Return other + self, an array or, where `other` is Rows as well, the rows of both, or
        raise a ValueError if their shapes differ."""
        if not isinstance(other, Rows):
            return self.add_to(other)
        if (self.shape, self.num_rows) != (other.shape, other.num_rows):
            raise ValueError(f"cannot add rows of arrays of shapes {other.shape} and {self.shape}")
        dtype = numerics.promote(other.dtype, self.dtype)
        values = jnp.concatenate([other.values.astype(dtype), self.values.astype(dtype)])
        return self._replace_rows(jnp.concatenate([other.indices, self.indices]), values)

    def _replace_rows(self, indices: jax.Array, values: jax.Array) -> "Rows":
        """Return an array of the same shape with these rows, in any order."""
        return Rows(indices, values, self.num_rows, view=self.view)


_ARRAYS, _STATIC = ("indices", "values"), ("num_rows", "unique", "parts", "view")


def _flatten_with_keys(rows: Rows) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return indices and values with their keys, and the static fields."""
    children = tuple((jax.tree_util.GetAttrKey(k), getattr(rows, k)) for k in _ARRAYS)
    return children, tuple(getattr(rows, k) for k in _STATIC)


def _unflatten(static: tuple[Any, ...], children: Iterable[Leaf]) -> Rows:
    """Return Rows of static fields and children, without the checks of the constructor."""
    # The constructor checks for arrays, but JAX also unflattens with children of any type.
    rows = object.__new__(Rows)
    vars(rows).update(zip((*_ARRAYS, *_STATIC), (*children, *static), strict=True))
    return rows


jax.tree_util.register_pytree_with_keys(Rows, _flatten_with_keys, _unflatten)


def _view_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """Return `x`, of shape `rows.shape`, as (num_rows, …), the shape that indices count in, or
    unchanged if the rows have no view."""
    return x if rows.view is None else x.reshape(rows.num_rows, *rows.values.shape[1:])


def _merge(rows: Rows) -> Rows:
    """Return each distinct index once, in rising order, with the sum of its values in the order of
    the blocks, and padding for invalid indices."""
    # 1. Negative indices count from the end, as in an array; indices out of range are padding.
    indices = jnp.where(rows.indices < 0, rows.indices + rows.num_rows, rows.indices)
    inside = (indices >= 0) & (indices < rows.num_rows)
    indices = jnp.where(inside, indices, rows.num_rows)
    # 2. Values go to the places of their indices in their old order, the same on all devices.
    distinct, places = find_distinct(indices, rows.num_rows)
    return Rows(
        distinct,
        _add_blocks(jnp.zeros_like(rows.values), dataclasses.replace(rows, indices=places)),
        rows.num_rows,
        unique=True,
        view=rows.view,
    )


def find_distinct(indices: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return each distinct index once, in rising order, with `num_rows` in the places that remain,
    and for each index its place among them, or the number of indices for `num_rows`.

    It takes one sort and one cumulative sum, and compiles in a third of the time of `jnp.unique`.

    Args:
      indices: int32 (k,), in [0, num_rows].
      num_rows: the index of padding.
    """
    # Sorted, equal indices are neighbours: the first of them takes the next place.
    order = _find_order(indices, num_rows)
    rising = indices[order]
    first = jnp.concatenate([jnp.ones(1, bool)[: rising.size], rising[1:] != rising[:-1]])
    place = jnp.cumsum(first, dtype=jnp.int32) - 1
    # Padding goes to the end; its values are dropped.
    target = jnp.where(rising < num_rows, place, rising.size)
    places = jnp.zeros_like(target).at[order].set(target)
    return jnp.full_like(indices, num_rows).at[place].set(rising), places


def _find_order(indices: jax.Array, num_rows: int) -> jax.Array:
    """Return the permutation that sorts `indices`, int32 in [0, num_rows]."""
    count = indices.size
    if (num_rows + 1) * count > 2**32:
        return jnp.argsort(indices)
    # Index and position in one word: a single array sorts several times faster on CPU.
    words = indices.astype(jnp.uint32) * np.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(words) % np.uint32(max(count, 1))).astype(jnp.int32)


def take_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """Return x[rows.indices], (k, …), with zeros for padding."""
    # A gather from an array without rows is an error, even if all indices are padding.
    if not rows.num_rows:
        return jnp.zeros(rows.values.shape, x.dtype)
    return _view_rows(x, rows).at[rows.indices].get(mode="fill", fill_value=0)


def put_rows(x: jax.Array, values: jax.Array, rows: Rows) -> jax.Array:
    """Return `x` with x[rows.indices] = values in its dtype, ignoring padding, for indices that
    must not be repeated."""
    result = _view_rows(x, rows).at[rows.indices].set(values.astype(x.dtype), mode="drop")
    return result.reshape(x.shape)


def _add_blocks(x: jax.Array, rows: Rows) -> jax.Array:
    """Return x with the rows added block by block, which gives the same bits on all devices, and
    drop rows whose index is out of range."""
    # A block has no index twice, so the order of the blocks decides the order of each sum, on all
    # devices alike: they get the same bits.
    if rows.parts == 1:
        return x.at[rows.indices].add(rows.values, mode="drop")
    indices, values = (a.reshape(rows.parts, -1, *a.shape[1:]) for a in (rows.indices, rows.values))

    def add_block(i: jax.Array, x: jax.Array) -> jax.Array:
        target = x.at[indices[i]]
        return target.add(values[i], mode="drop", indices_are_sorted=True, unique_indices=True)

    return jax.lax.fori_loop(0, rows.parts, add_block, x)
