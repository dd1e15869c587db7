"""PartitionSpecs as users give them: by the structure of params, or by patterns of paths."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import checks, tree
from optfn.core.types import Params, PyTree
from optfn.leaves import contents, patterns
from optfn.mesh.collectives.axes import Axes, join_axes, to_axes

# A tree of PartitionSpecs or NamedShardings with the structure of params or a prefix of it, in
# which None is a whole leaf; or a mapping from patterns of paths to any of them.
Specs: TypeAlias = PyTree


def list_specs(specs: Specs) -> dict[Any, P]:
    """Map each pattern of a mapping, or each path of a tree, to its PartitionSpec, P() for None, or
    raise a TypeError for a value of another type.

    Of a NamedSharding only the spec counts.

    Raises:
      TypeError: something is neither a PartitionSpec, a NamedSharding, nor None.
    """
    items: Any
    if _is_flat(specs):
        # JAX would sort the keys, but of several patterns the first match counts.
        items = specs.items()
    else:
        paths = tree.paths(specs, _is_entry)
        items = zip(paths, jax.tree.leaves(specs, is_leaf=_is_entry), strict=True)
    return {path: _to_spec(path, x) for path, x in items}


def assign_specs(specs: Specs, params: Params) -> dict[str, P]:
    """Map the path of each leaf to its spec, leave out leaves that no pattern matches, and raise a
    ValueError if the specs do not fit params.

    A mapping whose keys are paths, or beginnings of paths, and together name all leaves, is read as
    a tree, and a mapping of another kind, without nested values, as patterns. Both readings agree
    unless a key has characters that mean something else in a pattern, and then the key is a name.

    Raises:
      ValueError: the tree does not have the structure of params, or of a prefix of it; or a pattern
        matches no leaf.
    """
    listed = list_specs(specs)
    found, missing, unused = _find_longest_prefixes(listed, params)
    if not (missing or unused):
        return found
    if _is_flat(specs):
        matches = patterns.first_matches(listed, params, "shard")
        return {path: spec for paths, spec in matches for path in paths}
    raise ValueError(
        "shard: the tree of PartitionSpecs must have the structure of params, or of a prefix of "
        f"it: {'; '.join(tree.list_misfits(missing, unused))}. The paths of params are: "
        f"{tree.list_names(tree.paths(params))}"
    )


def _find_longest_prefixes(
    listed: Mapping[Any, P], params: Params
) -> tuple[dict[str, P], list[str], list[str]]:
    """Return for each leaf the spec of the longest listed path that the leaf's path begins with,
    and the leaves and the listed paths that find no match.

    Returns:
      The specs by path; the leaves without a spec, which masked leaves may lack; and the paths that
      no leaf begins with. Such a path may have P(), because libraries put None in the place of
      modules without params.
    """
    found: dict[str, P] = {}
    missing, used = [], set[Any]()
    for name, leaf in contents.leaves_with_names(params):
        prefix = next((x for x in _list_prefixes(name) if x in listed), None)
        if prefix is not None:
            found[name] = listed[prefix]
        elif not tree.is_masked(leaf):
            missing.append(name)
        used.update(_list_prefixes(name))
    unused = [str(path) for path, spec in listed.items() if path not in used and any(spec)]
    return found, missing, unused


def _list_prefixes(path: str) -> Iterator[str]:
    """Yield a path and its beginnings up to each slash, the longest first, and at last "", the path
    of a leaf without a tree."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def check_specs(specs: Specs, mesh: Mesh | AbstractMesh) -> None:
    """Raise a ValueError if a spec names an axis that the mesh does not have, or an axis twice, and
    a TypeError if an entry is no spec.

    Raises:
      TypeError: something is no spec.
      ValueError: a spec names an axis that the mesh does not have, or names an axis twice.
    """
    for path, spec in list_specs(specs).items():
        names = [a for entry in spec for a in to_axes(entry)]
        missing = [a for a in names if a not in mesh.shape]
        if len(set(names)) < len(names):
            raise ValueError(f"shard: {spec} for {path!r} must not name a mesh axis twice")
        if missing:
            raise ValueError(
                f"shard: the mesh has no axis {missing[0]!r} for {path!r}, whose spec is {spec}; "
                f"its axes are {mesh.axis_names}"
            )


def check_workers_are_whole(specs: Specs, workers: Axes) -> None:
    """Raise a ValueError if a spec divides a leaf over one of the axes of workers: each worker has
    whole leaves."""
    for path, spec in list_specs(specs).items():
        over_workers = [name for name in join_axes(*spec) if name in workers]
        if over_workers:
            raise ValueError(
                f"shard: {spec} for {path!r} divides over {over_workers[0]!r}, but along that "
                "axis devices are workers, each with whole leaves. Name it in sharded(..., axis=)"
            )


def _is_entry(x: object) -> bool:
    """Tell whether `x` is an entry of specs: a PartitionSpec, a sharding, or None (whole)."""
    return tree.is_masked(x) or isinstance(x, P | jax.sharding.Sharding)


def _is_flat(specs: Specs) -> bool:
    """Tell whether `specs` is a mapping from text or compiled patterns to PartitionSpecs, shardings
    or None, without nested values."""
    return isinstance(specs, Mapping) and all(
        isinstance(key, str | re.Pattern) and _is_entry(x) for key, x in specs.items()
    )


def _to_spec(path: object, x: object) -> P:
    """Return an entry that is a PartitionSpec, the spec of a NamedSharding, or P() for a masked
    leaf, or raise a TypeError."""
    if isinstance(x, NamedSharding):
        return x.spec
    if tree.is_masked(x):
        return P()
    if not isinstance(x, P):
        raise TypeError(
            'shard must be "state", "params", a mapping from patterns of paths to PartitionSpecs, '
            "a tree of PartitionSpecs or NamedShardings with the structure of params or of a "
            f"prefix of it, or sharded(...) of one of these; got {checks.show(x)}"
            + (f" at {path!r}" if path else "")
        )
    return x
