"""The number of bytes that a worker sends in a step, by formula.

A transform that exchanges gradients itself gives this number by the `traffic` of the `Exchanged` in
its state, a hashable object:

    @dataclasses.dataclass(frozen=True)
    class MyTraffic:
        packet: int

        def bytes_sent(self, exchange, num_workers):
            return (num_workers - 1) * self.packet

Here `exchange` is the number of the exchange, an array that the `step` of the state counts, and
`num_workers` is a Python number. `TrainStep.init` warns if the object has a property
`compresses_nothing` that is true.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optfn.core import tree
from optfn.core.checks import warn
from optfn.core.types import LeafKind, OptState, Updates
from optfn.mesh.collectives.axes import Axes, axis_size, exclude_axes
from optfn.mesh.state.per_worker import Exchanged, find_exchange_axes, find_nodes


def all_reduce_bytes(size: float, num_workers: int | jax.Array) -> float | jax.Array:
    """Return the bytes that each worker sends in a ring all-reduce of `size` bytes:
    2(N − 1)/N·size."""
    return 2 * (num_workers - 1) / num_workers * size


def traffic_metrics(
    grads: Updates, before: OptState, after: OptState, axis_name: Axes
) -> dict[str, jax.Array]:
    """Return the bytes that a worker sends in a step, as "bytes_sent", or {} if a gradient is
    row-sparse or a transform does not give its traffic.

    Over the axes without an exchange, an all-reduce averages each leaf.

    Args:
      grads: the gradients of one worker.
      before: the state of the optimizer before the update.
      after: the state of the optimizer after the update.
      axis_name: the mesh axes of the workers.
    """
    leaves = tree.leaves(grads)
    states = list(zip(_find_exchanges(before), _find_exchanges(after), strict=True))
    # A mark that lies in no such state has no step, and so no traffic that we could ask for.
    marks = [new.exchanged for _, new in states]
    have_traffic = all(mark.traffic != () for mark in marks)
    is_known = have_traffic and len(marks) == len(find_nodes(Exchanged, after))
    if not is_known or any(isinstance(g, LeafKind) for g in leaves):
        return {}
    total = jnp.zeros((), jnp.float32)
    for g, done in zip(leaves, find_exchange_axes(before, grads), strict=True):
        if not tree.is_masked(g) and tree.is_inexact(g):
            workers = axis_size(exclude_axes(axis_name, done))
            total += all_reduce_bytes(g.size * g.dtype.itemsize, workers)
    # A state that does not count on has exchanged nothing in this step.
    for old, new in states:
        workers = axis_size(new.exchanged.axes)
        sent = new.exchanged.traffic.bytes_sent(old.step, workers)
        total += jnp.where(new.step != old.step, sent, 0.0)
    return {"bytes_sent": total}


def warn_if_nothing_compressed(state: OptState) -> None:
    """Warn if a transform that should compress gradients says that it compresses no leaf, as when
    all are smaller than its `min_size`."""
    if any(getattr(x.traffic, "compresses_nothing", False) for x in find_nodes(Exchanged, state)):
        warn(
            "tx: gradients are sent as they are, although it has deep gradient compression: every "
            "leaf has fewer elements than its min_size, or is wider than float32. Pass a smaller "
            "min_size, cast params to float32, or leave it out"
        )


def _find_exchanges(state: OptState) -> list[Any]:
    """Return the states of transforms that exchange and count steps, with both an `exchanged` mark
    and a `step`."""

    def is_counting(x: Any) -> bool:
        return isinstance(getattr(x, "exchanged", None), Exchanged) and hasattr(x, "step")

    return [x for x in jax.tree.leaves(state, is_leaf=is_counting) if is_counting(x)]
