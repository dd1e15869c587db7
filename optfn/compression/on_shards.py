"""An exchange between workers that are groups of devices: each device exchanges its shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import OptState, Params, Updates
from optfn.state.per_worker import Divided, PerWorker
from optfn.workers import Group

# (updates, state, params) -> (updates, state)
Update = Callable[[Updates, OptState, Params | None], tuple[Updates, OptState]]


def update_on_shards(
    update: Update, updates: Updates, state: Any, params: Params | None, group: Group | None
) -> tuple[Updates, OptState]:
    """Return the result of an update that each device computes on its shards of the arrays.

    Args:
      update: the update of one worker; it takes flat per-worker arrays.
      updates: the gradients of one worker.
      state: the worker's state, a NamedTuple. Its per-worker arrays are flat, or have the shape of
        the leaf if that is divided.
      params: the params, or None.
      group: the devices of a worker; None if a worker is one device.
    """

    def run(updates: Updates, state: Any, params: Params | None) -> tuple[Updates, OptState]:
        flat = _map_private(lambda x: jax.tree.map(jnp.ravel, x), state)
        updates, new = update(updates, flat, params)
        old = iter([x.value for x in state if isinstance(x, PerWorker | Divided)])
        return updates, _map_private(lambda x: jax.tree.map(_reshaped, x, next(old)), new)

    if group is None:
        return run(updates, state, params)
    specs = group.specs_of(updates), _specs_of_state(state, updates, group)
    param_specs = None if params is None else group.specs_of(params)
    result: tuple[Updates, OptState] = group.mapped(run, (*specs, param_specs), specs)(
        updates, state, params
    )
    return result


def _map_private(fn: Callable[[Any], Any], state: Any) -> Any:
    """Map the trees of per-worker arrays among the fields of a state."""

    def mapped(x: Any) -> Any:
        return x._replace(value=fn(x.value)) if isinstance(x, PerWorker | Divided) else x

    return type(state)(*map(mapped, state))


def _reshaped(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(like.shape)


def _specs_of_state(state: Any, updates: Updates, group: Group) -> Any:
    """Return the PartitionSpecs of a state; fields like the params are divided like them."""
    structure = tree.flatten(updates)[1]

    def field_specs(x: Any) -> Any:
        if isinstance(x, PerWorker):
            return x._replace(value=group.specs_of(x.value))
        if isinstance(x, Divided):
            return x._replace(value=group.row_specs(x.value))
        return group.specs_of(x) if tree.flatten(x)[1] == structure else P()

    return type(state)(*map(field_specs, state))
