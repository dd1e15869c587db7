"""Leaves and their paths: flatten trees, name leaves, select them by pattern, compare structures.

A tree here may have masked leaves: None, or optax's MaskedNode where `optax.masked` or
`optax.partition` has taken a leaf out. Masked leaves count as leaves, so that trees that are masked
in different places (a gradient that is None for an integer parameter) have the same structure. A
row-sparse gradient is one leaf. A buffer of a Packed is one leaf too; it has the names of all the
leaves that it holds, where any other leaf has one name.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef

from optfn import checks
from optfn.leaves.layout import BufferLayout, plain
from optfn.leaves.traits import traits_of
from optfn.leaves.types import Leaf, LeafKind, PyTree

# A pattern of leaf paths: a regular expression that must match the whole path, or path -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def is_masked(x: Leaf) -> bool:
    """Tell whether `x` is a masked leaf: a mark in the place of an array."""
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Leaf) -> bool:
    """Tell whether `x` is a single leaf to optfn and a tree to JAX: masked, or Rows."""
    return is_masked(x) or isinstance(x, LeafKind)


def is_inexact(x: Leaf) -> bool:
    """Tell whether a leaf is floating point: not masked, not an integer, not a float0."""
    if not hasattr(x, "dtype"):
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_key(x: Leaf) -> bool:
    """Tell whether a leaf is a typed PRNG key, or an array of them."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def is_traced(x: object) -> bool:
    """Tell whether a leaf is an array that JAX traces, which has no value yet."""
    return isinstance(x, jax.core.Tracer)


