"""Row-sparse gradients of tables: `Rows`, `Table`, `value_and_grad`, `densify`.

An embedding table may have millions of rows, but a step looks up only thousands. `value_and_grad`
returns the gradient of such a leaf as rows, one for each lookup, without an array of the size of
the table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from optfn import core
from optfn.jaxprs.equations import Equation, Equations, read, variables
from optfn.leaves import leafwise, tree
from optfn.leaves.rows import Rows
from optfn.leaves.tree import Pattern
from optfn.leaves.types import DType, Leaf, Params, Updates
from optfn.sparse.tables import Owners

__all__ = ["Rows", "Table", "densify", "value_and_grad"]


@core.transform(complex_leaves=True)
def densify() -> core.Rule:
    """Make row-sparse gradients dense, for transforms of other libraries that come after it.

    Each row-sparse leaf becomes an array of the size of the table. No state. Real and complex
    leaves.
    """
    return core.stateless(lambda updates, params: leafwise.to_dense(updates))


@jax.tree_util.register_pytree_node_class
class Table:
    """An embedding table as a loss sees it: it can be looked up, and nothing else.

    `table[ids]` returns the rows for integer ids of any shape, (*ids.shape, …). Ids out of range
    are treated as in an array.

    Args:
      array: the leaf, (rows, …).
      path: its path, for errors.

    Raises:
      TypeError: the loss does something else with the table than to look up integer ids.
    """

    def __init__(self, array: jax.Array, path: str) -> None:
        self._array, self._path = array, path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self._array.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the leaf."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the leaf."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        return self._array.size

    def __getitem__(self, ids: Leaf) -> Any:
        if ids is Ellipsis:  # nnx reads a Variable by [...]
            return self
        if isinstance(ids, list | int | np.ndarray | np.integer):
            ids = jnp.asarray(np.asarray(ids))
        if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.integer):
            came = f"an array of dtype {ids.dtype}" if hasattr(ids, "dtype") else repr(ids)
            raise TypeError(
                f"table {self._path!r} must be looked up by integer ids, table[ids]; got {came}"
            )
        # JAX reads a single id of an array by a slice, and moves its start into the array if it is
        # out of range. The gradient goes to the row that was read. This gather does the same.
        return self._array[ids] if ids.ndim else self._array.at[ids[None]].get(mode="clip")[0]

    def __jax_array__(self) -> Any:
        raise TypeError(_dense_use(self._path, "an operation on the whole array"))

    def __array__(self, *args: object, **options: object) -> Any:
        raise TypeError(_dense_use(self._path, "a conversion to NumPy"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TypeError(_dense_use(self._path, f"its attribute {name!r}"))

    def tree_flatten(self) -> tuple[tuple[jax.Array], str]:
        """Return the array and, as static data, the path."""
        return (self._array,), self._path

    @classmethod
    def tree_unflatten(cls, path: str, children: tuple[jax.Array]) -> "Table":
        """Return the table of a path and an array."""
        return cls(children[0], path)


def _refuse(operation: str) -> Callable[..., Any]:
    def refuse(self: Table, *args: object) -> Any:
        raise TypeError(_dense_use(self._path, operation))

    return refuse


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"):
    setattr(Table, f"__{_name}__", _refuse(_name))
    setattr(Table, f"__r{_name}__", _refuse(_name))
for _name in (
    *("neg", "abs", "len", "iter", "bool", "contains", "float", "int"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(Table, f"__{_name}__", _refuse(_name))


def _dense_use(path: str, use: str) -> str:
    return (
        f"table {path!r} can only be looked up, table[ids], but the loss uses it in another way "
        f"({use}). If it has to, leave this leaf out of `tables`; its gradient is then dense"
    )


def value_and_grad(
    loss_fn: Callable[..., Any],
    tables: Pattern,
    *,
    has_aux: bool = False,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    owners: Owners | None = None,
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients, which are row-sparse for tables.

    It is like `jax.value_and_grad` for the first argument, except for the leaves that `tables`
    selects. Inside `loss_fn` these are `Table`s, and their gradients are `Rows` with an entry for
    each id that was looked up, so that no array of the size of a table is made. `make_train_step`
    and `minimize` do this with their argument `tables`.

    Args:
      loss_fn: a function (params, *args) -> loss, or (loss, aux). Lookups may be inside jit and
        vmap. Inside the body of a scan, a cond or a checkpoint they are an error: look rows up
        before it, and pass them in.
      tables: a regular expression that matches the whole path of each table, or a function
        path -> bool.
      has_aux: whether `loss_fn` returns auxiliary data too.
      transform: a transformation of the rest of the loss, after its lookups, such as a `recompute`
        of names in it. A segment that is recomputed cannot contain a lookup.
      owners: the workers that keep the rows of the tables. `make_train_step` with
        `shard_tables=True` passes it, inside a `shard_map` over parts of the tables; gradients of
        tables are then parts of the mean.

    Returns:
      A function (params, *args, **kwargs) -> (loss, gradients), or ((loss, aux), gradients), which
      can be jitted.

    Raises:
      ValueError: the pattern matches no leaf.
      TypeError: a table is not a floating-point array with rows, ids are not integers, or the loss
        does something else with a table than to look rows up.

    >>> import jax.numpy as jnp
    >>> params = {"table": jnp.ones((1000, 2)), "w": jnp.ones(2)}
    >>> loss = lambda p, ids: jnp.sum(p["table"][ids] @ p["w"])
    >>> value, grads = value_and_grad(loss, "table")(params, jnp.array([3, 5, 3]))
    >>> grads["table"].indices.tolist(), grads["table"].num_rows
    ([3, 5, 3], 1000)
    """
    pattern = tree.check_pattern("tables", tables)
    if pattern is None:
        raise TypeError("tables must be a pattern of the paths of leaves; got None")

    def value_and_rows(params: Params, *args: Any, **kwargs: Any) -> tuple[Any, Updates]:
        leaves, structure = tree.flatten(params)
        paths, tables = tree.paths(params), tree.matching(pattern, params, "tables")
        chosen = [path in tables for path in paths]
        for path, leaf, is_table in zip(paths, leaves, chosen, strict=True):
            if is_table:
                _check_table(path, leaf)
        # Trace the loss with whole tables. With parts, negative ids would count from their ends.
        seen = [
            _whole(x, owners) if is_table else x for x, is_table in zip(leaves, chosen, strict=True)
        ]

        def loss_of_leaves(leaves: list[Leaf]) -> Any:
            with_tables = [
                Table(x, path) if is_table else x
                for x, path, is_table in zip(leaves, paths, chosen, strict=True)
            ]
            return loss_fn(structure.unflatten(with_tables), *args, **kwargs)

        program = Equations(loss_of_leaves, seen)
        inputs = iter(program.inputs)
        # The variable of each leaf in the program.
        var_of = [None if tree.is_masked(x) else next(inputs) for x in leaves]
        path_of = {v: p for v, p, is_table in zip(var_of, paths, chosen, strict=True) if is_table}
        lookups = _lookups(program, path_of)

        arrays = {v: x for v, x in zip(var_of, leaves, strict=True) if v is not None}
        outputs = [e.outvars[0] for e in lookups]
        # Run the part of the program that computes ids and looks them up, without a derivative.
        instead = (
            {} if owners is None else {id(e): partial(_from_owners, e, owners) for e in lookups}
        )
        first = program.run(program.needed_for(outputs), arrays, instead)
        ids = [starts[..., 0] for starts in read(first, [e.invars[1] for e in lookups])]

        def loss(dense: list[Leaf], looked_up: list[jax.Array]) -> Any:
            known = arrays | {v: x for v, x in zip(var_of, dense, strict=True) if x is not None}
            instead = {
                id(e): partial(_constant, x) for e, x in zip(lookups, looked_up, strict=True)
            }
            values = program.run(program.equations, known, instead)
            return program.structure.unflatten(read(values, program.outputs))

        dense = [
            None if is_table or v is None else x
            for v, x, is_table in zip(var_of, leaves, chosen, strict=True)
        ]
        value, (grads, found) = jax.value_and_grad(
            loss if transform is None else transform(loss),
            argnums=(0, 1),
            has_aux=has_aux,
            allow_int=True,
        )(dense, read(first, outputs))
        grads = [
            _rows(x, [r for r in zip(lookups, ids, found, strict=True) if r[0].invars[0] is v])
            if is_table
            else (x if v is None else g)
            for g, x, v, is_table in zip(grads, seen, var_of, chosen, strict=True)
        ]
        if owners is not None:
            grads = [owners.send(g) if isinstance(g, Rows) else g for g in grads]
        return value, structure.unflatten(grads)

    return value_and_rows


