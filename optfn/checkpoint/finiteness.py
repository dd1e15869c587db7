"""States that must not be kept, because their params, or the last loss, are not finite."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from optfn.core import tree
from optfn.core.types import Leaf, OptState
from optfn.mesh.state.names import iterate_nodes

# The counters of wrappers that leave a step out if its gradient is not finite; optax's is the last.
_COUNTERS = {"skipped", "total_notfinite"}


def has_guard(opt_state: OptState) -> bool:
    """Tell whether a state counts steps left out because their gradients are not finite."""
    return any(
        iterate_nodes(lambda x: bool(_COUNTERS.intersection(getattr(x, "_fields", ()))), opt_state)
    )


def select_params(named: Iterable[tuple[str, Leaf]]) -> list[Leaf]:
    """Return the floating-point arrays that have "params" as one of the words of their path."""
    return [x for name, x in named if "params" in name.split("/") and tree.is_inexact(x)]


def are_finite(arrays: Mapping[str, Leaf]) -> bool:
    """Tell whether the params among the arrays of a state by name, on the host, are all finite,
    whatever the other arrays are."""
    return all(bool(np.all(np.isfinite(x))) for x in select_params(arrays.items()))


def may_keep_last_loss(state: OptState, history: Mapping[str, Any]) -> bool:
    """Tell whether the last loss of a history is finite, which is also true without a loss or if
    the optimizer has a guard that leaves such steps out."""
    losses = np.asarray(history.get("loss", ()))
    return not losses.size or bool(np.isfinite(losses.flat[-1])) or has_guard(state)
