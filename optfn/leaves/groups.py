"""One call for several things of one kind, such as a collective for all arrays of one dtype."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_groups(
    fn: Callable[[list[T]], Sequence[R]], things: Sequence[T], key: Callable[[T], object]
) -> list[R]:
    """Return the results of `fn` for all things, in their order, with a call for each group.

    Args:
      fn: a function of the things of a group, which returns a result for each.
      things: the things.
      key: things with equal keys are in one group.
    """
    keys = [key(x) for x in things]
    found: dict[int, R] = {}
    for i, own in enumerate(keys):
        if i not in found:
            group = [j for j, other in enumerate(keys) if other == own]
            found |= zip(group, fn([things[j] for j in group]), strict=True)
    return [found[i] for i in range(len(things))]
