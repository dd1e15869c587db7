"""Embedding tables whose rows are divided over N owners: owner k keeps rows k, k + N, k + 2·N, …

The owners are the devices along the shard axes, and each of them looks rows up, too. A device
fetches the rows that its batch looks up from their owners, and sends them the gradients. It sends
an id once, however often its batch repeats it. Usually one round is enough, in which every owner
gets as many ids as the fullest one needs; if that is unusually many, there are more rounds. There
is nothing to tune, and no id is dropped.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn.core.types import Arrays, Leaf, LeafKind, Scalars
from optfn.mesh.collectives.axes import Axes
from optfn.mesh.collectives.devices import Devices
from optfn.tables.rows import Rows


def count_rows(owners: Devices, shard: Leaf) -> int:
    """Return the number of rows of a whole table, which is the number of owners times the rows of
    one shard."""
    return int(owners.size * shard.shape[0])


def find_places(owners: Devices, ids: jax.Array, num_rows: int) -> jax.Array:
    """Return the place of each row of `ids` among all stored rows, and the padding `num_rows` for
    an id that is not below it.

    All stored rows are one array, with the rows of owner 0 first.
    """
    place = ids % owners.size * (num_rows // owners.size) + ids // owners.size
    return jnp.where(ids < num_rows, place, num_rows)


def run_on_owners(owners: Devices, fn: Callable[..., Any], *arguments: Any, **scalars: Any) -> Any:
    """Run `fn` on each owner's shards of the arguments, with the same scalars for all, and return
    the whole arrays of the results.

    Inside the `shard_map` of further axes `fn` must not close over arrays, whose types name the
    axes bound outside.
    """
    over_owners = P(owners.axes)

    def run(shards: Sequence[Any], scalars: Mapping[str, Any]) -> Any:
        return fn(*shards, **scalars)

    return owners.shard_map(run, (over_owners, P()), over_owners)(arguments, scalars)


def lookup_rows(owners: Devices, shard: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows of given ids, which are fetched from their owners in rounds, a repeated id
    once, inside `shard_map`.

    Args:
      owners: the devices that keep the rows.
      shard: the rows that this device keeps, (R/N, …).
      ids: the rows that it wants, int32 (n,) in [0, R).

    Returns:
      (n, …).
    """
    total = count_rows(owners, shard)
    places = find_places(owners, ids, total)
    # Each id is sent once, however often the batch repeats it.
    once, place = jnp.unique(places, size=ids.size, fill_value=total, return_inverse=True)
    rounds = _Rounds.of(once, owners, shard.shape[0])

    def ask(first: jax.Array, size: int, found: jax.Array) -> jax.Array:
        at = rounds.find_positions(first, size)
        asked = _all_to_all(owners, rounds.to_local_ids(at))
        answers = shard.at[asked].get(mode="fill", fill_value=0)
        return found.at[at].set(_all_to_all(owners, answers), mode="drop")

    found = rounds.run(ask, jnp.zeros((ids.size, *shard.shape[1:]), shard.dtype))
    answers: jax.Array = found[place.reshape(-1)]
    return answers


def send_gradients(owners: Devices, grads: Rows) -> "OwnedRows":
    """Send each row's gradient to its owner, and return the mean over devices of the gradients of
    the rows that this device keeps.

    It runs inside `shard_map`.

    Args:
      owners: the devices that keep the rows.
      grads: the rows of this device's gradient.
    """
    indices = find_places(owners, grads.indices, grads.num_rows)
    # 1. Merge repeated rows.
    once = dataclasses.replace(grads, indices=indices, unique=False, parts=1).merge()
    per_owner = grads.num_rows // owners.size
    rounds = _Rounds.of(once.indices, owners, per_owner)
    width = once.indices.size + rounds.sizes[0]  # the last round may have room for more

    # 2. Send the ids, so that owners know which rows they get.
    def send_ids(first: jax.Array, size: int, arrived: jax.Array) -> jax.Array:
        ids = _all_to_all(owners, rounds.to_local_ids(rounds.find_positions(first, size)))
        return lax.dynamic_update_slice_in_dim(arrived, ids, first, axis=1)

    arrived = rounds.run(send_ids, jnp.full((owners.size, width), per_owner, jnp.int32))
    # 3. Give each distinct row a place.
    room = _count_room(width, owners.size, per_owner)
    indices, place = jnp.unique(arrived, size=room, fill_value=per_owner, return_inverse=True)
    # Drop padding.
    place = jnp.where(arrived < per_owner, place.reshape(arrived.shape), room)

    # 4. Send the values, and add them up at their places.
    def send_values(first: jax.Array, size: int, sums: jax.Array) -> jax.Array:
        at = rounds.find_positions(first, size)
        values = once.values.at[at].get(mode="fill", fill_value=0)
        at = lax.dynamic_slice_in_dim(place, first, size, axis=1)
        return sums.at[at].add(_all_to_all(owners, values), mode="drop")

    zeros = jnp.zeros((room, *once.values.shape[1:]), once.values.dtype)
    sums = rounds.run(send_values, zeros)
    # The mean over workers, as of a dense gradient.
    return OwnedRows(indices, sums / owners.size, grads.num_rows, owners, width)


