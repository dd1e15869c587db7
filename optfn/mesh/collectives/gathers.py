"""All-gathers and all-to-alls of trees: one collective for all arrays of a dtype.

The latency of a collective is worth more than the copy into a common bucket.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core.types import PyTree
from optfn.mesh.collectives import torus
from optfn.mesh.collectives.axes import Axes, Division, axis_size, mark_varying, vma_axes
from optfn.mesh.compilers import groups, xla

# The function (totals, packet, scale) -> totals + scale·decode(packet).
Adder = Callable[[list[jax.Array], PyTree, float], list[jax.Array]]


def all_gather(x: jax.Array, names: Axes) -> jax.Array:
    """Gather the x of every worker into an array (N, *shape), the same on all workers."""
    checked = vma_axes(names)
    # The gather joins arrays along axis 0, so flat arrays give a flat array. On a TPU, (N, n) would
    # be padded, and a copy would have to take the padding out.
    rows = mark_varying(x if x.ndim else x[None], checked)
    to = "invarying" if checked else "varying"
    gathered = torus.all_gather_along(rows, names, 0, to=to)
    return gathered.reshape(axis_size(names), *x.shape)


def all_gather_shards(x: jax.Array, divisions: Iterable[Division]) -> jax.Array:
    """Gather a whole array from its shards, one divided dimension at a time, or return x unchanged
    without divisions."""
    for dimension, names in divisions:
        x = torus.all_gather_along(x, names, dimension)
    return x


def all_to_all_leaves(x: PyTree, names: Axes) -> PyTree:
    """Send row k of each array to worker k, and return the rows that all workers sent to this one,
    (N, …).

    There is one all-to-all per dtype. All dtypes of 32 bits share one.

    Args:
      x: a tree of arrays (N, …), with a row for each worker.
      names: the mesh axes of the workers.
    """
    buckets, unpack = fill_buckets(x)
    return unpack([lax.all_to_all(bucket, names, 0, 0) for bucket in buckets])


def fill_buckets(x: PyTree) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], PyTree]]:
    """Concatenate the rows of all arrays of a dtype, or of any 32-bit dtype, to one bucket, and
    return the buckets and the function that undoes this.

    Args:
      x: a tree of arrays (rows, …), all with the same number of rows.

    Returns:
      Buckets (rows, size), and a function from buckets of any number of rows to a tree like x.
    """
    arrays, structure = jax.tree.flatten(x)
    numbers: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        # Numbers of 32 bits travel as their bits, which no collective changes.
        dtype = jnp.dtype(jnp.uint32) if array.dtype.itemsize == 4 else array.dtype
        numbers.setdefault(dtype, []).append(i)

    def words(i: int, dtype: Any) -> jax.Array:
        """Return array i as rows of `dtype`, (rows, n)."""
        return _bits(arrays[i], dtype).reshape(len(arrays[i]), -1)

    def unpack(buckets: Sequence[jax.Array]) -> PyTree:
        found: dict[int, jax.Array] = {}
        for group, bucket in zip(numbers.values(), buckets, strict=True):
            pieces = xla.split(bucket, [arrays[i].size // len(arrays[i]) for i in group])
            for i, piece in zip(group, pieces, strict=True):
                like = arrays[i]
                found[i] = _bits(piece, like.dtype).reshape(len(bucket), *like.shape[1:])
        return jax.tree.unflatten(structure, [found[i] for i in range(len(arrays))])

    rows = [[words(i, dtype) for i in group] for dtype, group in numbers.items()]
    return [jnp.concatenate(of_dtype, axis=1) for of_dtype in rows], unpack


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Reinterpret the bits of x as a dtype of the same width, or return x unchanged if it already
    has this dtype."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


class GatheredPackets(NamedTuple):
    """The packets of all workers, still in the buckets that one all-gather per dtype returned.

    buckets: arrays (N, size), with a row for each worker.
    unpack: the function from buckets to packets with a leading axis.
    """

    buckets: list[jax.Array]
    unpack: Callable[[Sequence[jax.Array]], PyTree]

    @classmethod
    def of(cls, packet: PyTree, axis_name: Axes) -> "GatheredPackets":
        """Gather the packets of all workers, trees of arrays, by one all-gather for each bucket,
        and return them without unpacking the buckets."""
        buckets, unpack = fill_buckets(jax.tree.map(lambda x: x[None], packet))
        return cls([all_gather(x[0], axis_name) for x in buckets], unpack)

    @property
    def packets(self) -> PyTree:
        """The packets of all workers, as a tree whose arrays have a leading axis of workers."""
        return self.unpack(self.buckets)

    def mean(self, zeros: list[jax.Array], add: Adder) -> list[jax.Array]:
        """Decode the packets one at a time by `add`, and return `zeros` plus their mean over
        workers, or `zeros` if the packets have no arrays.

        All replicas get the same bits, because packets are added in the order of the workers. Each
        packet leaves its bucket only when it is added, so that no copy of all packets exists.

        Args:
          zeros: zeros in the shapes of the arrays; the mean may be added to them in place.
          add: adds a multiple of a decoded packet to arrays.
        """
        workers = len(self.buckets[0]) if self.buckets else 0
        # A flat bucket has no padding between workers. A place beyond 2³¹ would not fit the int32
        # of a slice's start, so larger buckets keep their rows.
        buckets = [x if x.size >= 2**31 else x.reshape(-1) for x in self.buckets]

        def row(x: jax.Array, worker: jax.Array) -> jax.Array:
            if x.ndim > 1:
                return lax.dynamic_index_in_dim(x, worker)
            size = x.size // workers
            flat: jax.Array = lax.dynamic_slice_in_dim(x, worker * size, size)
            return flat[None]

        def add_worker(worker: jax.Array, means: list[jax.Array]) -> list[jax.Array]:
            rows = [row(x, worker) for x in buckets]
            packet = jax.tree.map(lambda x: x[0], self.unpack(rows))
            return add(means, packet, 1 / workers)

        varying = frozenset().union(*map(groups.varying_axes, self.buckets))
        start = [mark_varying(x, varying) for x in zeros]
        return lax.fori_loop(0, workers, add_worker, start)
