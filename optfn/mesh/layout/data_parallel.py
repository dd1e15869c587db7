"""Data parallelism: the workers split the batch, and the loss is the mean over workers.

The whole step runs in one `shard_map` over the worker axes, if there are any; along shard axes only
the objective does (`optfn/loss/objective.py`). The optimizer gets the mean gradient, the same on
all workers. If its state says that it exchanges gradients itself (`per_worker.has_exchange`), it
gets each worker's gradient instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, tree
from optfn.core.types import Batch, DType, Leaf, OptState, PyTree, Updates
from optfn.mesh.collectives import mesh as meshes
from optfn.mesh.collectives.axes import Axes, exclude_axes, join_axes
from optfn.mesh.collectives.devices import Workers
from optfn.mesh.collectives.means import map_key_data, mean_over_workers
from optfn.mesh.state import per_worker
from optfn.mesh.state.placement import specs_over_workers

# Bytes of the alignment that lets a CPU device of JAX share the memory of a NumPy array, and the
# size below which JAX's second copy, of an unaligned one, takes less time than the aligned address.
_ALIGNMENT, _UNALIGNED = 64, 1 << 18


# The remedies for a batch that cannot be divided.
REMEDIES_OF_SIZE = (
    "Drop the batch (optfn.shuffled drops the remainder of an epoch), use another size, or pad it "
    "with examples of weight 0 and return the loss as an optfn.Mean"
)


def shard_map_step(
    step: Callable[[PyTree, Batch], tuple[PyTree, PyTree]], mesh: Mesh, worker_axes: Axes
) -> Callable[[PyTree, Batch], tuple[PyTree, PyTree]]:
    """Return the function (state, batch) -> (state, metrics) that runs one worker's step in a
    `shard_map`, with the batch and per-worker arrays split over workers.

    Args:
      step: the step of one worker on its shard of the batch, run where the axes are bound.
      mesh: the mesh of the workers.
      worker_axes: the mesh axes of the workers, which split the batch.
    """

    def global_step(state: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        replicated = jax.tree.map(lambda x: P(), state)
        placed = replicated._replace(opt_state=specs_over_workers(state.opt_state, worker_axes))
        split = jax.tree.map(lambda x: batch_spec(x, worker_axes), batch)
        in_specs, out_specs = (placed, split), (placed, P())
        # An exchange may run over axes that do not split the batch. They must be bound too.
        names = join_axes(worker_axes, per_worker.join_exchange_axes(state.opt_state))
        run = meshes.shard_map(step, mesh, names, in_specs, out_specs)
        return run(state, batch)

    return global_step


def batch_spec(x: Leaf, data_axis: Axes) -> P:
    """Return the spec that splits an array's leading axis over the data axes, or P() for a
    scalar."""
    return P(data_axis) if jnp.ndim(x) else P()


def replicate(x: PyTree, mesh: Mesh) -> PyTree:
    """Copy arrays, which must be the same in every process, to all devices of the mesh, and return
    traced arrays unchanged."""

    def place(leaf: Leaf) -> jax.Array:
        if tree.is_key(leaf):
            return map_key_data(place, leaf)
        return copy_to_devices(leaf, meshes.make_sharding(mesh, P(), jnp.ndim(leaf)))

    return jax.tree.map(place, x)


def split_batch(batch: Batch, mesh: Mesh, data_axis: Axes, local_steps: int = 1) -> Batch:
    """Split the leading axis of each array of a batch over the data axes of a mesh, copy scalars to
    all devices, and raise a ValueError if an axis splits unevenly.

    Args:
      batch: arrays of all examples, the same in every process. Global arrays are not copied
        (`jax.make_array_from_process_local_data` makes one from the shard of each process), and
        traced arrays are split along explicit axes alone.
      mesh: the mesh of the workers.
      data_axis: the mesh axes that split it.
      local_steps: for how many steps each worker splits its shard evenly.

    Raises:
      ValueError: a leading axis cannot be split evenly; the error names the leaf.
    """
    workers = meshes.count_devices(mesh, data_axis)

    def put(place: tree.Place, x: Leaf) -> Leaf:
        if tree.is_masked(x):
            return x
        if jnp.ndim(x) and np.shape(x)[0] % (workers * local_steps):
            factors = f"the {workers} workers"
            factors += f" times {local_steps} local steps" if local_steps > 1 else ""
            raise ValueError(
                f"the leading axis of the batch must be divisible by {factors}; "
                f"{f'leaf {place!r}' if str(place) else 'it'} has shape {np.shape(x)}. "
                f"{REMEDIES_OF_SIZE}"
            )
        placement = NamedSharding(mesh, batch_spec(x, data_axis))
        if checks.is_traced(x):  # a scan gives a slice that no explicit axis divides
            return jax.sharding.reshard(x, placement) if mesh.explicit_axes else x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        # device_put moves an array between devices without a copy on the host.
        if isinstance(x, jax.Array) and placement.is_fully_addressable:
            return jax.device_put(x, placement)
        if tree.is_key(x):
            return map_key_data(lambda data: copy_to_devices(data, placement), x)
        return copy_to_devices(x, placement)

    return tree.map_named(put, batch)


def copy_beside(batch: Batch, like: jax.Array) -> Batch:
    """Copy the NumPy arrays of a batch to the device of `like`, or on the host if `like` lies on
    several or on a CPU."""
    copied = copy_host_arrays(batch)
    device = next(iter(like.devices()))
    # A step on a CPU reads the copy itself, and `device_put` takes longer than such a step.
    if copied is batch or like.sharding.num_devices > 1 or device.platform == "cpu":
        return copied
    target = device if like.committed else None
    return jax.tree.map(
        lambda x: jax.device_put(x, target) if isinstance(x, np.ndarray) else x, copied
    )


def copy_host_arrays(batch: Batch) -> Batch:
    """Copy the NumPy arrays of a batch on the host, in the dtypes that JAX keeps.

    A loader may overwrite its buffer while the step still reads it, and JAX shares the memory of an
    aligned NumPy array on a CPU, `device_put(may_alias=False)` included (JAX 0.10 to 0.12,
    jax#37830).
    """
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)):
        return batch
    return jax.tree.map(lambda x: _copy_aligned(x) if isinstance(x, np.ndarray) else x, batch)


def _copy_aligned(x: np.ndarray) -> np.ndarray:
    """Return a copy in the dtype that JAX keeps, aligned so that JAX on a CPU shares its memory, or
    without alignment below 256 KiB."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.nbytes < _UNALIGNED:
        return np.array(x, dtype)
    size = x.size * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + size].view(dtype).reshape(x.shape)
    copy[...] = x
    return copy


