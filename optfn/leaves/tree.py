"""Leaves and their paths: naming, selecting, and errors that a reader can act on.

A tree here may have masked leaves: None, and optax's MaskedNode where `optax.masked` or
`optax.partition` has taken a leaf out. They count as leaves, so that trees that are masked in
different places (a gradient that is None for an integer parameter) still have the same structure. A
row-sparse gradient is one leaf as well. So is a buffer of a Packed: it has the names of all leaves
in it, where another leaf has one.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optfn.leaves.layout import BufferLayout, Packed, Stacked, is_packed, plain
from optfn.leaves.rows import Rows
from optfn.leaves.types import Leaf, PyTree

# A pattern of leaf paths: a regular expression that must match the whole path, or path -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def is_masked(x: Leaf) -> bool:
    """Tell whether `x` is a masked leaf: it stands where there is no array."""
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Leaf) -> bool:
    """Tell whether `x` is one leaf here where JAX sees a tree: masked, or Rows."""
    return is_masked(x) or isinstance(x, Rows)


def is_inexact(x: Leaf) -> bool:
    """Tell whether a leaf is floating point: not masked, nor an integer, nor a float0."""
    if not hasattr(x, "dtype"):
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def flatten(tree: PyTree) -> tuple[list[Leaf], Any]:
    """Return the leaves of `tree`, masked ones included, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def map_arrays(fn: Callable[[Leaf], Any], tree: PyTree) -> PyTree:
    """Map `fn` over the leaves of `tree` that are not masked; masked ones stay as they are."""
    return jax.tree.map(lambda x: x if is_masked(x) else fn(x), tree, is_leaf=is_leaf)


def paths(tree: PyTree) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`: "layers/0/bias".

    Keys are joined by "/". The last key of an nnx.Variable (its `value`) is left out: nnx gives the
    tree with it at init and without it at update, and a leaf has one name. So is the key of a node
    that only marks what is below it (`Stacked`, `PerWorker`).
    """
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())

    def stop(x: Any) -> bool:
        return is_leaf(x) or is_transparent(x) or isinstance(x, variable)

    names: list[str] = []
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        name = "/".join(map(key_name, keys))
        if is_transparent(node):
            names.extend(join(name, inner) for inner in paths(node[0]))
        elif isinstance(node, variable) and not is_masked(node):
            names.extend([name] * len(jax.tree.leaves(node, is_leaf=is_leaf)))
        else:
            names.append(name)
    return names


def is_transparent(x: Any) -> bool:
    """Tell whether `x` is a node that adds no word to paths: a NamedTuple of one field."""
    return getattr(type(x), "transparent", False) is True


def join(*words: str) -> str:
    """Return a path made of words, empty ones left out."""
    return "/".join(filter(None, words))


def key_name(key: Any) -> str:
    """Return a key of a JAX key path as a word."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_node(x: Any) -> bool:
    """Tell whether `x` is a leaf here, or a node that says what lies in its leaves."""
    return isinstance(x, Packed | Stacked) or is_leaf(x)


def layouts(tree: PyTree) -> list[BufferLayout]:
    """Return what lies in each leaf, in the order of `flatten`."""

    def of(node: Any, stacked: int) -> list[BufferLayout]:
        if isinstance(node, Stacked):
            inner = jax.tree.leaves(node.layers, is_leaf=is_node)
            return [layout for below in inner for layout in of(below, stacked + 1)]
        if isinstance(node, Packed):
            return [*node.layout.buffers, *(plain(_shape(x)) for x in node.frozen)]
        return [plain(_shape(node), stacked)]

    return [layout for node in jax.tree.leaves(tree, is_leaf=is_node) for layout in of(node, 0)]


def _shape(x: Leaf) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def stacked_axes(tree: PyTree) -> list[int]:
    """Return for each leaf how many leading axes a `Stacked` around it says count tensors."""
    return [layout.runs[0].stacked for layout in layouts(tree)]


def names(tree: PyTree) -> list[tuple[str, ...]]:
    """Return the paths of the leaves that lie in each leaf, in the order of `flatten`.

    That is one, the leaf's own; in a buffer of a Packed as many as it has.
    """
    if not any(map(is_packed, jax.tree.leaves(tree, is_leaf=is_packed))):
        return [(path,) for path in paths(tree)]
    found: list[tuple[str, ...]] = []
    for prefix, node in _named_nodes(tree):
        if not isinstance(node, Packed):
            found += [(join(prefix, path),) for path in paths(node)]
            continue
        inside = [join(prefix, path) for path in node.layout.paths]
        found += [tuple(inside[i] for i in buffer.leaves) for buffer in node.layout.buffers]
        found += [(inside[i],) for i in node.layout.frozen]
    return found


def _named_nodes(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield the Packed and the leaves of a tree with their paths."""

    def stop(x: Any) -> bool:
        return is_packed(x) or is_leaf(x) or is_transparent(x)

    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        prefix = "/".join(map(key_name, keys))
        if is_transparent(node):
            yield from ((join(prefix, path), inner) for path, inner in _named_nodes(node[0]))
        else:
            yield prefix, node


# For each leaf, whether each of the leaves that lie in it is selected.
Flags = list[tuple[bool, ...]]


def select(pattern: Pattern | None, tree: PyTree, argument: str) -> Flags:
    """Tell for each leaf of `tree`, in the order of `flatten`, what `pattern` selects of it.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool; None
        selects nothing.
      tree: the tree whose paths are meant; masked leaves have paths too.
      argument: how the pattern is called in an error.

    Returns:
      For each leaf a bool in a tuple; for a buffer of a Packed, one for each leaf in it.

    Raises:
      ValueError: a regular expression matches none of the paths of a tree that has leaves.
      TypeError: a function gives something other than a bool.
    """
    own = names(tree)
    flat = [name for group in own for name in group]
    packed = filter(is_packed, jax.tree.leaves(tree, is_leaf=is_node))
    known = flat + [path for node in packed for path in node.layout.paths]
    chosen = iter(_select(pattern, flat, known, flatten(tree)[0], argument))
    return [tuple(itertools.islice(chosen, len(group))) for group in own]


def _select(
    pattern: Pattern | None,
    names: Sequence[str],
    known: Sequence[str],
    leaves: Sequence[Any],
    argument: str,
) -> list[bool]:
    """Return whether each name is selected; `known` are also names that may be meant."""
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


def check_pattern(argument: str, pattern: Any) -> Pattern | None:
    """Return `pattern` if it is one, or None; raise an error that names `argument`."""
    if pattern is None or callable(pattern) or isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise TypeError(
            f"{argument} must be a regular expression of leaf paths or a function path -> bool; "
            f"got {pattern!r} of type {type(pattern).__name__}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from None
    return pattern


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return `names` for an error message, cut after `most`."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown}, … ({len(names)} in all)" if len(names) > most else shown


def check_same_structure(who: str, what: str, tree: PyTree, than: str, reference: PyTree) -> None:
    """Raise a ValueError that says where, unless `tree` has the structure of `reference`."""
    if flatten(tree)[1] == flatten(reference)[1]:
        return
    ours, theirs = paths(tree), paths(reference)
    missing = [name for name in theirs if name not in set(ours)]
    extra = [name for name in ours if name not in set(theirs)]
    if missing or extra:
        where = "; ".join(
            f"{word} {listed(names)}"
            for word, names in (("missing", missing), ("not expected", extra))
            if names
        )
    else:
        where = f"{jax.tree.structure(tree)} against {jax.tree.structure(reference)}"
    raise ValueError(f"{who}: {what} must have the tree structure of {than}: {where}")
