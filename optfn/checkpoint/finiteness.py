"""States that must not be kept, because params, moments or the last loss are not finite."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from optfn.core import tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState
from optfn.mesh.state.names import iterate_nodes, match_params
from optfn.mesh.state.per_worker import PerWorker

# The counters of wrappers that leave a step out if its gradient is not finite; optax's is the last.
_COUNTERS = {"skipped", "total_notfinite"}


def find_guards(opt_state: OptState) -> list[Any]:
    """Return the states that count steps left out because their gradients are not finite."""
    counting = iterate_nodes(
        lambda x: bool(_COUNTERS.intersection(getattr(x, "_fields", ()))), opt_state
    )
    return [x for x in counting if not traits_of(x).applies_nonfinite]


def select_judged(named: Iterable[tuple[str, Leaf]]) -> list[Leaf]:
    """Return the floating-point arrays of a state by name that must be finite: the params of each
    TrainState, or else the arrays of each key "params", and the arrays of the optimizer that follow
    one.

    Others may be infinite by their meaning, such as the norms that `skip_spikes` has not seen yet,
    and so may arrays of the model state.
    """
    named = list(named)
    found: list[Leaf] = []
    for place in _find_places([name for name, _ in named]):
        root = place.removesuffix("train/")
        of_state = [(name, x) for name, x in named if name.startswith(root)]
        found += _select_of_state(of_state, place)
    return found


def _select_of_state(named: list[tuple[str, Leaf]], place: str) -> list[Leaf]:
    """Return the arrays of one state that must be finite; the names of its params begin with
    `place` and the word "params"."""
    start = f"{place}params/"
    params = {f"{name}/"[len(start) : -1]: x for name, x in named if f"{name}/".startswith(start)}
    found = []
    for (name, x), path in zip(named, match_params(named, params), strict=True):
        is_param = f"{name}/".startswith(start)
        # With a single param without a path, any array would follow it.
        follows = path is not None and (path or np.shape(x) == np.shape(params[path]))
        is_apart = f"{name}/".startswith(f"{place}model_state/")
        if (is_param or follows) and tree.is_inexact(x) and not is_apart:
            found.append(x)
    return found


def _find_places(names: Iterable[str]) -> list[str]:
    """Return the beginnings of names before the word "params", as "train/" or "critic/train/", of
    TrainStates, or without any TrainState of all, but none inside another."""
    names = list(names)
    pattern = "((?:.*?/)??%s)params(?:/.*)?"
    for kind in ("train/", ""):
        places = {match[1] for name in names if (match := re.fullmatch(pattern % kind, name))}
        if places:
            return [x for x in sorted(places) if not any(_is_inside(x, y) for y in places)]
    return []


def _is_inside(place: str, other: str) -> bool:
    """Tell whether a place is inside the state of another one."""
    return place != other and place.startswith(other.removesuffix("train/"))


def may_keep_last_loss(state: OptState, history: Mapping[str, Any]) -> bool:
    """Tell whether the last loss of a history is finite, or no evidence against the state.

    It is none if the history has no loss, if the loss is a `Mean` without weight, or if a guard has
    left out the step.
    """
    losses, weights = (np.ravel(history.get(name, ())) for name in ("loss", "weight"))
    if not losses.size or np.isfinite(losses[-1]) or (weights.size and weights[-1] == 0):
        return True
    guards, skipped = find_guards(state), list(np.ravel(history.get("skipped", ())))
    # Of the counters of several workers the history has the largest, which need not rise.
    is_shared = not any(isinstance(getattr(x, "skipped", None), PerWorker) for x in guards)
    if skipped and is_shared:
        return bool(skipped[-1] > (skipped[-2] if len(skipped) > 1 else 0))
    return bool(guards)
