"""A loss as a program on its params, of which some are tables, or shards that a device keeps.

JAX traces the loss once, for whole params, and then equations decide:

    an equation reads rows of a table     the rows are looked up before, and have the gradient
    it uses a table in another way        a TypeError, with the line of the loss
    it needs a sharded param              the param is gathered
    a scan takes a stack of such params   its body gathers a layer at a time

`lookups.py` finds the first two, `jaxprs/sharded.py` the last two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optfn.collectives.devices import Devices
from optfn.core import tree
from optfn.core.types import Leaf, Params, Updates
from optfn.jaxprs.equations import Environment, Equations, bindings
from optfn.jaxprs.sharded import ShardedParam, gather_params, is_sharded, has_scan_over_arrays
from optfn.leaves import patterns
from optfn.leaves.patterns import Pattern
from optfn.sparse.lookups import Lookups
from optfn.sparse.tables import count_rows, send_gradients


class LossProgram:
    """A loss as a program on its params.

    Args:
      loss_fn: params -> loss, or (loss, aux).
      params: the params. A leaf may be a ShardedParam; the loss is traced for its whole array.
      tables: the pattern of the paths of tables; None if there are none.
      owners: the workers that keep the rows, if params have shards of tables; None if these are
        whole.

    Raises:
      TypeError: a table is not a floating-point array with rows, or the loss does something else
        with a table than to look rows up.
    """

    def __init__(
        self,
        loss_fn: Callable[[Params], Any],
        params: Params,
        tables: Pattern | None,
        owners: Devices | None,
    ) -> None:
        self._loss_fn, self._owners = loss_fn, owners
        self._leaves, self._structure = jax.tree.flatten(params, is_leaf=is_sharded)
        whole = jax.tree.map(_whole_shape, params, is_leaf=is_sharded)
        chosen = patterns.match_names(tables, whole, "tables")

        def enter(place: tree.Place, x: Leaf) -> Leaf:
            if str(place) not in chosen:
                return x
            _check_table(str(place), x)
            # In a shard, negative ids would count from its end.
            return x if owners is None else _divided_table_shape(x, owners)

        traced = tree.map_named(enter, whole)
        paths = [path if path in chosen else None for path in tree.array_paths(whole)]
        program = Equations(loss_fn, traced, inline=bool(chosen))
        self._is_read = bool(chosen) or has_scan_over_arrays(program.equations)
        self._lookups = Lookups(program, paths, jax.tree.leaves(traced), owners)

    def value(self) -> Any:
        """Return the loss at the params."""
        known = self._known
        return self._value(known, self._lookups.look_up(known)[1])

    def value_and_grad(
        self,
        has_aux: bool = False,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> tuple[Any, Updates]:
        """Return the loss at the params and its gradients, a tree like params.

        The gradient of a table is `Rows`, at their owners if there are some. The gradient of a
        ShardedParam is the gradient of its shard.

        Args:
          has_aux: whether the loss returns auxiliary data too.
          transform: a transformation of the loss after its lookups; None leaves it as it is.
        """
        lookups, known = self._lookups, self._known
        dense = [v for v in lookups.inputs if v not in lookups.tables]

        def loss_of_rows(values: Sequence[Any], rows: list[jax.Array]) -> Any:
            return self._value(known | bindings(dense, values), rows)

        ids, rows = lookups.look_up(known)
        value, (grads, row_grads) = jax.value_and_grad(
            loss_of_rows if transform is None else transform(loss_of_rows),
            argnums=(0, 1),
            has_aux=has_aux,
            allow_int=True,
        )([known[v] for v in dense], rows)
        grads = [g.shard.array if isinstance(g, ShardedParam) else g for g in grads]
        found: Environment = lookups.gradients(ids, row_grads) | bindings(dense, grads)
        if self._owners is not None:
            found |= {v: send_gradients(self._owners, found[v]) for v in lookups.tables}
        return value, jax.tree.unflatten(self._structure, [found[v] for v in lookups.inputs])

    @property
    def _known(self) -> Environment:
        """The values of the inputs."""
        return bindings(self._lookups.inputs, self._leaves)

    def _value(self, known: Environment, rows: list[jax.Array]) -> Any:
        if self._is_read:
            return self._lookups.value(known, rows)
        # Tracing the loss again is faster than running its equations one by one.
        arrays = gather_params(known[v] for v in self._lookups.inputs)
        return self._loss_fn(jax.tree.unflatten(self._structure, arrays))


def _whole_shape(x: Leaf) -> Leaf:
    """Return the shape and dtype of the whole array of a ShardedParam; another leaf as it is."""
    return jax.eval_shape(ShardedParam.gather, x) if isinstance(x, ShardedParam) else x


def _divided_table_shape(shard: Leaf, owners: Devices) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count_rows(owners, shard), *shard.shape[1:]), shard.dtype)


def _check_table(path: str, leaf: Leaf) -> None:
    if not tree.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        came = leaf.dtype if tree.is_array(leaf) else type(leaf).__name__
        raise TypeError(f"table {path!r} must be a floating-point array; got {came}")
    if not leaf.ndim or not leaf.shape[0]:
        raise TypeError(f"table {path!r} must have rows; got shape {leaf.shape}")
