"""Where the state of Deep Gradient Compression lies on a mesh, and how it moves to another one.

Only u and v are a worker's own. On a mesh each of their leaves is one flat array, (N·n,), sharded
over the axis, so that a worker's part is the (n,) that the transform sees; all else is replicated.
The type of the state says which is which, however the transform is wrapped.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import checks
from optfn.compression.dgc import DeepGradientCompressionState
from optfn.leaves import state_names
from optfn.parallel import mesh as meshes
from optfn.parallel.mesh import AxisName
from optfn.wrappers.accumulation import AccumulateState

# The fields of the state that differ between workers.
_OWN = ("local_velocity", "residual")


def _is_compression(x: Any) -> bool:
    return isinstance(x, DeepGradientCompressionState)


def _is_accumulation(x: Any) -> bool:
    return isinstance(x, AccumulateState)


def is_compressed(opt_state: Any) -> bool:
    """Tell whether there is Deep Gradient Compression in a state."""
    return any(map(_is_compression, jax.tree.leaves(opt_state, is_leaf=_is_compression)))


def map_state(
    own: Callable[[Any], Any], shared: Callable[[Any], Any], opt_state: Any, count: Any = None
) -> Any:
    """Map `own` over what is a worker's own, `shared` over the rest, `count` over num_workers."""

    def convert(node: Any) -> Any:
        if not _is_compression(node):
            return shared(node)
        new = jax.tree.map(shared, node)
        replaced = {name: jax.tree.map(own, getattr(node, name)) for name in _OWN}
        if count is not None:
            replaced["num_workers"] = jax.tree.map(count, node.num_workers)
        return new._replace(**replaced)

    return jax.tree.map(convert, opt_state, is_leaf=_is_compression)


def specs_of(opt_state: Any, axis_name: AxisName = "data") -> Any:
    """Return the PartitionSpec of each array of a state; see `state_specs`."""
    for node in jax.tree.leaves(opt_state, is_leaf=_is_accumulation):
        if _is_accumulation(node) and is_compressed(node):
            raise ValueError(
                "accumulate around Deep Gradient Compression would keep a sum of gradients of each "
                "worker, which is not laid out over the mesh; take the mean over several batches "
                "in the loss instead"
            )
    own = P(meshes.axes(axis_name))
    return map_state(lambda x: own, lambda x: P(), opt_state)


def state_specs(
    tx: optax.GradientTransformation, params: Any, *, axis_name: AxisName = "data"
) -> Any:
    """Return the PartitionSpecs of the state of an optimizer, for `shard_map`.

    Args:
      tx: an optimizer, however wrapped, with or without Deep Gradient Compression.
      params: the parameters, arrays or ShapeDtypeStructs.
      axis_name: the mesh axes over which workers exchange.

    Returns:
      A tree like the state: P(axis_name) for what is a worker's own, P() for the rest.

    Raises:
      ValueError: `accumulate` stands around Deep Gradient Compression.
    """
    return specs_of(jax.eval_shape(tx.init, params), axis_name)


def init_state(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh, *, axis_name: AxisName = "data"
) -> Any:
    """Return the state of step 0 on a mesh: u and v sharded over the workers, the rest replicated.

    Nothing larger than a worker's part is made on any device. In a run of several processes each
    calls it with the same params.

    Args:
      tx: an optimizer, however wrapped.
      params: the parameters, arrays on the host or replicated over the mesh.
      mesh: such as `data_mesh()`.
      axis_name: the mesh axes over which workers exchange.
    """
    workers = num_workers(mesh, axis_name)

    def init(params: Any) -> Any:
        return map_state(
            lambda x: jnp.tile(x, workers),
            lambda x: x,
            tx.init(params),
            lambda x: jnp.full_like(x, workers),
        )

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), state_specs(tx, params, axis_name=axis_name)
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


def rescale_residuals(opt_state: Any, num_workers: int) -> Any:
    """Return a state for another number of workers: each gets the mean of u and the mean of v.

        u_j = mean over the old workers of u;  v_j = mean over the old workers of v

    What is owed to the parameters, the mean of v over workers, stays what it was.

    Args:
      opt_state: a state as `init_state` lays it out, or anything that holds one; or the mapping
        that `state_dict` gives, also of a whole TrainState.
      num_workers: the new N, ≥ 1.

    Returns:
      The same, on the host, with flat u and v for `num_workers` workers. Load a mapping into a
      template on the new mesh by `load_state_dict`.

    Raises:
      ValueError: there is no Deep Gradient Compression in it, or its sizes do not fit.
    """
    new = checks.count("num_workers", num_workers)
    if isinstance(opt_state, Mapping):
        return _rescale_mapping(opt_state, new)
    if not is_compressed(opt_state):
        raise ValueError("rescale_residuals: the state holds no Deep Gradient Compression")

    def convert(node: Any) -> Any:
        if not _is_compression(node):
            return node
        (old,) = jax.tree.leaves(node.num_workers)

        def own(x: Any) -> Any:
            return _means(np.asarray(x), int(old), new, "u or v")

        return map_state(own, lambda x: x, node, lambda x: jnp.full_like(x, new))

    return jax.tree.map(convert, opt_state, is_leaf=_is_compression)


def _rescale_mapping(mapping: Mapping[str, Any], new: int) -> dict[str, Any]:
    word = state_names.state_word(DeepGradientCompressionState)
    out = dict(mapping)
    counts = [k for k in out if k.endswith("/num_workers") and word in k.split("/")[-2]]
    if not counts:
        raise ValueError("rescale_residuals: the mapping holds no Deep Gradient Compression")
    for name in counts:
        owner, old = name.removesuffix("num_workers"), int(np.asarray(out[name]))
        for key in out:
            if key.startswith(tuple(f"{owner}{field}" for field in _OWN)):
                out[key] = _means(np.asarray(out[key]), old, new, key)
        out[name] = np.full_like(np.asarray(out[name]), new)
    return out


def _means(x: np.ndarray, old: int, new: int, name: str) -> np.ndarray:
    """Return the mean of the parts of `old` workers once for each of `new`, flat."""
    if x.ndim != 1 or x.size % old:
        raise ValueError(
            f"rescale_residuals: {name} has shape {x.shape}; it must be flat, a part for each of "
            f"{old} workers, as init_state lays it out"
        )
    mean = np.mean(x.reshape(old, -1), axis=0, dtype=np.float64)
    return np.tile(mean.astype(x.dtype), new)
