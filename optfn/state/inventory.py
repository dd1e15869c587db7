"""The inventory of a state: what each of its arrays is called, and how workers keep it.

Specs, shapes on a mesh, counts of workers, bytes of a parameter and conversions to other numbers of
workers need the same facts of each array. They are an `Entry` beside the array, so that code about
states is a loop over entries and arrays.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from optfn.collectives.axes import Axes, join_axes
from optfn.core.traits import traits_of
from optfn.core.tree import is_array
from optfn.core.types import OptState, PyTree
from optfn.state.encoded import Codes, codes_by_name
from optfn.state.names import named_leaves, named_states, params_of_leaves
from optfn.state.per_worker import Divided, Exchanged, PerWorker, nodes_of

Kept = Literal["replicated", "per_worker", "sliced", "count"]


class Entry(NamedTuple):
    """What is known of an array of a state.

    name: its name in `state_dict`, "scale_by_adam/mu/layers/0/w".
    param: the path of its parameter, "layers/0/w"; None for counters and rates.
    kept: "replicated", the same on all workers, though the devices of each may divide it;
      "per_worker", in a `PerWorker`; "sliced", in a `Divided`, of which each worker keeps a slice;
      or "count", the `num_workers` of a state with per-worker arrays.
    axes: the mesh axes of the workers, where it is not replicated; none means all.
    size: the length of the last axis without padding if it is sliced, else 0.
    codes: how to decode it, if it has codes instead of numbers.
    """

    name: str
    param: str | None
    kept: Kept
    axes: Axes = Axes()
    size: int = 0
    codes: Codes | None = None


def inventory(state: OptState, params: Iterable[str] = ()) -> list[Entry]:
    """Return an entry for each array of a state, in the order of jax.tree.leaves.

    Args:
      state: the state of an optimizer, however wrapped, of arrays or their shapes.
      params: the paths of the parameters. Without them no entry has a `param`.
    """
    named = list(named_leaves(state))
    codes = codes_by_name([name for name, _ in named])
    owners = params_of_leaves(named, params)
    return [
        Entry(name, param, *placement, codes.get(name))
        for (name, _), param, placement in zip(named, owners, _placements(state), strict=True)
    ]


def map_entries(
    fn: Callable[[Entry, Any], Any], state: OptState, params: Iterable[str] = ()
) -> PyTree:
    """Map fn(entry, array) over the arrays of a state; `params` are the paths for `inventory`."""
    arrays, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, map(fn, inventory(state, params), arrays))


def _placements(state: OptState) -> Iterator[tuple[Kept, Axes, int]]:
    """Yield the `kept`, `axes` and `size` of each array of a state."""
    for node in jax.tree.leaves(state, is_leaf=_is_declared):
        if isinstance(node, PerWorker):
            for _ in jax.tree.leaves(node):
                yield "per_worker", node.axes, 0
        elif isinstance(node, Divided):
            # Where the devices of a worker divide the leaf, each has a row.
            for x, size in zip(jax.tree.leaves(node), node.sizes, strict=True):
                yield "sliced", node.axes, size // (x.shape[0] if x.ndim == 2 else 1)
        elif _counts_workers(node):
            own_axes = join_axes(*(x.axes for x in nodes_of(PerWorker, node)))
            for field, child in node._asdict().items():
                if field == "num_workers":
                    yield "count", own_axes, 0
                else:
                    yield from _placements(child)
        else:
            yield "replicated", Axes(), 0


def _is_declared(x: object) -> bool:
    return isinstance(x, PerWorker | Divided) or _counts_workers(x)


def _counts_workers(x: object) -> TypeGuard[Any]:
    """Tell whether `x` is a state with an int32 field `num_workers` and per-worker arrays."""
    if "num_workers" not in getattr(x, "_fields", ()):
        return False
    counts = jax.tree.leaves(x.num_workers)  # type: ignore[attr-defined]
    is_int32 = [is_array(count) and count.dtype == jnp.int32 for count in counts]
    return is_int32 == [True] and bool(nodes_of(PerWorker, x) or nodes_of(Exchanged, x))


def whole_matrices(state: OptState, params: Collection[str]) -> dict[str, str]:
    """Map the path of each leaf whose rule needs whole matrices to the word of the rule for it.

    Args:
      state: the state of an optimizer, however wrapped.
      params: the paths of the parameters.
    """
    return {
        entry.param: traits_of(part).whole_matrices
        for _, part in named_states(lambda x: bool(traits_of(x).whole_matrices), state)
        for entry in inventory(part, params)
        if entry.param is not None
    }
