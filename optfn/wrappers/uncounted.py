"""Updates that do not count: one decision for all parts of an optimizer.

A guard drops an update whose gradient is not finite or whose norm is a spike, and so does the scale
of a loss that overflows. An update whose weights add up to 0 averages nothing. In each case params
and state stay, bit for bit, in every link of a chain and in every label of a partition:

    chain(skip_nonfinite(adam), ema)      the average counts the updates that adam counts
    {"a": skip_spikes(sgd), "b": adam}    b stays where a's update is a spike

`drop_uncounted` makes it so after `update`, from the states before and after. A training step calls
it, and so do guards, masters and `accumulate` for the optimizer inside. It reads of the state:

* The field `skipped` of a guard counts the updates that it drops. The guard itself keeps the state
  that it wraps.
* `@traits(counts_weight=True)`: the transform itself chooses the arrays that an update without
  weight changes: `accumulate` weighs several calls, `exchange` keeps its residuals, and a guard
  takes such an update for no evidence.
* `@traits(goes_on=...)`: these fields go on in each case, such as `skipped`.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optfn.core import numerics, tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, LeafKind, OptState, Updates
from optfn.leaves import contents
from optfn.mesh.state.names import is_state, iterate_nodes

_ApplyIfFinite = optax.transforms.ApplyIfFiniteState
Flags = list[jax.Array]


def drop_uncounted(
    updates: Updates, after: OptState, before: OptState, weight: jax.Array | None = None
) -> tuple[Updates, OptState, jax.Array | None]:
    """Return updates, the state after them and None, or if an update may not count, updates of −0.0
    and the state before where it does not, and whether it does not.

    Updates of integers are unchanged in both cases. Where the update has no weight, so are the
    updates of leaves whose gradients `accumulate` sums: it decides by the weight of all its calls.

    Args:
      updates: the updates that `update` returned.
      after: the state that it returned.
      before: the state that it took.
      weight: the weight of the update; None if it counts whatever the loss is.
    """
    skips, empty = find_skips(before, after), None if weight is None else weight == 0
    reasons = skips if empty is None else [*skips, empty]
    if not reasons:
        return updates, after, None
    state = _restore(before, after, [], empty)
    if state is not after:
        updates = _drop(updates, after, skips, empty)
    return updates, state, any_of(reasons)


def select_unless_skipped(
    skip: jax.Array, updates: Updates, after: OptState, before: OptState
) -> tuple[Updates, OptState]:
    """Return `updates` and the state `after`, or if `skip` updates of −0.0 and the state `before`,
    where updates of integers are unchanged in both cases."""
    dropped = tree.map_arrays(functools.partial(_drop_leaf, skip), updates)
    return dropped, optax.tree.where(skip, before, after)


def find_skips(before: OptState, after: OptState) -> Flags:
    """Return for each guard of a state, `optax.apply_if_finite` included, whether it has dropped
    the update between two states."""
    return list(map(operator.ne, _find_counters(before), _find_counters(after)))


def any_of(flags: Sequence[jax.Array]) -> jax.Array:
    """Tell whether any of some flags, at least one, is true."""
    return functools.reduce(jnp.logical_or, flags)


def _find_counters(state: OptState) -> list[jax.Array]:
    """Return the counter of dropped updates of each guard in a state."""
    found = iterate_nodes(_is_guard, state)
    return [x.total_notfinite if isinstance(x, _ApplyIfFinite) else x.skipped for x in found]


def _is_guard(x: Any) -> bool:
    """Tell whether `x` is the state of a guard."""
    return isinstance(x, _ApplyIfFinite) or (is_state(x) and "skipped" in x._fields)


def _counts_weight(x: Any) -> bool:
    """Tell whether `x` is the state of a transform that itself chooses the arrays that an update
    without weight changes."""
    return traits_of(x).counts_weight


def _restore(before: OptState, after: OptState, skips: Flags, empty: jax.Array | None) -> OptState:
    """Return a state where the update counts, or the state before it, or `after` itself if it
    counts anyway.

    Args:
      before: the state before the update.
      after: the state after it.
      skips: whether the update is dropped, by each guard that this state does not know of.
      empty: whether the update has no weight; None if it counts whatever the loss is.
    """
    decides = _counts_weight(after)
    reasons = skips if empty is None or decides else [*skips, empty]
    has_parts = any(True for _ in iterate_nodes(lambda x: _is_guard(x) or _counts_weight(x), after))
    if not has_parts:
        return optax.tree.where(any_of(reasons), before, after) if reasons else after
    parts, treedef = jax.tree.flatten(after, is_leaf=lambda x: x is not after)
    structure: Any = treedef
    pairs = list(zip(structure.flatten_up_to(before), parts, strict=True))
    if hasattr(after, "_fields"):
        kept = traits_of(after).goes_on
        drops = [[] if name in kept else skips for name in after._fields]
    else:  # a chain, list or dict, whose guards drop the states beside them too
        found = list(itertools.starmap(find_skips, pairs))
        others = (found[:i] + found[i + 1 :] for i in range(len(parts)))
        drops = [skips + list(itertools.chain.from_iterable(flags)) for flags in others]
    restored = [
        # A state that decides does so for the states inside as well.
        (optax.tree.where(any_of(drop), old, new) if drop else new)
        if decides else _restore(old, new, drop, empty)
        for (old, new), drop in zip(pairs, drops, strict=True)
    ]  # fmt: skip
    return after if all(map(operator.is_, restored, parts)) else structure.unflatten(restored)


def _drop(updates: Updates, state: OptState, skips: Flags, empty: jax.Array | None) -> Updates:
    """Return updates, or −0.0 where a guard drops them, or where they have no weight and no
    `accumulate` in the state sums their gradients."""
    summed = set[str]()
    for x in iterate_nodes(_counts_weight, state):
        summed |= getattr(x, "summed", set())
    names = contents.leaf_names(updates)

    def drop(place: tree.Place, u: Leaf) -> Leaf:
        is_summed = not summed.isdisjoint(names[place.number])
        reasons = skips if empty is None or is_summed else [*skips, empty]
        return u if tree.is_masked(u) or not reasons else _drop_leaf(any_of(reasons), u)

    return tree.map_named(drop, updates)


def _drop_leaf(skip: jax.Array, u: Leaf) -> Leaf:
    """Return an update, or −0.0 if `skip` and it is no integer's."""
    if isinstance(u, LeafKind):
        return u.map(functools.partial(_drop_leaf, skip))
    if not jnp.issubdtype(u.dtype, jnp.inexact):
        return u
    return jnp.where(skip, numerics.negative_zero(u.dtype), u)
