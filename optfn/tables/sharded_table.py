"""Tables whose rows are dealt out to the devices in turn, but are read in natural order.

With N devices, row r of a table is on device r mod N, as its row r // N. Ids are often numbered by
frequency, and this deals frequent ids out evenly. No PartitionSpec can express this, so the array
of a `ShardedTable` has all rows of device 0, then all rows of device 1, and so on. The optimizer
works on this array, and its state for the table has the same order. Outside of a training step,
arrays have the natural order; `to_logical` and `to_physical` convert them.
"""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, tree
from optfn.core.traits import traits
from optfn.core.types import DType, Leaf, PyTree
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Axes, to_axes
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.state.per_worker import is_per_worker
from optfn.tables.tables import find_places

# The attributes that the array of stored rows shares with the table, or has for it.
_OF_STORED = ("shape", "dtype", "ndim", "size", "sharding", "addressable_shards")


@traits(transparent=True)
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["owners", "num_rows"]
)
class ShardedTable:
    """A table that is read in natural order, and whose rows are dealt out to the devices in turn.

    It has the shape and dtype of the table. `np.asarray` and `jnp.asarray` return the table,
    `table[ids]` returns rows, and it has the attributes of the table; only `sharding` and
    `addressable_shards` describe the stored rows. It is a pytree node with one array, the stored
    rows, and does not change paths. The state of an optimizer has such a node in the same place.

    Args:
      stored: the rows, device by device; or an array of the optimizer's state for them.
      owners: the devices that keep the rows.
      num_rows: R, the number of rows of the table.
    """

    def __init__(self, stored: PyTree, owners: Devices, num_rows: int) -> None:
        self.stored, self.owners, self.num_rows = stored, owners, num_rows

    def of(self, stored: PyTree) -> "ShardedTable":
        """Return a node of another array, `stored`, with this table's owners and order of rows."""
        return ShardedTable(stored, self.owners, self.num_rows)

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> np.ndarray:
        x = np.asarray(self.stored)
        axis = _find_row_axis(x.shape, self.num_rows)
        return np.asarray(x if axis is None else _permute_rows(self, x, axis, True), dtype)

    def __jax_array__(self) -> jax.Array:
        return to_logical(self)

    def __getitem__(self, key: Any) -> jax.Array:
        """Return the rows of integer ids, negative ones counted from the end, and all clipped to
        the range, or index the table in natural order by another key."""
        if isinstance(key, int | np.integer | list) or tree.is_array(key):
            ids = jnp.asarray(key)
            if jnp.issubdtype(ids.dtype, jnp.integer):
                if ids.dtype.itemsize < 4:  # the number of rows may be none of theirs
                    ids = ids.astype(jnp.int32)
                # As in an array: negative ids count from the end, ids out of range read the nearest
                # row.
                ids = jnp.clip(jnp.where(ids < 0, ids + self.num_rows, ids), 0, self.num_rows - 1)
                return self.stored[find_places(self.owners, ids, self.num_rows)]
        return self.__jax_array__()[key]

    def __len__(self) -> int:
        return self.num_rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(name)
        return getattr(self.stored if name in _OF_STORED else self.__jax_array__(), name)

    def __repr__(self) -> str:
        return f"ShardedTable({self.stored!r} of {self.num_rows} rows, in turn)"


def is_sharded_table(x: object) -> TypeGuard[ShardedTable]:
    """Tell whether `x` is a ShardedTable."""
    return isinstance(x, ShardedTable)


def divide_tables(params: PyTree, are_tables: PyTree, owners: Devices) -> PyTree:
    """Wrap each table of params in a ShardedTable, whose rows are dealt out to the owners in turn.

    Args:
      params: the params.
      are_tables: whether each leaf is a table.
      owners: the devices that keep their rows.
    """

    def leaf(is_table: bool, x: Leaf) -> Leaf:
        if is_table is not True:
            return x
        node = ShardedTable(x, owners, x.shape[0])
        return node.of(_reorder_rows(node, x, to_natural=False))

    return jax.tree.map(leaf, are_tables, params, is_leaf=tree.is_masked)


