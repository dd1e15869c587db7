"""One call for several things of one kind, such as a collective for all arrays of one dtype."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
from jax import lax

T = TypeVar("T")
R = TypeVar("R")


def map_groups(
    fn: Callable[[list[T]], Sequence[R]], things: Sequence[T], key: Callable[[T], object]
) -> list[R]:
    """Return a result for each thing, in order, with one call of `fn` for all things of equal key.

    Args:
      fn: a function of the things of a group, which returns a result for each.
      things: the things.
      key: things with equal keys are in one group.
    """
    keys = list(map(key, things))
    found: dict[int, R] = {}
    # By ==, in place of a dict: keys need not be hashable.
    for i, first in enumerate(keys):
        if i not in found:
            group = [j for j, k in enumerate(keys) if k == first]
            found |= zip(group, fn([things[j] for j in group]), strict=True)
    return [found[i] for i in range(len(things))]


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """Return the mesh axes whose devices may hold different values of `x`, as JAX tracks them, or
    an empty set where it does not.

    Inside `shard_map(check_vma=True)` each array has such a set; elsewhere the set is empty.
    """
    kind = jax.typeof(x)
    if hasattr(kind, "mat"):  # JAX 0.10.1 or newer
        return frozenset(kind.mat.varying)
    return frozenset(getattr(kind, "vma", ()))


def manual_axes() -> set[Hashable]:
    """Return the axes of the mesh that an enclosing `shard_map` has bound, or an empty set outside
    of one."""
    # By name: while `loss/jaxprs/constraints.py` traces a loss, the mesh shows bound axes as free.
    return set(filter(is_bound, jax.sharding.get_abstract_mesh().axis_names))


def is_bound(axis: Hashable) -> bool:
    """Tell whether an enclosing `shard_map`, pmap or vmap has bound an axis of this name."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True
