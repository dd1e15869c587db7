"""Embedding tables whose rows are spread over the workers: each keeps 1/N of them, in order.

A worker asks the owners of the rows that its batch looks up, and sends them their gradients. Each
id goes over the link once per worker, in rounds of a fixed number of ids for each owner. The
number of rounds is that of the fullest owner: there is nothing to tune, and no id is dropped.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import mesh as meshes
from optfn.leaves import rows as local_rows
from optfn.leaves.rows import Rows
from optfn.leaves.types import Leaf, LeafKind
from optfn.mesh import Axes
from optfn.state.placement import num_workers


class Owners(NamedTuple):
    """The workers that keep the rows of tables: worker k has rows k·R/N to (k + 1)·R/N.

    mesh: the mesh.
    axes: the mesh axes of these workers.
    """

    mesh: Mesh
    axes: Axes

    @property
    def workers(self) -> int:
        """The number of workers."""
        return num_workers(self.mesh, self.axes)

    def num_rows(self, part: Leaf) -> int:
        """Return the number of rows of the table of which a worker keeps `part`."""
        return int(self.workers * part.shape[0])

    def on_each(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        """Run `fn` on each worker's part of whole arrays, and return whole arrays."""
        spread = P(self.axes)
        return meshes.mapped(fn, self.mesh, self.axes, spread, spread)(*arguments)

    def lookup(self, part: jax.Array, ids: jax.Array) -> jax.Array:
        """Return the rows of a table, inside `shard_map`.

        Args:
          part: the rows that this worker keeps, (R/N, …).
          ids: the rows that it wants, int32 (n,) in [0, R).

        Returns:
          (n, …).
        """
        total = self.num_rows(part)
        once, place = jnp.unique(ids, size=ids.size, fill_value=total, return_inverse=True)
        rounds = _Rounds.of(once, self, part.shape[0])

        def ask(r: jax.Array, found: jax.Array) -> jax.Array:
            at = rounds.positions(r)
            asked = self._exchange(rounds.local_ids(at))
            answers = part.at[asked].get(mode="fill", fill_value=0)
            return found.at[at].set(self._exchange(answers), mode="drop")

        found = jnp.zeros((ids.size, *part.shape[1:]), part.dtype)
        found = lax.fori_loop(0, rounds.number, ask, found)
        answers: jax.Array = found[place.reshape(-1)]
        return answers

    def send(self, grads: Rows) -> "OwnedRows":
        """Return this worker's part of the mean gradient, inside `shard_map`.

        Args:
          grads: the rows of this worker's own gradient.
        """
        once = local_rows.merged(grads)
        per_owner = grads.num_rows // self.workers
        rounds = _Rounds.of(once.indices, self, per_owner)
        width = -(-once.indices.size // rounds.capacity) * rounds.capacity

        def send_ids(r: jax.Array, arrived: jax.Array) -> jax.Array:
            ids = self._exchange(rounds.local_ids(rounds.positions(r)))
            return lax.dynamic_update_slice(arrived, ids, (0, r * rounds.capacity))

        arrived = jnp.full((self.workers, width), per_owner, jnp.int32)
        arrived = lax.fori_loop(0, rounds.number, send_ids, arrived)
        indices, place = jnp.unique(
            arrived, size=arrived.size, fill_value=per_owner, return_inverse=True
        )
        # Padding is dropped.
        place = jnp.where(arrived < per_owner, place.reshape(arrived.shape), arrived.size)

        def send_values(r: jax.Array, sums: jax.Array) -> jax.Array:
            values = once.values.at[rounds.positions(r)].get(mode="fill", fill_value=0)
            shape = (self.workers, rounds.capacity)
            at = lax.dynamic_slice(place, (0, r * rounds.capacity), shape)
            return sums.at[at].add(self._exchange(values), mode="drop")

        sums = jnp.zeros((arrived.size, *once.values.shape[1:]), once.values.dtype)
        sums = lax.fori_loop(0, rounds.number, send_values, sums)
        return OwnedRows(indices, sums / self.workers, grads.num_rows, self)

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Send row k of x to worker k, and return the rows that come from each worker."""
        received: jax.Array = lax.all_to_all(x, self.axes, 0, 0)
        return received


class _Rounds(NamedTuple):
    """Rising ids, sent to their owners in rounds.

    ids: int32 (n,), rising, with the number of rows of the table as padding.
    starts, ends: for each owner, where its ids begin and end.
    number: how many rounds there are, the same on all workers.
    capacity: how many ids an owner gets in a round.
    per_owner: the number of rows that each worker keeps.
    """

    ids: jax.Array
    starts: jax.Array
    ends: jax.Array
    number: jax.Array
    capacity: int
    per_owner: int

    @classmethod
    def of(cls, ids: jax.Array, owners: Owners, per_owner: int) -> "_Rounds":
        """Return the rounds of rising ids."""
        capacity = _capacity(ids.size, owners.workers)
        firsts = np.arange(owners.workers + 1, dtype=np.int32) * np.int32(per_owner)
        bounds = jnp.searchsorted(ids, firsts).astype(jnp.int32)
        starts, ends = bounds[:-1], bounds[1:]
        needed = jnp.max(-(-(ends - starts) // capacity))
        number = lax.pmax(needed, owners.axes)
        return cls(ids, starts, ends, number, capacity, per_owner)

    def positions(self, r: jax.Array) -> jax.Array:
        """Return for each owner the positions of its ids of round r; n for none."""
        at = self.starts[:, None] + r * self.capacity + np.arange(self.capacity, dtype=np.int32)
        return jnp.where(at < self.ends[:, None], at, self.ids.size)

    def local_ids(self, at: jax.Array) -> jax.Array:
        """Return the ids at these positions, as the owner numbers its rows; its count for none."""
        padding = np.int32(self.per_owner * at.shape[0])
        ids = self.ids.at[at].get(mode="fill", fill_value=padding)
        first = np.arange(at.shape[0], dtype=np.int32)[:, None] * np.int32(self.per_owner)
        return jnp.where(ids < padding, ids - first, self.per_owner)


def _capacity(ids: int, workers: int) -> int:
    """Return how many ids an owner gets in a round.

    For ids that are spread evenly the fullest owner hardly ever has four standard deviations more
    than the mean, and one round is enough.
    """
    mean = ids / workers
    return max(1, min(ids, 8 * int(np.ceil((mean + 4 * np.sqrt(mean)) / 8))))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["indices", "values"],
    meta_fields=["num_rows", "owners"],
)
@dataclasses.dataclass(frozen=True)
class OwnedRows(LeafKind):
    """The gradient of a table whose rows are spread over workers: its rows, where they are kept.

    It stands for an array of `shape`, as `Rows` does, and meets rules in the same way, each worker
    on its rows.

    indices: int32 (N·k,), spread over the workers: which of its rows each has here, once and in
      rising order, with R/N as padding at the end.
    values: (N·k, …), the rows.
    num_rows: R.
    owners: the workers.
    """

    indices: jax.Array
    values: jax.Array
    num_rows: int
    owners: Owners

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return (self.num_rows, *self.values.shape[1:])

    def map(self, fn: Callable[[Leaf], Leaf]) -> "OwnedRows":
        """Return these rows with values fn(values), for an elementwise fn with fn(0) = 0."""
        return dataclasses.replace(self, values=fn(self.values))

    def reshape(self, shape: tuple[int, ...]) -> "OwnedRows":
        """Return the same rows; they cannot be those of an array of another shape."""
        if shape != self.shape:
            raise ValueError(f"rows of a sharded table of shape {self.shape} are not of {shape}")
        return self

    def check(self, name: str) -> None:
        """Raise unless the indices are integers."""
        if self.indices.dtype != jnp.int32:
            raise TypeError(
                f"{name} has indices of dtype {self.indices.dtype}; they must be int32 (a "
                "transform that scales every array takes no rows of a sharded table)"
            )

    def merged(self) -> "OwnedRows":
        """Return the same rows: each is here once."""
        return self

    @property
    def divided_over(self) -> Axes:
        """The axes of the workers that keep the rows."""
        return self.owners.axes

    def joined(self) -> "OwnedRows":
        """Return the rows of all parts, inside `shard_map` over the workers that keep them."""
        values = self.values.reshape(-1, *self.values.shape[2:])
        size = self.num_rows // self.owners.workers
        once = local_rows.merged(Rows(self.indices.reshape(-1), values, size))
        return dataclasses.replace(self, indices=once.indices, values=once.values)

    def mean_over(self, axes: tuple[Any, ...]) -> "OwnedRows":
        """Return the mean over groups of such workers, inside `shard_map` over theirs as well."""
        own = self._local(self.indices, self.values)
        once = local_rows.merged(own.mean_over(axes))
        return dataclasses.replace(self, indices=once.indices, values=once.values)

    def dense(self) -> jax.Array:
        """Return the array that the rows represent, spread over the workers."""
        whole: jax.Array = self.owners.on_each(
            lambda *x: self._local(*x).dense(), self.indices, self.values
        )
        return whole

    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p + self, each worker on its rows: in place, where p is donated."""
        total: jax.Array = self.owners.on_each(
            lambda p, *x: self._local(*x).add_to(p), p, self.indices, self.values
        )
        return total

    def __add__(self, other: jax.Array) -> jax.Array:
        """Return other + self, an array."""
        return self.add_to(other)

    __radd__ = __add__

    def _local(self, indices: jax.Array, values: jax.Array) -> Rows:
        """Return the rows of one worker as rows of its part of the table."""
        return Rows(indices, values, self.num_rows // self.owners.workers, unique=True)

    def apply(
        self,
        rule: Callable[..., Any],
        rows: str,
        accumulators: Sequence[jax.Array],
        params: Sequence[jax.Array],
    ) -> Any:
        """Apply a rule to the rows where they are kept, or to the dense array."""
        if rows == "linear":
            return self.map(rule)
        if rows == "dense":
            return rule(self.dense(), *accumulators, *params)
        run = partial(self._apply_on_owner, rule, len(accumulators))
        values, *new = self.owners.on_each(run, self.indices, self.values, *accumulators, *params)
        update = dataclasses.replace(self, values=values)
        return (update, *new) if accumulators else update

    def _apply_on_owner(
        self,
        rule: Callable[..., Any],
        num_accumulators: int,
        indices: jax.Array,
        values: jax.Array,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Return the update of the rows of one worker, and its accumulators.

        As many rows at a time as one worker may send, since an owner seldom gets more.
        """
        accumulators, params = arrays[:num_accumulators], arrays[num_accumulators:]
        chunk = indices.size // self.owners.workers
        size = self.num_rows // self.owners.workers

        def update(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            values, *accumulators = carry
            some = self._local(
                *(lax.dynamic_slice_in_dim(x, k * chunk, chunk) for x in (indices, values))
            )
            result = some.apply(rule, "touched", accumulators, params)
            u, *new = result if accumulators else (result,)
            values = lax.dynamic_update_slice_in_dim(
                values, u.values.astype(values.dtype), k * chunk, 0
            )
            return values, *(x.astype(old.dtype) for x, old in zip(new, accumulators, strict=True))

        count = jnp.sum(indices < size, dtype=jnp.int32)
        updated: tuple[jax.Array, ...] = lax.fori_loop(
            0, -(-count // chunk), update, (values, *accumulators)
        )
        return updated
