"""Leaves and their paths: flatten trees, name leaves, compare structures.

A tree may have masked leaves: None, or the MaskedNode that `optax.masked` and `optax.partition` put
in the place of a leaf. Masked leaves count as leaves, so that trees that are masked in different
places (such as a gradient that is None for an integer parameter) have the same structure. A
row-sparse gradient is one leaf.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef

from optfn.core.traits import traits_of
from optfn.core.types import Leaf, LeafKind, PyTree


def is_masked(x: Leaf) -> bool:
    """Tell whether `x` is a masked leaf, a mark instead of an array."""
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Leaf) -> bool:
    """Tell whether `x` is a single leaf to optfn and a tree to JAX: masked, or Rows."""
    return is_masked(x) or isinstance(x, LeafKind)


def is_array(x: object) -> TypeGuard[jax.Array]:
    """Tell whether `x` has a dtype: an array, of NumPy too, its shape, or Rows."""
    return hasattr(x, "dtype")


def is_inexact(x: Leaf) -> bool:
    """Tell whether a leaf is floating point or complex, also a Python number, and so not masked, an
    integer or a float0."""
    if not is_array(x):
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_float0(x: Leaf) -> bool:
    """Tell whether `x` is a float0, JAX's gradient of an integer."""
    return is_array(x) and x.dtype == jax.dtypes.float0


def has_shape(x: Leaf, shape: tuple[int, ...]) -> bool:
    """Tell whether `x` is an array of this shape."""
    return is_array(x) and x.shape == shape


def shape_of(x: Leaf) -> tuple[int, ...]:
    """Return the shape of an array, a number or Rows."""
    return x.shape if isinstance(x, LeafKind) else jnp.shape(x)


def as_array(x: Leaf) -> Leaf:
    """Convert a number or a floating-point NumPy array to a JAX array."""
    is_host = isinstance(x, int | float | complex) or (isinstance(x, np.ndarray) and is_inexact(x))
    return jnp.asarray(x) if is_host else x


def is_key(x: Leaf) -> bool:
    """Tell whether a leaf is a typed PRNG key, or an array of them."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def flatten(tree: PyTree) -> tuple[list[Leaf], PyTreeDef]:
    """Return the leaves of `tree` and its structure, where a masked or row-sparse leaf counts as
    one leaf."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def leaves(tree: PyTree) -> list[Leaf]:
    """Return the leaves of `tree`, where a masked or row-sparse leaf counts as one leaf."""
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
    """Map `fn` over the leaves of `tree` that are not masked, and return masked leaves
    unchanged."""
    return map(lambda x: x if is_masked(x) else fn(x), tree)


def map_named(fn: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Map fn(place, leaf, *leaves of `trees`) over all leaves, masked ones included, where the
    place says the path for errors."""
    return flatten(tree)[1].unflatten(fn(*row) for row in items(tree, *trees))


def map_to(
    count: int, fn: Callable[..., Sequence[Any]], tree: PyTree, *trees: PyTree
) -> tuple[PyTree, ...]:
    """Map fn(place, leaf, *leaves of `trees`) over all leaves, masked ones included, and return a
    tree of each of its `count` results."""
    results = [fn(*row) for row in items(tree, *trees)]
    structure = flatten(tree)[1]
    return tuple(structure.unflatten(result[k] for result in results) for k in range(count))


class Place:
    """The place of a leaf in a tree. Its text is the path, made only where an error needs it."""

    def __init__(self, paths: Callable[[], list[str]], number: int) -> None:
        self._paths, self.number = paths, number

    def __str__(self) -> str:
        return self._paths()[self.number]

    def __repr__(self) -> str:
        return repr(str(self))


def items(tree: PyTree, *trees: PyTree) -> Iterator[tuple[Any, ...]]:
    """Yield (place, leaf, *leaves of `trees` in its place) for all leaves of a tree."""
    # On demand and once: to name the leaves takes longer than to check them.
    known = functools.cache(functools.partial(paths, tree))
    for i, row in enumerate(zip(*(leaves(x) for x in (tree, *trees)), strict=True)):
        yield Place(known, i), *row


def paths(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> list[str]:
    """Return the path of each leaf in the order of `flatten`, such as "layers/0/bias", or "" for a
    tree that is a leaf.

    Keys are joined by "/". The last key of an nnx.Variable (its `value`) is left out: nnx passes
    the tree with it at init and without it at update, and a leaf must have the same name in both.
    The key of a node that only marks the tree below it (`Stacked`, `PerWorker`) is left out too.
    """
    # Whoever passes a variable of nnx has loaded flax; it is no dependency of optfn.
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())

    def stop(x: object) -> bool:
        return is_leaf(x) or is_transparent(x) or isinstance(x, variable)

    found: list[str] = []
    # JAX knows nothing of transparent nodes, so a walk stops at each and goes on inside it.
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        if is_transparent(node):
            found.extend(join(name, path) for path in paths(inner_tree(node), is_leaf))
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


def inner_tree(node: PyTree) -> PyTree:
    """Return the tree in a node that adds no word to paths."""
    children, _ = jax.tree_util.default_registry.flatten_one_level(node)
    return next(iter(children))


def replace_nodes(is_node: Callable[[Any], bool], fn: Callable[[Any], PyTree], x: PyTree) -> PyTree:
    """Replace each node of a tree that `is_node` chooses by `fn` of it."""
    return jax.tree.map(lambda node: fn(node) if is_node(node) else node, x, is_leaf=is_node)


def unwrap_nodes(x: PyTree, is_node: Callable[[Any], bool]) -> PyTree:
    """Replace each node that `is_node` chooses by the tree in it."""
    return replace_nodes(is_node, lambda node: unwrap_nodes(inner_tree(node), is_node), x)


def join(*words: str) -> str:
    """Join words by "/" to a path, without empty words."""
    return "/".join(filter(None, words))


def list_names(names: Sequence[str], most: int = 20) -> str:
    """Return at most `most` names in quotes for an error, followed by their count if there are
    more."""
    return list_words([repr(name) for name in names], most)


def list_words(words: Sequence[str], most: int) -> str:
    """Join at most `most` words by commas, followed by their count if there are more."""
    shown = ", ".join(words[:most])
    return f"{shown}, … ({len(words)} in all)" if len(words) > most else shown


def list_misfits(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Return the clauses "missing …" and "not expected …" with the names of each list, leaving out
    the clause of an empty list."""
    found = {"missing": missing, "not expected": unexpected}
    return [f"{word} {list_names(names)}" for word, names in found.items() if names]


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
    where = "; ".join(list_misfits(missing, extra))
    where = where or f"{jax.tree.structure(tree)} against {jax.tree.structure(reference)}"
    raise ValueError(f"{who}: {name} must have the tree structure of {than}: {where}")
