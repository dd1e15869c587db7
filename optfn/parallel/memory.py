"""The costs of each way of sharding a model: bytes on a device, and bytes sent in a step."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.leaves import tree
from optfn.leaves.types import Params, PyTree
from optfn.mesh import Axes, AxisName, axes, restricted, without
from optfn.parallel.layout import Kind, Layout, Sharded, is_spec, layout_of
from optfn.parallel.owners import coded_bytes
from optfn.parallel.traffic import all_reduce_bytes
from optfn.state.per_worker import exchanged_axes
from optfn.state.placement import num_workers, on_workers_of


class MemoryPlan(NamedTuple):
    """Bytes of a training step on each device.

    params: of the parameters.
    state: of the optimizer's state.
    gradients: of the gradient that each worker computes, before it is reduced.
    sent: by each device in a step, in a ring, for the means that the step takes. The packets of
      a transform that exchanges gradients by itself are not counted.
    """

    params: int
    state: int
    gradients: int
    sent: int


def plan_memory(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh | AbstractMesh,
    *,
    shard: Kind | None = None,
    data_axis: AxisName = "data",
    tables: tree.Pattern | None = None,
    microbatches: int = 1,
) -> MemoryPlan:
    """Return the bytes that a way of sharding a model takes; nothing is allocated.

    With N workers, P bytes of params, G of gradients and S of state:

        shard       params  state  sent
        None        P       S      2(N − 1)/N·G
        "state"     P       S/N    (N − 1)/N·(G + P)
        "params"    P/N     S/N    (N − 1)/N·(G + P), and P once more for a `Stacked`, whose layers
                                   `scan_layers` gathers again in the backward pass

    With `sharded(kind, axis=)` N is the number of devices that divide a leaf; along the other axes
    of `data_axis`, with W workers, each device sends 2(W − 1)/W of its part of G as well. With
    `gather=` or `reduce=` P or G count the bytes of their packets. A leaf that cannot be divided by
    N counts whole, and goes through an all-reduce. Activations and the batch come on top.

    Args:
      tx: an optimizer, however wrapped.
      params: arrays or ShapeDtypeStructs.
      mesh: a mesh, or a `jax.sharding.AbstractMesh` of devices that are not there.
      shard: as for `make_train_step`.
      data_axis: as for `make_train_step`.
      tables: as for `make_train_step`; with `shard` their rows are divided. Their gradients are the
        rows that a batch looks up, which are not counted.
      microbatches: as for `make_train_step`; with "params" each of them gathers params and reduces
        gradients, unless `sharded(..., gather_once=True)`.
    """
    tx = core.check_transform("plan_memory: tx", tx)
    mesh = cast("Mesh", mesh)  # only the sizes of its axes are read
    num_workers(mesh, data_axis)  # the mesh has these axes
    params = jax.eval_shape(lambda x: x, params)
    layout = layout_of(shard, mesh, data_axis, tables if shard is not None else None)
    state = jax.eval_shape(on_workers_of(tx.init, mesh, layout.worker_axes), params)
    specs, grad_specs = layout.of_params(params), layout.of_gradients(params)
    stacked, rows = tree.stacked_axes(params), tree.matching(tables, params, "tables")
    exchanged = exchanged_axes(state, params)
    once = isinstance(shard, Sharded) and shard.gathers_once
    sent, gradients = 0.0, 0
    for place, p, spec, grad_spec in tree.items(params, specs, grad_specs):
        if tree.is_masked(p) or not tree.is_inexact(p) or str(place) in rows:
            continue
        passes = 1 if once else microbatches
        gathers = 2 if stacked[place.number] and not once else 1
        layers = int(np.prod(p.shape[: stacked[place.number]], dtype=np.int64)) if not once else 1
        leaf = _Leaf(
            layout, bool(layout.divisions(spec)), bool(layout.divisions(grad_spec)), p.size, layers
        )
        whole = _bytes_on_device(p, _outside(grad_spec, layout.data_axes), mesh)
        sent += leaf.sent(whole, passes, gathers, exchanged[place.number])
        gradients += whole
    return MemoryPlan(
        _bytes_on_device(params, specs, mesh),
        _bytes_on_device(state, layout.of_state(state, params), mesh),
        gradients,
        round(sent),
    )


class _Leaf(NamedTuple):
    """Whether a leaf of params is divided over the part axes, and whether its gradient is.

    size: the number of its elements.
    layers: in how many pieces it is gathered for the loss, and its gradient reduced.
    """

    layout: Layout
    is_divided: bool
    has_divided_gradient: bool
    size: int
    layers: int

    def sent(self, whole: float, passes: int, gathers: int, exchanged: Axes) -> float:
        """Return the bytes that a device sends.

        Args:
          whole: the bytes of the leaf before the data axes divide it.
          passes: how often a divided leaf is gathered for the loss, and its gradient reduced.
          gathers: how many gathers that takes.
          exchanged: the axes over which a transform exchanges its gradient.
        """
        mesh, parts = self.layout.mesh, self.layout.num_parts
        workers = num_workers(mesh, without(self.layout.worker_axes, exchanged))
        if not self.has_divided_gradient:
            return float(all_reduce_bytes(whole, parts) + all_reduce_bytes(whole, workers))
        layers = self.layers if self.is_divided else 1
        gather, reduce = (
            coded_bytes(codec, self.size, parts, whole, layers)
            for codec in (self.layout.gather, self.layout.reduce)
        )
        over_parts = passes * (reduce + gathers * gather) if self.is_divided else reduce + gather
        return float(over_parts + all_reduce_bytes(whole / parts, workers))


def _outside(spec: P, names: Axes) -> P:
    """Return a PartitionSpec without these axes."""
    return restricted(spec, {a for entry in spec for a in axes(entry) if a not in names})


def _bytes_on_device(values: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Return the bytes of arrays on each device."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    return sum(
        int(np.prod(x.shape, dtype=np.int64)) * jnp.dtype(x.dtype).itemsize
        // num_workers(mesh, tuple(axis for entry in spec for axis in axes(entry)))
        for x, spec in pairs
    )  # fmt: skip
