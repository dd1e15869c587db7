"""Leaves and their paths: naming, selecting, and errors that a reader can act on.

A tree here may have holes: None, and optax's MaskedNode where `optax.masked` or `optax.partition`
has taken a leaf out. A hole counts as a leaf, so that trees with holes in different places (a
gradient that is None for an integer parameter) still have the same structure. A row-sparse gradient
is one leaf as well. A buffer of a Packed is one leaf; `select` looks at the leaves in it.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

from optfn.leaves.layout import Packed, Part, is_packed
from optfn.leaves.rows import Rows

# A pattern of leaf paths: a regular expression that must match the whole path, or path -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def is_hole(x: Any) -> bool:
    """Tell whether `x` stands where there is no array."""
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Any) -> bool:
    """Tell whether `x` is one leaf here where JAX sees a tree: a hole, or Rows."""
    return is_hole(x) or isinstance(x, Rows)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of `tree`, holes included, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def map_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Map `fn` over the leaves of `tree` that are not holes; holes stay as they are."""
    return jax.tree.map(lambda x: x if is_hole(x) else fn(x), tree, is_leaf=is_leaf)


def paths(tree: Any) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`: "layers/0/bias".

    Keys are joined by "/". The last key of an nnx.Variable (its `value`) is left out: nnx gives the
    tree with it at init and without it at update, and a leaf has one name.
    """
    nnx = sys.modules.get("flax.nnx")
    variable = getattr(nnx, "Variable", ())

    def stop(x: Any) -> bool:
        return is_leaf(x) or isinstance(x, variable)

    names = []
    for words, node in _leaves_with_words(tree, stop):
        name = "/".join(words)
        inside = 1
        if not is_hole(node) and isinstance(node, variable):
            inside = len(jax.tree.leaves(node, is_leaf=is_leaf))
        names.extend([name] * inside)
    return names


def _leaves_with_words(
    tree: Any, is_leaf: Callable[[Any], bool]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each leaf with the words of its path.

    A transparent node, a NamedTuple of one field whose type has `transparent = True`, adds no word.
    """

    def stop(x: Any) -> bool:
        return is_leaf(x) or _is_transparent(x)

    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        words = tuple(map(_key_name, keys))
        if is_leaf(node) or not _is_transparent(node):
            yield words, node
        else:
            for inner, leaf in _leaves_with_words(node[0], is_leaf):
                yield words + inner, leaf


def _is_transparent(x: Any) -> bool:
    return getattr(type(x), "transparent", False) is True


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_node(x: Any) -> bool:
    """Tell whether `x` is a leaf here, or a Packed."""
    return is_packed(x) or is_leaf(x)


def parts(tree: Any) -> list[Part | None]:
    """Return for each leaf, in the order of `flatten`, what lies in it; None for a usual leaf."""
    found: list[Part | None] = []
    for node in jax.tree.leaves(tree, is_leaf=is_node):
        if isinstance(node, Packed):
            found += [*node.layout.parts, *[None] * len(node.held)]
        else:
            found.append(None)
    return found


def names(tree: Any) -> list[str | tuple[str, ...]]:
    """Return the path of each leaf; for a buffer of a Packed, those of the leaves in it."""
    found: list[str | tuple[str, ...]] = []
    whole = paths(tree)
    for before, node in _leaves_with_words(tree, is_node):
        if not isinstance(node, Packed):
            found.append(whole[len(found)])
            continue
        layout = node.layout
        inside = ["/".join(filter(None, [*before, path])) for path in layout.paths]
        found += [tuple(inside[i] for i in part.leaves) for part in layout.parts]
        found += [inside[i] for i in layout.held]
    return found


# Whether a leaf is selected; for a buffer of a Packed, whether each of the leaves in it is.
Flag = bool | tuple[bool, ...]


def select(pattern: Pattern | None, tree: Any, argument: str) -> list[Flag]:
    """Tell for each leaf of `tree`, in the order of `flatten`, whether `pattern` selects it.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool; None
        selects nothing.
      tree: the tree whose paths are meant; holes have paths too.
      argument: how the pattern is called in an error.

    Raises:
      ValueError: a regular expression matches none of the paths of a tree that has leaves.
      TypeError: a function gives something other than a bool.
    """
    own = names(tree)
    flat = [name for n in own for name in (n if isinstance(n, tuple) else (n,))]
    known = flat + [path for node in _packed_nodes(tree) for path in node.layout.paths]
    chosen = iter(_select(pattern, flat, known, flatten(tree)[0], argument))
    return [tuple(next(chosen) for _ in n) if isinstance(n, tuple) else next(chosen) for n in own]


def _packed_nodes(tree: Any) -> list[Packed]:
    nodes = jax.tree.leaves(tree, is_leaf=is_node)
    return [node for node in nodes if is_packed(node)]


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
        if not (any(map(compiled.fullmatch, known)) or all(map(is_hole, leaves))):
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


def is_state(x: Any) -> bool:
    """Tell whether `x` is the state of a transform: a NamedTuple of a type named …State."""
    return isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__name__.endswith("State")


def _holds_states(x: Any) -> bool:
    if is_state(x):
        return True
    if isinstance(x, dict):
        return any(map(_holds_states, x.values()))
    return isinstance(x, tuple | list) and any(map(_holds_states, x))


def state_word(state_type: type) -> str:
    """Return "scale_by_adam" for ScaleByAdamState, also for a subclass of it."""
    kind = next(c for c in state_type.__mro__ if c.__bases__ == (tuple,))
    name = kind.__name__.removesuffix("State")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def named_parts(
    state: Any,
    stop: Callable[[Any], bool] = lambda x: False,
    *,
    unnamed: Callable[[Any], bool] = lambda x: False,
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an optimizer's state with their names, in the order of jax.tree.leaves.

    A name is made of words: the transform that owns the leaf, from the type of its state, then the
    field, then the path in a tree like the parameters: "scale_by_adam/mu/layers/0/w". Neither
    positions in a chain nor wrappers enter, so that a transform put before or around another leaves
    its names as they were; a second one of the same type is numbered, "scale_by_momentum_2". The
    labels of a dict of states (`optax.partition`) stand before: "fast/scale_by_adam/mu/w".

    Args:
      state: the state of an optimizer, however wrapped.
      stop: states that are yielded whole.
      unnamed: states whose own word is left out, because what holds them says it all.
    """
    seen: dict[str, int] = {}

    def join(*words: str) -> str:
        return "/".join(filter(None, words))

    def walk(node: Any, own: str, labels: str) -> Iterator[tuple[str, Any]]:
        if is_state(node) and node._fields:
            name = own
            if not unnamed(node):
                name = join(labels, state_word(type(node)))
                seen[name] = seen.get(name, 0) + 1
                name += f"_{seen[name]}" if seen[name] > 1 else ""
            if stop(node):
                yield name, node
                return
            for field, child in zip(node._fields, node, strict=True):
                own_field = name if _holds_states(child) else join(name, field)
                yield from walk(child, own_field, labels)
        elif _holds_states(node):
            children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
            for (key,), child in children:
                label = _key_name(key) if isinstance(node, dict) else ""
                yield from walk(child, own, join(labels, label))
        else:
            leaves = jax.tree.leaves(node, is_leaf=is_hole)
            for path, leaf in zip(paths(node), leaves, strict=True):
                if not is_hole(leaf):
                    yield join(own, path), leaf

    yield from walk(state, "", "")