def on_key_data(fn: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Return the key whose data are `fn` of the data of `key`."""
    data = fn(jax.random.key_data(key))
    new: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return new


def flatten(tree: PyTree) -> tuple[list[Leaf], PyTreeDef]:
    """Return the leaves of `tree`, masked ones included, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def map_arrays(fn: Callable[[Leaf], Any], tree: PyTree) -> PyTree:
    """Map `fn` over the leaves of `tree` that are not masked; masked ones stay as they are."""
    return jax.tree.map(lambda x: x if is_masked(x) else fn(x), tree, is_leaf=is_leaf)


def replace_arrays(tree: PyTree, values: Sequence[Any]) -> PyTree:
    """Return `tree` with one of `values` for each leaf; masked leaves stay as they are."""
    leaves, structure = flatten(tree)
    pairs = zip(leaves, values, strict=True)
    return structure.unflatten([x if is_masked(x) else value for x, value in pairs])


def paths(tree: PyTree) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`: "layers/0/bias".

    Keys are joined by "/". The last key of an nnx.Variable (its `value`) is left out: nnx passes
    the tree with it at init and without it at update, and a leaf must have the same name in both.
    The key of a node that only marks the tree below it (`Stacked`, `PerWorker`) is left out too.
    """
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())

    def stop(x: object) -> bool:
        return is_leaf(x) or is_transparent(x) or isinstance(x, variable)

    found: list[str] = []
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        name = "/".join(map(key_name, keys))
        if is_transparent(node):
            inner, *_ = node
            found.extend(join(name, path) for path in paths(inner))
        elif isinstance(node, variable) and not is_masked(node):
            found.extend([name] * len(jax.tree.leaves(node, is_leaf=is_leaf)))
        else:
            found.append(name)
    return found


def array_paths(tree: PyTree) -> list[str]:
    """Return the path of each leaf that is not masked, in the order of `jax.tree.leaves`."""
    pairs = zip(paths(tree), flatten(tree)[0], strict=True)
    return [path for path, leaf in pairs if not is_masked(leaf)]


def is_transparent(x: object) -> bool:
    """Tell whether `x` is a node that adds no word to paths: its first field is the tree."""
    return traits_of(x).transparent


def join(*words: str) -> str:
    """Join words to a path; empty words are left out."""
    return "/".join(filter(None, words))


def key_name(key: object) -> str:
    """Return one key of a JAX key path as a word."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def describes_leaves(x: object) -> bool:
    """Tell whether `x` is a node that knows the layouts of its leaves, such as `Packed`."""
    return traits_of(x).describes_leaves


def layouts(tree: PyTree) -> list[BufferLayout]:
    """Return the layout of each leaf, in the order of `flatten`."""
    found: list[BufferLayout] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: describes_leaves(x) or is_leaf(x)):
        found += node.layouts() if describes_leaves(node) else [layout_of_leaf(node)]
    return found


def layout_of_leaf(x: Leaf) -> BufferLayout:
    """Return the layout of a leaf that is one tensor."""
    return plain(tuple(getattr(x, "shape", ())))


def stacked_axes(tree: PyTree) -> list[int]:
    """Return for each leaf how many leading axes count tensors: the `Stacked` around it."""
    return [layout.runs[0].stacked for layout in layouts(tree)]


def names(tree: PyTree) -> list[tuple[str, ...]]:
    """Return the names of each leaf, in the order of `flatten`.

    A leaf has one name, its path; a buffer of a Packed has the path of each leaf that it holds.
    """
    found: list[tuple[str, ...]] = []
    for prefix, node in _named_nodes(tree):
        groups = node.leaf_names() if _has_names(node) else [(path,) for path in paths(node)]
        found += [tuple(join(prefix, name) for name in group) for group in groups]
    return found


def _has_names(x: object) -> bool:
    """Tell whether `x` is a node whose leaves have names of their own."""
    return hasattr(type(x), "leaf_names")


def _named_nodes(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield with their paths the leaves of a tree, and the nodes whose leaves have names."""
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())

    def stop(x: object) -> bool:
        return _has_names(x) or is_leaf(x) or is_transparent(x) or isinstance(x, variable)

    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        prefix = "/".join(map(key_name, keys))
        if is_transparent(node):
            inner, *_ = node
            yield from ((join(prefix, path), below) for path, below in _named_nodes(inner))
        else:
            yield prefix, node


# For each leaf a tuple of flags: one, or for a buffer of a Packed one per leaf that it holds.
Flags = list[tuple[bool, ...]]


def select(pattern: Pattern | None, tree: PyTree, argument: str) -> Flags:
    """Return for each leaf of `tree`, in the order of `flatten`, whether `pattern` selects it.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool; None
        selects nothing.
      tree: the tree whose leaves are selected; masked leaves have paths too.
      argument: the name of the pattern in errors.

    Returns:
      For each leaf a tuple of one bool; for a buffer of a Packed, one bool for each leaf in it.

    Raises:
      ValueError: a regular expression matches none of the paths of a tree that has leaves.
      TypeError: a function returns something other than a bool.
    """
    names_of_leaves = names(tree)
    flat = [name for group in names_of_leaves for name in group]
    nodes = filter(_has_names, jax.tree.leaves(tree, is_leaf=_has_names))
    known = flat + [path for node in nodes for path in node.layout.paths]
    selected = iter(_select(pattern, flat, known, flatten(tree)[0], argument))
    return [tuple(itertools.islice(selected, len(group))) for group in names_of_leaves]


def _select(
    pattern: Pattern | None,
    names: Sequence[str],
    known: Sequence[str],
    leaves: Sequence[Leaf],
    argument: str,
) -> list[bool]:
    """Return for each of `names` whether it is selected.

    A pattern that matches nothing is an error, unless it matches one of `known`, the names that
    the tree has or had before leaves were taken out, or all `leaves` are masked.
    """
    if pattern is None:
        return [False] * len(names)
    if isinstance(pattern, str | re.Pattern):
        compiled = re.compile(pattern)
        selected = [compiled.fullmatch(name) is not None for name in names]
        if not (any(map(compiled.fullmatch, known)) or all(map(is_masked, leaves))):
            raise ValueError(
                f"{argument}: the pattern {compiled.pattern!r} matches no leaf; "
                f"it must match a whole path. The paths are: {listed(names)}"
            )
        return selected
    selected = [pattern(name) for name in names]
    for name, chosen in zip(names, selected, strict=True):
        if not isinstance(chosen, bool):
            raise TypeError(f"{argument} must give True or False; got {chosen!r} for leaf {name!r}")
    return selected


def check_pattern(argument: str, pattern: object) -> Pattern | None:
    """Return `pattern` if it is a pattern or None; else raise an error that names `argument`."""
    if pattern is None or callable(pattern) or isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise TypeError(
            f"{argument} must be a regular expression of leaf paths or a function path -> bool; "
            f"got {checks.shown(pattern)}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from None
    return pattern


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return `names` as text for an error message, at most the first `most` of them."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown}, … ({len(names)} in all)" if len(names) > most else shown


def check_same_structure(who: str, what: str, tree: PyTree, than: str, reference: PyTree) -> None:
    """Raise a ValueError that lists the differences unless `tree` has the structure of `reference`.

    Args:
      who: the function that the error names.
      what: the name of `tree` in the error.
      tree: the tree to check.
      than: the name of `reference` in the error.
      reference: the tree with the expected structure.
    """
    if flatten(tree)[1] == flatten(reference)[1]:
        return
    found, expected = paths(tree), paths(reference)
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    if missing or extra:
        where = "; ".join(
            f"{word} {listed(absent)}"
            for word, absent in (("missing", missing), ("not expected", extra))
            if absent
        )
    else:
        where = f"{jax.tree.structure(tree)} against {jax.tree.structure(reference)}"
    raise ValueError(f"{who}: {what} must have the tree structure of {than}: {where}")
