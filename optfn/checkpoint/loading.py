"""Loading arrays by name, as `state_dict` returns them, into the state of an optimizer.

Strict loading needs every name to fit. Otherwise `Changes` says how the names differ, so that a run
can continue with a changed chain, changed frozen parameters or a changed model, and keep all that
the two have in common.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.checkpoint.changes import Changes, Misfit
from optfn.checkpoint.masters import convert_masters
from optfn.checkpoint.packed_state import (
    is_packed_or_padded,
    make_placeholders,
    pack_state,
    unpack_state,
)
from optfn.checkpoint.snapshot import ABOUT, KEYS, VERSION
from optfn.core import checks, tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState, PyTree
from optfn.leaves.nodes import Stacked
from optfn.mesh.compilers import memories
from optfn.mesh.state.bits import DecodedArrays, convert_dtype
from optfn.mesh.state.inventory import Entry, arrays_with_entries
from optfn.mesh.state.names import (
    arrays_with_names,
    find_names_in_field,
    iterate_nodes,
    make_report_test,
    states_with_names,
)
from optfn.mesh.state.placement import keep_for_each_worker, pad_to_multiple, read_counts
from optfn.mesh.state.reports import read_local
from optfn.tables.sharded_table import to_physical, unwrap_tables
from optfn.transforms import late_steps
from optfn.transforms.late_steps import LateStepsState, Steps, has_leaf_counts


def load_state_dict(
    opt_state: OptState, mapping: Mapping[str, Any], *, strict: bool = True
) -> OptState:
    """Return `opt_state` with the arrays that `mapping` has under their names, or raise a
    ValueError if shapes or, with `strict`, names do not fit.

    Args:
      opt_state: a state of the same optimizer, as a template: `tx.init(params)`. The result has its
        structure, wrappers, dtypes and shardings.
      mapping: arrays by name: a dict, or the result of `numpy.load`.
      strict: whether `mapping` must have exactly the names of the template. If False,
        missing arrays are taken from the template and superfluous ones are dropped, and one
        warning lists the names that were carried over, are new, or were dropped.

    Arrays of another dtype than the template's are converted: floats are rounded, and integers keep
    their value, in a float too. A float for an integer, and a number beyond the range, are errors.

    Even with `strict=True`, names that only report on a run may be missing or superfluous: the
    factor of a clip, the numbers of `record_metrics` and the counters of `skip_nonfinite`.

    The state of a `jax.pmap`, with a copy for each device, loads into the state of a step on a
    mesh: one copy of each array that is the same on all devices, and the residuals of each device.

    Master weights load in any form: float32 copies, or remainders of 32 or 24 bits. To make copies
    from remainders, the mapping must have the parameters too, as a TrainState's does. A copy that
    lies halfway between two parameters becomes smaller by up to 2⁻²³ of its value.

    You can save a state with a number as learning rate and load it with a schedule, or vice versa;
    the step count continues. If moments are new in a state that has already made steps, such as
    moments of a parameter that was frozen, their bias correction counts from this step on
    (`begun/<path>`, 4 bytes each). If the state is a TrainState, the average of a new parameter
    begins at that parameter.

    Raises:
      ValueError: names are missing or not expected (strict), shapes do not fit, a number does not
        fit the dtype of the template, or the version is newer than this one. The error lists all of
        them.
    """
    checks.flag("strict", strict)
    loaded, changes = load_named(opt_state, mapping, strict=strict)
    if changes and not strict:
        checks.warn(f"load_state_dict: {changes}")
    return loaded


def load_named(
    opt_state: OptState,
    mapping: Mapping[str, Any],
    *,
    strict: bool,
    shown: Callable[[str], str] = str,
) -> tuple[OptState, Changes]:
    """Return the state that `load_state_dict` returns and how the names differ, or raise a `Misfit`
    if arrays or, with `strict`, names do not fit.

    Errors have the names as `shown` returns them.

    Raises:
      Misfit: names or arrays do not fit.
    """
    _check_format(mapping)
    opt_state = keep_for_each_worker(opt_state, mapping)
    mapping = DecodedArrays(mapping)
    # 1. `plain` is the template with the arrays that `state_dict` names: an array for each leaf
    #    instead of buffers of several leaves, and none padded.
    is_converted = bool([*iterate_nodes(is_packed_or_padded, opt_state)])
    plain = unwrap_tables(opt_state)
    if is_converted:
        plain = _unpack_for(mapping, plain)
    named = list(arrays_with_names(plain))
    template_names, entries = [name for name, _ in named], arrays_with_entries(plain)
    mapping = _take_one_replica(entries, mapping)
    # 2. The masters in `mapping` have the form of the masters in `plain`.
    mapping = convert_masters(plain, dict(named), mapping)
    # 3. Both states have a step count for each leaf whose moments begin late, and for no more.
    late = _find_late_leaves(plain, template_names, mapping)
    if late:
        opt_state, plain = (_set_start_counts(x, late) for x in (opt_state, plain))
        named, entries = list(arrays_with_names(plain)), arrays_with_entries(plain)
    changes = _compare_names(template_names, [name for name, _ in named], mapping)
    refused, wrong = _list_errors(plain, changes, shown) if strict else [], []
    # 4. The arrays of `mapping`, and arrays made of its params, have the dtype and the sharding of
    #    `plain`, and its shape, also if they were saved by another number of workers.
    made = _begin_at_params(plain, named, mapping)
    leaves = []
    for (entry, leaf), stacked in zip(entries, _count_stacked_axes(plain), strict=True):
        value, problem = mapping.get(entry.name, made.get(entry.name)), ""
        if value is not None:
            value, problem = _fit(_resize(value, leaf, entry, stacked), leaf)
        if problem := problem or _compare_key(entry.name, leaf, mapping):
            wrong.append(f"{shown(entry.name)!r} {problem}")
        leaves.append(leaf if value is None else value)
    if refused or wrong:
        raise Misfit(refused, wrong)
    loaded = jax.tree.unflatten(jax.tree.structure(plain), leaves)
    # 5. Buffers are packed and padded again, and lie on the devices of the template's.
    if is_converted:
        like = unwrap_tables(opt_state)
        loaded = _place_like(like, pack_state(like, loaded))
    return to_physical(opt_state, loaded), changes


def _compare_key(name: str, leaf: Leaf, mapping: Mapping[str, Any]) -> str:
    """Return in words that a leaf is a typed key of another implementation than the saved one, or
    "" if it is no key, and if the implementation is not known."""
    if not tree.is_key(leaf):
        return ""
    own, impls = str(jax.random.key_impl(leaf)), mapping.get(KEYS, np.empty((0, 2)))
    saved = dict(np.asarray(impls).tolist()).get(name, own)
    return "" if saved == own else f"is a key of {saved}, but the template has a key of {own}"


def _check_format(mapping: Mapping[str, Any]) -> None:
    """Raise a TypeError unless `mapping` is a Mapping, and a ValueError if its version is newer
    than VERSION, while one without a version is accepted."""
    wanted = "a mapping from names to arrays, such as the result of state_dict or numpy.load"
    checks.instance("load_state_dict: mapping", mapping, Mapping, wanted)
    version = checks.count("version", np.asarray(mapping.get("version", VERSION)).tolist())
    if version > VERSION:
        raise ValueError(
            f"the state has format version {version}; this version of optfn reads versions up to "
            f"{VERSION}"
        )


def _resize(value: Leaf, leaf: Leaf, entry: Entry, stacked: int) -> Leaf:
    """Return a saved array in the template's shape if it is per-worker, sliced or stacked and holds
    the same elements but for padding, and otherwise unchanged.

    A per-worker array is flat, or has the shape of the leaf where devices divide it. A sliced array
    is padded for the number of workers. In an array with `stacked` leading axes, stages are in the
    order of the model, however these axes are folded (`stack_stages`).
    """
    shape = np.shape(value)
    rest = leaf.shape[stacked:]
    if stacked and shape != leaf.shape and shape[len(shape) - len(rest) :] == rest:
        is_same_count = np.size(value) == leaf.size and len(shape) > len(rest)
        return np.reshape(value, leaf.shape) if is_same_count else value
    if entry.kept == "per_worker" and np.size(value) == leaf.size:
        return np.reshape(value, leaf.shape)
    is_sliced = entry.kept == "sliced" and len(shape) == leaf.ndim and shape[-1] >= entry.size
    if not is_sliced or shape == leaf.shape:
        return value
    return pad_to_multiple(np.asarray(value), entry.size, leaf.shape[-1])


def _count_stacked_axes(state: PyTree) -> list[int]:
    """Return for each array of a state how many `Stacked` nodes are around it."""
    counts = []
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Stacked)):
        is_stacked = isinstance(node, Stacked)
        counts += [1 + n for n in _count_stacked_axes(node.layers)] if is_stacked else [0]
    return counts


def _take_one_replica(
    entries: Sequence[tuple[Entry, Leaf]], mapping: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a mapping with one copy of each shared array if the given one has the state of a pmap,
    or the given mapping itself otherwise.

    There each shared array has one more axis in front, with a copy for each worker; the counters of
    steps show it. So has a sliced one, of which each worker uses the slice that it owns. Per-worker
    arrays keep that axis, which they have anyway.

    Raises:
      ValueError: the copies of an array differ.
    """
    shared = {entry.name: leaf for entry, leaf in entries if entry.kept == "shared"}
    counters = [k for k, x in shared.items() if x.shape == () and x.dtype == jnp.int32]
    shapes = {np.shape(mapping[name]) for name in counters if name in mapping} - {()}
    if [len(shape) for shape in shapes] != [1]:
        return mapping
    ((count,),) = shapes
    found = dict(mapping)
    for name in {entry.name for entry, _ in entries if entry.kept == "count"} & mapping.keys():
        (number,) = read_counts([mapping[name]])
        found[name] = np.full((), number, np.int32)
    for name, leaf in shared.items():
        if name not in found or np.shape(found[name]) != (count, *leaf.shape):
            continue
        copies = np.asarray(mapping[name])
        if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
            raise ValueError(
                f"load_state_dict: {name!r} has {count} copies, as the state of a pmap has, but "
                "they differ, and the template keeps one for all workers"
            )
        found[name] = copies[0]
    sliced = [entry.name for entry, _ in entries if entry.kept == "sliced"]
    for name in {*sliced} & mapping.keys():
        found[name] = _join_own_slices(np.asarray(mapping[name]))
    return found


