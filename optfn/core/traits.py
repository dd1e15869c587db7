"""Traits: the declarations of a type of node, or of an optimizer's state, about itself.

A trait needs no array in the state and survives every wrapper:

    @traits(passes_rows=True)
    class MyState(NamedTuple):
        inner_state: OptState
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=type)


class Report(NamedTuple):
    """How the metrics of a training step show a field of a state (`optfn.mesh.state.reports`).

    metric: the name among the metrics, and in the history. If the field is a dict, each number in
      it has the keys after the name, as in "grad_norm/embed"; the name itself may then be empty.
    several: the reduction over several states of the type: "any", "max" or "min". Without one
      the metric is left out if there are several.
    rounds: the reduction over the steps and the workers of a round of local steps, likewise.
    is_needed: whether updates read the field, so that a checkpoint must have it.
    error: (state, value of the field) -> the error that ends the run once the field is not 0; None
      if it ends none.
    is_lasting: whether the field keeps its value once it is not 0. A step then does not wait for
      the one before it to read the field, and the error comes a few steps later.

    A field that "any" reduces, or that may end a run, is a flag, which the history leaves out.
    """

    metric: str
    several: str = ""
    rounds: str = ""
    is_needed: bool = False
    error: Callable[[Any, int], Exception] | None = None
    is_lasting: bool = False


@dataclasses.dataclass(frozen=True)
class Traits:
    """The traits of a type.

    Of nodes in a tree:
      transparent: the node does not change paths; its first field is the tree below it.

    Of a link of a chain, or a wrapper (`optfn.train.forms`):
      link: its kind, which decides the forms of an update that it takes and returns; "" if unknown.

    Of the names of a state (`optfn.mesh.state.names`):
      labels: its fields are labels, like the keys of a dict. The value is the field that accessors
        read if no path is given, or "*" if they read all.
      words: the words for its fields in names. The state itself then adds no word.
      reports: fields that hold measurements; a checkpoint may lack them. The value says how metrics
        show the field; None hides it.

    Of a state on the workers of a mesh (`optfn.mesh.state.per_worker`):
      passes_own_gradients: the state is the same on all workers, even around a transform that
        exchanges gradients itself.
      passes_rows: row-sparse updates may pass through the transform.
      counts_weight: its `update` takes the extra argument `weight`, and itself chooses the arrays
        that an update without weight changes (`optfn.wrappers.uncounted`).
      goes_on: the fields that count on in an update that another part of the optimizer drops.
      applies_nonfinite: its counter `skipped` counts no updates that are not finite.

    Of the arrays that a state has for each leaf:
      made_of_params: fields computed from params, and the start of a leaf that a checkpoint lacks:
        "" copies the param; the name of a field w gives w·param, a weighted sum; None cannot start.
      counted: the field with an array for each leaf, whose updates the field `step` counts. A leaf
        that begins late has a separate count (`optfn.transforms.late_steps`).
      spans_buffers: one scale covers a whole packed buffer, so the buffer cannot be split into
        leaves.
      whole_matrices: the word in `summary` for leaves whose rule needs the whole matrix to update
        a slice of it.
    """

    transparent: bool = False
    link: str = ""
    labels: str = ""
    words: tuple[str, ...] = ()
    reports: Mapping[str, Report | None] = dataclasses.field(default_factory=dict)
    passes_own_gradients: bool = False
    passes_rows: bool = False
    counts_weight: bool = False
    goes_on: tuple[str, ...] = ()
    applies_nonfinite: bool = False
    made_of_params: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    counted: str = ""
    spans_buffers: bool = False
    whole_matrices: str = ""


_NONE = Traits()
# The types that declare reports: a field's name is all that a checkpoint has of them.
_reporting: list[type] = []


def traits(**declared: Any) -> Callable[[T], T]:
    """Decorate a class with its traits, by the names of the fields of `Traits`, where those that
    are not given keep their defaults."""
    found = Traits(**declared)

    def declare(kind: T) -> T:
        kind.traits = found  # type: ignore[attr-defined]
        if found.reports:
            _reporting.append(kind)
        return kind

    return declare


def traits_of(x: object) -> Traits:
    """Return the traits of the type of `x`, all of them off for a type that declares none."""
    found = getattr(type(x), "traits", _NONE)
    return found if isinstance(found, Traits) else _NONE


def reporting_types() -> list[tuple[type, Mapping[str, Report | None]]]:
    """Return (type, its reports by field) for each type that declares reports."""
    return [(kind, kind.traits.reports) for kind in _reporting]  # type: ignore[attr-defined]
