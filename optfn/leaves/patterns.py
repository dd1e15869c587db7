"""Patterns of leaf names: regular expressions, or functions of a name."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
import numpy as np

from optfn.core import checks
from optfn.core.checks import T
from optfn.core.tree import is_masked, leaves, list_names
from optfn.core.types import PyTree
from optfn.leaves.contents import all_names, has_names

# A regular expression that must match the whole name, or a function name -> bool.
Pattern = str | re.Pattern[str] | Callable[[str], bool]


def match_names(pattern: Pattern | None, tree: PyTree, argument: str) -> frozenset[str]:
    """Return the names of the leaves of `tree` that `pattern` selects, none for None, or raise a
    ValueError if a regular expression matches no leaf.

    Names of leaves that were removed from a Packed count as matches; a fully masked tree is exempt.

    Args:
      pattern: a regular expression that must match a whole path, or a function path -> bool.
      tree: the tree whose leaves are selected; masked leaves have paths too.
      argument: the name of the pattern in errors.

    Raises:
      ValueError: a regular expression matches none of the paths of a tree that has leaves.
      TypeError: a function does not return a bool.
    """
    if pattern is None:
        return frozenset()
    known = all_names(tree)
    if callable(pattern):
        return frozenset(name for name in known if _is_chosen(pattern, name, argument))
    among = {*known, *_find_packed_names(tree)}
    return _match_regex(pattern, among, tree, argument).intersection(known)


def _match_regex(
    pattern: str | re.Pattern[str], among: Collection[str], tree: PyTree, argument: str
) -> frozenset[str]:
    """Return the names that match as a whole, or raise a ValueError if there are none, unless all
    leaves are masked."""
    compiled = re.compile(pattern)
    matched = frozenset(name for name in among if compiled.fullmatch(name))
    if not (matched or all(is_masked(x) for x in leaves(tree))):
        raise ValueError(
            f"{argument}: the pattern {compiled.pattern!r} matches no leaf; it must match a whole "
            f"path. The paths are: {list_names(all_names(tree))}"
        )
    return matched


def first_matches(
    choice: Mapping[str, T], tree: PyTree, argument: str
) -> Iterator[tuple[frozenset[str], T]]:
    """Yield for each pattern the leaf names that it is the first to match, and its value, or raise
    a ValueError if it matches none or is hidden.

    Raises:
      ValueError: a pattern matches no leaf, or an earlier pattern matches all its leaves and more.
        (A last pattern for all leaves is no error, even if no leaf is left for it.)
    """
    earlier: dict[str, frozenset[str]] = {}
    known, taken = frozenset(all_names(tree)), frozenset[str]()
    among = known.union(_find_packed_names(tree))
    for pattern, value in choice.items():
        matched = _match_regex(pattern, among, tree, argument)
        # Compared with all names that each pattern matched, so the order of params does not matter.
        wider = next((p for p, before in earlier.items() if matched and matched < before), None)
        if wider is not None:
            raise ValueError(
                f"{argument}: the pattern {pattern!r} has no effect, since the first match counts, "
                f"and {wider!r} before it matches all its leaves, {list_names(sorted(matched))}. "
                f"Put {pattern!r} first"
            )
        yield (matched & known) - taken, value
        earlier[pattern], taken = matched, taken | matched


def _is_chosen(pattern: Callable[[str], bool], name: str, argument: str) -> bool:
    """Tell whether a function that serves as a pattern chooses a name, and raise a TypeError unless
    it returns a bool."""
    chosen = pattern(name)
    if not isinstance(chosen, bool | np.bool_):
        raise TypeError(f"{argument} must return True or False; got {chosen!r} for leaf {name!r}")
    return bool(chosen)


def _find_packed_names(tree: PyTree) -> Iterator[str]:
    """Yield the names that nodes such as Packed had when they were packed, also of leaves since
    removed."""
    nodes = filter(has_names, jax.tree.leaves(tree, is_leaf=has_names))
    return (path for node in nodes for path in node.layout.paths)


def matches(pattern: Pattern | None, name: str) -> bool:
    """Tell whether a pattern selects a name, a regular expression by matching all of it, with True
    for the pattern None."""
    if callable(pattern):
        return bool(pattern(name))
    return pattern is None or re.fullmatch(pattern, name) is not None


def check_pattern(argument: str, pattern: Pattern | None) -> Pattern | None:
    """Return `pattern` if it is a pattern or None, or raise a TypeError or a ValueError that names
    `argument` otherwise."""
    if pattern is None or callable(pattern) or isinstance(pattern, re.Pattern):
        return pattern
    wanted = "a regular expression of leaf paths or a function path -> bool"
    checks.instance(argument, pattern, str, wanted)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from None
    return pattern


# The names that libraries of models give to kinds of leaves.
_BIAS_OR_SCALE = r"(.*/)?(([^/]*_)?bias(_[^/]*)?|b|scale|beta|gamma|offset)"
# The leaves of the norm alone: an adaptive norm has a projection, "norm1/linear/weight".
_IN_A_NORM = (
    r"(.*/)?([^/]*[_\d])?((layer|batch|group|rms|instance|pre|post)?_?norm(s|alization)?|ln|bn)"
    r"([_\d][^/]*)?(/~)?(/\d+)?(/(weight|w))?"
)


class _Named(str):
    """A pattern that `repr` shows by its name."""

    def __repr__(self) -> str:
        return "NORMS_AND_BIASES"


NORMS_AND_BIASES = _Named(f"(?i:{_BIAS_OR_SCALE}|{_IN_A_NORM})")
"""A pattern of the biases, and of the scales of normalizations, for `exclude=` of weight decay.

It goes by their names in flax, equinox, haiku, keras and torch. Names hold for stacked layers too,
whose leaves have one axis more, so that a rule by the number of axes fails.
"""