def _all_to_all(owners: Devices, x: jax.Array) -> jax.Array:
    """Send row k of x to owner k, and return the rows received from each device, (N, …)."""
    received: jax.Array = lax.all_to_all(x, owners.axes, 0, 0)
    return received


class _Rounds(NamedTuple):
    """Increasing ids, sent to their owners in rounds.

    ids: int32 (n,), increasing, with the number of rows of the table as padding.
    starts, ends: for each owner, where its ids begin and end.
    fullest: the largest number of ids that an owner gets from a worker, the same on all workers.
    sizes: the possible numbers of ids for an owner in a round, increasing.
    per_owner: the number of rows that each worker keeps.
    """

    ids: jax.Array
    starts: jax.Array
    ends: jax.Array
    fullest: jax.Array
    sizes: tuple[int, ...]
    per_owner: int

    @classmethod
    def of(cls, ids: jax.Array, owners: Devices, per_owner: int) -> "_Rounds":
        """Divide increasing ids, (n,), by owner, and find the fullest owner of any worker.

        All workers must call it, because they agree on the number of rounds.
        """
        firsts = np.arange(owners.size + 1, dtype=np.int32) * np.int32(per_owner)
        bounds = jnp.searchsorted(ids, firsts).astype(jnp.int32)
        starts, ends = bounds[:-1], bounds[1:]
        # The same on all workers: each round is a collective.
        fullest = lax.pmax(jnp.max(ends - starts), owners.axes)
        return cls(ids, starts, ends, fullest, _choose_sizes(ids.size, owners.size), per_owner)

    def run(
        self, send: Callable[[jax.Array, int, jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """Apply x = send(first, size, x) once per round until the fullest owner has got all its
        ids, and return x, unchanged without ids.

        A round sends each owner its ids from number `first` on, at most `size` of them: the
        smallest of `sizes` that is enough for the fullest owner.
        """
        limits = jnp.asarray(self.sizes, jnp.int32)

        def run_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, x = carry
            which = jnp.sum(limits[:-1] < self.fullest - first)
            ways = [lambda first, x, size=size: send(first, size, x) for size in self.sizes]
            return first + limits[which], lax.switch(which, ways, first, x)

        start = jnp.zeros((), jnp.int32), x
        # On most batches one iteration.
        return lax.while_loop(lambda carry: carry[0] < self.fullest, run_round, start)[1]

    def find_positions(self, first: jax.Array, size: int) -> jax.Array:
        """Return for each owner the positions of up to `size` of its ids, from index `first` on,
        (N, size), with n where there is no such id."""
        at = self.starts[:, None] + first + np.arange(size, dtype=np.int32)[None]
        return jnp.where(at < self.ends[:, None], at, self.ids.size)

    def to_local_ids(self, at: jax.Array) -> jax.Array:
        """Return the ids at these positions as indices of their owner's rows, or `per_owner` where
        there is no id."""
        padding = np.int32(self.per_owner * at.shape[0])
        ids = self.ids.at[at].get(mode="fill", fill_value=padding)
        first = np.arange(at.shape[0], dtype=np.int32)[:, None] * np.int32(self.per_owner)
        return jnp.where(ids < padding, ids - first, self.per_owner)


def _choose_sizes(ids: int, workers: int) -> tuple[int, ...]:
    """Return the possible counts of ids for an owner in a round, equal steps to the capacity, one
    for each eight ids, but at most eight.

    If a batch repeats ids, it sends fewer than the capacity allows for. Each size is compiled by
    itself, and a difference of fewer than eight ids is not worth a program.
    """
    most = _count_capacity(ids, workers)
    count = min(8, -(-most // 8))
    return tuple(-(-most * k // count) for k in range(1, count + 1))


def _count_room(width: int, workers: int, per_owner: int) -> int:
    """Return room for `width` ids of each worker, or for all rows of an owner where these are
    fewer, in a multiple of `width`."""
    return width * min(workers, -(-per_owner // width))


def _count_capacity(ids: int, workers: int) -> int:
    """Return how many ids an owner can get in a round, four standard deviations above the mean,
    rounded up to a multiple of 8, at most `ids`.

    If ids are distinct and evenly distributed, the fullest owner hardly ever gets more, and one
    round is enough.
    """
    mean = ids / workers
    return max(1, min(ids, 8 * int(np.ceil((mean + 4 * np.sqrt(mean)) / 8))))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["indices", "values"],
    meta_fields=["num_rows", "owners", "at_a_time"],
)
@dataclasses.dataclass(frozen=True)
class OwnedRows(LeafKind):
    """The gradient of a table whose rows are divided over workers: rows, at their owners.

    Like `Rows`, it represents an array of `shape`, and rules apply to it in the same way, on each
    worker to its rows.

    indices: int32 (N·k,), divided over the workers. Each worker has k: the numbers of some of its
      R/N rows, without repetition and increasing, with R/N as padding at the end.
    values: the rows, (N·k, …).
    num_rows: R, the number of rows of the table.
    owners: the workers.
    at_a_time: how many rows a rule updates at a time, a divisor of k: as many as one worker may
      send, since an owner seldom gets more.
    """

    indices: jax.Array
    values: jax.Array
    num_rows: int
    owners: Devices
    at_a_time: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole table that these rows belong to."""
        return (self.num_rows, *self.values.shape[1:])

    def map(self, fn: Callable[[Leaf], Leaf]) -> "OwnedRows":
        """Return these rows with values fn(values), for an elementwise fn with fn(0) = 0."""
        return dataclasses.replace(self, values=fn(self.values))

    def reshape(self, shape: tuple[int, ...]) -> "OwnedRows":
        """Return the same rows if `shape` is theirs, or raise a ValueError if it is another one."""
        if shape != self.shape:
            raise ValueError(
                f"rows of a sharded table of shape {self.shape} cannot be reshaped to {shape}"
            )
        return self

    def check(self, name: str) -> None:
        """Raise a TypeError that begins with `name` unless the indices are int32."""
        if self.indices.dtype != jnp.int32:
            raise TypeError(
                f"{name} has indices of dtype {self.indices.dtype}; they must be int32. Perhaps a "
                "transform of another library has scaled them: it does not take rows of a sharded "
                "table"
            )

    def merge(self) -> "OwnedRows":
        """Return these rows unchanged, because none is repeated."""
        return self

    @property
    def mesh_axes(self) -> Axes:
        """The axes of the workers that keep the rows."""
        return self.owners.axes

    def sum_leading(self) -> "OwnedRows":
        """Sum over the leading axis of indices and values, merge repeated rows, and return the
        rows, inside `shard_map` over the owners."""
        values = self.values.reshape(-1, *self.values.shape[2:])
        size = self.num_rows // self.owners.size
        once = Rows(self.indices.reshape(-1), values, size).merge()
        return dataclasses.replace(self, indices=once.indices, values=once.values)

    def mean_over(self, axes: tuple[Any, ...]) -> "OwnedRows":
        """Return the mean over groups of such workers along `axes`, with the rows of all groups
        merged, inside `shard_map` over these axes too."""
        once = self._local(self.indices, self.values).mean_over(axes).merge()
        return dataclasses.replace(self, indices=once.indices, values=once.values)

    def dense(self) -> jax.Array:
        """Return the array that the rows represent, with zeros in all other rows, divided over the
        workers."""
        whole: jax.Array = run_on_owners(
            self.owners, lambda *x: self._local(*x).dense(), self.indices, self.values
        )
        return whole

    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p + self, which each worker computes on its own rows, in place if p is donated."""
        total: jax.Array = run_on_owners(
            self.owners, lambda p, *x: self._local(*x).add_to(p), p, self.indices, self.values
        )
        return total

    def _local(self, indices: jax.Array, values: jax.Array) -> Rows:
        """Return the rows of one worker as rows of its shard of the table."""
        return Rows(indices, values, self.num_rows // self.owners.size, unique=True)

    def apply_to_rows(
        self, rule: Callable[..., Any], accumulators: Arrays, params: Arrays, scalars: Scalars
    ) -> Any:
        """Apply a rule to the rows on the workers that keep them, and return the update and the new
        accumulators, or the update alone without accumulators."""
        run = partial(self._apply_on_owner, rule, len(accumulators))
        values, *new = run_on_owners(
            self.owners, run, self.indices, self.values, *accumulators, *params, **scalars
        )
        update = dataclasses.replace(self, values=values)
        return (update, *new) if accumulators else update

    def _apply_on_owner(
        self,
        rule: Callable[..., Any],
        num_accumulators: int,
        indices: jax.Array,
        values: jax.Array,
        *arrays: jax.Array,
        **scalars: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Apply a rule to one worker's rows, `at_a_time` at a time as far as they are not padding,
        and return the update's values and the accumulators."""
        accumulators, params = arrays[:num_accumulators], arrays[num_accumulators:]
        chunk = self.at_a_time
        size = self.num_rows // self.owners.size

        def update(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            values, *accumulators = carry
            some = self._local(
                *(lax.dynamic_slice_in_dim(x, k * chunk, chunk) for x in (indices, values))
            )
            result = some.apply_to_rows(rule, accumulators, params, scalars)
            u, *new = result if accumulators else (result,)
            values = lax.dynamic_update_slice_in_dim(
                values, u.values.astype(values.dtype), k * chunk, 0
            )
            return values, *(x.astype(old.dtype) for x, old in zip(new, accumulators, strict=True))

        # Few rows arrive; padding is not computed.
        count = jnp.sum(indices < size, dtype=jnp.int32)
        updated: tuple[jax.Array, ...] = lax.fori_loop(
            0, -(-count // chunk), update, (values, *accumulators)
        )
        return updated
