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
      transparent: it adds no word to paths; its first field is the tree below it.
      describes_leaves: it knows the layouts of its leaves, `node.layouts()`.

    Of the names of a state (`optfn.state.names`):
      adds_no_word: the states in it are named as if it were not there.
      labels: its fields are labels of parts, as the keys of a dict are.
      main: the field of the part that accessors mean where no part is named.
      words: words for its fields where these differ from the fields' names.
      retired: fields of which earlier versions kept arrays and this one does not.
      reports: fields that only report on a run: a state loads without them, and anew.

    Of a state on the workers of a mesh (`optfn.state.per_worker`):
      passes_own_gradients: it is the same on all workers around a transform that exchanges
        gradients by itself.
      passes_rows: row-sparse updates may pass.
      workers_in_front: gradients come with the workers as their leading axis.
      follows_params: it holds copies or averages of params.
      counted: its field with an array for each leaf, whose updates its field `step` counts; a leaf
        that begins late then has a count of its own (`optfn.transforms.late_steps`).
      copies: its field of copies of params; where a checkpoint lacks them, they are made anew.
      sums: its fields of weighted sums of params, each with the field of the sum of the weights;
        where a checkpoint has the weights, but lacks a sum, it begins at the param.
      spans_buffers: the order of the elements in the whole buffer of a Packed matters to it.
      skipped: the field that counts steps which left params and state as they were.

    Of a state that tells how its rule treats the leaves of which it holds an array:
      treatment: the word for such a leaf in `summary`.
      whole_matrices: an update of a part of a matrix needs the whole of it.
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
# The types that declare reports. A name left over in a checkpoint has no other trace of its type.
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
