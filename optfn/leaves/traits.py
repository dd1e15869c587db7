"""Traits: the declarations of a type of node, or of an optimizer's state, about itself.

A trait needs no array in the state and survives every wrapper:

    @traits(passes_rows=True)
    class MyState(NamedTuple):
        inner_state: OptState
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


@dataclasses.dataclass(frozen=True)
class Traits:
    """The traits of a type.

    Of nodes in a tree:
      transparent: the node does not change paths; its first field is the tree below it.
      describes_leaves: the node has the layouts of its leaves, `node.layouts()`.

    Of the names of a state (`optfn.state.names`):
      adds_no_word: the states inside have the same names as without this one.
      labels: its fields are labels of states, like the keys of a dict.
      main: the field that accessors read if no path is given.
      words: the words for its fields in names, if they differ from the fields' names.
      retired: fields of which earlier versions kept arrays, but this one does not.
      reports: fields that only report on a run, so that a state also loads without them.

    Of a state on the workers of a mesh (`optfn.state.per_worker`):
      passes_own_gradients: the state is the same on all workers, even around a transform that
        exchanges gradients itself.
      passes_rows: row-sparse updates may pass through the transform.
      workers_in_front: gradients have the workers as their leading axis.
      follows_params: the state has copies or averages of params.
      counted: the field with an array for each leaf, whose updates the field `step` counts. A leaf
        that begins late is counted by itself (`optfn.transforms.late_steps`).
      copies: the field with copies of params. If a checkpoint lacks them, they are made again.
      sums: the fields with weighted sums of params, each with the field of the sum of the weights.
        If a checkpoint has the weights but lacks a sum, the average begins at the param.
      spans_buffers: the order of the elements in the whole buffer of a Packed matters.
      skipped: the field that counts steps that left params and state unchanged.

    Of a state that tells how its rule treats the leaves of which it has an array:
      treatment: the word for such a leaf in `summary`.
      whole_matrices: to update a shard of a matrix, the rule needs the whole matrix.
    """

    transparent: bool = False
    describes_leaves: bool = False
    adds_no_word: bool = False
    labels: bool = False
    main: str = ""
    words: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    passes_own_gradients: bool = False
    passes_rows: bool = False
    workers_in_front: bool = False
    follows_params: bool = False
    counted: str = ""
    copies: str = ""
    sums: tuple[tuple[str, str], ...] = ()
    spans_buffers: bool = False
    skipped: str = ""
    treatment: str = ""
    whole_matrices: bool = False


_NONE = Traits()
# The types that declare reports: a field's name is all that a checkpoint has of them.
_reporting: list[type] = []


def traits(**declared: Any) -> Callable[[T], T]:
    """Decorate a class with its traits, the fields of `Traits`."""
    found = Traits(**declared)

    def declare(kind: T) -> T:
        kind.traits = found  # type: ignore[attr-defined]
        if found.reports:
            _reporting.append(kind)
        return kind

    return declare


def traits_of(x: object) -> Traits:
    """Return the traits of the type of `x`; those of a plain type are all off."""
    found = getattr(type(x), "traits", _NONE)
    return found if isinstance(found, Traits) else _NONE


def reporting_types() -> list[tuple[type, tuple[str, ...]]]:
    """Return the types that declare reports, and the fields."""
    return [(kind, kind.traits.reports) for kind in _reporting]  # type: ignore[attr-defined]
