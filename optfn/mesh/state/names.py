"""Names for the entries of an optimizer's state, which stay the same when a chain changes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from optfn.core.checks import package
from optfn.core.traits import reporting_types, traits_of
from optfn.core.tree import inner_tree, is_masked, is_transparent, join, leaves_with_paths
from optfn.core.types import OptState, PyTree


def is_state(x: object) -> bool:
    """Tell whether `x` is the state of a transform, or a TrainState: a NamedTuple named …State.

    The name of its type is a word in the names of checkpoints (`state_word`): don't rename a type.
    """
    return isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__name__.endswith("State")


def match_params(named: Iterable[tuple[str, Any]], paths: Iterable[str]) -> Iterator[str | None]:
    """Yield for each (name, array) the longest of `paths` that its name ends with, or None if there
    is none, as for counters and rates.

    Numbers at the end of a name are ignored if need be: they count the arrays of a list for each
    parameter. If the only parameter has no path, all arrays that are not scalars belong to it.
    """
    known = set(paths)

    def find_param(name: str, leaf: Any) -> str | None:
        for end in _strip_numbers(name):
            # Of "w" and "layers/w" the longer path owns "…/layers/w".
            for slash in re.finditer("/", end):
                if end[slash.end() :] in known:
                    return end[slash.end() :]
            if "" in known and leaf.shape:
                return ""
        return None

    for name, leaf in named:
        yield find_param(name, leaf)


def _strip_numbers(name: str) -> Iterator[str]:
    """Yield a name, then the name without the last of the numbers that it ends with, and so on."""
    yield name
    before, _, last = name.rpartition("/")
    if last.isdigit():
        yield from _strip_numbers(before)


def iterate_nodes(chosen: Callable[[Any], Any], state: OptState) -> Iterator[Any]:
    """Yield the chosen nodes of a state, each before the chosen nodes inside of it."""
    for node in jax.tree.leaves(state, is_leaf=lambda x: bool(chosen(x))):
        if chosen(node):
            yield node
            yield from iterate_nodes(chosen, get_children(node))


def get_children(node: object) -> list[Any]:
    """Return a list of the direct children of a node, or of the node itself if it is a leaf."""
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)


def find_main_state(state: OptState) -> OptState:
    """Return the field that the type of the outermost node with a declared main field names, or
    `state` itself if no type declares one.

    Accessors read this state if no path is given.
    """
    found = next(iterate_nodes(lambda x: traits_of(x).labels not in ("", "*"), state), None)
    return state if found is None else found._asdict()[traits_of(found).labels]


def _has_states(x: object) -> bool:
    """Tell whether `x` is a state of a transform, or a tuple, list or dict with one in it at any
    depth."""
    if is_state(x):
        return True
    if isinstance(x, dict):
        return any(map(_has_states, x.values()))
    return isinstance(x, tuple | list) and any(map(_has_states, x))


def _fields_are_labels(node: PyTree) -> bool:
    """Tell whether the fields of a NamedTuple tell its states apart: it has several states, or has
    one and is no state itself, and its type is from another library than optfn and optax.

    A state around a single state adds no word. Names of the states of optfn and optax must not
    depend on how they are wrapped.
    """
    if not hasattr(node, "_fields") or package(type(node).__module__) in ("optfn", "optax"):
        return False
    return sum(map(_has_states, node)) > (1 if is_state(node) else 0)


def state_word(state_type: type) -> str:
    """Return the word of a state's type in names:
    "scale_by_adam" for ScaleByAdamState and subclasses."""
    kind = next(c for c in state_type.__mro__ if c.__bases__ == (tuple,))
    name = kind.__name__.removesuffix("State")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def arrays_with_names(state: OptState) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) for each array of a state, in the order of jax.tree.leaves.

    A name consists of the transform that the leaf belongs to, from the type of its state; the
    field; and the path in a tree like the parameters, as in "scale_by_adam/mu/layers/0/w".
    It does not tell positions in a chain or wrappers, so names do not change when a transform is
    put before or around another. A second transform of the same type has a number,
    "scale_by_momentum_2". Labels come first, as in "fast/scale_by_adam/mu/w": the keys of a dict of
    states (`optax.partition`), and the fields of a NamedTuple of several states.

    A type may declare that its fields are labels, as the keys of a dict are (`labels`), or the
    words for its fields (`words`); it adds no word then, because the word of the state around it is
    enough.

    Args:
      state: the state of an optimizer, however wrapped.
    """
    return _walk(state, None)