def unwrap_tables(values: PyTree) -> PyTree:
    """Replace each ShardedTable of a tree by its array of stored rows."""
    return tree.unwrap_nodes(values, is_sharded_table)


def wrap_tables_like(like: PyTree, values: PyTree) -> PyTree:
    """Put stored rows back into ShardedTables where `like` has them, as the inverse of
    `unwrap_tables`."""
    return jax.tree.map(
        lambda x, value: x.of(value) if is_sharded_table(x) else value,
        like, values, is_leaf=lambda x: is_sharded_table(x) or tree.is_leaf(x),
    )  # fmt: skip


def to_logical(values: PyTree) -> PyTree:
    """Replace each ShardedTable by an array with its rows in the order of their ids.

    On a mesh, rows are sent between devices; in a run of several processes, all must call it.
    """

    def convert(node: ShardedTable) -> PyTree:
        return jax.tree.map(lambda x: _reorder_rows(node, x, to_natural=True), node.stored)

    return tree.replace_nodes(is_sharded_table, convert, values)


def to_physical(like: PyTree, values: PyTree) -> PyTree:
    """Wrap arrays in ShardedTables where `like` has them, with their rows reordered from natural to
    stored order.

    It is the inverse of `to_logical`. Arrays of `like` itself are already in stored order, and are
    not reordered.
    """

    def convert(node: PyTree, value: PyTree) -> PyTree:
        if not is_sharded_table(node):
            return value

        def reorder_array(old: Leaf, x: Leaf) -> Leaf:
            return x if x is old else _reorder_rows(node, x, to_natural=False)

        return node.of(jax.tree.map(reorder_array, node.stored, value))

    return jax.tree.map(convert, like, values, is_leaf=is_sharded_table)


def check_tables(params: PyTree, are_tables: PyTree) -> None:
    """Raise a TypeError unless each table of params is a ShardedTable, made by `divide_tables`."""

    values = jax.tree.leaves(params, is_leaf=lambda x: is_sharded_table(x) or tree.is_leaf(x))
    for (place, is_table), x in zip(tree.items(are_tables), values, strict=True):
        if is_table is True and not is_sharded_table(x):
            raise TypeError(
                f"params[{str(place)!r}] is a table whose rows are divided over devices; it must "
                f"be a ShardedTable, which step.init makes; got {checks.show(x)}"
            )


