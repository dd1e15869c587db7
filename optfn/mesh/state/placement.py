"""The placement of an optimizer's state on a mesh, and its conversion between numbers of workers.

The state says which of its arrays are per-worker (`per_worker.PerWorker`), however the transform is
wrapped. On a mesh, a per-worker array has the shape (N·n, …) and is sharded along its first axis,
so that each worker sees the (n, …) of `tx.init`. An array that workers keep in slices
(`per_worker.Divided`) is sharded too. Shared arrays are replicated.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn.core import checks
from optfn.core.tree import is_key
from optfn.core.types import Leaf, OptState, Params, PyTree
from optfn.mesh.collectives.axes import AxisName, check_axis_names, to_axes
from optfn.mesh.collectives.means import map_key_data
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.compilers import memories
from optfn.mesh.state.bits import DecodedArrays, is_raw, view_as_bits
from optfn.mesh.state.encoded import find_codes
from optfn.mesh.state.inventory import Entry, arrays_with_entries, map_entries
from optfn.mesh.state.names import find_names_in_field
from optfn.mesh.state.padded import is_padded, pad
from optfn.mesh.state.per_worker import PerWorker, check_wrappers, has_per_worker_state

# The key under which `state_dict` lists the names of the per-worker arrays.
PER_WORKER_KEY = "per_worker"


def specs_over_workers(opt_state: OptState, axis_name: AxisName = "data") -> PyTree:
    """Return the PartitionSpec of each array of a state, over workers if per-worker or sliced, else
    P(), or raise a ValueError for an unsafe wrapper."""
    check_wrappers("the optimizer", opt_state)
    return map_entries(functools.partial(spec_over_workers, axis_name), opt_state)


def spec_over_workers(axis_name: AxisName, entry: Entry, x: Leaf) -> P:
    """Return the PartitionSpec of an array of a state, over workers along its first axis if
    per-worker and its last if sliced, and P() otherwise.

    Args:
      axis_name: the axes of the workers, for per-worker arrays that name none.
      entry: the facts about the array.
      x: the array, or its shape.
    """
    if entry.kept == "per_worker":
        return P(to_axes(entry.axes or axis_name))
    return P(*[None] * (x.ndim - 1), entry.axes) if entry.kept == "sliced" else P()


def state_specs(
    tx: optax.GradientTransformation, params: Params, *, axis_name: AxisName = "data"
) -> PyTree:
    """Return the PartitionSpecs of the state of an optimizer, for a `shard_map` that you write, or
    raise a ValueError for an exchange in an unsafe wrapper.

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
    check_axis_names("axis_name", axis_name, optional=True)
    return specs_over_workers(jax.eval_shape(tx.init, params), axis_name)


def widen_init(
    init: Callable[[Params], OptState], mesh: Mesh, axis_name: AxisName
) -> Callable[[Params], OptState]:
    """Return an `init` for all workers of a mesh, which repeats per-worker arrays, pads sliced ones
    and sets counts.

    Args:
      init: returns the state of one worker.
      mesh: the mesh of the workers.
      axis_name: the axes of the workers, for per-worker arrays that name none.
    """

    def widen(entry: Entry, x: Leaf) -> Leaf:
        """Return an array of one worker's state as all workers keep it. A shared array is returned
        unchanged."""
        if entry.kept == "shared":
            return x
        count = count_devices(mesh, entry.axes or axis_name)
        if entry.kept == "per_worker":
            return jnp.tile(x, (count, *[1] * (x.ndim - 1)))
        if entry.kept == "sliced":
            return pad_to_multiple(x, entry.size, count)
        return jnp.full_like(x, count)

    return lambda params: map_entries(widen, init(params))


def keep_for_each_worker(opt_state: OptState, mapping: Mapping[str, Any]) -> OptState:
    """Return a template whose shared arrays are per-worker if `mapping` has one for each worker, as
    it has counters after local steps that did not count on all workers. Arrays that the mapping
    lacks, since `only` leaves them out, stay as they are."""
    own = {str(name) for name in np.asarray(mapping.get(PER_WORKER_KEY, ()))} & mapping.keys()

    def widen(entry: Entry, x: Leaf) -> PyTree:
        if entry.kept != "shared" or entry.name not in own:
            return x
        return PerWorker(jnp.zeros(np.shape(mapping[entry.name]), x.dtype))

    return map_entries(widen, opt_state) if own else opt_state


