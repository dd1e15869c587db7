"""Leaves and their paths: flatten trees, name leaves, select them by pattern, compare structures.

A tree here may have masked leaves: None, or optax's MaskedNode, with which `optax.masked` and
`optax.partition` replace a leaf. Masked leaves count as leaves, so that trees that are masked in
different places (such as a gradient that is None for an integer parameter) have the same structure.
A row-sparse gradient is one leaf. A buffer of a Packed is one leaf with many names: those of the
leaves packed in it.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef

from optfn.core import checks
from optfn.core.checks import T
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OneLeaf, PyTree

if TYPE_CHECKING:
    from optfn.leaves.layout import BufferLayout, Run

# A pattern of leaf paths: a regular expression that must match the whole path, or path -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def is_masked(x: Leaf) -> bool:
    """Tell whether `x` is a masked leaf, a mark instead of an array."""
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Leaf) -> bool:
    """Tell whether `x` is a single leaf to optfn and a tree to JAX: masked, or Rows."""
    return is_masked(x) or isinstance(x, OneLeaf)


def is_array(x: object) -> TypeGuard[jax.Array]:
    """Tell whether `x` has a dtype: an array, of NumPy too, its shape, or Rows."""
    return hasattr(x, "dtype")


def is_inexact(x: Leaf) -> bool:
    """Tell whether a leaf is floating point: not masked, not an integer, not a float0."""
    if not is_array(x):
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_float0(x: Leaf) -> bool:
    """Tell whether `x` is a float0, JAX's gradient of an integer."""
    return is_array(x) and x.dtype == jax.dtypes.float0


def has_shape(x: Leaf, shape: tuple[int, ...]) -> bool:
    """Tell whether `x` is an array of this shape."""
    return is_array(x) and x.shape == shape


def as_array(x: Leaf) -> Leaf:
    """Return a number or a floating-point NumPy array as a JAX array, else the leaf as it is."""
    is_host = isinstance(x, int | float | complex) or (isinstance(x, np.ndarray) and is_inexact(x))
    return jnp.asarray(x) if is_host else x


def is_key(x: Leaf) -> bool:
    """Tell whether a leaf is a typed PRNG key, or an array of them."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def map_key_data(fn: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Return the key whose data are `fn` of the data of `key`."""
    data = fn(jax.random.key_data(key))
    new: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return new


def flatten(tree: PyTree) -> tuple[list[Leaf], PyTreeDef]:
    """Return the leaves of `tree`, masked ones included, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def leaves(tree: PyTree) -> list[Leaf]:
    """Return the leaves of `tree`, masked ones included."""
    return jax.tree.leaves(tree, is_leaf=is_leaf)


def arrays(tree: PyTree) -> list[Leaf]:
    """Return the leaves of `tree` that are not masked."""
    return [x for x in leaves(tree) if not is_masked(x)]


def map(fn: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Map fn(leaf, *leaves of `trees` in its place) over all leaves, masked ones included."""
    first, structure = flatten(tree)
    columns = (leaves(x) for x in trees)
    return structure.unflatten(fn(*row) for row in zip(first, *columns, strict=True))


def map_arrays(fn: Callable[[Leaf], Any], tree: PyTree) -> PyTree:
    """Map `fn` over the leaves of `tree` that are not masked; masked ones stay as they are."""
    return map(lambda x: x if is_masked(x) else fn(x), tree)


