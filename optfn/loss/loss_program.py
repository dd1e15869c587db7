"""A loss as a program on its params: whole arrays, tables, and shards that a device keeps.

JAX traces the loss once, for whole params, and then equations decide:

    an equation reads rows of a table     the rows are looked up before, and have the gradient
    it uses a table in another way        a TypeError, with the line of the loss
    it needs a sharded param              the param is gathered
    a scan takes a stack of such params   its body gathers a layer at a time

`lookups.py` finds the first two, `loss/jaxprs/sharded.py` the last two.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optfn.core import leafwise, tree
from optfn.core.types import Leaf, Params, Updates
from optfn.leaves import patterns
from optfn.leaves.patterns import Pattern
from optfn.loss.jaxprs.equations import Equations, read, shapes_of
from optfn.loss.jaxprs.sharded import has_scan_over_arrays
from optfn.loss.jaxprs.sharded_param import ShardedParam, gather_params, is_sharded_param
from optfn.loss.lookups import TracedLoss
from optfn.mesh.collectives.devices import Devices
from optfn.tables.rows import check_num_rows
from optfn.tables.tables import count_rows, send_gradients


class LossProgram:
    """A loss as a program on its params, traced once. Without tables and ShardedParams the loss
    function is called instead.

    Args:
      loss_fn: params -> loss, or (loss, aux).
      params: the params. A leaf may be a ShardedParam; the loss gets its whole array.
      tables: the pattern of the paths of tables; None if there are none.
      owners: the devices that keep the rows, if params have shards of tables; None if these are
        whole.

    Raises:
      TypeError: a table is not a floating-point array with rows, or the loss does something else
        with a table than to look rows up.
    """

    def __init__(
        self,
        loss_fn: Callable[[Params], Any],
        params: Params,
        tables: Pattern | None = None,
        owners: Devices | None = None,
    ) -> None:
        self._loss_fn, self._owners = loss_fn, owners
        self._counts: jax.Array | None = None
        self._leaves, self._structure = jax.tree.flatten(params, is_leaf=is_sharded_param)
        self._program: TracedLoss | None = None
        self._equations: Equations | None = None
        if tables is not None or any(map(is_sharded_param, self._leaves)):
            self._equations, self._program = self._trace(params, tables)

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward pass itself averages gradients, in gathers of params or at the
        owners of rows."""
        return self._owners is not None or any(map(is_sharded_param, self._leaves))

    def with_counts(self, params: Params, counts: jax.Array) -> "LossProgram":
        """Return a copy of this program at `params`, not traced again, whose gradients are zeros
        where `counts` is false.

        Args:
          params: the same params, whose shards know `counts` too.
          counts: whether this device's gradients count.
        """
        program = copy.copy(self)
        program._leaves = jax.tree.leaves(params, is_leaf=is_sharded_param)
        program._counts = counts
        return program

    def _trace(self, params: Params, tables: Pattern | None) -> tuple[Equations, TracedLoss | None]:
        """Trace the loss, and return its equations with the `TracedLoss` that runs them, or with
        None if it has neither tables nor scans over arrays.

        Without a `TracedLoss` the loss runs on gathered params.
        """
        whole = jax.tree.map(_whole_shape, params, is_leaf=is_sharded_param)
        chosen = patterns.match_names(tables, whole, "tables")

        def enter(place: tree.Place, x: Leaf) -> Leaf:
            if str(place) not in chosen:
                return x
            _check_table(str(place), x)
            if self._owners is not None:
                # The whole table: in a shard, negative ids would count from its end.
                shape = count_rows(self._owners, x), *x.shape[1:]
                x = jax.ShapeDtypeStruct(shape, x.dtype)
            check_num_rows(f"table {str(place)!r} has", x.shape[0])
            return x

        traced = tree.map_named(enter, whole)
        # Lookups are found among equations outside of calls, so jitted functions are inlined for
        # tables. For params alone they stay calls, which `run_on_shards` enters.
        program = Equations(self._loss_fn, traced, inline=bool(chosen))
        if not chosen and not has_scan_over_arrays(program.equations):
            return program, None
        paths = [path if path in chosen else None for path in tree.array_paths(whole)]
        return program, TracedLoss(program, paths, jax.tree.leaves(traced), self._owners)

    @property
    def shapes(self) -> Any:
        """The shapes and dtypes of the result, of a loss that was traced."""
        assert self._equations is not None
        return self._equations.shapes

    def value_of_last(self) -> Any:
        """Return the last leaf of the result of a loss that was traced, at these params, by the
        equations of this leaf alone if no param decides it, which leaves out the loss's side
        effects."""
        assert self._equations is not None
        inputs = shapes_of(self._equations.inputs)
        program = self._equations.retrace({}, inputs)
        last = program.outputs[-1:]
        if program.find_dependencies(last).isdisjoint(program.inputs):
            (value,) = read(program.run(program.find_equations(last), {}), last)
            return value
        rows = [] if self._program is None else self._program.look_up(self._leaves)[1]
        return jax.tree.leaves(self._value(self._leaves, rows))[-1]

    def value_and_grad(
        self,
        has_aux: bool = False,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> tuple[Any, Updates]:
        """Run the loss and its backward pass, and return its result and the gradients, a tree like
        params, with `Rows` for tables and gradients of shards for ShardedParams.

        Rows are sent to their owners if there are some. Gradients of a program `with_counts` are
        zeros if they do not count.

        Args:
          has_aux: whether the loss returns auxiliary data too.
          transform: a transformation of the loss after its lookups; None leaves it unchanged.
        """
        program = self._program
        tables = [] if program is None else program.tables
        dense = [i for i in range(len(self._leaves)) if i not in tables]
        ids, rows = ([], []) if program is None else program.look_up(self._leaves)

        def loss_of_rows(values: Sequence[Any], rows: list[jax.Array]) -> Any:
            given = dict(zip(dense, values, strict=True))
            return self._value([given.get(i, x) for i, x in enumerate(self._leaves)], rows)

        value, (grads, row_grads) = jax.value_and_grad(
            loss_of_rows if transform is None else transform(loss_of_rows),
            argnums=(0, 1),
            has_aux=has_aux,
            allow_int=True,
        )([self._leaves[i] for i in dense], rows)
        # The gather of a ShardedParam knows whether this device's gradient counts.
        found = {
            i: g.shard.array if isinstance(g, ShardedParam) else leafwise.keep_if(self._counts, g)
            for i, g in zip(dense, grads, strict=True)
        }
        if program is not None:
            of_tables = program.gradients(ids, row_grads)
            kept = [leafwise.keep_if(self._counts, g) for g in of_tables.values()]
            if self._owners is not None:
                kept = send_gradients(self._owners, kept)
            found |= dict(zip(of_tables, kept, strict=True))
        return value, jax.tree.unflatten(self._structure, [found[i] for i in sorted(found)])

    def whole_params(self) -> Params:
        """Return the params, with the shape and dtype of the whole array in place of each
        ShardedParam."""
        return jax.tree.unflatten(self._structure, map(_whole_shape, self._leaves))

    def evaluate(self, params: Params) -> Any:
        """Run the traced loss on whole params, or call the loss function if it was not traced, and
        return the result."""
        if self._equations is None:
            return self._loss_fn(params)
        return self._equations.evaluate(jax.tree.leaves(params))

    def _value(self, leaves: Sequence[Any], rows: list[jax.Array]) -> Any:
        """Return the loss from the leaves of params and the rows looked up, by its `TracedLoss`, or
        without one on params that are gathered first."""
        if self._program is not None:
            return self._program.value(leaves, rows)
        return self.evaluate(jax.tree.unflatten(self._structure, gather_params(leaves)))


def _whole_shape(x: Leaf) -> Leaf:
    """Return the shape and dtype of the whole array of a ShardedParam, or the leaf itself."""
    return x.shard.whole_type() if isinstance(x, ShardedParam) else x


def _check_table(path: str, leaf: Leaf) -> None:
    """Raise a TypeError unless a table is a floating-point array with at least one row."""
    if not tree.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        came = leaf.dtype if tree.is_array(leaf) else type(leaf).__name__
        raise TypeError(f"table {path!r} must be a floating-point array; got {came}")
    if not leaf.ndim or not leaf.shape[0]:
        raise TypeError(f"table {path!r} must have rows; got shape {leaf.shape}")
