"""Lookups in a loss: `Table`, an embedding table as the loss sees it, and the loss as a program."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from optfn.collectives.devices import Devices
from optfn.core import tree
from optfn.core.types import Leaf, Params
from optfn.jaxprs.equations import Atom, Environment, Equation, Equations, read, type_of, variables
from optfn.leaves import patterns
from optfn.leaves.patterns import Pattern
from optfn.sparse.rows import Rows
from optfn.sparse.tables import count_rows, lookup_rows


@jax.tree_util.register_pytree_node_class
class Table:
    """An embedding table as a loss sees it: it can be looked up, and nothing else.

    `table[ids]` returns the rows for integer ids of any shape, (*ids.shape, …). Ids out of range
    are treated as in an array. `shape`, `dtype`, `ndim` and `size` are those of the leaf.

    Args:
      array: the leaf, (rows, …).
      path: its path, for errors.

    Raises:
      TypeError: the loss does something else with the table than to look up integer ids.
    """

    def __init__(self, array: jax.Array, path: str) -> None:
        self._array, self.path = array, path

    def __getitem__(self, ids: Leaf) -> Any:
        if ids is Ellipsis:  # nnx reads a Variable by [...]
            return self
        if isinstance(ids, list | int | np.ndarray | np.integer):
            ids = jnp.asarray(np.asarray(ids))
        if not tree.is_array(ids) or not jnp.issubdtype(ids.dtype, jnp.integer):
            came = f"an array of dtype {ids.dtype}" if tree.is_array(ids) else repr(ids)
            raise TypeError(
                f"table {self.path!r} must be looked up by integer ids, table[ids]; got {came}"
            )
        # JAX reads a single id of an array by a slice, and moves its start into the array if it is
        # out of range. The gradient goes to the row that was read. This gather does the same.
        return self._array[ids] if ids.ndim else self._array.at[ids[None]].get(mode="clip")[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "size"):
            return getattr(self._array, name)
        raise _dense_use_error(self.path, f"its attribute {name!r}")

    def __jax_array__(self) -> Any:
        raise _dense_use_error(self.path, "an operation on the whole array")

    def __array__(self, *args: object, **options: object) -> Any:
        raise _dense_use_error(self.path, "a conversion to NumPy")

    def tree_flatten(self) -> tuple[tuple[jax.Array], str]:
        """Return the array and, as static data, the path."""
        return (self._array,), self.path

    @classmethod
    def tree_unflatten(cls, path: str, children: tuple[jax.Array]) -> "Table":
        """Return the table of a path and an array."""
        return cls(children[0], path)


def _dense_use_error(path: str, use: str) -> TypeError:
    return TypeError(
        f"table {path!r} can only be looked up, table[ids], but the loss uses it in another way "
        f"({use}). If it has to, leave this leaf out of `tables`; its gradient is then dense"
    )


def _make_refusal(operation: str) -> Callable[..., Any]:
    def refuse(self: Table, *args: object) -> Any:
        raise _dense_use_error(self.path, operation)

    return refuse


# Python looks up operators in the class, not by __getattr__.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow")
_OPERATORS = ("neg", "abs", "len", "iter", "bool", "contains", "float", "int")
for _name in (*_BINARY, *_OPERATORS, "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Table, f"__{_name}__", _make_refusal(_name))
for _name in _BINARY:
    setattr(Table, f"__r{_name}__", _make_refusal(_name))


class LossOfTables:
    """A loss as a program that looks up rows of tables, and does nothing else with tables.

    Args:
      loss_fn: params -> loss, traced here with a `Table` for each table.
      params: the parameters.
      pattern: the pattern of the paths of tables.
      owners: the workers that keep the rows, if params have shards of tables; None if these are
        whole.

    inputs: the variable of each array of params, in order.
    tables: the path of each table, by its variable.
    lookups: the equations that look up rows.
    """

    def __init__(
        self,
        loss_fn: Callable[[Params], Any],
        params: Params,
        pattern: Pattern,
        owners: Devices | None,
    ) -> None:
        paths = patterns.match_names(pattern, params, "tables")

        def wrap_table(place: tree.Place, x: Leaf) -> Leaf:
            path = str(place)
            if path not in paths:
                return x
            _check_table(path, x)
            if owners is not None:
                # In a shard, negative ids would count from its end.
                x = jax.ShapeDtypeStruct((count_rows(owners, x), *x.shape[1:]), x.dtype)
            return Table(x, path)

        self._program = Equations(loss_fn, tree.map_named(wrap_table, params))
        self._owners = owners
        self.inputs = self._program.inputs
        named = zip(self.inputs, tree.array_paths(params), strict=True)
        self.tables = {v: path for v, path in named if path in paths}
        self.lookups = _find_lookups(self._program, self.tables)

    def look_up(self, known: Environment) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the ids and the rows of each lookup, by the equations that these depend on.

        Args:
          known: the values of the inputs.
        """
        instead = {}
        if self._owners is not None:
            instead = {id(e): partial(_fetch_rows, e, self._owners) for e in self.lookups}
        outputs = [e.outvars[0] for e in self.lookups]
        found = self._program.run(self._program.find_equations(outputs), known, instead)
        starts = read(found, [e.invars[1] for e in self.lookups])
        return [x[..., 0] for x in starts], read(found, outputs)

    def value(self, known: Environment, rows: list[jax.Array]) -> Any:
        """Return the loss for the values of the inputs and the rows of each lookup."""
        pairs = zip(self.lookups, rows, strict=True)
        instead = {id(e): partial(_return_constant, x) for e, x in pairs}
        values = self._program.run(self._program.equations, known, instead)
        return self._program.structure.unflatten(read(values, self._program.outputs))

    def gradients(self, ids: list[jax.Array], row_grads: list[jax.Array]) -> dict[Atom, Rows]:
        """Return the gradient of each table, from the gradients of the rows of each lookup."""
        found: dict[Atom, list[_Lookup]] = {v: [] for v in self.tables}
        for lookup in zip(self.lookups, ids, row_grads, strict=True):
            found[lookup[0].invars[0]].append(lookup)
        return {v: _collect_rows(type_of(v), lookups) for v, lookups in found.items()}


