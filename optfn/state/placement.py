"""The placement of an optimizer's state on a mesh, and its conversion between numbers of workers.

The state says which of its arrays are per-worker (`per_worker.PerWorker`), however the transform is
wrapped. On a mesh, a per-worker array has the shape (N·n, …) and is sharded along its first axis,
so that each worker sees the (n, …) of `tx.init`. An array of which each worker keeps a slice
(`per_worker.Divided`) is sharded too. Shared arrays are replicated.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.collectives import axes as meshes
from optfn.collectives.axes import AxisName
from optfn.core import checks
from optfn.core.tree import is_array, is_key, map_key_data
from optfn.core.types import Leaf, OptState, Params, PyTree
from optfn.state.encoded import Encoded, encoded_fields, encoded_names, has_codes
from optfn.state.names import names_within
from optfn.state.per_worker import (
    Divided,
    Exchanged,
    PerWorker,
    check_wrappers,
    has_own_state,
    nodes_of,
)

# The key under which `state_dict` lists the names of the per-worker arrays.
PER_WORKER_KEY = "per_worker"


def _counts_workers(x: PyTree) -> bool:
    """Tell whether `x` is a state with an int32 field `num_workers` and per-worker arrays."""
    if "num_workers" not in getattr(x, "_fields", ()):
        return False
    counts = jax.tree.leaves(x.num_workers)
    is_int32 = [is_array(count) and count.dtype == jnp.int32 for count in counts]
    return is_int32 == [True] and bool(nodes_of(PerWorker, x) or nodes_of(Exchanged, x))


def map_state(
    per_worker: Callable[[Any, meshes.Axes], Any],
    shared: Callable[[Any], Any],
    opt_state: OptState,
    count: Callable[[Any, meshes.Axes], Any] | None = None,
    divided: Callable[[Divided], Any] | None = None,
) -> OptState:
    """Map each array of a state by its kind.

    Args:
      per_worker: the function of per-worker arrays and the axes along which workers differ.
      shared: the function of arrays that are the same on all workers.
      opt_state: the state of an optimizer, however wrapped.
      count: the function of the fields `num_workers` and the same axes; None means `shared`.
      divided: the function of each `Divided`; None means `per_worker` of its arrays.
    """

    def convert(node: PyTree) -> PyTree:
        if divided is not None and isinstance(node, Divided):
            return divided(node)
        if isinstance(node, PerWorker | Divided):
            return jax.tree.map(lambda x: per_worker(x, node.axes), node)
        if count is None or not _counts_workers(node):
            return shared(node)
        axes = meshes.joined(*(x.axes for x in nodes_of(PerWorker, node)))
        fields = {
            name: jax.tree.map(lambda x: count(x, axes), child)
            if name == "num_workers"
            else map_state(per_worker, shared, child, count, divided)
            for name, child in node._asdict().items()
        }
        return node._replace(**fields)

    def stop(x: PyTree) -> bool:
        counts = count is not None and _counts_workers(x)
        return counts or isinstance(x, PerWorker | Divided)

    return jax.tree.map(convert, opt_state, is_leaf=stop)


def specs_of(opt_state: OptState, axis_name: AxisName = "data") -> PyTree:
    """Return the PartitionSpec of each array of a state; see `state_specs`."""
    check_wrappers("the optimizer", opt_state)

    return map_state(
        lambda x, axes: P(meshes.axes(axes or axis_name)),
        lambda x: P(),
        opt_state,
        divided=lambda node: node.mapped(lambda x, n: P(*[None] * (x.ndim - 1), node.axes)),
    )


def state_specs(
    tx: optax.GradientTransformation, params: Params, *, axis_name: AxisName = "data"
) -> PyTree:
    """Return the PartitionSpecs of the state of an optimizer, for a `shard_map` of your own.

    Args:
      tx: an optimizer, however wrapped, with or without per-worker state.
      params: the parameters, arrays or ShapeDtypeStructs.
      axis_name: the mesh axes of the workers, for per-worker arrays that name none.

    Returns:
      A tree like the state: P(axis_name) for per-worker arrays, P() for shared ones.

    Raises:
      ValueError: a transform that exchanges gradients itself is inside a wrapper that is not known
        to be correct there.
    """
    tx = core.check_transform("state_specs: tx", tx)
    meshes.check_names("axis_name", axis_name, optional=True)
    return specs_of(jax.eval_shape(tx.init, params), axis_name)


def on_workers_of(
    init: Callable[[Params], OptState], mesh: Mesh, axis_name: AxisName
) -> Callable[[Params], OptState]:
    """Return `init` with its result widened from one worker to all workers of a mesh.

    Args:
      init: returns the state of one worker.
      mesh: the mesh of the workers.
      axis_name: the axes of the workers, for per-worker arrays that name none.
    """

    def workers(axes: meshes.Axes) -> int:
        return num_workers(mesh, axes or axis_name)

    def init_all(params: Params) -> OptState:
        return map_state(
            lambda x, axes: jnp.tile(x, (workers(axes), *[1] * (x.ndim - 1))),
            lambda x: x,
            init(params),
            lambda x, axes: jnp.full_like(x, workers(axes)),
            lambda node: node.mapped(lambda x, n: padded_to_multiple(x, n, workers(node.axes))),
        )

    return init_all


def padded_to_multiple(x: Leaf, size: int, count: int) -> Leaf:
    """Return x[..., :size], padded with zeros until `count` divides its last axis.

    Args:
      x: an array, on the host or traced.
      size: the number of its entries that are not padding.
      count: the number of workers, each of which keeps a slice.
    """
    numpy = np if isinstance(x, np.ndarray) else jnp
    missing = -size % count
    return numpy.pad(x[..., :size], [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def num_workers(mesh: Mesh, axis_name: AxisName) -> int:
    """Return the number of workers: the product of the sizes of axes of a mesh.

    Raises:
      TypeError: `mesh` is not a mesh, or `axis_name` not a name.
      ValueError: the mesh has no such axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh such as optfn.distributed.data_mesh(); "
            f"got {checks.shown(mesh)}"
        )
    meshes.check_names("axis_name", axis_name, optional=True)
    missing = [axis for axis in meshes.axes(axis_name) if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}; its axes are {mesh.axis_names}. Name those of "
            "the workers: data_axis= of a training step, axis_name= elsewhere"
        )
    return math.prod(mesh.shape[axis] for axis in meshes.axes(axis_name))


