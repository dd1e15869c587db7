"""Row-sparse gradients of tables: `value_and_grad`, `densify`.

An embedding table may have millions of rows, but a step looks up only thousands. `value_and_grad`
returns the gradient of such a leaf as rows, one for each lookup, without an array of the size of
the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from optfn import core
from optfn.core import checks, leafwise
from optfn.core.traits import traits
from optfn.core.types import Params, Updates
from optfn.leaves import patterns
from optfn.leaves.patterns import Pattern
from optfn.loss.loss_program import LossProgram
from optfn.mesh.collectives.devices import Devices


@traits(link="pass")
class DensifyState(NamedTuple):
    """State of `densify`: empty."""


@core.transform(complex_leaves=True)
def densify() -> core.Unchecked:
    """Return a transformation that turns each row-sparse update into an array of the size of the
    table.

    For third-party transforms that come after it. No state. Real and complex leaves.
    """
    return core.stateless(lambda updates, params: leafwise.densify_rows(updates), DensifyState())


def value_and_grad(
    loss_fn: Callable[..., Any],
    tables: Pattern,
    *,
    has_aux: bool = False,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    owners: Devices | None = None,
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients, `Rows` for the leaves of `tables`,
    and raises an error if the loss does more with a table than look rows up.

    It is like `jax.value_and_grad` for the first argument, except for the leaves that `tables`
    selects. `loss_fn` may cast these and look up whole rows, as `table[ids]`, `jnp.take` and the
    embedding layers of flax, haiku and equinox do. Their gradients are `Rows` with an entry for
    each id that was looked up, so that no array of the size of a table is made. `make_train_step`
    and `minimize` do this with their argument `tables`.

    Args:
      loss_fn: a function (params, *args) -> loss, or (loss, aux). Lookups may be inside jit and
        vmap, and inside a checkpoint, which then keeps their rows. Inside the body of a scan or a
        cond they are an error: look rows up before it, and pass them in.
      tables: a regular expression that matches the whole path of each table, or a function
        path -> bool.
      has_aux: whether `loss_fn` returns auxiliary data too.
      transform: a transformation of the loss after its lookups, such as a `recompute` of names in
        it. A segment that is recomputed cannot contain a lookup.
      owners: the devices that keep the rows of the tables. `make_train_step` with
        `shard_tables=True` passes it, inside a `shard_map` over shards of the tables; gradients of
        tables are then shards of the mean.

    Returns:
      A function (params, *args, **kwargs) -> (loss, gradients), or ((loss, aux), gradients), which
      can be jitted.

    Raises:
      ValueError: the pattern matches no leaf.
      TypeError: a table is not a floating-point array with rows, or the loss does something else
        with a table than to look rows up; the error names the operation and its line.

    >>> import jax.numpy as jnp
    >>> params = {"table": jnp.ones((1000, 2)), "w": jnp.ones(2)}
    >>> loss = lambda p, ids: jnp.sum(p["table"][ids] @ p["w"])
    >>> value, grads = value_and_grad(loss, "table")(params, jnp.array([3, 5, 3]))
    >>> grads["table"].indices.tolist(), grads["table"].num_rows
    ([3, 5, 3], 1000)
    """
    checks.instance("loss_fn", loss_fn, Callable, "a function (params, *args)")
    pattern = patterns.check_pattern("tables", tables)
    if pattern is None:
        raise TypeError("tables must be a pattern of the paths of leaves; got None")

    def value_and_rows(params: Params, *args: Any, **kwargs: Any) -> tuple[Any, Updates]:
        def loss(params: Params) -> Any:
            return loss_fn(params, *args, **kwargs)

        return LossProgram(loss, params, pattern, owners).value_and_grad(has_aux, transform)

    return value_and_rows