def pad_to_multiple(x: Leaf, size: int, count: int) -> Leaf:
    """Return x[..., :size], padded with zeros until `count` divides its last axis.

    Args:
      x: an array, on the host or traced.
      size: the number of its entries that are not padding.
      count: the number of workers that keep a slice.
    """
    return pad(x[..., :size], x.ndim - 1, size + -size % count)


def rescale_residuals(opt_state: OptState, num_workers: int) -> OptState:
    """Convert a state or mapping to another number of workers, and return it on the host, or raise
    a ValueError without per-worker arrays or one old number.

        x_j = mean over the old workers of x    for floating-point arrays
        x_j = x of the old worker 0             for integers and bools

    Nothing is lost: the mean of a residual over the workers, the update that the parameters have
    not yet received, stays the same. An array that all workers share, such as `published` of
    `exchange(route="parts")`, stays whole, and is divided again. Codes, such as 8-bit moments, are
    decoded, averaged, and encoded as the nearest code under the mean of their scales. In a mapping,
    uint16 arrays are the bits of bfloat16, unless its list of dtypes says something else.

    `restore_checkpoint` does this by itself.

    Args:
      opt_state: a state in the layout of `init_state`, or a tree that contains one; or a mapping
        from `state_dict`, also of a TrainState.
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
    if not has_per_worker_state(opt_state):
        raise ValueError("rescale_residuals: the state has no per-worker arrays to convert")
    rescaled = _rescale(arrays_with_entries(opt_state), count)
    return jax.tree.unflatten(jax.tree.structure(opt_state), rescaled)


def _rescale_mapping(mapping: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Convert the per-worker arrays and counts of a mapping, or raise a ValueError without
    per-worker arrays."""
    names = [str(name) for name in np.asarray(mapping.get(PER_WORKER_KEY, ()))]
    if not names:
        raise ValueError("rescale_residuals: the mapping has no per-worker arrays to convert")
    codes = find_codes(names)
    entries = [Entry(name, None, "per_worker", codes=codes.get(name)) for name in names]
    entries += [Entry(name, None, "count") for name in find_count_names(mapping, names)]
    mapping = dict(mapping)  # each array of a file is read once
    decoded = DecodedArrays(mapping)
    arrays = [_read_raw(np.asarray(decoded[entry.name])) for entry in entries]
    rescaled = _rescale(list(zip(entries, arrays, strict=True)), count)
    changed = zip(entries, rescaled, strict=True)
    return mapping | {entry.name: view_as_bits(new) for entry, new in changed}


def _read_raw(x: np.ndarray) -> np.ndarray:
    """Read raw bytes as bfloat16 if an entry has 2 of them, else as codes of 8 bits, and return an
    array of a known dtype unchanged."""
    return x.view(jnp.bfloat16 if x.itemsize == 2 else np.uint8) if is_raw(x.dtype) else x


def _rescale(pairs: Sequence[tuple[Entry, Leaf]], count: int) -> list[Any]:
    """Return arrays for `count` workers, with means of per-worker ones repeated, slices padded
    anew, counts set, and shared ones copied to the host.

    See `rescale_residuals`.
    """
    # From N to M workers:
    #   1. A per-worker array, (N·n, …) over the devices, becomes (N, n, …) on the host.
    #   2. Its mean over workers is (n, …): the array that one worker will have. Of integers this is
    #      worker 0's. Codes are decoded, (N, n), averaged, and encoded, (n,).
    #   3. It is repeated for the new workers, (M·n, …), and num_workers is M.
    # A sliced array is cut from (N·⌈n/N⌉,) to (n,), and padded to (M·⌈n/M⌉,).
    # Codes need their scales, which are a separate entry.
    by_name = {entry.name: x for entry, x in pairs}
    old_count = _common_count([x for entry, x in pairs if entry.kept == "count"])

    def rescale(entry: Entry, x: Leaf) -> Any:
        if entry.kept == "shared":
            return _to_host(x)
        if entry.kept == "sliced":
            return pad_to_multiple(np.asarray(x), entry.size, count)
        if entry.kept == "count":
            return np.full_like(x, count)
        by_worker = _split_by_worker(x, old_count, entry.name)
        if entry.codes is None:
            return _repeat(_average_workers(by_worker), count)
        scales = _split_by_worker(by_name[entry.codes.scales], old_count, entry.codes.scales)
        return _repeat(entry.codes.field.mean(by_worker, scales), count)

    return [rescale(entry, x) for entry, x in pairs]