def rescale_residuals(opt_state: OptState, num_workers: int) -> OptState:
    """Convert a state to another number of workers, to continue a run on another mesh.

        x_j = mean over the old workers of x    for floating-point arrays
        x_j = x of the old worker 0             for integers and bools

    Nothing is lost: the mean of a residual over the workers, the update that the parameters have
    not yet received, stays the same. An array that all workers share, such as `published` of
    `exchange(route="parts")`, stays whole, and is divided again. Codes, such as 8-bit moments, are
    decoded, averaged, and encoded as the nearest code under the mean of their scales. In a mapping,
    uint16 arrays are the bits of bfloat16, as in `state_dict`.

    `restore_checkpoint` does this by itself.

    Args:
      opt_state: a state in the layout of `init_state`, or a tree that contains one; or a mapping
        from `state_dict`, which may be that of a TrainState.
      num_workers: the new number of workers, ≥ 1.

    Returns:
      The state or mapping on the host, with per-worker arrays for `num_workers` workers. Load a
      mapping into a template on the new mesh by `load_state_dict`.

    Raises:
      ValueError: there is no per-worker state; the old number of workers is missing or ambiguous;
        or the shape of an array does not fit it.
    """
    count = checks.count("num_workers", num_workers)
    if isinstance(opt_state, Mapping):
        return _rescale_mapping(opt_state, count)
    if not has_own_state(opt_state):
        raise ValueError("rescale_residuals: the state has no per-worker arrays to convert")
    old_count = _agreed(_worker_counts(opt_state))
    # From N to M workers. Shared arrays stay as they are until step 4 takes them to the host.
    #   1. A per-worker array, (N·n, …) over the devices, becomes (N, n, …) on the host.
    #   2. Its mean over workers is (n, …): the array that one worker will have. Of integers, codes
    #      among them, this is worker 0's.
    #   3. Codes: decoded (N, n), averaged, encoded (n). Their scales were averaged in step 2.
    #   4. Repeated for the new workers, (M·n, …), and num_workers is M.
    # A Divided keeps its (N·⌈n/N⌉,) until step 4, which cuts it to (n,) and pads it to (M·⌈n/M⌉,).
    means = map_state(
        lambda x, axes: _mean(_by_worker(x, old_count)),
        lambda x: x,
        opt_state,
        divided=lambda node: node,
    )
    of_codes = functools.partial(_mean_of_codes, old_count)
    means = jax.tree.map(of_codes, opt_state, means, is_per_worker(opt_state), is_leaf=has_codes)
    return map_state(
        lambda x, axes: _repeated(x, count),
        _host_array,
        means,
        lambda x, axes: np.full_like(x, count),
        lambda node: node.mapped(lambda x, n: padded_to_multiple(np.asarray(x), n, count)),
    )


def is_per_worker(opt_state: OptState) -> PyTree:
    """Tell for each array of a state whether it is per-worker."""
    return map_state(
        lambda x, axes: True,
        lambda x: False,
        opt_state,
        divided=lambda node: node.mapped(lambda x, n: False),
    )


def divided_sizes(opt_state: OptState) -> PyTree:
    """Return the unpadded length of each `Divided` array, and 0 for each array of another kind."""
    return map_state(
        lambda x, axes: 0,
        lambda x: 0,
        opt_state,
        divided=lambda node: node.mapped(lambda x, n: n),
    )


