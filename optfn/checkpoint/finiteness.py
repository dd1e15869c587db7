"""States that must not be kept, because params, moments or the last loss are not finite."""

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
_PARAMS = "train/params"


def find_guards(opt_state: OptState) -> list[Any]:
    """Return the states that count steps left out because their gradients are not finite."""
    counting = iterate_nodes(
        lambda x: bool(_COUNTERS.intersection(getattr(x, "_fields", ()))), opt_state
    )
    return [x for x in counting if not traits_of(x).applies_nonfinite]


def select_judged(named: Iterable[tuple[str, Leaf]]) -> list[Leaf]:
    """Return the floating-point arrays of a state by name that must be finite: params, and the
    arrays of the optimizer that follow one.

    Others may be infinite by their meaning, such as the norms that `skip_spikes` has not seen yet,
    and so may arrays of the model state.
    """
    named = list(named)
    shapes = {name[len(_PARAMS) :].lstrip("/"): np.shape(x) for name, x in named if _is_param(name)}
    found = []
    for (name, x), path in zip(named, match_params(named, shapes), strict=True):
        # With a single param without a path, any array would follow it.
        follows = path is not None and (path or np.shape(x) == shapes[path])
        if follows and tree.is_inexact(x) and not f"{name}/".startswith("train/model_state/"):
            found.append(x)
    return found


def _is_param(name: str) -> bool:
    """Tell whether an array of this name is a param."""
    return f"{name}/".startswith(f"{_PARAMS}/")


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