def _to_host(x: object) -> object:
    """Copy an array of JAX to the host, or a typed key to the first device, and return anything
    that this process cannot read unchanged."""
    if not isinstance(x, jax.Array) or not (x.is_fully_addressable or x.is_fully_replicated):
        return x
    if is_key(x):
        return map_key_data(lambda data: jnp.asarray(np.asarray(data)), x)
    return np.asarray(x)


def find_count_names(names: Iterable[str], per_worker: Sequence[str]) -> list[str]:
    """Return the names of the fields `num_workers` beside per-worker arrays, or of all such fields
    if none is beside any, as that of an exchange without residuals inside an `accumulate`.

    Otherwise a number beside no such array, as in the local state of `sgd`, counts nothing.
    """
    counts = [x for x in names if x not in per_worker and x.rpartition("/")[2] == "num_workers"]
    beside = [x for x in counts if find_names_in_field(per_worker, x.rpartition("/")[0])]
    return beside or counts


def count_workers(opt_state: OptState) -> int:
    """Return the number of workers that a state counts, or 0 if it has no per-worker arrays or
    count, is traced, or its counts differ."""
    if not has_per_worker_state(opt_state):  # the names of a large state take time
        return 0
    counts = [x for entry, x in arrays_with_entries(opt_state) if entry.kept == "count"]
    are_arrays = all(isinstance(x, np.ndarray | jax.Array) and x.ndim == 0 for x in counts)
    if not are_arrays or checks.is_traced(counts):  # shapes, or the stacked states of a vmap
        return 0
    numbers = set(map(int, counts))
    return numbers.pop() if len(numbers) == 1 else 0


def _common_count(counts: list[Leaf]) -> int:
    """Return the one value that all counts have, or raise a ValueError if they differ or there are
    none."""
    numbers = read_counts(counts)
    if len(numbers) != 1:
        found = f"different ones: {sorted(numbers)}" if numbers else "none (no field num_workers)"
        raise ValueError(
            f"rescale_residuals: the state must have one number of workers; it has {found}"
        )
    return numbers.pop()


def read_counts(counts: Iterable[Leaf]) -> set[int]:
    """Return the numbers of workers that counts say.

    In the state of a pmap each device has a copy of the count, which is 1 before its first step.
    """
    found = [np.ravel(np.asarray(x)) for x in counts]
    return {x.size if np.all(x == 1) else int(n) for x in found for n in x}


def _split_by_worker(x: Leaf, count: int, name: str) -> np.ndarray:
    """Split an array of all workers, (count·n, …), into (count, n, …) on the host, or raise a
    ValueError if count does not divide its first axis."""
    array = np.asarray(x)
    if array.ndim < 1 or array.shape[0] % count:
        raise ValueError(
            f"rescale_residuals: {name} has shape {array.shape}; its first axis must be divisible "
            f"by the {count} workers, as in the layout of init_state"
        )
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def _average_workers(by_worker: np.ndarray) -> np.ndarray:
    """Return the mean of (workers, n, …) over the workers, computed in float64 and returned in the
    dtype of the array, or worker 0's array of integers and bools."""
    if not jnp.issubdtype(by_worker.dtype, jnp.inexact):
        return np.asarray(by_worker[0])
    wide = np.complex128 if np.iscomplexobj(by_worker) else np.float64
    return np.asarray(np.mean(by_worker, axis=0, dtype=wide).astype(by_worker.dtype))


def _repeat(x: np.ndarray, count: int) -> np.ndarray:
    """Repeat one worker's array, (n, …), for `count` workers, (count·n, …)."""
    return np.asarray(np.tile(x, (count, *[1] * (x.ndim - 1))))


def place_on_host(shardings: PyTree, state: OptState) -> PyTree:
    """Return the shardings of a state with the memory of the host for its large arrays.

    Padded arrays stay on the device, where each step cuts the padding off.

    Args:
      shardings: the sharding of each array.
      state: the state, or its shapes.
    """

    def place(sharding: Any, x: Leaf) -> Any:
        if is_padded(x) or not memories.is_large(x):
            return sharding
        return sharding.with_memory_kind(memories.PINNED_HOST)

    return jax.tree.map(place, shardings, state, is_leaf=is_padded)
