"""How many bytes a worker sends in a step, by formula.

A transform that exchanges by itself says so in its state, in the `traffic` of its `Exchanged`: an
object without arrays that is a static node of a tree,

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class MyTraffic:
        packet: int

        def bytes_sent(self, exchange, num_workers):
            return (num_workers - 1) * self.packet

where `exchange` is the number of the exchange, the `step` of the state, which counts them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optfn import mesh
from optfn.leaves import tree
from optfn.leaves.types import LeafKind, OptState, Updates
from optfn.mesh import AxisName
from optfn.state.per_worker import Exchanged, nodes_of, own_leaves


def all_reduce_bytes(size: float, num_workers: int | jax.Array) -> float | jax.Array:
    """Return the bytes that each worker sends in a ring's all-reduce of `size` bytes."""
    return 2 * (num_workers - 1) / num_workers * size


def metrics(
    grads: Updates, before: OptState, after: OptState, axis_name: AxisName
) -> dict[str, jax.Array]:
    """Return the bytes that a worker sends for an update as "bytes_sent"; {} if not known.

    Leaves that no transform exchanges by itself are averaged in an all-reduce. What is not known
    are row-sparse gradients, and transforms that do not say.

    Args:
      grads: one worker's gradients.
      before: the state of the optimizer that gets them.
      after: its state after the update.
      axis_name: the mesh axes of the workers.
    """
    leaves = tree.flatten(grads)[0]
    states = list(zip(_exchanging(before), _exchanging(after), strict=True))
    is_known = len(states) == len(nodes_of(Exchanged, after)) and all(
        new.exchanged.traffic != () for _, new in states
    )
    if not is_known or any(isinstance(g, LeafKind) for g in leaves):
        return {}
    pairs = zip(leaves, own_leaves(before, grads), strict=True)
    averaged = sum(g.size * g.dtype.itemsize for g, is_own in pairs if _is_averaged(g, is_own))
    total = jnp.asarray(all_reduce_bytes(averaged, mesh.axis_size(axis_name)), jnp.float32)
    for old, new in states:
        sent = new.exchanged.traffic.bytes_sent(old.step, new.num_workers)
        total += jnp.where(new.step != old.step, sent, 0.0)
    return {"bytes_sent": total}


def _is_averaged(g: Any, is_own: bool) -> bool:
    return not is_own and not tree.is_masked(g) and tree.is_inexact(g)


def _exchanging(state: OptState) -> list[Any]:
    """Return the states of transforms that exchange by themselves and count their exchanges."""

    def is_one(x: Any) -> bool:
        return isinstance(getattr(x, "exchanged", None), Exchanged) and hasattr(x, "step")

    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
