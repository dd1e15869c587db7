"""The lookups of a loss: where the program that JAX traces reads rows of tables."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import (
    Environment,
    Equations,
    Value,
    bindings,
    read,
    run_equations,
    variables,
)
from optfn.loss.jaxprs.primitives import Checkpoint, Equation, RowLookup, Variable
from optfn.loss.jaxprs.sharded import run_on_shards
from optfn.loss.jaxprs.sharded_param import gather_params
from optfn.mesh.collectives.devices import Devices
from optfn.tables.rows import Rows
from optfn.tables.tables import count_rows, lookup_rows


class _Source(NamedTuple):
    """The origin of a variable: a table, and the operations on its entries that were applied."""

    table: Variable
    casts: tuple[Equation, ...]


class _Lookup(NamedTuple):
    """An equation that reads whole rows of a table, one for each id.

    The casts of the table are made of the rows instead, whose gradient then has the dtype of the
    table.
    """

    equation: Equation
    how: RowLookup
    source: _Source

    @property
    def is_constant(self) -> bool:
        """Whether the loss stops the gradient of the table before it looks rows up."""
        return any(map(primitives.stops_gradient, self.source.casts))

    def ids(self, table: Any, indices: list[Value]) -> jax.Array:
        """Return the ids that the equation looks up, as int32, where an id out of range remains out
        of range at the same end of the table.

        An index that is out of range along another axis gives an id past the end, unless the mode
        is `CLIP`.

        Args:
          table: the table, (R, …), or its shape and dtype.
          indices: the operands of the equation after the table.
        """
        count, axes = table.shape[0], self.how.index_axes
        if self.how.start is not None:
            return jnp.asarray(self.how.start, jnp.int32)
        if axes is None:
            return _within(indices[0], count)
        at = axes.index(0)
        ids = _within(indices[0][..., at], count)
        if len(axes) > 1 and self.how.mode != GatherScatterMode.CLIP:
            # The remaining axes are read whole: the only start that is in range is zero.
            starts = jnp.delete(indices[0], at, axis=-1, assume_unique_indices=True)
            ids = jnp.where(jnp.all(starts == 0, axis=-1), ids, count)
        return ids

    def read_whole(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Read the rows of `ids`, (*ids.shape, …), from a whole table, with ids out of range read
        as the equation's mode says."""
        row, mode, fill = table.shape[1:], self.how.mode, self.how.fill
        numbers = GatherDimensionNumbers(tuple(range(ids.ndim, ids.ndim + len(row))), (0,), (0,))
        return lax.gather(table, ids[..., None], numbers, (1, *row), mode=mode, fill_value=fill)

    def fill_outside(self, rows: jax.Array, is_inside: jax.Array) -> jax.Array:
        """Return the rows of ids with those that are not inside the table as the equation's mode
        reads them, from the nearest rows for them."""
        # A gather reads the nearest row for an id out of range, unless its mode is FILL_OR_DROP.
        if self.how.mode != GatherScatterMode.FILL_OR_DROP:
            return rows
        is_inside = is_inside.reshape(*is_inside.shape, *[1] * (rows.ndim - is_inside.ndim))
        return jnp.where(is_inside, rows, jnp.nan if self.how.fill is None else self.how.fill)

    def result(self, program: Equations, rows: jax.Array) -> jax.Array:
        """Apply the loss's casts of the table to the rows of the ids, (*ids.shape, …), and return
        them in the shape of the equation's result."""
        rows = program.run(self.source.casts, {self.source.table: rows})[self.equation.invars[0]]
        kept, places = self.how.kept, self.how.offset_dims
        if places is None:
            return rows[None]
        num_axes = len(primitives.type_of(self.equation.invars[0]).shape) - 1  # of a row
        rows = rows.reshape(*rows.shape[: rows.ndim - num_axes], *kept)
        return jnp.moveaxis(rows, tuple(range(-len(kept), 0)), places)

    def indices_of_gradient(self, ids: jax.Array, num_rows: int) -> jax.Array:
        """Return for each id the row that gets its gradient, where an id out of range gives the
        nearest row in mode `CLIP`, else `num_rows`, which is padding."""
        if self.how.mode == GatherScatterMode.CLIP:
            return jnp.clip(ids, 0, num_rows - 1)
        return jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows)