# The equation of a lookup, its ids, and the gradient of the rows that it returns.
_Lookup = tuple[Equation, jax.Array, jax.Array]


def _fetch_rows(
    equation: Equation, owners: Devices, shard: jax.Array, starts: jax.Array
) -> list[jax.Array]:
    """Return the results of a lookup, fetched from the workers that keep the rows."""
    ids, rows = starts[..., 0], shard.shape[1:]
    count = count_rows(owners, shard)
    # A gather reads the nearest row for an id out of range, unless its mode is FILL_OR_DROP.
    inside = jnp.clip(ids, 0, count - 1)
    found = lookup_rows(owners, shard, inside.reshape(-1).astype(jnp.int32)).reshape(
        *ids.shape, *rows
    )
    if equation.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        fill = equation.params["fill_value"]
        is_inside = (ids == inside).reshape(*ids.shape, *[1] * len(rows))
        found = jnp.where(is_inside, found, jnp.nan if fill is None else fill)
    last = tuple(range(-len(rows), 0))
    return [jnp.moveaxis(found, last, equation.params["dimension_numbers"].offset_dims)]


def _return_constant(x: jax.Array, *arguments: object) -> list[jax.Array]:
    return [x]


def _check_table(path: str, leaf: Leaf) -> None:
    if not tree.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        came = leaf.dtype if tree.is_array(leaf) else type(leaf).__name__
        raise TypeError(f"table {path!r} must be a floating-point array; got {came}")
    if not leaf.ndim or not leaf.shape[0]:
        raise TypeError(f"table {path!r} must have rows; got shape {leaf.shape}")


def _find_lookups(program: Equations, path_of: dict[Any, str]) -> list[Equation]:
    """Return the equations that look up rows; raise a TypeError if a table is used otherwise.

    Args:
      program: the loss.
      path_of: the path of each table, by its variable in the program.
    """
    found = []
    for equation in program.equations:
        used = [v for v in variables(equation.invars) if v in path_of]
        if not used:
            continue
        if not _is_lookup(equation, path_of):
            name, path = equation.primitive.name, path_of[used[0]]
            if not equation.params.keys().isdisjoint(_BODIES):
                raise TypeError(
                    f"table {path!r} is used inside the body of {name}, where lookups cannot be "
                    "found. Look the rows up before it, and pass them in"
                )
            raise _dense_use_error(path, name)
        found.append(equation)
    for v in variables(program.outputs):
        if v in path_of:
            raise _dense_use_error(path_of[v], "it is returned")
    return found


# The params of equations that run functions.
_BODIES = ("jaxpr", "branches", "body_jaxpr", "call_jaxpr")


def _is_lookup(equation: Equation, path_of: dict[Any, str]) -> bool:
    """Tell whether an equation gathers whole rows of a table, by ids that are not a table."""
    if equation.primitive.name != "gather" or equation.invars[1] in path_of:
        return False
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table: Any = equation.invars[0].aval
    return (
        tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(sizes[1:]) == table.shape[1:]
    )


def _collect_rows(table: Any, lookups: list[_Lookup]) -> Rows:
    """Return the gradient of a table.

    Args:
      table: the shape and dtype of the table.
      lookups: the lookups of this table.
    """
    num_rows, row = table.shape[0], table.shape[1:]
    # If there is no lookup, return one row of padding.
    indices = [jnp.full(0 if lookups else 1, num_rows, jnp.int32)]
    values = [jnp.zeros((0 if lookups else 1, *row), table.dtype)]
    for equation, ids, gradient in lookups:
        last = range(-len(row), 0)
        rows = jnp.moveaxis(gradient, equation.params["dimension_numbers"].offset_dims, tuple(last))
        if equation.params["mode"] == GatherScatterMode.CLIP:
            ids = jnp.clip(ids, 0, num_rows - 1)
        ids = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows)
        indices.append(ids.reshape(-1).astype(jnp.int32))
        values.append(rows.reshape(-1, *row))
    return Rows(jnp.concatenate(indices), jnp.concatenate(values), num_rows)
