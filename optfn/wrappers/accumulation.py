"""Gradient accumulation: one step of an optimizer for several gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, errors, leafwise, numerics, tree
from optfn.core.traits import traits
from optfn.core.types import Leaf, OptState, Params, PyTree, Stepped, Updates
from optfn.leaves.contents import leaves_with_names
from optfn.mesh.collectives.axes import join_axes
from optfn.mesh.state.per_worker import PerWorker, find_exchange_axes, mark_per_worker
from optfn.transforms.in_place import run_if
from optfn.wrappers.attributes import without_frozen
from optfn.wrappers.uncounted import drop_uncounted


@traits(link="accumulate", passes_own_gradients=True, counts_weight=True, goes_on=("micro_step",))
class AccumulateState(NamedTuple):
    """State of `accumulate`: 4 bytes per parameter, three scalars, and the inner state.

    total: the sum of the gradients, for leaves whose gradient is the same on all workers. At
      micro-step 0 it is the last update, which the next gradient overwrites.
    own_total: sums per worker, for leaves whose gradients the inner optimizer exchanges itself.
      Scalars have shape (1,), because a PerWorker is divided along its first axis.
    weight: the sum of the calls' weights.
    value: the sum of weight·value, the loss of the calls.
    """

    micro_step: jax.Array
    total: Updates
    own_total: PerWorker
    inner_state: OptState
    weight: jax.Array
    value: jax.Array

    @property
    def summed(self) -> set[str]:
        """The names of the leaves whose gradients are summed."""
        named = [x for t in (self.total, self.own_total.value) for x in leaves_with_names(t)]
        return {name for name, x in named if not tree.is_masked(x)}


@without_frozen
@core.record_call
def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it takes one step for `every` gradients, with their weighted mean,
    and its updates in all calls between are −0.0.

        total = w·g if n = 0, else total + w·g;  n += 1
        if n ≥ every:  u = tx(total/∑ w);  n = 0
        else:          u = −0.0

    w is the extra argument `weight` of `update`, else 1. A training step passes it if the loss is
    a `Mean`. A call of weight 0 adds nothing, and counts as a call. If the weights add up to 0,
    u = −0.0 and the state of `tx` stays, but for an `accumulate` in it, which counts a call. The
    extra argument `value` reaches `tx` as the mean of the calls' values, by their weights; `grad`,
    `value_fn` and `obj_fn` do not.

    Use it if a batch does not fit in memory. For a loss that is a mean over examples, this is the
    step of the whole batch. `tx` runs only in every n-th call, so its schedules and averages count
    real steps. A run that resumes with another `every` takes the mean of all gradients that it has
    summed. If the optimizer exchanges gradients itself, each worker keeps a private sum.

    Args:
      tx: an optimizer of optfn or optax.
      every: the number of gradients for a step, ≥ 1.

    State: the micro-step n, the sum of gradients in float32, 4 bytes per parameter, ∑ w, ∑ w·value,
    and the state of `tx`.

    Raises:
      TypeError: `tx` is not a gradient transformation, or `every` is not a Python integer.
      ValueError: `every` < 1.
    """
    every = checks.count("accumulate: every", every)
    inner = core.check_transform("accumulate: tx", tx)

    def init(params: Params) -> AccumulateState:
        inner_state = inner.init(params)
        zero = partial(jnp.zeros, (), numerics.scalar_dtype())
        totals = _init_totals(inner_state, params)
        return AccumulateState(core.first_step(), *totals, inner_state, zero(), zero())

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        _check_arguments(updates, state, params)
        call_weight = extra.get("weight")
        call = _count_call(state, every, extra)
        add = partial(_add_to_total, call, call_weight)
        totals = tree.map(add, state.total, state.own_total.value, updates)
        arrays, static = _split_extra(extra | call.extra)

        def step(totals: Updates, inner_state: OptState, reads: PyTree) -> tuple[Updates, OptState]:
            params, arrays = reads
            mean = tree.map(partial(_mean_gradient, every), updates, totals)
            updated, new = inner.update(mean, inner_state, params, **arrays, **static)
            updated, new, _ = drop_uncounted(updated, new, inner_state, arrays.get("weight"))
            # Without params a boundary inside `tx` cannot know their dtype; gradients have it.
            if params is None:
                updated = jax.tree.map(lambda u, g: u.astype(g.dtype), updated, updates)
            return updated, new

        updated, totals, inner_state = _step_if(
            call.is_last, step, totals, state.inner_state, (params, arrays)
        )
        micro_step, weight, value = (
            jnp.where(call.is_last, 0, x) for x in (state.micro_step + 1, call.weight, call.value)
        )
        return updated, AccumulateState(
            micro_step, *_split_totals(totals, state), inner_state, weight, value
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_arguments(updates: Updates, state: OptState, params: Params) -> None:
    """Raise an error if the state is of another wrapper, or the updates do not have the shapes of
    its totals or, if given, of the params."""
    errors.check_state("accumulate", state, AccumulateState)
    errors.check_shapes("accumulate", updates, "the state", state.total)
    if params is not None:
        errors.check_shapes("accumulate", updates, "params", params)


class _Call(NamedTuple):
    """The place of a call of an accumulation among the calls of its step.

    is_first: whether it is the first of them.
    is_last: whether it is the last of them: then the optimizer steps.
    share: the factor of the totals: `every` over the weight of the calls in the last, else 1.
    weight: the sum of the weights so far.
    value: the sum of weight·value so far.
    extra: the arguments `weight` and `value` of the optimizer's step, as far as the call has them.
    """

    is_first: jax.Array
    is_last: jax.Array
    share: jax.Array
    weight: jax.Array
    value: jax.Array
    extra: dict[str, Any]


def _count_call(state: AccumulateState, every: int, given: dict[str, Any]) -> _Call:
    """Return the place of a call in its step, with the weight 1 if it has none."""
    call_weight, call_value = given.get("weight"), given.get("value")
    # A guard in another label may have dropped the call that began a step.
    is_first = (state.micro_step == 0) | (state.weight == 0)
    # A run that resumes with a smaller `every` may be beyond it.
    is_last = state.micro_step + 1 >= every
    added = jnp.asarray(1 if call_weight is None else call_weight, state.weight.dtype)
    weight = jnp.where(is_first, 0, state.weight) + added
    value = jnp.where(is_first, 0, state.value)
    divisor, extra = jnp.where(weight == 0, 1, weight), {}
    if call_weight is not None:
        extra["weight"] = weight
    if call_value is not None:
        wide = numerics.promote(call_value, jnp.float32)
        # A call without weight has no examples, and its value may be NaN.
        of_call = jnp.where(added == 0, 0, jnp.asarray(added, wide) * jnp.asarray(call_value, wide))
        value += of_call.astype(value.dtype)
        extra["value"] = (value / divisor).astype(wide)
    # The mean is total/every, and a total of another weight is scaled here: for total/weight
    # XLA's compiler for TPUs keeps a temporary of half the size.
    share = jnp.where(is_last, every / divisor, 1.0)
    return _Call(is_first, is_last, share, weight, value, extra)


def _init_totals(inner_state: OptState, params: Params) -> tuple[Updates, PerWorker]:
    """Return zeros for the sums of gradients as two trees, private to each worker for leaves that
    the inner optimizer exchanges, and shared for the rest.

    A leaf is masked in the tree that does not have its sum, and in both if it is not floating
    point.
    """
    exchanging = find_exchange_axes(inner_state, params)

    def split(place: tree.Place, total: Leaf) -> tuple[Leaf, Leaf]:
        is_private = exchanging[place.number] and not tree.is_masked(total)
        masked = optax.MaskedNode()
        # A PerWorker is divided along its first axis, so a scalar gets one.
        return (masked, total.reshape(total.shape or 1)) if is_private else (total, masked)

    shared, private = tree.map_to(2, split, leafwise.zeros_like(leafwise.keep_inexact(params)))
    return shared, mark_per_worker(private, join_axes(*exchanging))


def _split_totals(totals: Updates, state: AccumulateState) -> tuple[Updates, PerWorker]:
    """Return one tree of totals as the two trees of `state`, with leaves masked where they are
    masked in `state`."""

    def keep(old: Leaf, total: Leaf) -> Leaf:
        return old if tree.is_masked(old) else total

    private = tree.map(keep, state.own_total.value, totals)
    return tree.map(keep, state.total, totals), state.own_total._replace(value=private)


def _is_summed(total: Leaf, g: Leaf) -> bool:
    """Tell whether a leaf's gradients are summed: it is inexact, and has a total."""
    return tree.is_inexact(g) and not tree.is_masked(total)


def _add_to_total(
    call: _Call, weight: jax.Array | float | None, shared: Leaf, private: Leaf, g: Leaf
) -> Leaf:
    """Return (total + weight·g)·share, with a total of 0 if `is_first`, or the total unchanged if
    the leaf's gradients are not summed."""
    total = shared if tree.is_masked(private) else private
    if not _is_summed(total, g):
        return total
    g = g.astype(total.dtype).reshape(total.shape)
    if weight is not None:
        # A call without weight has no examples, and its gradient may be NaN.
        weight = jnp.asarray(weight)
        g = leafwise.keep_if(weight != 0, leafwise.scale(g, weight))
    sum_ = jnp.where(call.is_first, 0, total) + g
    return sum_ * numerics.scalar(call.share, sum_)


def _mean_gradient(every: int, g: Leaf, total: Leaf) -> Leaf:
    """Return total/every in the gradient's shape, or g itself if the leaf's gradients are not
    summed."""
    return total.reshape(jnp.shape(g)) / every if _is_summed(total, g) else g


def _split_extra(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the extra arguments, without `grad`, `value_fn` and `obj_fn`, as two dicts, trees of
    arrays, and static values such as Python numbers.

    The three that are dropped concern only one gradient, not the mean of several.
    """
    extra = {k: v for k, v in extra.items() if k not in ("grad", "value_fn", "obj_fn")}

    def is_array(x: object) -> bool:
        return isinstance(x, jax.Array)

    arrays = {k: v for k, v in extra.items() if all(map(is_array, jax.tree.leaves(v)))}
    return arrays, {k: v for k, v in extra.items() if k not in arrays}


def _step_if(
    due: jax.Array,
    step: Callable[[Updates, OptState, PyTree], tuple[Updates, OptState]],
    totals: Updates,
    inner_state: OptState,
    reads: PyTree,
) -> tuple[Updates, Updates, OptState]:
    """Return (updates, totals, inner_state) after `step` if `due`, else −0.0 and both unchanged.

    The updates overwrite the totals, because new arrays would be allocated in every call. Updates
    of integer leaves are zero in both cases, and are made outside of the conditional.
    """
    shapes = jax.eval_shape(step, totals, inner_state, reads)[0]
    # The conditional returns the updates in the dtypes of the totals, which masters may exceed.
    room = tree.map(_widen_to, totals, shapes)

    def run(room: Updates, inner_state: OptState, reads: PyTree) -> tuple[Updates, OptState]:
        updates, inner_state = step(optax.tree.cast_like(room, totals), inner_state, reads)
        return tree.map(_overwrite, room, updates), inner_state

    def read(like: Leaf, total: Leaf) -> Leaf:
        if tree.is_inexact(like):
            # The update has overwritten the total; if there was no step, it is −0.0.
            held = numerics.negative_zero(like.dtype)
            return jnp.where(due, total.astype(like.dtype), held).reshape(like.shape)
        return like if tree.is_masked(like) else numerics.integer_zeros(like.shape, like.dtype)

    room, inner_state = run_if(due, [run], (room, inner_state), reads)
    return tree.map(read, shapes, room), optax.tree.cast_like(room, totals), inner_state


def _widen_to(total: Leaf, u: Leaf) -> Leaf:
    """Return a total in the dtype of its update if that is wider, else unchanged."""
    return total.astype(numerics.promote(total.dtype, u.dtype)) if tree.is_inexact(u) else total


def _overwrite(total: Leaf, u: Leaf) -> Leaf:
    """Return an update in the total's shape and dtype, so that it overwrites the total's memory, or
    the total itself if the update is not floating point."""
    return u.astype(total.dtype).reshape(total.shape) if tree.is_inexact(u) else total
