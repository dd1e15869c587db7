"""Arrays by name, back into the state of an optimizer: what `state_dict` gives, loaded.

A state loads where every name fits. Where names differ, `Changes` says how: a run that goes on with
another chain, other frozen parameters or another model loads what it has in common with before.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn import checks
from optfn.leaves import tree
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import unpack
from optfn.leaves.traits import traits_of
from optfn.leaves.types import Leaf, OptState, PyTree
from optfn.state import names as state_names
from optfn.state.placement import PER_WORKER_KEY
from optfn.train.packed_state import holds_packed, pack_state, unpack_state
from optfn.train.state_dict import VERSION, bits_of, is_foreign, named_leaves, per_worker_names
from optfn.transforms import learning_rate as rates

# Keys of a mapping that are no part of the state.
ABOUT = ("version", PER_WORKER_KEY)


@dataclasses.dataclass(frozen=True)
class Changes:
    """How the names of a mapping differ from those of the state that it was loaded into.

    carried: the names that were loaded.
    new: those that the mapping lacks, whose arrays are the template's.
    dropped: those that the state lacks.
    """

    carried: Sequence[str]
    new: Sequence[str]
    dropped: Sequence[str]

    def __bool__(self) -> bool:
        """Tell whether there is a difference."""
        return bool(self.new or self.dropped)

    def __str__(self) -> str:
        parts = {
            "carried over": self.carried,
            "new, as in the template": self.new,
            "dropped": self.dropped,
        }
        return "; ".join(f"{what}: {tree.listed(x) or 'nothing'}" for what, x in parts.items())


def load_state_dict(
    opt_state: OptState, mapping: Mapping[str, Any], *, strict: bool = True
) -> OptState:
    """Return `opt_state` with the arrays of `mapping`, as `state_dict` gave them.

    Args:
      opt_state: a state of the same optimizer, as a template: `tx.init(params)`. The result has its
        structure, wrappers, dtypes and shardings.
      mapping: arrays by name: a dict, or the result of `numpy.load`.
      strict: whether every name of the template must be in `mapping` and no other. If not, arrays
        that are missing stay as the template has them, and others are dropped; one warning lists
        the names that were carried over, are new, or were dropped.

    Some names may be missing or left over in either case: of fields that earlier versions kept, and
    of those that only report on a run, such as the factor of a clip, what `record_metrics` has
    recorded and the counters of `skip_nonfinite`.

    A state saved under a number loads under a schedule and the other way round: the step goes on.

    Raises:
      ValueError: names are missing or not expected (strict), shapes or kinds of dtype do not fit,
        or the version is newer than this one; the error lists all.
    """
    checks.flag("strict", strict)
    loaded, changes = load(opt_state, mapping, strict=strict)
    if changes and not strict:
        checks.warn(f"load_state_dict: {changes}")
    return loaded


def load(
    opt_state: OptState, mapping: Mapping[str, Any], *, strict: bool
) -> tuple[OptState, Changes]:
    """Return what `load_state_dict` returns, and how the names differ."""
    if not isinstance(mapping, Mapping):
        raise TypeError(
            "load_state_dict: mapping must give arrays by name, as state_dict and numpy.load do; "
            f"got {checks.shown(mapping)}"
        )
    version = checks.count("version", np.asarray(mapping.get("version", VERSION)).tolist())
    if version > VERSION:
        raise ValueError(f"the state has format version {version}; this optfn reads {VERSION}")
    plain = _unpacked_for(mapping, opt_state) if holds_packed(opt_state) else opt_state
    named = list(named_leaves(plain))
    changes = _changes([name for name, _ in named], mapping)
    wrong = _refused(plain, changes) if strict else []
    copied = _copied_params(plain, named, mapping)
    leaves = []
    for name, leaf in named:
        found = mapping.get(name, copied.get(name))
        value, problem = (leaf, "") if found is None else _fitted(found, leaf)
        if problem:
            wrong.append(f"{name!r} {problem}")
        leaves.append(value)
    if wrong:
        raise ValueError("the state does not fit: " + "; ".join(wrong))
    loaded = jax.tree.unflatten(jax.tree.structure(plain), leaves)
    if plain is not opt_state:
        loaded = _placed(pack_state(opt_state, loaded), opt_state)
    return loaded, changes


def _changes(names: Iterable[str], mapping: Mapping[str, Any]) -> Changes:
    names = list(names)
    known = {*names, *ABOUT}
    return Changes(
        [name for name in names if name in mapping],
        [name for name in names if name not in mapping],
        [name for name in mapping if name not in known],
    )


def _copied_params(
    state: OptState, named: Sequence[tuple[str, Leaf]], mapping: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return the copies of params that a mapping with params lacks, such as new masters."""
    parts = state_names.named_parts(state, stop=_copies, unnamed=rates.is_rate)
    fields = [tree.join(name, traits_of(part).copies) for name, part in parts if _copies(part)]
    by_name, copied = dict(named), {}
    for field in fields:
        for name, leaf in named:
            source = f"train/params{name.removeprefix(field)}"
            is_copy = _is_within(name, [field]) and source in by_name
            if is_copy and name not in mapping and source in mapping:
                param, _ = _fitted(mapping[source], by_name[source])
                copied[name] = param.astype(leaf.dtype)
    return copied