def map_named(fn: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Map fn(place, leaf, *leaves of `trees`); the place says the path, for errors."""
    return flatten(tree)[1].unflatten(fn(*row) for row in items(tree, *trees))


def map_to(
    count: int, fn: Callable[..., Sequence[Any]], tree: PyTree, *trees: PyTree
) -> tuple[PyTree, ...]:
    """Map fn(place, leaf, *leaves of `trees`), which has `count` results; return a tree of each."""
    results = [fn(*row) for row in items(tree, *trees)]
    structure = flatten(tree)[1]
    return tuple(structure.unflatten(result[k] for result in results) for k in range(count))


class Place:
    """The place of a leaf in a tree; its text is the path, made only where an error needs it."""

    def __init__(self, paths: Callable[[], list[str]], number: int) -> None:
        self._paths, self.number = paths, number

    def __str__(self) -> str:
        return self._paths()[self.number]

    def __repr__(self) -> str:
        return repr(str(self))


def items(tree: PyTree, *trees: PyTree) -> Iterator[tuple[Any, ...]]:
    """Yield (place, leaf, *leaves of `trees` in its place) for all leaves of a tree."""
    known = functools.cache(functools.partial(paths, tree))
    for i, row in enumerate(zip(*(leaves(x) for x in (tree, *trees)), strict=True)):
        yield Place(known, i), *row


def paths(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> list[str]:
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
        name = "/".join(key_name(key) for key in keys)
        if is_transparent(node):
            found.extend(join(name, path) for path in paths(inside(node), is_leaf))
        elif isinstance(node, variable) and not is_masked(node):
            found.extend([name] * len(jax.tree.leaves(node, is_leaf=is_leaf)))
        else:
            found.append(name)
    return found


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Return (path, leaf) for each leaf."""
    return list(zip(paths(tree), leaves(tree), strict=True))


def array_paths(tree: PyTree) -> list[str]:
    """Return the path of each leaf that is not masked, in the order of `jax.tree.leaves`."""
    return [path for path, _ in arrays_with_paths(tree)]


def arrays_with_paths(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Return (path, leaf) for each leaf that is not masked."""
    return [(path, leaf) for path, leaf in leaves_with_paths(tree) if not is_masked(leaf)]


def is_transparent(x: object) -> bool:
    """Tell whether `x` is a node that adds no word to paths: its first field is the tree."""
    return traits_of(x).transparent


def inside(node: PyTree) -> PyTree:
    """Return the tree in a node that adds no word to paths."""
    children, _ = jax.tree_util.default_registry.flatten_one_level(node)
    return next(iter(children))


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
    return hasattr(type(x), "leaf_layouts")


def layouts(tree: PyTree) -> "list[BufferLayout]":
    """Return the layout of each leaf, in the order of `flatten`."""
    found: list[BufferLayout] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: describes_leaves(x) or is_leaf(x)):
        found += node.leaf_layouts() if describes_leaves(node) else [layout_of_leaf(node)]
    return found


def layout_of_leaf(x: Leaf) -> "BufferLayout":
    """Return the layout of a leaf that is one tensor."""
    from optfn.leaves.layout import plain

    return plain(tuple(x.shape) if is_array(x) else ())


def stacked_axes(tree: PyTree) -> list[int]:
    """Return for each leaf how many leading axes count tensors: the `Stacked` around it."""
    return [layout.runs[0].stacked for layout in layouts(tree)]


def runs(tree: PyTree) -> "dict[str, Run]":
    """Map each leaf name to its run: the neighbours of one shape in the same array."""
    return {
        name: run
        for group, layout in zip(names(tree), layouts(tree), strict=True)
        for name, run in zip(group, layout.run_of_leaves.values(), strict=True)
    }


def names(tree: PyTree) -> list[tuple[str, ...]]:
    """Return the names of each leaf, in the order of `flatten`.

    A leaf has one name, its path; a buffer of a Packed has the path of each leaf that it holds.
    """
    found: list[tuple[str, ...]] = []
    nodes = jax.tree.leaves(tree, is_leaf=_is_named)
    for path, node in zip(paths(tree, _is_named), nodes, strict=True):
        groups = node.leaf_names() if has_names(node) else [("",)]
        found += [tuple(join(path, name) for name in group) for group in groups]
    return found


def leaves_with_names(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Return (name, leaf) for each name of each leaf; see `names`."""
    pairs = zip(names(tree), leaves(tree), strict=True)
    return [(name, leaf) for group, leaf in pairs for name in group]


def has_names(x: object) -> bool:
    """Tell whether `x` is a node that names its leaves, such as `Packed`."""
    return hasattr(type(x), "leaf_names")


def _is_named(x: Any) -> bool:
    return has_names(x) or is_leaf(x)


def matching(pattern: Pattern | None, tree: PyTree, argument: str) -> frozenset[str]:
    """Return the names of the leaves of `tree` that `pattern` selects.

    A regular expression must match a name of the tree, or a name that it had before leaves were
    taken out of a Packed, unless all leaves are masked.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool; None
        selects nothing.
      tree: the tree whose leaves are selected; masked leaves have paths too.
      argument: the name of the pattern in errors.

    Raises:
      ValueError: a regular expression matches none of the paths of a tree that has leaves.
      TypeError: a function does not return a bool.
    """
    if pattern is None:
        return frozenset()
    known = list(itertools.chain(*names(tree)))
    if callable(pattern):
        return frozenset(name for name in known if _is_chosen(pattern, name, argument))
    return _matched(pattern, {*known, *_names_before(tree)}, tree, argument).intersection(known)


def _matched(
    pattern: str | re.Pattern[str], among: Collection[str], tree: PyTree, argument: str
) -> frozenset[str]:
    """Return the names that a regular expression matches; none only if all leaves are masked."""
    compiled = re.compile(pattern)
    matched = frozenset(name for name in among if compiled.fullmatch(name))
    if not (matched or all(is_masked(x) for x in leaves(tree))):
        raise ValueError(
            f"{argument}: the pattern {compiled.pattern!r} matches no leaf; it must match a whole "
            f"path. The paths are: {listed(list(itertools.chain(*names(tree))))}"
        )
    return matched


def first_matches(
    choice: Mapping[str, T], tree: PyTree, argument: str
) -> Iterator[tuple[frozenset[str], T]]:
    """Yield for each pattern the leaf names that it is the first to match, and its value.

    Raises:
      ValueError: a pattern matches no leaf, or an earlier pattern matches all its leaves and more.
        (A last pattern for all leaves is no error, even if no leaf is left for it.)
    """
    earlier: dict[str, frozenset[str]] = {}
    known, taken = frozenset(itertools.chain(*names(tree))), frozenset[str]()
    among = known.union(_names_before(tree))
    for pattern, value in choice.items():
        matched = _matched(pattern, among, tree, argument)
        wider = next((p for p, before in earlier.items() if matched and matched < before), None)
        if wider is not None:
            raise ValueError(
                f"{argument}: the pattern {pattern!r} has no effect, since the first match counts, "
                f"and {wider!r} before it matches all its leaves, {listed(sorted(matched))}. Put "
                f"{pattern!r} first"
            )
        yield (matched & known) - taken, value
        earlier[pattern], taken = matched, taken | matched


def _is_chosen(pattern: Callable[[str], bool], name: str, argument: str) -> bool:
    chosen = pattern(name)
    if not isinstance(chosen, bool):
        raise TypeError(f"{argument} must return True or False; got {chosen!r} for leaf {name!r}")
    return chosen


def _names_before(tree: PyTree) -> Iterator[str]:
    """Yield the names of the leaves that nodes of named leaves had when they were packed."""
    nodes = filter(has_names, jax.tree.leaves(tree, is_leaf=has_names))
    return (path for node in nodes for path in node.layout.paths)


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
    return first_of([repr(name) for name in names], most)


def first_of(words: Sequence[str], most: int) -> str:
    """Return words as a list in a text, at most the first `most`, and how many there are."""
    shown = ", ".join(words[:most])
    return f"{shown}, … ({len(words)} in all)" if len(words) > most else shown


def check_same_structure(who: str, name: str, tree: PyTree, than: str, reference: PyTree) -> None:
    """Raise a ValueError that lists the differences unless `tree` has the structure of `reference`.

    Args:
      who: the function that the error names.
      name: the name of `tree` in the error.
      tree: the tree to check.
      than: the name of `reference` in the error.
      reference: the tree with the expected structure.
    """
    if flatten(tree)[1] == flatten(reference)[1]:
        return
    found, expected = paths(tree), paths(reference)
    missing = [path for path in expected if path not in set(found)]
    extra = [path for path in found if path not in set(expected)]
    lists = {"missing": missing, "not expected": extra}
    where = "; ".join(f"{word} {listed(absent)}" for word, absent in lists.items() if absent)
    where = where or f"{jax.tree.structure(tree)} against {jax.tree.structure(reference)}"
    raise ValueError(f"{who}: {name} must have the tree structure of {than}: {where}")
