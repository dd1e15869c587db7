"""Leaves and their paths: naming, selecting, and errors that a reader can act on.

A tree here may have holes: None, and optax's MaskedNode where `optax.masked` or `optax.partition`
has taken a leaf out. A hole counts as a leaf, so that trees with holes in different places (a
gradient that is None for an integer parameter) still have the same structure.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

# A pattern of leaf paths: a regular expression that must match the whole path, or path -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def is_hole(x: Any) -> bool:
    """Tell whether `x` stands where there is no array."""
    return x is None or isinstance(x, optax.MaskedNode)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of `tree`, holes included, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_hole)


def map_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Map `fn` over the leaves of `tree` that are not holes; holes stay as they are."""
    return jax.tree.map(lambda x: x if is_hole(x) else fn(x), tree, is_leaf=is_hole)


def paths(tree: Any) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`: "layers/0/bias".

    Keys are joined by "/". The last key of an nnx.Variable (its `value`) is left out: nnx gives the
    tree with it at init and without it at update, and a leaf has one name.
    """
    nnx = sys.modules.get("flax.nnx")
    variable = getattr(nnx, "Variable", ())

    def stop(x: Any) -> bool:
        return is_hole(x) or isinstance(x, variable)

    names = []
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        name = "/".join(map(_key_name, keys))
        inside = 1
        if not is_hole(node) and isinstance(node, variable):
            inside = len(jax.tree.leaves(node, is_leaf=is_hole))
        names.extend([name] * inside)
    return names


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def select(pattern: Pattern | None, names: Sequence[str], argument: str) -> list[bool]:
    """Tell for each of the paths `names` whether `pattern` selects it.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool; None
        selects nothing.
      names: the paths.
      argument: how the pattern is called in an error.

    Raises:
      ValueError: a regular expression matches none of the paths.
      TypeError: a function gives something other than a bool.
    """
    if pattern is None:
        return [False] * len(names)
    if isinstance(pattern, str | re.Pattern):
        compiled = re.compile(pattern)
        selected = [compiled.fullmatch(name) is not None for name in names]
        if names and not any(selected):
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


def check_same_structure(who: str, what: str, tree: Any, than: str, reference: Any) -> None:
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


def choose(pattern: Pattern | None, argument: str, selected: Any, others: Any) -> Any:
    """Return a tree of the leaves of `selected` where `pattern` matches, else of `others`."""
    chosen = select(pattern, paths(others), argument)
    yes, structure = flatten(selected)
    no = flatten(others)[0]
    return structure.unflatten([a if c else b for c, a, b in zip(chosen, yes, no, strict=True)])