def _copies(x: object) -> bool:
    return bool(traits_of(x).copies)


def _refused(state: OptState, changes: Changes) -> list[str]:
    """Return the differences for which strict loading refuses, in words."""
    retired = state_names.retired_fields(state, unnamed=rates.is_rate)
    is_report = state_names.reports_of(state)
    missing = [name for name in changes.new if not is_report(name)]
    extra = [name for name in changes.dropped if not (is_report(name) or _is_within(name, retired))]
    wrong = [f"missing {tree.listed(missing)}"] if missing else []
    return wrong + ([f"not expected {tree.listed(extra)}"] if extra else [])


def _is_within(name: str, fields: Sequence[str]) -> bool:
    return any(f"{name}/".startswith(f"{field}/") for field in fields)


def _unpacked_for(mapping: Mapping[str, Any], opt_state: OptState) -> OptState:
    """Return a state without buffers as the template for a mapping; packed again, it is placed.

    Earlier versions saved per-worker buffers packed; where `mapping` has such buffers, those of the
    result stay packed too.
    """

    def on_host(node: PyTree) -> PyTree:
        return jax.tree.map(_shape_on_host, node) if is_packed(node) else node

    def is_in(mapping: Mapping[str, Any], state: OptState) -> bool:
        named, own = dict(named_leaves(state)), per_worker_names(state)
        return all(k in mapping and np.shape(mapping[k]) == named[k].shape for k in own)

    forms = unpack_state, unpack
    template = jax.tree.map(on_host, opt_state, is_leaf=is_packed)
    form = next((form for form in forms if is_in(mapping, form(template))), unpack_state)
    plain = form(template)
    # Arrays that the mapping lacks stay as they are.
    is_whole = all(name in mapping for name, _ in named_leaves(plain))
    return plain if is_whole else form(opt_state)


def _shape_on_host(leaf: Leaf) -> Leaf:
    """Return an array on the host of the shape of `leaf`, without its numbers."""
    if tree.is_key(leaf):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _placed(state: OptState, like: OptState) -> OptState:
    """Return a state whose buffers lie as those of `like`."""

    def place(like: PyTree, node: PyTree) -> PyTree:
        if not is_packed(like):
            return node
        return jax.tree.map(lambda x, leaf: _fitted(x, leaf)[0], node, like)

    return jax.tree.map(place, like, state, is_leaf=is_packed)


def _fitted(value: Leaf, leaf: Leaf) -> tuple[Leaf, str]:
    """Return `value` as an array like `leaf`, and the reason if it cannot be one, else ""."""
    if tree.is_key(leaf):
        data, problem = _fitted(value, jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)), problem
    if isinstance(value, jax.Array) and _lies_as(value, leaf):
        fits = value.shape == leaf.shape and value.dtype == leaf.dtype
        return value, "" if fits else f"is {value.dtype}{value.shape}, not {leaf.dtype}{leaf.shape}"
    array = np.asarray(value)
    dtype = np.dtype(leaf.dtype)
    if array.shape != leaf.shape:
        return leaf, f"has shape {array.shape}, the template {leaf.shape}"
    if is_foreign(dtype) and array.dtype in (bits_of(dtype), np.dtype(f"V{dtype.itemsize}")):
        array = array.view(dtype)
    if not jnp.can_cast(array.dtype, dtype, "same_kind") and not is_foreign(array.dtype):
        return leaf, f"has dtype {array.dtype}, the template {dtype}"
    array = array.astype(dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return jnp.asarray(array), ""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]), ""


def _lies_as(value: jax.Array, leaf: Leaf) -> bool:
    """True if sharding and dtype already match, or the array is not fully addressable here."""
    return not value.is_fully_addressable or (
        value.sharding == getattr(leaf, "sharding", None) and value.dtype == leaf.dtype
    )
