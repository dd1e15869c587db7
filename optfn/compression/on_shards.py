"""An exchange between shard groups: each device of a worker exchanges its shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import OptState, Params, Updates
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.state.per_worker import Divided, PerWorker

# (updates, state, params, weight) -> (updates, state)
Update = Callable[[Updates, OptState, Params | None, jax.Array | None], tuple[Updates, OptState]]


def update_on_shards(
    update: Update,
    updates: Updates,
    state: Any,
    params: Params | None,
    weight: jax.Array | None,
    group: Devices | None,
    flat: tuple[type, ...] = (PerWorker, Divided),
) -> tuple[Updates, OptState]:
    """Run `update` on each device's shards if `group` is given, else on one worker's whole arrays,
    with state fields of the `flat` kinds raveled for it and reshaped after it.

    Args:
      update: the update of one worker.
      updates: the gradients of one worker.
      state: the worker's state, a NamedTuple. Its per-worker arrays have the shape of the leaf if
        that is divided.
      params: the params, or None.
      weight: the weight of the update, or None.
      group: the devices of a worker; None if a worker is one device.
      flat: the kinds of fields whose arrays `update` takes flat.
    """

    def run(
        updates: Updates, state: Any, params: Params | None, weight: jax.Array | None
    ) -> tuple[Updates, OptState]:
        def map_fields(fn: Callable[..., Any], *states: Any) -> Any:
            """Map the fields of these types, and take the rest from the first state."""
            fields = zip(*states, strict=True)
            return type(state)(*(fn(*x) if isinstance(x[0], flat) else x[0] for x in fields))

        def restore_shape(new: Any, old: Any) -> Any:
            """Give raveled arrays the shapes that they had before."""
            return jax.tree.map(lambda x, like: x.reshape(like.shape), new, old)

        # Shards have the leaf's axes, but packets and searches take flat arrays.
        raveled = map_fields(lambda x: jax.tree.map(jnp.ravel, x), state)
        updates, new = update(updates, raveled, params, weight)
        return updates, map_fields(restore_shape, new, state)

    if group is None:
        return run(updates, state, params, weight)
    specs = group.specs_of(updates), _specs_of_state(state, updates, group)
    param_specs = None if params is None else group.specs_of(params)
    in_specs = *specs, param_specs, None if weight is None else P()
    return group.shard_map(run, in_specs, specs)(updates, state, params, weight)


def _specs_of_state(state: Any, updates: Updates, group: Devices) -> Any:
    """Return a state's PartitionSpecs, where per-worker fields and fields with the tree of the
    updates are divided as their leaves are, and the rest is replicated."""
    structure = tree.flatten(updates)[1]

    def field_specs(x: Any) -> Any:
        if isinstance(x, PerWorker):
            return x._replace(value=group.specs_of(x.value))
        if isinstance(x, Divided):
            return x._replace(value=group.specs_of_flat_shards(x.value))
        # Such as the velocity of dense leaves; scalars have another structure.
        return group.specs_of(x) if tree.flatten(x)[1] == structure else P()

    return type(state)(*map(field_specs, state))
