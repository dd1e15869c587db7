"""The placement of an optimizer's state on a mesh, and its conversion to other numbers of workers.

The state says which of its arrays are per-worker (`per_worker.PerWorker`), however the transform is
wrapped. On a mesh a per-worker array has the shape (N·n, …) and is sharded along its first axis, so
that each worker sees the (n, …) of `tx.init`; all other arrays are replicated.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optfn import checks, core
from optfn import mesh as meshes
from optfn.leaves.types import Leaf, OptState, Params, PyTree
from optfn.mesh import AxisName
from optfn.state.per_worker import Exchanged, PerWorker, check_wrappers, has_own_state, nodes_of

# The key under which `state_dict` lists the names of the per-worker arrays.
PER_WORKER_KEY = "per_worker"
# Mappings without that list are older: their per-worker arrays are in these fields, beside a field
# `num_workers`.
_FIELDS_BEFORE_THE_LIST = ("local_velocity", "residual")


def _is_per_worker(x: object) -> bool:
    return isinstance(x, PerWorker)


def _counts_workers(x: PyTree) -> bool:
    """Tell whether `x` is a state with an int32 field `num_workers` and per-worker arrays."""
    if "num_workers" not in getattr(x, "_fields", ()):
        return False
    counts = jax.tree.leaves(x.num_workers)
    is_int32 = [getattr(count, "dtype", None) == jnp.int32 for count in counts]
    return is_int32 == [True] and bool(nodes_of(PerWorker, x) or nodes_of(Exchanged, x))


def map_state(
    per_worker: Callable[[Any], Any],
    shared: Callable[[Any], Any],
    opt_state: OptState,
    count: Callable[[Any], Any] | None = None,
) -> OptState:
    """Map each array of a state by its kind.

    Args:
      per_worker: the function of per-worker arrays.
      shared: the function of all other arrays.
      opt_state: the state of an optimizer, however wrapped.
      count: the function of the fields `num_workers`; None means `shared`.
    """

    def convert(node: PyTree) -> PyTree:
        if _is_per_worker(node):
            return jax.tree.map(per_worker, node)
        if count is None or not _counts_workers(node):
            return shared(node)
        fields = {
            name: jax.tree.map(count, child)
            if name == "num_workers"
            else map_state(per_worker, shared, child, count)
            for name, child in node._asdict().items()
        }
        return node._replace(**fields)

    def stop(x: PyTree) -> bool:
        return _is_per_worker(x) or (count is not None and _counts_workers(x))

    return jax.tree.map(convert, opt_state, is_leaf=stop)


def specs_of(opt_state: OptState, axis_name: AxisName = "data") -> PyTree:
    """Return the PartitionSpec of each array of a state; see `state_specs`."""
    check_wrappers("the optimizer", opt_state)
    sharded = P(meshes.axes(axis_name))
    return map_state(lambda x: sharded, lambda x: P(), opt_state)


def state_specs(
    tx: optax.GradientTransformation, params: Params, *, axis_name: AxisName = "data"
) -> PyTree:
    """Return the PartitionSpecs of the state of an optimizer, for `shard_map`.

    Args:
      tx: an optimizer, however wrapped, with or without per-worker state.
      params: the parameters, arrays or ShapeDtypeStructs.
      axis_name: the mesh axes over which workers exchange.

    Returns:
      A tree like the state: P(axis_name) for per-worker arrays, P() for all others.

    Raises:
      ValueError: a transform that exchanges gradients by itself is inside a wrapper that is not
        known to be correct there.
    """
    tx = core.check_transform("state_specs: tx", tx)
    meshes.check_names("axis_name", axis_name, optional=True)
    return specs_of(jax.eval_shape(tx.init, params), axis_name)


def init_state(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
) -> OptState:
    """Return the state of step 0 on a mesh: per-worker arrays sharded, the rest replicated.

    Each device stores only its worker's part of the per-worker arrays. In a run of several
    processes, each process must call it with the same params.

    Args:
      tx: an optimizer, however wrapped.
      params: the parameters, arrays on the host or replicated over the mesh.
      mesh: a mesh, such as `data_mesh()`.
      axis_name: the mesh axes over which workers exchange.
    """
    return init_on_mesh(core.check_transform("init_state: tx", tx).init, params, mesh, axis_name)


def init_on_mesh(
    init: Callable[[Params], OptState], params: Params, mesh: Mesh, axis_name: AxisName
) -> OptState:
    """Return what `init_state` does, for an init function."""
    workers = num_workers(mesh, axis_name)

    def init_all(params: Params) -> OptState:
        return map_state(
            lambda x: jnp.tile(x, (workers, *[1] * (x.ndim - 1))),
            lambda x: x,
            init(params),
            lambda x: jnp.full_like(x, workers),
        )

    shapes = jax.eval_shape(init, params)
    shardings = jax.tree.map(
        lambda spec, x: meshes.sharding(mesh, spec, x.ndim), specs_of(shapes, axis_name), shapes
    )
    return jax.jit(init_all, out_shardings=shardings)(params)


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
        raise ValueError(f"the mesh has no axis {missing[0]!r}; its axes are {mesh.axis_names}")
    return int(np.prod([mesh.shape[axis] for axis in meshes.axes(axis_name)], dtype=np.int64))


def rescale_residuals(opt_state: OptState, num_workers: int) -> OptState:
    """Convert a state to another number of workers.

        x_j = mean over the old workers of x    for floating-point arrays
        x_j = x of the old worker 0             for all others

    The mean over workers of a residual, the part of the updates that the parameters have not yet
    received, does not change.

    Args:
      opt_state: a state in the layout of `init_state`, or a tree that contains one; or a mapping
        from `state_dict`, also of a TrainState.
      num_workers: the new number of workers, ≥ 1.

    Returns:
      The state or mapping on the host, with per-worker arrays for `num_workers` workers. Load a
      mapping into a template on the new mesh by `load_state_dict`.

    Raises:
      ValueError: there is no per-worker state, the old number of workers is missing or ambiguous,
        or the shape of an array does not fit it.
    """
    count = checks.count("num_workers", num_workers)
    if isinstance(opt_state, Mapping):
        return _rescale_mapping(opt_state, count)
    if not has_own_state(opt_state):
        raise ValueError("rescale_residuals: the state has no per-worker part")
    old_count = _agreed(_worker_counts(opt_state))
    return map_state(
        lambda x: _rescaled(np.asarray(x), old_count, count, "a per-worker array"),
        lambda x: x,
        opt_state,
        lambda x: jnp.full_like(x, count),
    )


def _rescale_mapping(mapping: Mapping[str, Any], count: int) -> dict[str, Any]:
    rescaled = dict(mapping)
    if PER_WORKER_KEY in mapping:
        names = [str(key) for key in np.asarray(mapping[PER_WORKER_KEY])]
    else:
        names = _unlisted_names(mapping)
    if not names:
        raise ValueError("rescale_residuals: the mapping has no per-worker part")
    count_keys = [
        key
        for key in mapping
        if f"/{key}".endswith("/num_workers")
        and key not in names
        and any(name.startswith(key.removesuffix("num_workers")) for name in names)
    ]
    old_count = _agreed([mapping[key] for key in count_keys])
    for key in names:
        rescaled[key] = _rescaled(np.asarray(mapping[key]), old_count, count, key)
    for key in count_keys:
        rescaled[key] = np.full_like(np.asarray(mapping[key]), count)
    return rescaled


def _worker_counts(opt_state: OptState) -> list[Leaf]:
    """Return the fields `num_workers` of a state."""
    counts: list[Leaf] = []

    def collect(x: Leaf) -> Leaf:
        counts.append(x)
        return x

    map_state(lambda x: x, lambda x: x, opt_state, collect)
    return counts


def _unlisted_names(mapping: Mapping[str, Any]) -> list[str]:
    """Return the names of the per-worker arrays of a mapping that does not list them."""
    owners = [key.removesuffix("num_workers") for key in mapping if key.endswith("/num_workers")]
    fields = [f"{owner}{field}" for owner in owners for field in _FIELDS_BEFORE_THE_LIST]
    return [key for key in mapping if any(f"{key}/".startswith(f"{field}/") for field in fields)]


def _agreed(counts: list[Leaf]) -> int:
    """Return the number of workers, on which all counts must agree."""
    numbers = {int(np.asarray(count)) for count in counts}
    if len(numbers) != 1:
        found = f"different ones: {sorted(numbers)}" if numbers else "none (no field num_workers)"
        raise ValueError(
            f"rescale_residuals: the state must have one number of workers; it has {found}"
        )
    return numbers.pop()


def _rescaled(x: np.ndarray, old_count: int, count: int, name: str) -> np.ndarray:
    """Return the mean of the workers' parts of `x`, or worker 0's part, for `count` workers.

    Args:
      x: an array of shape (old_count·n, …).
      old_count: the number of workers whose parts `x` has.
      count: the number of workers of the result, (count·n, …).
      name: the name of the array in errors.
    """
    if x.ndim < 1 or x.shape[0] % old_count:
        raise ValueError(
            f"rescale_residuals: {name} has shape {x.shape}; its first axis must be divisible by "
            f"the {old_count} workers, as in the layout of init_state"
        )
    parts = x.reshape(old_count, x.shape[0] // old_count, *x.shape[1:])
    part = parts[0]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        part = np.mean(parts, axis=0, dtype=wide).astype(x.dtype)
    return np.tile(part, (count, *[1] * (x.ndim - 1)))