def copy_to_devices(x: Leaf, placement: NamedSharding) -> jax.Array:
    """Copy an array to all devices of `placement`, in every process, and return a traced array
    unchanged."""
    if checks.is_traced(x):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=placement)(x)
    host = np.asarray(x).astype(jnp.result_type(x), copy=False)
    # JAX may share memory with a NumPy array, and the step overwrites its params in place. So each
    # device gets a copy of its shard.
    return jax.make_array_from_callback(host.shape, placement, lambda index: host[index].copy())


def reduce_gradients(
    grads: Updates,
    opt_state: OptState,
    workers: Workers,
    metrics: PyTree = None,
    dtype: DType | None = None,
    averaged: PyTree = None,
) -> tuple[Updates, PyTree, dict[str, Any]]:
    """Average over the workers the metrics, and each gradient that differs between them.

    A gradient skips the axes of a mean in the loss, and the axes of a transform that exchanges it.
    Gradients are added and sent in `dtype`, or in their dtype if it is None. `averaged` has the
    axes of each leaf's mean in the loss; None if the loss averages nothing.

    Returns:
      The gradients that the optimizer takes, the metrics, and extra arguments of its update: {}, or
      with an exchange `workers`, with whom wrappers such as `skip_nonfinite` agree.
    """
    axes, exchanges = workers.axes, per_worker.has_exchange(opt_state)
    done = [Axes() for _ in tree.leaves(grads)] if averaged is None else tree.leaves(averaged)
    if not axes or not (exchanges or any(done)):
        return *mean_over_workers(grads, metrics, workers, dtype), {}
    exchanged = per_worker.find_exchange_axes(opt_state, grads)
    remaining = [exclude_axes(axes, join_axes(*both)) for both in zip(done, exchanged, strict=True)]
    # Leaves that are averaged over the same axes go together, so that small ones share an
    # all-reduce.
    for names in dict.fromkeys([axes, *filter(None, remaining)]):

        def select(place: tree.Place, g: Leaf, names: Axes = names) -> Leaf:
            return g if remaining[place.number] == names else None

        some = tree.map_named(select, grads)
        of_all = metrics if names == axes else None
        over = workers._replace(axes=names)
        means, of_all = mean_over_workers(some, of_all, over, dtype)
        metrics = of_all if names == axes else metrics
        grads = tree.map(lambda g, mean: g if mean is None else mean, grads, means)
    return grads, metrics, {"workers": workers} if exchanges else {}
