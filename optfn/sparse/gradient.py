"""Row-sparse gradients of tables: `value_and_grad`, `densify`.

An embedding table may have millions of rows, of which a step looks up thousands. `value_and_grad`
returns the gradient of such a leaf as the rows that were looked up, without an array of the size of
the table.
"""

from collections.abc import Callable
from typing import Any

import jax

from optfn import core
from optfn.leaves import leafwise, tree
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Params, Updates
from optfn.sparse.lookups import LossOfTables
from optfn.sparse.tables import Owners


@core.transform(complex_leaves=True)
def densify() -> core.Rule:
    """Make row-sparse gradients dense, for third-party transforms that follow.

    Each row-sparse leaf becomes an array of the size of the table. No state. Real and complex
    leaves.
    """
    return core.stateless(lambda updates, params: leafwise.to_dense(updates))


def value_and_grad(
    loss_fn: Callable[..., Any],
    tables: Pattern,
    *,
    has_aux: bool = False,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    owners: Owners | None = None,
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients, row-sparse for tables.

    Like `jax.value_and_grad` for the first argument, except for the leaves that `tables` selects:
    inside `loss_fn` they are `Table`s, and their gradient is `Rows` with an entry for each id that
    was looked up. No array of the size of a table is made.

    Args:
      loss_fn: (params, *args) -> loss, or (loss, aux). It may look up inside jit and vmap; inside
        the body of a scan, a cond or a checkpoint a lookup is an error: look up before it.
      tables: a regular expression that matches the whole path of each table, or path -> bool.
      has_aux: whether `loss_fn` returns auxiliary data too.
      transform: a transformation of the rest of the loss, after its lookups, such as a `recompute`
        of names in it; a segment that is recomputed cannot contain a lookup.
      owners: the workers that keep the rows of the tables, where it runs inside their `shard_map`
        on parts of them; gradients of tables are then the parts of the mean. `make_train_step`
        with `shard_tables=True` passes it.

    Returns:
      (params, *args, **kwargs) -> (loss, gradients), or ((loss, aux), gradients); jit-able.

    Raises:
      ValueError: the pattern matches no leaf.
      TypeError: a table that is not a floating-point array with rows, ids that are not integers, or
        any use of a table but a lookup.

    >>> import jax.numpy as jnp
    >>> params = {"table": jnp.ones((1000, 2)), "w": jnp.ones(2)}
    >>> loss = lambda p, ids: jnp.sum(p["table"][ids] @ p["w"])
    >>> value, grads = value_and_grad(loss, "table")(params, jnp.array([3, 5, 3]))
    >>> grads["table"].indices.tolist(), grads["table"].num_rows
    ([3, 5, 3], 1000)
    """
    pattern = tree.check_pattern("tables", tables)
    if pattern is None:
        raise TypeError("tables must be a pattern of leaf paths; got None")

    def value_and_rows(params: Params, *args: Any, **kwargs: Any) -> tuple[Any, Updates]:
        loss = LossOfTables(lambda p: loss_fn(p, *args, **kwargs), params, pattern, owners)
        arrays, structure = jax.tree.flatten(params)  # masked leaves are part of the structure
        known = dict(zip(loss.inputs, arrays, strict=True))
        dense = [v for v in loss.inputs if v not in loss.tables]

        def of_rows(values: list[jax.Array], rows: list[jax.Array]) -> Any:
            return loss.value(known | dict(zip(dense, values, strict=True)), rows)

        ids, rows = loss.look_up(known)
        value, (grads, row_grads) = jax.value_and_grad(
            of_rows if transform is None else transform(of_rows),
            argnums=(0, 1),
            has_aux=has_aux,
            allow_int=True,
        )([known[v] for v in dense], rows)
        found: dict[Any, Any] = loss.gradients(ids, row_grads) | dict(
            zip(dense, grads, strict=True)
        )
        if owners is not None:
            found |= {v: owners.send(found[v]) for v in loss.tables}
        return value, jax.tree.unflatten(structure, [found[v] for v in loss.inputs])

    return value_and_rows