def _whole(part: jax.Array, owners: Owners | None) -> Leaf:
    """Return the shape of the table that `part` belongs to; without owners, the array itself."""
    if owners is None:
        return part
    return jax.ShapeDtypeStruct((owners.num_rows(part), *part.shape[1:]), part.dtype)


def _from_owners(
    equation: Equation, owners: Owners, part: jax.Array, starts: jax.Array
) -> list[jax.Array]:
    """Return the results of a lookup, fetched from the workers that keep the rows."""
    ids, rows = starts[..., 0], part.shape[1:]
    count = owners.num_rows(part)
    # A gather reads the nearest row for an id that is out of range, unless its mode is
    # FILL_OR_DROP.
    inside = jnp.clip(ids, 0, count - 1)
    found = owners.lookup(part, inside.reshape(-1).astype(jnp.int32)).reshape(*ids.shape, *rows)
    if equation.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        fill = equation.params["fill_value"]
        is_inside = (ids == inside).reshape(*ids.shape, *[1] * len(rows))
        found = jnp.where(is_inside, found, jnp.nan if fill is None else fill)
    last = tuple(range(-len(rows), 0))
    return [jnp.moveaxis(found, last, equation.params["dimension_numbers"].offset_dims)]


def _constant(x: jax.Array, *arguments: object) -> list[jax.Array]:
    return [x]


def _check_table(path: str, leaf: Leaf) -> None:
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        came = getattr(leaf, "dtype", type(leaf).__name__)
        raise TypeError(f"table {path!r} must be a floating-point array; got {came}")
    if not leaf.ndim or not leaf.shape[0]:
        raise TypeError(f"table {path!r} must have rows; got shape {leaf.shape}")


def _lookups(program: Equations, path_of: dict[Any, str]) -> list[Equation]:
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
            if any(
                key in equation.params for key in ("jaxpr", "branches", "body_jaxpr", "call_jaxpr")
            ):
                raise TypeError(
                    f"table {path!r} is used inside the body of {name}, where lookups cannot be "
                    "found. Look the rows up before it, and pass them in"
                )
            raise TypeError(_dense_use(path, name))
        found.append(equation)
    for v in variables(program.outputs):
        if v in path_of:
            raise TypeError(_dense_use(path_of[v], "it is returned"))
    return found


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


def _rows(table: jax.Array, lookups: list[tuple[Equation, jax.Array, jax.Array]]) -> Rows:
    """Return the gradient of a table.

    Args:
      table: the leaf.
      lookups: for each lookup its equation, its ids and the gradient of the rows looked up.
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