def _join_own_slices(copies: np.ndarray) -> np.ndarray:
    """Return the slices that workers own, each from this worker's copy, (workers, size)."""
    count, size = copies.shape
    own = np.arange(size) // -(-size // count)
    return copies[own, np.arange(size)]


def _compare_names(
    template: Iterable[str], state: Sequence[str], mapping: Mapping[str, Any]
) -> Changes:
    """Return the names that are carried over, in both mapping and state, new, which the mapping
    lacks, and dropped, which the state lacks."""
    known = {*state, *ABOUT}
    return Changes(
        [name for name in state if name in mapping],
        [name for name in template if name not in mapping and name in known],
        [name for name in mapping if name not in known],
    )


def _find_late_leaves(
    state: OptState, names: Sequence[str], mapping: Mapping[str, Any]
) -> dict[str, dict[str, np.ndarray]]:
    """For each state whose step is in the mapping, return the leaves whose moments begin late: the
    mapping lacks these moments, or says that they begin late.

    If the mapping has the step count of a state but not the moments of a leaf, these moments are
    the template's, and have seen as many steps as the template, which may be none.

    Args:
      state: the template.
      names: the names of its arrays.
      mapping: arrays by name.

    Returns:
      For the name of each such state, a dict from the path of a leaf to the step count when its
      moments began.
    """
    late: dict[str, dict[str, np.ndarray]] = {}
    for name, node in states_with_names(has_leaf_counts, state):
        if f"{name}/step" not in mapping:
            continue
        field = tree.join(name, traits_of(node).counted)
        paths = find_names_in_field(names, field)
        # Leaves that began late in the saved run, and leaves whose moments begin now.
        saved = {path for path in paths if tree.join(name, "begun", path) in mapping}
        fresh = [path for path in paths if tree.join(field, path) not in mapping]
        found = dict.fromkeys(saved, np.zeros(()))  # the mapping has the values
        found |= _count_late_starts(node.step, mapping[f"{name}/step"], sorted({*fresh} - saved))
        if found or isinstance(node.step, LateStepsState):
            late[name] = {path: found[path] for path in paths if path in found}
    return late