def _host_array(x: object) -> object:
    """Return an array that this process can read on the host, a key on its first device."""
    if not isinstance(x, jax.Array) or not (x.is_fully_addressable or x.is_fully_replicated):
        return x
    if is_key(x):
        return map_key_data(lambda data: jnp.asarray(np.asarray(data)), x)
    return np.asarray(x)


def _mean_of_codes(count: int, node: OptState, mean: OptState, flags: OptState) -> OptState:
    """Return `mean` with the mean of the numbers that codes stand for, where a node has codes.

    Args:
      count: the number of workers.
      node: a node of a state.
      mean: the node with the mean over workers of each array; of codes, worker 0's.
      flags: for each array whether it is per-worker.
    """

    def of_leaf(field: Encoded, flag: bool, codes: Leaf, scales: Leaf, shared: Leaf) -> Leaf:
        return field.mean(_by_worker(codes, count), _by_worker(scales, count)) if flag else shared

    for field in encoded_fields(node):
        found = jax.tree.map(
            functools.partial(of_leaf, field),
            getattr(flags, field.codes),
            getattr(node, field.codes),
            getattr(node, field.scale),
            getattr(mean, field.codes),
        )
        mean = mean._replace(**{field.codes: found})
    return mean


def _rescale_mapping(mapping: Mapping[str, Any], count: int) -> dict[str, Any]:
    rescaled = dict(mapping)
    names = [str(name) for name in np.asarray(mapping.get(PER_WORKER_KEY, ()))]
    if not names:
        raise ValueError("rescale_residuals: the mapping has no per-worker arrays to convert")
    count_keys = count_names(mapping, names)
    old_count = _agreed([mapping[key] for key in count_keys])
    by_worker = {key: _by_worker(mapping[key], old_count, key) for key in names}
    encoded = encoded_names(by_worker)
    for key, x in by_worker.items():
        if key in encoded:
            field, scale = encoded[key]
            mean = field.mean(x, by_worker[scale])
        else:
            mean = _mean(x.view(jnp.bfloat16) if x.dtype == np.uint16 else x).view(x.dtype)
        rescaled[key] = _repeated(mean, count)
    for key in count_keys:
        rescaled[key] = np.full_like(np.asarray(mapping[key]), count)
    return rescaled


def count_names(names: Iterable[str], per_worker: Sequence[str]) -> list[str]:
    """Return the `num_workers` keys that belong to these per-worker arrays.

    A number beside no such array, as in the local state of `sgd`, counts nothing.
    """

    def counts(name: str) -> bool:
        owner, _, field = name.rpartition("/")
        return field == "num_workers" and bool(names_within(per_worker, owner))

    return [name for name in names if name not in per_worker and counts(name)]


def _worker_counts(opt_state: OptState) -> list[Leaf]:
    """Return the fields `num_workers` of a state."""
    counts: list[Leaf] = []
    map_state(lambda x, axes: x, lambda x: x, opt_state, lambda x, axes: counts.append(x))
    return counts


def workers_of(opt_state: OptState) -> int:
    """Return the number of workers of a state; 0 if it has no per-worker arrays, or is traced."""
    counts = _worker_counts(opt_state)
    are_arrays = all(isinstance(x, np.ndarray | jax.Array) and x.ndim == 0 for x in counts)
    if not are_arrays or checks.is_traced(counts):  # shapes, or the stacked states of a vmap
        return 0
    numbers = set(map(int, counts))
    return numbers.pop() if len(numbers) == 1 else 0


def _agreed(counts: list[Leaf]) -> int:
    """Return the number of workers, on which all counts must agree."""
    numbers = set(map(int, counts))
    if len(numbers) != 1:
        found = f"different ones: {sorted(numbers)}" if numbers else "none (no field num_workers)"
        raise ValueError(
            f"rescale_residuals: the state must have one number of workers; it has {found}"
        )
    return numbers.pop()


def _by_worker(
    x: np.ndarray | jax.Array, count: int, name: str = "a per-worker array"
) -> np.ndarray:
    """Return the array (count·n, …) of all workers on the host, as (count, n, …)."""
    array = np.asarray(x)
    if array.ndim < 1 or array.shape[0] % count:
        raise ValueError(
            f"rescale_residuals: {name} has shape {array.shape}; its first axis must be divisible "
            f"by the {count} workers, as in the layout of init_state"
        )
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def _mean(by_worker: np.ndarray) -> np.ndarray:
    """Return the mean over the workers of (workers, n, …); worker 0's array if it has integers."""
    if not jnp.issubdtype(by_worker.dtype, jnp.inexact):
        return np.asarray(by_worker[0])
    wide = np.complex128 if np.iscomplexobj(by_worker) else np.float64
    return np.asarray(np.mean(by_worker, axis=0, dtype=wide).astype(by_worker.dtype))


def _repeated(x: np.ndarray, count: int) -> np.ndarray:
    """Return the array of one worker for each of `count` workers: (count·n, …)."""
    return np.asarray(np.tile(x, (count, *[1] * (x.ndim - 1))))
