"""All-gathers and all-to-alls of whole trees, with one collective for all arrays of a dtype."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.collectives import torus
from optfn.collectives.axes import Axes, axis_size, checked_axes, vary
from optfn.compilers import xla
from optfn.compilers.groups import varying_axes
from optfn.core.types import PyTree

# (totals, packet, scale) -> totals + scale times the decoded packet.
Adder = Callable[[list[jax.Array], PyTree, float], list[jax.Array]]


def all_gather(x: jax.Array, names: Axes) -> jax.Array:
    """Return the x of every worker, (N, *shape), the same array on all workers."""
    checked = checked_axes(names)
    # Of flat arrays a TPU makes a flat one, without padding that a copy would have to take out.
    rows = vary(x if x.ndim else x[None], checked)
    to = "invarying" if checked else "varying"
    gathered = torus.gather_along(rows, names, 0, to=to)
    return gathered.reshape(axis_size(names), *x.shape)


def gather_in_one(x: PyTree, names: Axes) -> PyTree:
    """Return a tree of the arrays of all workers, (N, *shape) each, by one all-gather per dtype.

    All dtypes of 32 bits share one all-gather.
    """
    buckets, restored = buckets_of(jax.tree.map(lambda array: array[None], x))
    return restored([all_gather(bucket[0], names) for bucket in buckets])


def all_to_all_in_one(x: PyTree, names: Axes) -> PyTree:
    """Return the rows that all workers have for this one, (N, …), by one all-to-all per dtype.

    All dtypes of 32 bits share one all-to-all.

    Args:
      x: a tree of arrays (N, …), with a row for each worker.
      names: the mesh axes of the workers.
    """
    buckets, restored = buckets_of(x)
    return restored([lax.all_to_all(bucket, names, 0, 0) for bucket in buckets])


def buckets_of(x: PyTree) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], PyTree]]:
    """Return arrays of rows side by side, and the function from such buckets to a tree like x.

    Args:
      x: a tree of arrays (rows, …).

    Returns:
      Arrays (rows, size), one for each dtype; all dtypes of 32 bits share one. The function takes
      buckets of any number of rows.
    """
    arrays, structure = jax.tree.flatten(x)
    numbers: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        dtype = jnp.dtype(jnp.uint32) if array.dtype.itemsize == 4 else array.dtype
        numbers.setdefault(dtype, []).append(i)

    def words(i: int, dtype: Any) -> jax.Array:
        return _bits(arrays[i], dtype).reshape(len(arrays[i]), -1)

    def restored(buckets: Sequence[jax.Array]) -> PyTree:
        found: dict[int, jax.Array] = {}
        for group, bucket in zip(numbers.values(), buckets, strict=True):
            pieces = xla.split(bucket, [arrays[i].size // len(arrays[i]) for i in group])
            for i, piece in zip(group, pieces, strict=True):
                like = arrays[i]
                found[i] = _bits(piece, like.dtype).reshape(len(bucket), *like.shape[1:])
        return jax.tree.unflatten(structure, [found[i] for i in range(len(arrays))])

    rows = [[words(i, dtype) for i in group] for dtype, group in numbers.items()]
    return [jnp.concatenate(of_dtype, axis=1) for of_dtype in rows], restored


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


class Gathered(NamedTuple):
    """The packets of all workers, as one all-gather per dtype brings them.

    buckets: arrays (N, size), of all packets side by side.
    restored: the function from buckets to packets, with a leading axis.
    """

    buckets: list[jax.Array]
    restored: Callable[[Sequence[jax.Array]], PyTree]

    @classmethod
    def of(cls, packet: PyTree, axis_name: Axes) -> "Gathered":
        """Gather the packet of each worker, a tree of arrays."""
        buckets, restored = buckets_of(jax.tree.map(lambda x: x[None], packet))
        return cls([all_gather(x[0], axis_name) for x in buckets], restored)

    @property
    def packets(self) -> PyTree:
        """The packets, each array with a leading axis of workers."""
        return self.restored(self.buckets)

    def mean(self, zeros: list[jax.Array], add: Adder) -> list[jax.Array]:
        """Return the mean over workers of the arrays that are encoded in their packets.

        Packets are added in the order of the workers, so that all replicas get the same bits. Each
        is taken out of the buckets when it is added, so that there are no copies of all.

        Args:
          zeros: zeros in the shapes of the arrays, to which the mean may be added in place.
          add: adds a multiple of a decoded packet to arrays.
        """
        workers = len(self.buckets[0]) if self.buckets else 0
        # Flat, a bucket has no padding between workers. Places beyond 2³¹ are no int32.
        buckets = [x if x.size >= 2**31 else x.reshape(-1) for x in self.buckets]

        def row(x: jax.Array, worker: jax.Array) -> jax.Array:
            if x.ndim > 1:
                whole: jax.Array = lax.dynamic_index_in_dim(x, worker)
                return whole
            size = x.size // workers
            flat: jax.Array = lax.dynamic_slice_in_dim(x, worker * size, size)
            return flat[None]

        def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
            rows = [row(x, worker) for x in buckets]
            packet = jax.tree.map(lambda x: x[0], self.restored(rows))
            return add(means, packet, 1 / workers)

        varying = frozenset().union(*map(varying_axes, self.buckets))
        start = [vary(x, varying) for x in zeros]
        means: list[jax.Array] = lax.fori_loop(0, workers, add_worker, start)
        return means
