"""Where the state of an optimizer lies on a mesh, and how it moves to another number of workers.

The state says which of its arrays are a worker's own (`per_worker.PerWorker`), however the
transform is wrapped. On a mesh each of these is one array, (N·n, …), sharded along its first axis,
so that a worker sees the (n, …) of `tx.init`; everything else is replicated.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import checks
from optfn.leaves.types import OptState, Params, PyTree
from optfn.parallel import mesh as meshes
from optfn.parallel.mesh import AxisName
from optfn.parallel.per_worker import Exchanged, PerWorker, check_wrappers, has_own_state, nodes_of

# The key under which `state_dict` lists the names of the arrays that are a worker's own.
PER_WORKER_KEY = "per_worker"
# Mappings written before that list existed have per-worker arrays in these fields only, of the one
# kind of state that had a field `num_workers`.
_FIELDS_BEFORE_THE_LIST = ("local_velocity", "residual")


def _is_per_worker(x: Any) -> bool:
    return isinstance(x, PerWorker)


def _counts_workers(x: PyTree) -> bool:
    """Tell whether `x` is a state with a field `num_workers`, an int32, beside per-worker parts."""
    if "num_workers" not in getattr(x, "_fields", ()):
        return False
    counts = jax.tree.leaves(x.num_workers)
    is_int32 = [getattr(count, "dtype", None) == jnp.int32 for count in counts]
    return is_int32 == [True] and bool(nodes_of(PerWorker, x) or nodes_of(Exchanged, x))


def map_state(
    own: Callable[[Any], Any],
    shared: Callable[[Any], Any],
    opt_state: OptState,
    count: Callable[[Any], Any] | None = None,
) -> OptState:
    """Map each array of a state by its kind.

    Args:
      own: what to do with arrays that are a worker's own.
      shared: what to do with all others.
      opt_state: the state of an optimizer, however wrapped.
      count: what to do with the fields `num_workers`; None means `shared`.
    """

    def convert(node: PyTree) -> PyTree:
        if _is_per_worker(node):
            return jax.tree.map(own, node)
        if count is None or not _counts_workers(node):
            return shared(node)
        fields = {
            name: jax.tree.map(count, child)
            if name == "num_workers"
            else map_state(own, shared, child, count)
            for name, child in node._asdict().items()
        }
        return node._replace(**fields)

    def stop(x: PyTree) -> bool:
        return _is_per_worker(x) or (count is not None and _counts_workers(x))

    return jax.tree.map(convert, opt_state, is_leaf=stop)


def specs_of(opt_state: OptState, axis_name: AxisName = "data") -> PyTree:
    """Return the PartitionSpec of each array of a state; see `state_specs`."""
    check_wrappers("the optimizer", opt_state)
    own = P(meshes.axes(axis_name))
    return map_state(lambda x: own, lambda x: P(), opt_state)


def state_specs(
    tx: optax.GradientTransformation, params: Params, *, axis_name: AxisName = "data"
) -> PyTree:
    """Return the PartitionSpecs of the state of an optimizer, for `shard_map`.

    Args:
      tx: an optimizer, however wrapped, with or without per-worker state.
      params: the parameters, arrays or ShapeDtypeStructs.
      axis_name: the mesh axes over which workers exchange.

    Returns:
      A tree like the state: P(axis_name) for arrays that are a worker's own, P() for the rest.

    Raises:
      ValueError: a wrapper that is not known to be right there stands around a transform that
        exchanges gradients by itself.
    """
    return specs_of(jax.eval_shape(tx.init, params), axis_name)


def init_state(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
) -> OptState:
    """Return the state of step 0 on a mesh: per-worker arrays sharded, the rest replicated.

    No device holds more than its worker's part. In a run of several processes each calls it with
    the same params.

    Args:
      tx: an optimizer, however wrapped.
      params: the parameters, arrays on the host or replicated over the mesh.
      mesh: such as `data_mesh()`.
      axis_name: the mesh axes over which workers exchange.
    """
    workers = num_workers(mesh, axis_name)

    def init(params: Params) -> OptState:
        return map_state(
            lambda x: jnp.tile(x, (workers, *[1] * (x.ndim - 1))),
            lambda x: x,
            tx.init(params),
            lambda x: jnp.full_like(x, workers),
        )

    shapes = jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(
        lambda spec, x: meshes.sharding(mesh, spec, x.ndim), specs_of(shapes, axis_name), shapes
    )
    return jax.jit(init, out_shardings=shardings)(params)


def num_workers(mesh: Mesh, axis_name: AxisName) -> int:
    """Return the size of the axes of a mesh.

    Raises:
      ValueError: the mesh has no such axis.
    """
    missing = [axis for axis in meshes.axes(axis_name) if axis not in mesh.shape]
    if missing:
        raise ValueError(f"the mesh has no axis {missing[0]!r}; its axes are {mesh.axis_names}")
    return int(np.prod([mesh.shape[axis] for axis in meshes.axes(axis_name)], dtype=np.int64))


def rescale_residuals(opt_state: OptState, num_workers: int) -> OptState:
    """Return a state for another number of workers.

        x_j = mean over the old workers of x    for floating-point arrays
        x_j = x of the old worker 0             for all others

    The mean over workers of a residual, which is what the parameters are still owed, stays the
    same.

    Args:
      opt_state: a state as `init_state` lays it out, or anything that holds one; or the mapping
        that `state_dict` gives, also of a whole TrainState.
      num_workers: the new N, ≥ 1.

    Returns:
      The same, on the host, with per-worker arrays for `num_workers` workers. Load a mapping into a
      template on the new mesh by `load_state_dict`.

    Raises:
      ValueError: there is no per-worker state in it, the old number of workers is not known or not
        the same everywhere, or an array does not fit it.
    """
    new = checks.count("num_workers", num_workers)
    if isinstance(opt_state, Mapping):
        return _rescale_mapping(opt_state, new)
    if not has_own_state(opt_state):
        raise ValueError("rescale_residuals: the state has no per-worker part")
    old = _agreed(_worker_counts(opt_state))
    return map_state(
        lambda x: _rescaled(np.asarray(x), old, new, "a per-worker array"),
        lambda x: x,
        opt_state,
        lambda x: jnp.full_like(x, new),
    )


def _rescale_mapping(mapping: Mapping[str, Any], new: int) -> dict[str, Any]:
    out = dict(mapping)
    if PER_WORKER_KEY in mapping:
        own = [str(key) for key in np.asarray(mapping[PER_WORKER_KEY])]
    else:
        own = _own_before_the_list(mapping)
    if not own:
        raise ValueError("rescale_residuals: the mapping has no per-worker part")
    counts = [
        key
        for key in mapping
        if f"/{key}".endswith("/num_workers")
        and any(name.startswith(key.removesuffix("num_workers")) for name in own)
    ]
    old = _agreed([mapping[key] for key in counts])
    out |= {key: _rescaled(np.asarray(mapping[key]), old, new, key) for key in own}
    out |= {key: np.full_like(np.asarray(mapping[key]), new) for key in counts}
    return out


def _worker_counts(opt_state: OptState) -> list[Any]:
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append(x)
        return x

    map_state(lambda x: x, lambda x: x, opt_state, note)
    return found


def _own_before_the_list(mapping: Mapping[str, Any]) -> list[str]:
    """Return the per-worker names of a mapping that does not list them."""
    owners = [key.removesuffix("num_workers") for key in mapping if key.endswith("/num_workers")]
    fields = [f"{owner}{field}" for owner in owners for field in _FIELDS_BEFORE_THE_LIST]
    return [key for key in mapping if any(f"{key}/".startswith(f"{field}/") for field in fields)]


def _agreed(counts: list[Any]) -> int:
    """Return the number of workers that all counts give."""
    found = {int(np.asarray(count)) for count in counts}
    if len(found) != 1:
        said = f"different ones: {sorted(found)}" if found else "none (no field num_workers)"
        raise ValueError(
            f"rescale_residuals: the state must say for how many workers it is; it says {said}"
        )
    return found.pop()


def _rescaled(x: np.ndarray, old: int, new: int, name: str) -> np.ndarray:
    """Return the mean of the parts of `old` workers, or the first of them, once for each of `new`.

    Args:
      x: an array of shape (old·n, …).
      old: the number of workers that it is for.
      new: the number of workers that it shall be for.
      name: how the array is called in an error.
    """
    if x.ndim < 1 or x.shape[0] % old:
        raise ValueError(
            f"rescale_residuals: {name} has shape {x.shape}; its first axis must have a part for "
            f"each of {old} workers, as init_state lays it out"
        )
    parts = x.reshape(old, x.shape[0] // old, *x.shape[1:])
    part = parts[0]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        part = np.mean(parts, axis=0, dtype=wide).astype(x.dtype)
    return np.tile(part, (new, *[1] * (x.ndim - 1)))
