"""Embedding tables whose rows are divided over N owners: owner k keeps rows k, k + N, k + 2·N, …

The owners are the devices along the shard axes, and each of them looks rows up, too. A device
fetches the rows that its batch looks up from their owners, and sends them the gradients. It sends
an id once, however often its batch repeats it. Usually one round is enough: every owner gets as
many ids as the fullest one needs. If that is unusually many, there are more rounds. There is
nothing to tune, and no id is dropped.
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
from optfn.mesh.compilers.groups import map_groups
from optfn.tables.rows import Rows, find_distinct


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


def lookup_rows(
    owners: Devices, shards: Sequence[jax.Array], ids: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the rows of given ids of some tables, which are fetched from their owners in rounds, a
    repeated id once, inside `shard_map`.

    Lookups of equally many ids and of rows of one shape and dtype share their messages and
    everything that is computed of ids, and so most of their compiled program.

    Args:
      owners: the devices that keep the rows.
      shards: for each lookup the rows of its table that this device keeps, (R/N, …).
      ids: for each lookup the rows that it wants, int32 (n,) in [0, R).

    Returns:
      for each lookup its rows, (n, …).
    """

    def kind(lookup: tuple[jax.Array, jax.Array]) -> Any:
        shard, ids = lookup
        return ids.size, shard.shape[1:], shard.dtype

    lookups = list(zip(shards, ids, strict=True))
    return map_groups(partial(_lookup_alike, owners), lookups, kind)


def send_gradients(owners: Devices, grads: Sequence[Rows]) -> list["OwnedRows"]:
    """Send the gradients of the rows of some tables to their owners, and return for each table the
    mean over devices of the gradients of the rows that this device keeps.

    It runs inside `shard_map`. Tables share messages as in `lookup_rows`.

    Args:
      owners: the devices that keep the rows.
      grads: for each table the rows of this device's gradient.
    """

    def kind(g: Rows) -> Any:
        return g.indices.size, g.values.shape[1:], g.dtype

    return map_groups(partial(_send_alike, owners), grads, kind)


def _lookup_alike(
    owners: Devices, lookups: Sequence[tuple[jax.Array, jax.Array]]
) -> Sequence[jax.Array]:
    """Return the rows of T lookups, each of a table in equally many ids, of rows of one shape and
    dtype."""
    shards = [s for s, _ in lookups]
    places = [find_places(owners, i, count_rows(owners, s)) for s, i in lookups]
    padding = max(count_rows(owners, s) for s in shards)
    # Each id is sent once, however often the batch repeats it.
    once, place = jax.vmap(partial(find_distinct, num_rows=padding))(jnp.stack(places))
    rounds = _Rounds.of(once, owners, [len(s) for s in shards])

    def ask(first: jax.Array, exchange: Exchange, found: jax.Array) -> jax.Array:
        at = rounds.find_positions(first)
        asked = exchange(rounds.to_local_ids(at), rounds.most)
        answers = [
            s.at[i].get(mode="fill", fill_value=0) for s, i in zip(shards, asked, strict=True)
        ]
        put = jax.vmap(lambda x, at, rows: x.at[at].set(rows, mode="drop"))
        return put(found, at, exchange(jnp.stack(answers), 0))

    row, dtype = shards[0].shape[1:], shards[0].dtype
    found = rounds.run(ask, jnp.zeros((*once.shape, *row), dtype))
    return list(jax.vmap(lambda rows, place: rows[place])(found, place))