def check_rows(state: PyTree) -> None:
    """Raise a ValueError if the state of a sharded table has an array without an axis of rows,
    scalars and per-worker arrays excepted."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: is_sharded_table(x) or is_per_worker(x))
    for node in filter(is_sharded_table, nodes):
        for x in jax.tree.leaves(node.stored, is_leaf=is_per_worker):
            # Per-worker arrays are flat, or those of all workers.
            if not is_per_worker(x) and x.ndim and node.num_rows not in x.shape:
                raise ValueError(
                    f"the table of {node.num_rows} rows has them divided over devices, "
                    f"but its optimizer state has an array of shape {x.shape}, without an axis of "
                    "rows. Use another optimizer for the table"
                )


def _find_row_axis(shape: tuple[int, ...], num_rows: int) -> int | None:
    """Return the first axis whose size is a multiple of `num_rows`, but not 0, or None without one.

    It counts the rows of the table, or the rows of all workers.
    """
    return next((a for a, n in enumerate(shape) if n and n % num_rows == 0), None)


def _reorder_rows(node: ShardedTable, x: Leaf, *, to_natural: bool) -> Leaf:
    """Bring the rows of an array from stored to natural order, or back unless `to_natural`, or
    return it unchanged without an axis of rows or with one owner."""
    axis = _find_row_axis(x.shape, node.num_rows)
    if axis is None or node.owners.size == 1:
        return x
    names = _find_mesh_axes(x, axis)
    # Devices can exchange their rows only where the owners' axes divide them, innermost.
    if names[-len(node.owners.axes) :] != node.owners.axes:
        return _permute_rows(node, x, axis, to_natural)
    return _exchange_rows(x, node.owners, names, axis, to_natural)


def _find_mesh_axes(x: Leaf, axis: int) -> Axes:
    """Return the mesh axes that divide an axis of an array, or no axes if it is traced or has no
    NamedSharding."""
    lies = x.sharding if isinstance(x, jax.Array) and not checks.is_traced(x) else None
    if not isinstance(lies, NamedSharding):
        return Axes()
    entries = [*lies.spec, *[None] * x.ndim]  # a spec may be shorter than the shape
    return to_axes(entries[axis])


def _permute_rows(node: ShardedTable, x: Leaf, axis: int, to_natural: bool) -> Leaf:
    """Reorder rows by a transposition of the whole array, from stored to natural order if
    `to_natural`, else from natural to stored order."""
    count = node.owners.size
    per_device = node.num_rows // count
    rows = (count, per_device) if to_natural else (per_device, count)
    shape = (*x.shape[:axis], x.shape[axis] // node.num_rows, *rows, *x.shape[axis + 1 :])
    return x.reshape(shape).swapaxes(axis + 1, axis + 2).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _exchange_rows(
    x: jax.Array, owners: Devices, names: Axes, axis: int, to_natural: bool
) -> jax.Array:
    """Reorder the rows of an array on the mesh: devices exchange rows, and none ever has all of
    them.

    Args:
      x: the array; its rows are divided over the axes `names`.
      owners: the devices that keep the rows.
      names: the mesh axes, the owners' axes last.
      axis: the axis of the rows.
      to_natural: whether each device sends the rows that it keeps to the devices whose natural
        blocks contain them; else it sends the rows of its block to the devices that keep them.
    """

    def reorder(shard: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(shard, axis, 0)
        stored, block = _find_places(rows, owners)
        sent, places = (stored, block) if to_natural else (block, stored)
        return jnp.moveaxis(_send_rows(rows, owners, sent, places), 0, axis)

    spec = P(*[None] * axis, names)
    return meshes.shard_map(reorder, owners.mesh, names, spec, spec)(x)


def _find_places(shard: jax.Array, owners: Devices) -> tuple[jax.Array, jax.Array]:
    """Return the places of the rows that this device exchanges with each device k, among its stored
    rows and in its natural block, with `count` for none.

    Both are (N, ⌈count/N⌉). The first are of its stored rows that belong to k's natural block, the
    second of the rows of its block that k stores.
    """
    me, all_devices = lax.axis_index(owners.axes), np.arange(owners.size)[:, None]
    stored, _ = _pair_places(owners, me, all_devices, len(shard))
    _, block = _pair_places(owners, all_devices, me, len(shard))
    return stored, block


def _pair_places(
    owners: Devices, owner: Any, device: Any, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the places, at `owner` and in `device`'s natural block, of the rows of the block that
    `owner` keeps, with `count` where there is none.

    The first result has their places at the owner, the second their places in the block. `count` is
    the number of rows of a device.
    """
    start = device * count
    number = np.arange(-(-count // owners.size), dtype=np.int32)[None]
    # The first place at `owner` whose row lies in the block.
    place = (start - owner + owners.size - 1) // owners.size
    place = place + number
    in_block = place * owners.size + owner - start
    is_inside = in_block < count
    return jnp.where(is_inside, place, count), jnp.where(is_inside, in_block, count)


def _send_rows(shard: jax.Array, owners: Devices, sent: jax.Array, places: jax.Array) -> jax.Array:
    """Send rows `sent[k]` to device k, and return the rows from device k at `places[k]`, with zeros
    in the remaining rows."""
    rows = shard.at[sent].get(mode="fill", fill_value=0)
    arrived = lax.all_to_all(rows, owners.axes, 0, 0)
    return jnp.zeros_like(shard).at[places].set(arrived, mode="drop", unique_indices=False)