class TracedLoss:
    """A traced loss: its lookups of tables run first, then the rest of it, on rows and shards.

    An input is a table, a ShardedParam or an array, and there may be no table. All equations but
    lookups run by `run_on_shards`, which gathers params, in a scan a layer at a time.

    Args:
      program: the program.
      paths: for each of its inputs the path of the table that it is, or None.
      values: the inputs that it was traced with.
      owners: the devices that keep the rows, if the inputs have shards of tables; None if these
        are whole.

    tables: the numbers of the inputs that are tables.

    Raises:
      TypeError: the program does something else with a table.
    """

    def __init__(
        self,
        program: Equations,
        paths: Sequence[str | None],
        values: Sequence[Any],
        owners: Devices | None = None,
    ) -> None:
        self._program = _with_lookups_before_checkpoints(program, paths, values)
        self._owners = owners
        self.tables = [i for i, path in enumerate(paths) if path is not None]
        path_of = _map_table_paths(self._program, paths)
        self._sources = _find_table_sources(self._program, path_of)
        # A cast of a table would make a whole array: lookups read the table, and cast the rows.
        casts = {id(e) for source in self._sources.values() for e in source.casts}
        live = [e for e in self._program.find_live_equations() if id(e) not in casts]
        self._equations = live
        self._lookups = _find_lookups(self._program, live, self._sources, path_of)

    def look_up(self, inputs: Sequence[Value]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the equations that the lookups depend on, look the rows up, and return the ids and
        the rows of each lookup.

        Lookups whose ids depend on no rows look up together.
        """
        found: dict[Variable, tuple[jax.Array, jax.Array]] = {}
        values = self._program.constants | self._values_of(inputs)
        left = self._lookups
        while left:
            later = {x.equation.outvars[0] for x in left}
            reads = [self._program.find_dependencies(x.equation.invars[1:]) for x in left]
            ready = [x for x, of_ids in zip(left, reads, strict=True) if later.isdisjoint(of_ids)]
            operands = [a for x in ready for a in x.equation.invars[1:]]
            needed = set(map(id, self._program.find_equations(operands)))
            equations = [
                e for e in self._equations if id(e) in needed and e.outvars[0] not in values
            ]
            values = run_equations(equations, values, rule=run_on_shards)
            tables = [values[x.source.table] for x in ready]
            ids = [
                x.ids(primitives.type_of(x.source.table), read(values, x.equation.invars[1:]))
                for x in ready
            ]
            rows = _fetch_rows(self._owners, ready, tables, ids)
            for x, i, r in zip(ready, ids, rows, strict=True):
                v = x.equation.outvars[0]
                found[v], values[v] = (i, r), x.result(self._program, r)
            left = [x for x in left if x.equation.outvars[0] not in found]
        pairs = [found[x.equation.outvars[0]] for x in self._lookups]
        return [i for i, _ in pairs], [r for _, r in pairs]

    def value(self, inputs: Sequence[Value], rows: list[jax.Array]) -> Any:
        """Run the program on its inputs, with `rows` in place of the rows that its lookups read,
        and return its result."""

        def result(lookup: _Lookup, rows: jax.Array, *operands: Value) -> list[jax.Array]:
            return [lookup.result(self._program, rows)]

        pairs = zip(self._lookups, rows, strict=True)
        instead = {id(x.equation): partial(result, x, r) for x, r in pairs}
        values = self._program.run(self._equations, self._values_of(inputs), instead, run_on_shards)
        outputs = gather_params(read(values, self._program.outputs))
        return self._program.structure.unflatten(outputs)

    def gradients(self, ids: list[jax.Array], row_grads: list[jax.Array]) -> dict[int, Rows]:
        """Join the gradients of rows into the `Rows` of each table, by the number of its input,
        without lookups behind a stopped gradient, or one row of padding if none remain."""
        found: dict[Variable, list[tuple[jax.Array, jax.Array]]] = {}
        for x, i, g in zip(self._lookups, ids, row_grads, strict=True):
            if not x.is_constant:
                table = primitives.type_of(x.source.table)
                indices = x.indices_of_gradient(i, table.shape[0])
                found.setdefault(x.source.table, []).append(
                    (indices.reshape(-1), g.reshape(-1, *table.shape[1:]))
                )
        variables_of = {i: self._program.inputs[i] for i in self.tables}
        return {
            i: _join_rows(primitives.type_of(v), found.get(v, [])) for i, v in variables_of.items()
        }

    def _values_of(self, inputs: Sequence[Value]) -> Environment:
        """Return the values of the inputs, and for each cast of a table the uncast table, because
        lookups cast only the rows that they read."""
        known = bindings(self._program.inputs, inputs)
        return known | {v: known[source.table] for v, source in self._sources.items()}


def _fetch_rows(
    owners: Devices | None,
    lookups: Sequence[_Lookup],
    tables: Sequence[jax.Array],
    ids: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return the rows of each lookup, (*ids.shape, …), from whole tables, or from the devices of
    `owners` unless it is None."""
    if owners is None:
        return [x.read_whole(t, i) for x, t, i in zip(lookups, tables, ids, strict=True)]
    inside = [jnp.clip(i, 0, count_rows(owners, t) - 1) for t, i in zip(tables, ids, strict=True)]
    rows = lookup_rows(owners, tables, [i.reshape(-1) for i in inside])
    return [
        x.fill_outside(r.reshape(*i.shape, *r.shape[1:]), i == j)
        for x, r, i, j in zip(lookups, rows, ids, inside, strict=True)
    ]


def _within(ids: jax.Array, count: int) -> jax.Array:
    """Return int32 ids unchanged, and ids of another dtype as int32, clipped to −1 and `count`."""
    if ids.dtype == jnp.int32:
        return ids
    limits = jnp.iinfo(ids.dtype)
    return jnp.clip(ids, max(-1, limits.min), min(count, limits.max)).astype(jnp.int32)


def _map_table_paths(program: Equations, paths: Sequence[str | None]) -> dict[Variable, str]:
    """Return the path of each table by its variable, without the inputs whose path is None."""
    return {v: p for v, p in zip(program.inputs, paths, strict=True) if p is not None}


def _find_table_sources(program: Equations, tables: dict[Variable, str]) -> dict[Variable, _Source]:
    """Map each variable that is a table, or a cast, copy or stopped gradient of one, to the table
    and these operations."""
    found = {v: _Source(v, ()) for v in tables}
    for equation in program.equations:
        if primitives.keeps_entries(equation) and (used := _find_used_tables(equation, found)):
            source = found[used[0]]
            found[equation.outvars[0]] = _Source(source.table, (*source.casts, equation))
    return found


def _find_used_tables(equation: Equation, sources: dict[Variable, _Source]) -> list[Variable]:
    """Return the operands of an equation that are tables or casts of tables, each once."""
    return [v for v in variables(equation.invars) if v in sources]


def _find_lookups(
    program: Equations,
    equations: Sequence[Equation],
    sources: dict[Variable, _Source],
    path_of: dict[Variable, str],
) -> list[_Lookup]:
    """Return a `_Lookup` for each equation that looks up rows of a table, and raise a TypeError if
    a table is used in another way or returned.

    Args:
      program: the program.
      equations: the equations of the program that may use tables.
      sources: the variables that are tables or casts of them.
      path_of: the path of each table.
    """
    found = []
    for equation in equations:
        used = _find_used_tables(equation, sources)
        if not used:
            continue
        how = primitives.as_row_lookup(equation) if used == equation.invars[:1] else None
        if how is None:
            raise _make_misuse_error(equation, path_of[sources[used[0]].table])
        found.append(_Lookup(equation, how, sources[used[0]]))
    for v in variables(program.outputs):
        if v in sources:
            raise _make_dense_use_error(path_of[sources[v].table], "it is returned")
    return found


def _make_misuse_error(equation: Equation, path: str) -> TypeError:
    """Return, not raise, the error for an equation that uses a table in another way than to look
    rows up."""
    name, where = primitives.name_of(equation), source_info_util.summarize(equation.source_info)
    if primitives.find_inner_jaxprs(equation):
        return TypeError(
            f"table {path!r} is used inside the body of {name}, where lookups cannot be found "
            f"({where}). Look the rows up before it, and pass them in"
        )
    if primitives.begins_product(equation):
        name += ": a matrix product, as of a tied or one-hot embedding, has a gradient in all rows"
    elif primitives.is_lookup(equation):
        name = f"{name} of other parts than whole rows, one for each integer id"
    return _make_dense_use_error(path, f"{name}; {where}")


def _make_dense_use_error(path: str, use: str) -> TypeError:
    """Return, not raise, the error for a table at `path` that the loss uses as a whole, in the way
    `use`."""
    return TypeError(
        f"table {path!r} can only be looked up, table[ids], but the loss uses it in another way "
        f"({use}). If it has to, leave this leaf out of `tables`; its gradient is then dense"
    )


def _with_lookups_before_checkpoints(
    program: Equations, paths: Sequence[str | None], values: Sequence[Any]
) -> Equations:
    """Retrace a program so that it looks rows up before its checkpoints, which then get no table,
    or return it unchanged if none of them uses a table.

    The arguments are the same as for `TracedLoss`.
    """
    tables = _map_table_paths(program, paths)
    sources = _find_table_sources(program, tables)
    instead = {}
    for e in program.equations:
        checkpoint, used = primitives.as_checkpoint(e), _find_used_tables(e, sources)
        if checkpoint is not None and used:
            path_of = {v: tables[sources[v].table] for v in used}
            inner = [None if isinstance(a, jex.Literal) else path_of.get(a) for a in e.invars]
            instead[id(e)] = partial(_run_checkpoint_on_rows, checkpoint, inner)
    return program.retrace(instead, values) if instead else program


def _run_checkpoint_on_rows(
    checkpoint: Checkpoint, paths: Sequence[str | None], *operands: Value
) -> list[Value]:
    """Run the lookups of a checkpoint outside of it, then the checkpoint with their rows in place
    of tables, and return its results."""
    body = Equations(jex.jaxpr_as_fun(jex.ClosedJaxpr(checkpoint.body, ())), *operands)
    inner = TracedLoss(body, paths, operands)
    dense = [i for i, path in enumerate(paths) if path is None]

    def rest(values: list[Value], rows: list[jax.Array]) -> Any:
        given = dict(zip(dense, values, strict=True))
        return inner.value([given.get(i, x) for i, x in enumerate(operands)], rows)

    _, rows = inner.look_up(operands)
    run = jax.checkpoint(rest, prevent_cse=checkpoint.prevent_cse, policy=checkpoint.policy)
    return jax.tree.leaves(run([operands[i] for i in dense], rows))


def _join_rows(table: Any, parts: Sequence[tuple[jax.Array, jax.Array]]) -> Rows:
    """Join the rows of all lookups of a table into one row-sparse gradient, repeats included, or
    into one row of padding without a lookup.

    Args:
      table: the shape and dtype of the table.
      parts: the indices and the values of rows, of each lookup.
    """
    num_rows, row = table.shape[0], table.shape[1:]
    # If there is no lookup, return one row of padding.
    count = 0 if parts else 1
    indices = [jnp.full(count, num_rows, jnp.int32), *(i for i, _ in parts)]
    values = [jnp.zeros((count, *row), table.dtype), *(g for _, g in parts)]
    return Rows(jnp.concatenate(indices), jnp.concatenate(values), num_rows)
