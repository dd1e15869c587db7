"""The readers of an optimizer state: a dict for checkpoints, averages, a summary.

`optfn.checkpoint.loading` makes a state from a dict again.

The name of an array consists of the transform that owns it, the field, and the path of the leaf, as
in "scale_by_adam/mu/layers/0/w" (`optfn.mesh.state.names.arrays_with_names`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from optfn import core
from optfn.checkpoint.snapshot import Snapshot
from optfn.core import checks, tree
from optfn.core.types import Leaf, OptState, Params, PyTree
from optfn.interop import closures, modules
from optfn.interop.calls import iterate_links
from optfn.leaves import foreign, packed, patterns
from optfn.leaves.patterns import Pattern
from optfn.mesh.collectives.axes import AxisName
from optfn.mesh.layout.sharding import Kind, layout_of
from optfn.mesh.state import names as state_names
from optfn.mesh.state.inventory import arrays_with_entries, find_compressed, find_whole_matrices
from optfn.mesh.state.padded import map_padded, unwrap_padded
from optfn.wrappers.attributes import DEFAULT, INHERIT, ParamAttr, attributes_of
from optfn.wrappers.averaging import is_average, read_average, read_statistics


def state_dict(opt_state: OptState) -> dict[str, Any]:
    """Return the arrays of a state by name, copied to the host as NumPy arrays for saving, except
    traced and partly remote ones, which are unchanged. `load_state_dict` is the way back.

    Names do not change when you insert a transform in the chain, replace a number as learning rate
    by a schedule, or pack the params. You can save all of it by `numpy.savez(file, **d)`: arrays
    without a NumPy dtype (bfloat16, float8) are given as their bits, PRNG keys as their data.
    Beside the arrays the dict has the "version" of the format; "dtypes", a JSON text as bytes, if
    arrays are bits, or integers that could be bits; and if there are per-worker arrays, the list of
    their names, "per_worker".

    Args:
      opt_state: the state of an optimizer, however wrapped; or any tree of arrays.

    Returns:
      A dict of NumPy arrays on the host. Traced arrays, and arrays that this process holds only a
      shard of, are returned as they are.

    Raises:
      TypeError: you passed an optimizer instead of its state.
      ValueError: two arrays have the same name, as the leaves of {"a/b": x, "a": {"b": y}} have; a
        name has a NUL character, or is "version", "dtypes", "per_worker" or "key_impls".
    """
    if isinstance(opt_state, optax.GradientTransformation):
        raise TypeError(
            "state_dict takes the state of an optimizer, such as tx.init(params); "
            f"got {checks.show(opt_state)}"
        )
    foreign.check_arrays("state_dict: state", opt_state)
    snapshot = Snapshot.of(jax.tree.map(_host_copy, opt_state))
    return snapshot.to_mapping() | {k: _host_copy(snapshot.arrays[k]) for k in snapshot.keys}


def _host_copy(leaf: Leaf) -> Leaf:
    """Copy an array to the host, and return it unchanged if it is a typed key, is traced, or this
    process holds only a shard of it."""
    # Neither has a value here; the caller's program or orbax deals with it.
    if checks.is_traced(leaf) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return leaf
    return leaf if tree.is_key(leaf) else np.array(leaf)


def averaged_params(opt_state: OptState, params: Params, *, name: str | None = None) -> Params:
    """Return the average of the parameters that an optimizer's state holds, with a copy of `params`
    before the first update and for leaves that are not averaged.

    Use it to evaluate or to save the average (`apply` in fluid). The state and `params` are not
    changed, so nothing has to be restored afterwards.

    Args:
      opt_state: the state of an optimizer with an average in it.
      params: the parameters, for structure and dtypes.
      name: which average, if there are several: whole words of its name, such as "model_average".

    Raises:
      ValueError: there is no average, or there are several and `name` does not choose one; the
        error lists them.
    """
    return read_average(_find_average(opt_state, name), params)


def averaged_model_state(opt_state: OptState, model_state: PyTree, name: str | None) -> PyTree:
    """Return the model state with the average of its floating-point arrays, where a step made with
    `average_model_state=True` keeps it, and otherwise unchanged. `name` is as in
    `averaged_params`."""
    return read_statistics(_find_average(opt_state, name), model_state)


def _find_average(opt_state: OptState, name: str | None) -> OptState:
    """Return the state of the average with a name, or of the only one for None, and raise a
    ValueError unless there is exactly one."""
    found = dict(state_names.states_with_names(is_average, map_padded(unwrap_padded, opt_state)))
    chosen = {k: v for k, v in found.items() if name is None or f"/{name}/" in f"/{k}/"}
    if len(chosen) != 1:
        if not found:
            raise ValueError(
                "the state has no average: put optfn.exponential_moving_average or "
                "optfn.model_average last in the chain"
            )
        wanted = "choose one of them by its name" if name is None else f"none of them is {name!r}"
        raise ValueError(f"the state has the averages {', '.join(map(repr, found))}; {wanted}")
    return next(iter(chosen.values()))


def summary(
    tx: optax.GradientTransformation,
    params: Params,
    *,
    mesh: Mesh | None = None,
    shard: Kind | None = None,
    data_axis: AxisName = "data",
    tables: Pattern | None = None,
    shard_tables: bool = False,
) -> str:
    """Return as text a table of the parameters with their attributes and the bytes of optimizer
    state of each, and their placement if `shard` is given.

    Print it before you train, to see which parameters are frozen, which have another rate or no
    weight decay, which label of a partition each has, which are sent compressed, and how much
    memory the optimizer takes.

    Args:
      tx: an optimizer, however wrapped. Nothing is allocated, and no mesh axis is needed.
      params: the parameters, arrays or ShapeDtypeStructs.
      mesh: with `shard` or `shard_tables`, the mesh that divides params and state.
      shard: as for `make_train_step`. There are then two more columns: the placement of each leaf
        (the mesh axes that divide it, or "whole"), and the bytes of params and state on a device.
      data_axis: as for `make_train_step`.
      tables: as for `make_train_step`.
      shard_tables: as for `make_train_step`: the rows of `tables` are divided.

    Returns:
      The text of the table: a line for each leaf with shape, dtype, attributes and bytes of state,
      and a line of totals.

    Raises:
      TypeError: params are a model that must be split first; the error has the line that does so.
    """
    tx = core.check_transform("summary: tx", tx)
    foreign.check_keys("summary: params", params)
    modules.check_split("summary", params)
    attrs, without_decay = attributes_of(tx, params), _find_without_decay(tx, params)
    # Shapes alone: nothing is allocated.
    state, params = jax.eval_shape(lambda params: packed.unpack((tx.init(params), params)), params)
    names, leaves = tree.paths(params), tree.leaves(params)
    kept = _bytes_by_leaf(state, names)
    treatments = find_whole_matrices(state, names)
    labels, compressed = closures.find_labels(tx, params), find_compressed(state, names)
    placement = []
    if checks.flag("shard_tables", shard_tables) and tables is None:
        raise ValueError("summary: shard_tables=True needs tables, a pattern of paths")
    if shard is not None or shard_tables:
        placement = _layout_columns(tx, params, mesh, shard, data_axis, tables)
    titles = ["placement", "bytes a device"] if placement else []
    rows = [("parameter", "shape", "dtype", "attributes", "state bytes", "per element", *titles)]
    for i, (name, p) in enumerate(zip(names, leaves, strict=True)):
        if tree.is_masked(p):
            continue
        per = f"{kept[name] / p.size:.2f}" if p.size else "-"
        shape = "×".join(map(str, p.shape)) or "scalar"
        words = [f"rule {labels[name]!r}"] if name in labels else []
        words += [treatments[name]] if name in treatments else []
        words += ["compressed"] if name in compressed else []
        words += _describe_attributes(attrs.get(name, DEFAULT), p, name in without_decay)
        row = (name or ".", shape, str(p.dtype), ", ".join(words), f"{kept[name]:,}", per)
        rows.append((*row, *(placement[i] if placement else ())))
    arrays = [p for p in leaves if not tree.is_masked(p)]
    count, size = sum(p.size for p in arrays), sum(p.size * p.dtype.itemsize for p in arrays)
    total = sum(map(_leaf_bytes, jax.tree.leaves(state)))
    per = f"{total / count:.2f}" if count else "-"
    last = (f"total of {len(arrays)}", f"{count:,}", f"{size:,} bytes", "", f"{total:,}", per)
    rows.append((*last, *(placement[-1] if placement else ())))
    return _align_columns(rows)


def _layout_columns(
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh | None,
    shard: Kind | None,
    data_axis: AxisName,
    tables: Pattern | None,
) -> list[tuple[str, str]]:
    """Return for each leaf the mesh axes that divide it, or "whole", with its bytes of params and
    state on a device, and at the end the sum of all bytes, or raise a ValueError without a mesh."""
    if mesh is None:
        raise ValueError(
            "summary: shard and shard_tables need mesh, the devices over which params and state "
            "are divided"
        )
    layout = layout_of(shard, mesh, data_axis, tables, tx)

    def shards(values: PyTree, specs: PyTree) -> PyTree:
        def shard(x: Leaf, placement: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(placement.shard_shape(x.shape), x.dtype)

        return jax.tree.map(shard, values, layout.make_shardings(specs))

    init = layout.init_of_all_workers(lambda params: packed.unpack(tx.init(params)))
    state = jax.eval_shape(init, params)
    state = shards(state, layout.state_specs(state, params))
    local = shards(params, layout.param_specs(params))
    kept = _bytes_by_leaf(state, tree.paths(params))
    columns = []
    for place, p, spec in tree.items(local, layout.gradient_specs(params)):
        size = 0 if tree.is_masked(p) else _leaf_bytes(p) + kept[str(place)]
        word = str(tuple(spec)).replace("'", "") if tuple(spec) else "whole"
        columns.append((word, f"{size:,}"))
    total = sum(map(_leaf_bytes, jax.tree.leaves((local, state))))
    return [*columns, ("", f"{total:,}")]


def _leaf_bytes(leaf: Leaf) -> int:
    """Return the bytes of an array or its shape."""
    return int(leaf.size) * leaf.dtype.itemsize


def _bytes_by_leaf(state: OptState, names: list[str]) -> dict[str, int]:
    """Return the bytes of state by the path of the parameter, without arrays that belong to no
    parameter, such as counters and rates."""
    kept = dict.fromkeys(names, 0)
    for entry, leaf in arrays_with_entries(state, names):
        if entry.param is not None:
            kept[entry.param] += _leaf_bytes(leaf)
    return kept


def _find_without_decay(tx: optax.GradientTransformation, params: Params) -> set[str]:
    """Return the paths of leaves that `exclude=` of an optimizer of optfn, or of a link in it,
    exempts from weight decay."""
    named = (link.call[2] for link in iterate_links(tx))
    excluded = (arguments["exclude"] for arguments in named if "exclude" in arguments)
    return set[str]().union(*(patterns.match_names(x, params, "exclude") for x in excluded))


def _describe_attributes(attr: ParamAttr, p: Leaf, without_decay: bool) -> list[str]:
    """Return in words how a leaf is treated, with an empty list if it is treated by the optimizer's
    defaults."""
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return ["frozen: not floating point"]
    if not attr.trainable:
        return ["frozen: not trainable"]
    words = []
    if attr.learning_rate != 1.0:
        words.append(f"rate × {attr.learning_rate:g}")
    if attr.regularization is None:
        words.append("no regularization")
    elif attr.regularization is not INHERIT:
        words.append("own regularization")
    if without_decay or attr.weight_decay == 0:
        words.append("no weight decay")
    elif attr.weight_decay != 1.0:
        words.append(f"weight decay × {attr.weight_decay:g}")
    if not attr.need_clip:
        words.append("not clipped")
    if attr.stacked:
        words.append(f"{attr.stacked} stacked")
    return words


def _align_columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the table as text: padded cells, a rule below the titles and above the totals."""
    columns = []
    for k, column in enumerate(zip(*rows, strict=True)):
        pad = str.rjust if k in {4, 5, 7} else str.ljust  # columns of numbers, and of words
        columns.append([pad(cell, max(map(len, column))) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
