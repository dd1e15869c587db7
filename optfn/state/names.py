"""Names for the entries of an optimizer's state, which stay the same when a chain changes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import jax

from optfn.leaves.traits import Traits, reporting_types, traits_of
from optfn.leaves.tree import inside, is_masked, is_transparent, join, key_name, leaves_with_paths
from optfn.leaves.types import OptState, PyTree

T = TypeVar("T")


def is_state(x: object) -> bool:
    """Tell whether `x` is the state of a transform: a NamedTuple of a type named …State."""
    return isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__name__.endswith("State")


def entries_by_param(
    entries: Iterable[tuple[str, Any]], paths: Iterable[str]
) -> Iterator[tuple[str | None, Any]]:
    """Yield (path of its parameter, array) for each entry (name, array) of a state.

    The path is the longest of `paths` that the leaf's name ends with, before any numbers (those of
    a list of arrays for each parameter); None for counters and rates. If the only parameter has no
    path, all arrays that are not scalars belong to it.
    """
    longest_first = sorted(paths, key=len, reverse=True)
    for name, leaf in entries:
        ends = (
            path
            for end in _without_numbers(name)
            for path in longest_first
            if end.endswith(f"/{path}") or (path == "" and leaf.shape)
        )
        yield next(ends, None), leaf


def _without_numbers(name: str) -> Iterator[str]:
    """Yield a name, and the name without each number that it ends with."""
    yield name
    before, _, last = name.rpartition("/")
    if last.isdigit():
        yield from _without_numbers(before)


def main_state(state: OptState) -> OptState:
    """Return the state that accessors read if no path is given.

    It is the main field of a node whose type declares one, or `state` itself if there is none.
    """

    def has_main(x: object) -> bool:
        return bool(traits_of(x).main)

    found = [x for x in jax.tree.leaves(state, is_leaf=has_main) if has_main(x)]
    return found[0]._asdict()[traits_of(found[0]).main] if found else state


def _has_states(x: object) -> bool:
    if is_state(x):
        return True
    if isinstance(x, dict):
        return any(map(_has_states, x.values()))
    return isinstance(x, tuple | list) and any(map(_has_states, x))


def state_word(state_type: type) -> str:
    """Return "scale_by_adam" for ScaleByAdamState and its subclasses."""
    kind = next(c for c in state_type.__mro__ if c.__bases__ == (tuple,))
    name = kind.__name__.removesuffix("State")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _field_words(state: OptState) -> tuple[str, ...]:
    """Return the words of the fields of a state."""
    fields: tuple[str, ...] = state._fields
    return traits_of(state).words or fields


def named_entries(
    state: OptState,
    stop: Callable[[Any], bool] = lambda x: False,
    *,
    unnamed: Callable[[Any], bool] = lambda x: False,
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an optimizer's state with their names, in the order of jax.tree.leaves.

    A name consists of the transform that the leaf belongs to, from the type of its state; the
    field; and the path in a tree like the parameters, as in "scale_by_adam/mu/layers/0/w".
    It does not tell positions in a chain or wrappers, so names do not change when a transform is
    put before or around another. A second transform of the same type has a number,
    "scale_by_momentum_2". The labels of a dict of states (`optax.partition`) come first, as in
    "fast/scale_by_adam/mu/w".

    Args:
      state: the state of an optimizer, however wrapped.
      stop: selects states that are yielded as they are, not leaf by leaf.
      unnamed: selects states that add no word, because that of the state around them is enough.

    A type may declare that its fields are labels, as the keys of a dict are (`labels`), that it
    adds no word (`adds_no_word`), or words for its fields instead of their names (`words`).
    """
    seen: dict[str, int] = {}

    def walk(node: PyTree, prefix: str, labels: str) -> Iterator[tuple[str, Any]]:
        if is_state(node) and node._fields:
            name = prefix
            if not (unnamed(node) or traits_of(node).adds_no_word):
                name = join(labels, state_word(type(node)))
                seen[name] = seen.get(name, 0) + 1
                name += f"_{seen[name]}" if seen[name] > 1 else ""
            if stop(node):
                yield name, node
                return
            for field, child in zip(_field_words(node), node, strict=True):
                start = name if _has_states(child) else join(name, field)
                yield from walk(child, start, labels)
        elif is_transparent(node):
            yield from walk(inside(node), prefix, labels)
        elif traits_of(node).labels:
            for label, child in node._asdict().items():
                yield from walk(child, join(labels, label), join(labels, label))
        elif _has_states(node):
            children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
            for (key,), child in children:
                label = key_name(key) if isinstance(node, dict) else ""
                yield from walk(child, prefix, join(labels, label))
        else:
            for path, leaf in leaves_with_paths(node):
                if not is_masked(leaf):
                    yield join(prefix, path), leaf

    yield from walk(state, "", "")


def treated(state: OptState, of: Callable[[Traits], T], names: Collection[str]) -> dict[str, T]:
    """Map each leaf path to the trait that its state declares.

    Args:
      state: the state of an optimizer, however wrapped.
      of: gives a declaration of a type by its traits, false where there is none.
      names: the paths of the leaves.
    """
    nodes = named_entries(state, stop=lambda x: bool(of(traits_of(x))))
    return {
        path: of(traits_of(node))
        for _, node in nodes
        if of(traits_of(node))
        for path, _ in entries_by_param(named_entries(node), names)
        if path is not None
    }


def names_within(names: Iterable[str], field: str) -> dict[str, str]:
    """Map the path within a field to the name, for the field and each array in it.

    All names are in the field "".
    """
    start = field and f"{field}/"
    return {name[len(start) :]: name for name in names if f"{name}/".startswith(start)}


def retired_fields(
    state: OptState, *, unnamed: Callable[[Any], bool] = lambda x: False
) -> list[str]:
    """Return the names of the fields in which only earlier versions kept arrays.

    Such a state declares them: `@traits(retired=("velocity",))`. Its type is a subclass of the
    one that kept the arrays, so that a transform of the same kind after it keeps its number.

    Args:
      state: the state of an optimizer, however wrapped.
      unnamed: as in `named_entries`.
    """

    def retires(x: object) -> bool:
        return bool(traits_of(x).retired)

    nodes = named_entries(state, stop=retires, unnamed=unnamed)
    return [join(name, field) for name, node in nodes for field in traits_of(node).retired]


def reports_of(state: OptState) -> Callable[[str], bool]:
    """Return a function that tells whether a name is of a field that only reports on a run.

    Types declare such fields: `@traits(reports=("factor",))`. A name may be of a transform that
    `state` does not have, such as a clip of the run that was saved.

    Args:
      state: the state of an optimizer, however wrapped.
    """
    known = [
        re.compile(rf"{state_word(kind)}(_\d+)?/({'|'.join(fields)})(/.*)?")
        for kind, fields in reporting_types()
    ]
    present = _state_words(state)

    def is_report(name: str) -> bool:
        words = name.split("/")
        for i in range(len(words) - 1):
            if any(pattern.fullmatch("/".join(words[i:])) for pattern in known):
                return True
            if re.sub(r"_\d+$", "", words[i]) in present:
                return False  # a field and the path of a leaf follow
        return False

    return is_report


def _state_words(node: PyTree) -> set[str]:
    """Return the words of a state and of all states nested in it."""
    found = {state_word(type(node))} if is_state(node) else set()
    for child in jax.tree.leaves(node, is_leaf=lambda x: x is not node and is_state(x)):
        if is_state(child):
            found |= _state_words(child)
    return found