def _count_late_starts(step: Steps, loaded: Leaf, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return by path the step count of each leaf's first step, without leaves that began at 0, or
    warn and return {} if a count cannot be read here.

    Args:
      step: the count of the template.
      loaded: the count that replaces it.
      paths: the leaves that keep their moments.
    """
    begun = step.begun if isinstance(step, LateStepsState) else {}
    (shared,) = jax.tree.leaves(late_steps.global_count(step))
    if not paths:
        return {}
    started = {path: jax.tree.leaves(begun.get(path, 0))[0] for path in paths}
    if not all(map(_is_on_host, (loaded, shared, *started.values()))):
        checks.warn(
            f"the moments of {tree.list_names(paths)} start at zero, but their step "
            "count is divided over several processes and cannot be changed here, so their bias "
            "correction also counts the steps before"
        )
        return {}
    made = np.subtract(read_local(loaded), read_local(shared))
    counts = {path: made + read_local(x) for path, x in started.items()}
    return {path: count for path, count in counts.items() if np.any(count)}


def _is_on_host(x: Leaf) -> bool:
    """Tell whether this process can read an array's value."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _set_start_counts(state: OptState, late: Mapping[str, Mapping[str, np.ndarray]]) -> OptState:
    """Return a state with the step counts by leaf of `late` in the states that it names, or plain
    counts if it has no leaves for them."""
    nodes = states_with_names(has_leaf_counts, state)
    found = {id(node): late[name] for name, node in nodes if name in late}

    def put(node: PyTree) -> PyTree:
        begun = found.get(id(node))
        if begun is None:
            return node
        step = late_steps.global_count(node.step)
        counts = {path: jax.tree.map(partial(_fill, count), step) for path, count in begun.items()}
        return node._replace(step=LateStepsState(step, counts) if counts else step)

    return jax.tree.map(put, state, is_leaf=has_leaf_counts)


def _fill(count: np.ndarray, like: Leaf) -> Leaf:
    """Return a count in the shape, dtype and sharding of a leaf."""
    return _fit(np.broadcast_to(count, like.shape).astype(like.dtype), like)[0]


def _begin_at_params(
    state: OptState, named: Sequence[tuple[str, Leaf]], mapping: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return by name the copies and averages that the mapping lacks, begun at their parameters, and
    warn of averages that begin at zero without params.

    A copy, such as a new master, is the param of the mapping. A sum whose weight the mapping has is
    weight·param, so that the average of a new leaf is its param. If the state has no params, the
    average begins at zero, and a warning says so.
    """
    # Two walks, since an average may be inside of the state with the masters that it averages.
    fields: list[tuple[str, str]] = []
    for has_weights in (False, True):
        for name, part in states_with_names(partial(_has_params, has_weights), state):
            for field, weight in traits_of(part).made_of_params.items():
                if weight is not None:
                    fields.append((tree.join(name, field), weight and tree.join(name, weight)))
    by_name, begun, at_zero = dict(named), {}, []
    for field, weight in fields:
        for path, name in find_names_in_field(by_name, field).items():
            source = tree.join("train/params", path)
            if name in mapping or (weight or source) not in mapping:
                continue
            if source in by_name:
                param, _ = _fit(mapping.get(source, by_name[source]), by_name[source])
                wide = param.astype(by_name[name].dtype)
                if weight:
                    wide *= read_local(mapping[weight]).astype(wide.dtype)
                begun[name] = wide
            elif weight:
                at_zero.append(name)
    if at_zero:
        checks.warn(
            f"the averages {tree.list_names(at_zero)} are new and begin at zero, because this "
            "state has no params. Load the whole TrainState, and they begin at its params"
        )
    return begun


def _has_params(has_weights: bool, x: object) -> bool:
    """Tell whether `x` declares copies of params, or with `has_weights` weighted sums of them."""
    weights = traits_of(x).made_of_params.values()
    return any(weight is not None and bool(weight) == has_weights for weight in weights)


def _list_errors(state: OptState, changes: Changes, shown: Callable[[str], str]) -> list[str]:
    """Return in words the names that are missing or not expected, without names that only report on
    a run."""
    is_report = make_report_test(state)
    missing = [shown(name) for name in changes.new if not is_report(name)]
    extra = [shown(name) for name in changes.dropped if not is_report(name)]
    return tree.list_misfits(missing, extra)


def _unpack_for(mapping: Mapping[str, Any], opt_state: OptState) -> OptState:
    """Return `opt_state` with an unpadded array for each leaf, where packed and padded arrays
    become placeholders if the mapping has all arrays."""
    plain = unpack_state(
        jax.tree.map(
            lambda node: make_placeholders(node) if is_packed_or_padded(node) else node,
            opt_state, is_leaf=is_packed_or_padded,
        )
    )  # fmt: skip
    is_whole = all(name in mapping for name, _ in arrays_with_names(plain))
    return plain if is_whole else unpack_state(opt_state)


def _place_like(like: OptState, state: OptState) -> OptState:
    """Give packed buffers and padded arrays the dtypes and shardings that they have in `like`."""

    def place(like: PyTree, node: PyTree) -> PyTree:
        if not is_packed_or_padded(like):
            return node
        return jax.tree.map(lambda x, leaf: _fit(x, leaf)[0], node, like)

    return jax.tree.map(place, like, state, is_leaf=is_packed_or_padded)


def _fit(value: Leaf, leaf: Leaf) -> tuple[Leaf, str]:
    """Return a value with the dtype and sharding of a leaf and "", or an array without meaning and
    the reason in words if it does not fit."""
    if tree.is_key(leaf):
        data, problem = _fit(value, jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)), problem
    sharding, dtype = getattr(leaf, "sharding", None), np.dtype(leaf.dtype)
    if isinstance(value, jax.Array):
        is_placed = getattr(value, "committed", True) == getattr(leaf, "committed", True)
        lies_there = is_placed and value.sharding == sharding and value.dtype == dtype
        # An array of several processes cannot be moved from here: it fits as it is, or not.
        if lies_there or not value.is_fully_addressable:
            fits = value.shape == leaf.shape and value.dtype == dtype
            got = f"is {value.dtype}{value.shape}, not {leaf.dtype}{leaf.shape}"
            return value, "" if fits else got
    if isinstance(value, np.ma.MaskedArray):
        return leaf, "is a masked array, and the template has no mask: pass x.filled(0.0)"
    array = np.asarray(value)
    if array.shape != leaf.shape:
        return leaf, f"has shape {array.shape}, but the template has {leaf.shape}"
    kept = jax.dtypes.canonicalize_dtype(dtype)
    array, problem = convert_dtype(array, kept)
    if problem:
        return leaf, problem + ("" if kept == dtype else " without jax_enable_x64")
    if sharding is None or not getattr(leaf, "committed", True):
        return jnp.asarray(array), ""
    return memories.make_array(array.shape, sharding, lambda index: array[index]), ""