def _send_alike(owners: Devices, grads: Sequence[Rows]) -> list["OwnedRows"]:
    """Send the gradients of T tables to their owners, which have equally many rows, of one shape
    and dtype, and return their means."""
    padding = max(g.num_rows for g in grads)
    places = [
        jnp.where(g.indices < g.num_rows, find_places(owners, g.indices, g.num_rows), padding)
        for g in grads
    ]
    # 1. Merge repeated rows.
    values = jnp.stack([g.values for g in grads])
    once = jax.vmap(lambda i, x: Rows(i, x, padding).merge())(jnp.stack(places), values)
    per_owner = [g.num_rows // owners.size for g in grads]
    rounds = _Rounds.of(once.indices, owners, per_owner)
    width, most = once.indices.shape[1], rounds.most  # no table has a row of number `most`

    # 2. Send the ids, so that owners know which rows they get.
    def send_ids(first: jax.Array, exchange: Exchange, arrived: jax.Array) -> jax.Array:
        ids = exchange(rounds.to_local_ids(rounds.find_positions(first)), most)
        return lax.dynamic_update_slice_in_dim(arrived, ids, first, axis=2)

    # The last round has room for more ids than there are.
    shape = len(grads), owners.size, width + rounds.sizes[-1]
    arrived = rounds.run(send_ids, jnp.full(shape, most, jnp.int32))
    # 3. Give each distinct row a place. An owner has room for all ids, or for all of its rows.
    rooms = [width * min(owners.size, -(-count // max(width, 1))) for count in per_owner]
    number = partial(find_distinct, num_rows=most)
    indices, place = jax.vmap(number)(arrived.reshape(len(grads), -1))
    place = place.reshape(shape)

    # 4. Send the values, and add them up at their places.
    def send_values(first: jax.Array, exchange: Exchange, sums: list[jax.Array]) -> list[jax.Array]:
        take = jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))
        values = exchange(take(once.values, rounds.find_positions(first)), 0)
        at = lax.dynamic_slice_in_dim(place, first, rounds.sizes[-1], axis=2)
        return [x.at[i].add(v, mode="drop") for x, i, v in zip(sums, at, values, strict=True)]

    row, dtype = once.values.shape[2:], once.values.dtype
    sums = rounds.run(send_values, [jnp.zeros((room, *row), dtype) for room in rooms])
    # The mean over workers, as of a dense gradient.
    return [
        OwnedRows(jnp.minimum(i[: len(x)], count), x / owners.size, g.num_rows, owners, width)
        for i, x, g, count in zip(indices, sums, grads, per_owner, strict=True)
    ]


# (values of the ids of a round, (T, N, capacity, …), a number) -> the values that each device has
# sent to this one, with the number in the places without an id.
Exchange = Callable[[jax.Array, int], jax.Array]


class _Rounds(NamedTuple):
    """Increasing ids of T tables, sent to their owners in rounds, all tables at once.

    ids: int32 (T, n + 1), increasing; the last of them, and those that there are not, are padding.
    starts, ends: for each table and owner, where its ids begin and end, (T, N).
    fullest: the largest number of ids that an owner gets from a worker, the same on all workers.
    sizes: the possible numbers of ids for an owner in a round, increasing to the capacity.
    axes: the mesh axes of the owners.
    firsts: the place of the first row of each owner, (T, N, 1).
    most: the largest number of rows that an owner keeps of a table.
    """

    ids: jax.Array
    starts: jax.Array
    ends: jax.Array
    fullest: jax.Array
    sizes: tuple[int, ...]
    axes: Axes
    firsts: np.ndarray
    most: int

    @classmethod
    def of(cls, ids: jax.Array, owners: Devices, per_owner: Sequence[int]) -> "_Rounds":
        """Divide increasing ids, (T, n), by owner, and find the fullest owner of any worker and
        table.

        All workers must call it, because they agree on the number of rounds.
        """
        counts = np.asarray(per_owner, np.int32)[:, None]
        firsts = counts * np.arange(owners.size + 1, dtype=np.int32)
        # One comparison of all: a binary search is a loop, which takes longer to compile.
        search = jax.vmap(partial(jnp.searchsorted, method="compare_all"))
        bounds = search(ids, firsts).astype(jnp.int32)
        starts, ends = bounds[:, :-1], bounds[:, 1:]
        # The same on all workers: each round is a collective.
        fullest = lax.pmax(jnp.max(ends - starts), owners.axes)
        sizes = _choose_sizes(ids.shape[1], owners.size)
        ids = jnp.pad(ids, ((0, 0), (0, 1)))
        firsts = firsts[:, :-1, None]
        return cls(ids, starts, ends, fullest, sizes, owners.axes, firsts, max(per_owner))

    def run(self, send: Callable[[jax.Array, Exchange, Any], Any], x: Any) -> Any:
        """Apply x = send(first, exchange, x) once per round until the fullest owner has got all its
        ids, and return x, unchanged without ids.

        A round sends each owner its ids from number `first` on. All arrays have room for the
        capacity, and `exchange` sends the smallest of `sizes` that is enough for the fullest owner.
        """
        limits, capacity = np.asarray(self.sizes[:-1], np.int32), self.sizes[-1]

        def send_some(size: int, padding: int, x: jax.Array) -> jax.Array:
            received = lax.all_to_all(x[:, :, :size], self.axes, 1, 1)
            rest = [(0, capacity - size if axis == 2 else 0) for axis in range(x.ndim)]
            return jnp.pad(received, rest, constant_values=padding)

        def run_round(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            first, x = carry
            which = jnp.sum(limits < self.fullest - first)

            # Each size compiles its branch, so a branch holds the transfer alone.
            def exchange(x: jax.Array, padding: int) -> jax.Array:
                ways = [partial(send_some, size, padding) for size in self.sizes]
                return lax.switch(which, ways, x)

            return first + capacity, send(first, exchange, x)

        start = jnp.zeros((), jnp.int32), x
        # On most batches one iteration.
        return lax.while_loop(lambda carry: carry[0] < self.fullest, run_round, start)[1]

    def find_positions(self, first: jax.Array) -> jax.Array:
        """Return for each table and owner the positions of its ids from index `first` on, as many
        as the capacity, (T, N, capacity), with n where there is no such id."""
        number = np.arange(self.sizes[-1], dtype=np.int32)[None, None]
        at = self.starts[..., None] + first + number
        return jnp.where(at < self.ends[..., None], at, self.ids.shape[1] - 1)

    def to_local_ids(self, at: jax.Array) -> jax.Array:
        """Return the ids at these positions as indices of their owner's rows, or `most` where there
        is no id."""
        take = jax.vmap(lambda ids, at: ids.at[at].get(mode="promise_in_bounds"))
        is_id = at < self.ids.shape[1] - 1
        return jnp.where(is_id, take(self.ids, at) - self.firsts, self.most)


def _choose_sizes(ids: int, workers: int) -> tuple[int, ...]:
    """Return the possible counts of ids for an owner in a round: the capacity, and two thirds of it
    for batches that repeat ids.

    The capacity is four standard deviations above the mean, rounded up to a multiple of 8, at most
    `ids`. If ids are distinct and evenly distributed, the fullest owner hardly ever gets more, and
    one round is enough.

    Each size is compiled by itself. With more of them fewer padded rows are sent, but the ids of
    Zipf's law seldom need less than a half.
    """
    mean = ids / workers
    most = max(1, min(ids, 8 * int(np.ceil((mean + 4 * np.sqrt(mean)) / 8))))
    return (-(-most * 2 // 3), most) if most > 8 else (most,)


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
        """Return the array that the rows represent, with zeros in the remaining rows, divided over
        the workers."""
        return run_on_owners(
            self.owners, lambda *x: self._local(*x).dense(), self.indices, self.values
        )

    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p + self, which each worker computes on its rows, in place if p is donated."""
        return run_on_owners(
            self.owners, lambda p, *x: self._local(*x).add_to(p), p, self.indices, self.values
        )

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
        return lax.fori_loop(0, -(-count // chunk), update, (values, *accumulators))