def states_with_names(chosen: Callable[[Any], bool], state: OptState) -> Iterator[tuple[str, Any]]:
    """Yield (name, state) for each chosen state, and leave out states inside a chosen one.

    In `arrays_with_names`, the names of this state's arrays begin with its name.
    """
    return _walk(state, chosen)


def _walk(state: OptState, chosen: Callable[[Any], bool] | None) -> Iterator[tuple[str, Any]]:
    """Yield the chosen states with their names, or every array with its name if `chosen` is
    None."""
    seen: dict[str, int] = {}

    def walk(node: PyTree, prefix: str, labels: str) -> Iterator[tuple[str, Any]]:
        if is_state(node) and node._fields:
            # A state: its type gives the word of the name, and its fields the next.
            name, words = prefix, traits_of(node).words
            if not words:
                name = join(labels, state_word(type(node)))
                # The second of a type in a chain has a number.
                seen[name] = seen.get(name, 0) + 1
                name += f"_{seen[name]}" if seen[name] > 1 else ""
            if chosen is not None and chosen(node):
                yield name, node
                return
            are_labels = _fields_are_labels(node)
            for field, child in zip(words or node._fields, node, strict=True):
                if not _has_states(child):
                    yield from walk(child, join(name, field), labels)
                else:
                    yield from walk(child, name, join(labels, field if are_labels else ""))
        elif is_transparent(node):
            yield from walk(inner_tree(node), prefix, labels)
        elif traits_of(node).labels or _fields_are_labels(node):
            for label, child in node._asdict().items():
                yield from walk(child, join(labels, label), join(labels, label))
        elif _has_states(node):
            # A chain, list or dict of states: its positions add no word, its keys are labels.
            children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
            for (key,), child in children:
                label = jax.tree_util.keystr((key,), simple=True) if isinstance(node, dict) else ""
                within = join(prefix or labels, label) if label else prefix
                yield from walk(child, within, join(labels, label))
        elif chosen is None:
            for path, leaf in leaves_with_paths(node):
                if not is_masked(leaf):
                    yield join(prefix, path), leaf

    yield from walk(state, "", "")


def find_names_in_field(names: Iterable[str], field: str) -> dict[str, str]:
    """Map the path within a field to the name, for all names in the field. The field "" has all
    names."""
    start = field and f"{field}/"
    return {name[len(start) :]: name for name in names if f"{name}/".startswith(start)}


def make_report_test(state: OptState) -> Callable[[str], bool]:
    """Return a function that tells whether a name is of a field that only reports, also in the
    state of a transform that `state` lacks.

    Types declare such fields: `@traits(reports={"factor": None})`. A name may be of a transform
    that `state` does not have, such as a clip of the run that was saved.

    Args:
      state: the state of an optimizer, however wrapped.
    """
    known = []
    for kind, reports in reporting_types():
        for field, report in reports.items():
            if report is None or not report.is_needed:
                known.append(re.compile(rf"{state_word(kind)}(_\d+)?/{field}(/.*)?"))
    present = {state_word(type(x)) for x in iterate_nodes(is_state, state)}

    def is_report(name: str) -> bool:
        words = name.split("/")
        for i in range(len(words) - 1):
            if any(pattern.fullmatch("/".join(words[i:])) for pattern in known):
                return True
            if re.sub(r"_\d+$", "", words[i]) in present:
                return False  # a field and the path of a leaf follow
        return False

    return is_report
