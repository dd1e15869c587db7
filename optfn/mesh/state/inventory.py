"""The inventory of a state: the name of each of its arrays, its parameter, and how workers keep it.

Specs, shapes on a mesh, counts of workers, bytes of a parameter and conversions to another number
of workers need the same facts about each array. An `Entry` has these facts beside the array, so
code about states is a loop over entries and arrays.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from optfn.core.traits import traits_of
from optfn.core.tree import is_array
from optfn.core.types import OptState, PyTree
from optfn.mesh.collectives.axes import Axes, join_axes
from optfn.mesh.state.encoded import Codes, find_codes
from optfn.mesh.state.names import arrays_with_names, match_params, states_with_names
from optfn.mesh.state.per_worker import Divided, Exchanged, PerWorker, find_nodes

Kept = Literal["shared", "per_worker", "sliced", "count"]


class Entry(NamedTuple):
    """The facts about an array of a state.

    name: its name in `state_dict`, "scale_by_adam/mu/layers/0/w".
    param: the path of its parameter, "layers/0/w"; None for counters and rates.
    kept: "shared", the same on all workers, though the devices of each may divide it;
      "per_worker", in a `PerWorker`; "sliced", in a `Divided`: each worker keeps a slice; or
      "count", the `num_workers` of a state with per-worker arrays.
    axes: the mesh axes of the workers, if it is not shared; without any, all worker axes.
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
    """Return an Entry for each array of a state, in the order of jax.tree.leaves, whose `param` is
    None if the array follows none of `params`.

    Args:
      state: the state of an optimizer, however wrapped, of arrays or their shapes.
      params: the paths of the parameters. Without them no entry has a `param`.
    """
    named = list(arrays_with_names(state))
    codes = find_codes([name for name, _ in named])
    owners = match_params(named, params)
    facts = zip(named, owners, _iterate_placements(state), strict=True)
    return [Entry(name, p, *placement, codes.get(name)) for (name, _), p, placement in facts]


def arrays_with_entries(state: OptState, params: Iterable[str] = ()) -> list[tuple[Entry, Any]]:
    """Return (entry, array) for each array of a state, in the order of `inventory`."""
    return list(zip(inventory(state, params), jax.tree.leaves(state), strict=True))


def map_entries(
    fn: Callable[[Entry, Any], Any], state: OptState, params: Iterable[str] = ()
) -> PyTree:
    """Map fn(entry, array) over the arrays of a state with their entries of `inventory`, and return
    a tree like the state."""
    mapped = [fn(entry, x) for entry, x in arrays_with_entries(state, params)]
    return jax.tree.unflatten(jax.tree.structure(state), mapped)


def _iterate_placements(state: OptState) -> Iterator[tuple[Kept, Axes, int]]:
    """Yield (kept, axes, size) of each array of a state, which is "shared" unless a node declares
    something else."""
    for node in jax.tree.leaves(state, is_leaf=_is_declared):
        if isinstance(node, PerWorker):
            for _ in jax.tree.leaves(node):
                yield "per_worker", node.axes, 0
        elif isinstance(node, Divided):
            # Where the devices of a worker divide the leaf, each has a row.
            for x, size in zip(jax.tree.leaves(node), node.sizes, strict=True):
                yield "sliced", node.axes, size // (x.shape[0] if x.ndim == 2 else 1)
        elif _has_worker_count(node):
            own_axes = join_axes(*(x.axes for x in find_nodes(PerWorker, node)))
            for field, child in node._asdict().items():
                if field == "num_workers":
                    yield "count", own_axes, 0
                else:
                    yield from _iterate_placements(child)
        else:
            yield "shared", Axes(), 0


def _is_declared(x: object) -> bool:
    """Tell whether a node says itself how workers keep its arrays, as a `PerWorker`, a `Divided` or
    a state with a count of workers does."""
    return isinstance(x, PerWorker | Divided) or _has_worker_count(x)


def _has_worker_count(x: object) -> TypeGuard[Any]:
    """Tell whether `x` has an int32 field `num_workers` beside per-worker arrays or an exchange."""
    if "num_workers" not in getattr(x, "_fields", ()):
        return False
    counts = jax.tree.leaves(x.num_workers)  # type: ignore[attr-defined]
    is_int32 = [is_array(count) and count.dtype == jnp.int32 for count in counts]
    # A field `num_workers` beside neither counts something else, as in the local state of sgd.
    return is_int32 == [True] and bool(find_nodes(PerWorker, x) or find_nodes(Exchanged, x))


def find_whole_matrices(state: OptState, params: Collection[str]) -> dict[str, str]:
    """Map the path of each leaf whose rule needs whole matrices to the word that the rule's state
    type declares.

    Args:
      state: the state of an optimizer, however wrapped.
      params: the paths of the parameters.
    """
    words = {}
    for _, part in states_with_names(lambda x: bool(traits_of(x).whole_matrices), state):
        for entry in inventory(part, params):
            if entry.param is not None:
                words[entry.param] = traits_of(part).whole_matrices
    return words


def find_compressed(state: OptState, params: Collection[str]) -> set[str]:
    """Return the paths of the leaves whose residual an exchange keeps, because it sends them
    compressed.

    Args:
      state: the state of an optimizer, however wrapped.
      params: the paths of the parameters.
    """
    exchanges = states_with_names(
        lambda x: isinstance(getattr(x, "exchanged", 0), Exchanged), state
    )
    entries = (entry for _, part in exchanges for entry in inventory(part, params))
    return {x.param for x in entries if x.param is not None and x.kept in ("per_worker", "sliced")}
