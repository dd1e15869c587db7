"""How many bytes a worker sends in a step, by formula.

A transform that exchanges gradients by itself says so in its state, in the `traffic` of its
`Exchanged`: an object without arrays that is a static node of a tree,

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class MyTraffic:
        packet: int

        def bytes_sent(self, exchange, num_workers):
            return (num_workers - 1) * self.packet

where `exchange` is the number of the exchange, the `step` of the state, which counts them, as an
array, and `num_workers` a Python number.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from optfn import mesh
from optfn.leaves import tree
from optfn.leaves.types import LeafKind, OptState, Updates
from optfn.mesh import Axes
from optfn.state.per_worker import Exchanged, exchanged_axes, nodes_of
from optfn.state.placement import num_workers


def all_reduce_bytes(size: float, num_workers: int | jax.Array) -> float | jax.Array:
    """Return the bytes that each worker sends in a ring's all-reduce of `size` bytes."""
    return 2 * (num_workers - 1) / num_workers * size


def traffic_metrics(
    grads: Updates, before: OptState, after: OptState, axis_name: Axes
) -> dict[str, jax.Array]:
    """Return the bytes that a worker sends for an update as "bytes_sent"; {} if not known.

    Leaves are averaged in an all-reduce over the axes over which no transform exchanges them by
    itself. Not known are row-sparse gradients, and transforms that do not say.

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
    total = jnp.zeros((), jnp.float32)
    for g, done in zip(leaves, exchanged_axes(before, grads), strict=True):
        if not tree.is_masked(g) and tree.is_inexact(g):
            workers = mesh.axis_size(mesh.without(axis_name, done))
            total += all_reduce_bytes(g.size * g.dtype.itemsize, workers)
    for old, new in states:
        workers = mesh.axis_size(new.exchanged.axes)
        sent = new.exchanged.traffic.bytes_sent(old.step, workers)
        total += jnp.where(new.step != old.step, sent, 0.0)
    return {"bytes_sent": total}


def packets_sent(state: OptState, mesh: Mesh) -> float:
    """Return the bytes of the packets that a worker sends in a late step, of those that say.

    Args:
      state: that of an optimizer, arrays or their shapes.
      mesh: the mesh of the workers, of which only the sizes of the axes are read.
    """
    late = 2**30
    nodes = [x.exchanged for x in _exchanging(state)]
    return sum(
        float(node.traffic.bytes_sent(jnp.int32(late), num_workers(mesh, node.axes)))
        for node in nodes
        if node.traffic != ()
    )


def _exchanging(state: OptState) -> list[Any]:
    """Return the states of transforms that exchange gradients by themselves and count exchanges."""

    def is_one(x: Any) -> bool:
        return isinstance(getattr(x, "exchanged", None), Exchanged) and hasattr(x, "step")

    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
