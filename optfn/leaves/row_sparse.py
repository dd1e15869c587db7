"""Row-sparse leaves of a tree: checked, merged, or made dense."""

from collections.abc import Callable

import jax

from optfn.core import checks, tree
from optfn.core.types import Leaf, LeafKind, Updates


def merged(updates: Updates) -> Updates:
    """Return `updates` with repeated rows of row-sparse leaves added up."""
    return _map_kinds(lambda place, g: g.merged(), updates)


def to_dense(updates: Updates, warning: str = "") -> Updates:
    """Return `updates` with row-sparse leaves dense; `warning` is given if there are any."""

    def dense(place: tree.Place, g: LeafKind) -> jax.Array:
        if warning:
            checks.warn(f"{warning}; it costs the whole table {place!r}")
        return g.dense()

    return _map_kinds(dense, updates)


def _map_kinds(fn: Callable[[tree.Place, LeafKind], Leaf], updates: Updates) -> Updates:
    def convert(place: tree.Place, g: Leaf) -> Leaf:
        if not isinstance(g, LeafKind):
            return g
        # A third-party transform before this one in a chain may have changed its indices.
        g.check(f"update: the gradient of {place!r}")
        return fn(place, g)

    return tree.map_named(convert, updates)
