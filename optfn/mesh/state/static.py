"""Static values of the nodes of a state: attributes of a node's type, instead of fields.

A state is made of NamedTuples, dicts, tuples and arrays, because serializers such as flax's take
nothing else. So a node that says something fixed besides, such as the names of mesh axes, is of a
subtype that says it. Equal values give the same subtype.
"""

import functools
from collections.abc import Hashable
from typing import Any, TypeVar

N = TypeVar("N", bound=tuple[Any, ...])
T = TypeVar("T")


def set_static(node: N, **values: Hashable) -> N:
    """Return a NamedTuple as the subtype of its type that has these static values, the same subtype
    for equal values."""
    return _make_node(type(node), tuple(values.items()), tuple(node))


def get_static(node: tuple[Any, ...], name: str, default: T) -> T:
    """Return the static value of this name that the type of a node has, or the default if it has
    none."""
    return dict(getattr(node, "static_values", ())).get(name, default)


def _make_node(
    kind: type, values: tuple[tuple[str, Hashable], ...], fields: tuple[Any, ...]
) -> Any:
    """Return a node with these fields of the subtype of `kind` with these values, for pickle, which
    finds this function at module level."""
    return _subtype(kind, values)(*fields)


# Kept, because equal values must give the same type: JAX compares the types of nodes.
@functools.cache
def _subtype(kind: type, values: tuple[tuple[str, Hashable], ...]) -> type:
    """Return the subtype of a NamedTuple with these static values, which is made once for equal
    values."""

    def reduce(node: tuple[Any, ...]) -> tuple[Any, ...]:
        # pickle finds a type by its name, which a subtype shares with its base.
        return _make_node, (kind, values, tuple(node))

    attributes = {"static_values": values, "__reduce__": reduce, "__slots__": ()}
    return type(kind.__name__, (kind,), attributes | {"__module__": kind.__module__})
