"""Warnings of an optimizer's arguments that have no effect in a step, or not the intended one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optfn import core
from optfn.core import checks, tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState, Params
from optfn.interop.calls import iterate_links, show_transform
from optfn.leaves import contents
from optfn.mesh.state import per_worker, reports
from optfn.mesh.state.names import iterate_nodes
from optfn.wrappers.attributes import resolve


def warn_of_frozen(tx: optax.GradientTransformation, params: Params) -> None:
    """Warn if no leaf of `params` is trained: the optimizer freezes all, or there are none.

    We see the attributes of optimizers of optfn, inside wrappers and chains of optfn too.
    """
    frozen = _find_frozen(tx, params)
    if not frozen and any(map(tree.is_inexact, jax.tree.leaves(params))):
        return
    if all(name in frozen for name, x in contents.leaves_with_names(params) if tree.is_inexact(x)):
        why = f"{show_transform(tx)} freezes all of them" if frozen else "params have no leaves"
        checks.warn(f"no parameter is trained, because {why}: steps will change nothing")


def warn_of_moves(opt_state: OptState) -> None:
    """Warn of an `optax.MultiSteps` on the host, which computes its step in every call."""
    if per_worker.find_nodes(optax.MultiStepsState, opt_state):
        checks.warn(
            "state_memory: optax.MultiSteps moves the whole state to the device and back in every "
            "call, also in those without a step. Use optfn.accumulate, which moves the sums alone"
        )


def _find_frozen(tx: object, params: Params) -> set[str]:
    """Return the paths of leaves that attributes freeze, by trainable=False or a rate factor of 0,
    in an optimizer of optfn, its chain or its wrappers."""
    if not isinstance(tx, core.Transform):
        return set()
    # The links of a chain are its positional arguments, and a wrapper's optimizer is `tx`. `others`
    # of muon is neither: it trains only some leaves, and its attributes freeze no leaf of muon's.
    _, positional, named = tx.call
    parts = *positional, named.get("tx")
    found = set[str]().union(*(_find_frozen(part, params) for part in parts))
    if tx.param_attrs:
        attrs = resolve(tx.param_attrs, params)
        found |= {name for name, x in attrs.items() if not (x.trainable and x.learning_rate)}
    return found


def warn_of_unclipped(tx: optax.GradientTransformation) -> None:
    """Warn if attributes exempt leaves from the clip of an optimizer, but it has no clip.

    The exemption concerns the clip of the optimizer: one before it in a chain clips all leaves.
    """
    for link in iterate_links(tx):
        name, _, arguments = link.call
        clips = [arguments.get(k) for k in ("grad_clip", "local_grad_clip_norm")]
        exempt = [pattern for pattern, x in (link.param_attrs or {}).items() if not x.need_clip]
        if exempt and clips == [None, None]:
            checks.warn(
                f"{name}: need_clip=False of param_attrs[{exempt[0]!r}] has no effect, because "
                f"{name} has no clip of its own. Pass the clip to it, {name}(…, grad_clip=…), not "
                "before it in a chain"
            )


def warn_of_schedules(tx: optax.GradientTransformation, steps: int, begin: int = 0) -> None:
    """Warn if the learning rate of an optimizer of optfn is negative or not finite in one of the
    steps that are tried, or 0 in all of them in a run that begins after step 0.

    A warm-down that goes on below zero turns the direction round. A schedule goes on from the step
    of the state, so the schedule of a second phase may be over before it begins. We try nine steps,
    the first and the last among them, and 100 more where all of these are 0.

    Args:
      tx: the optimizer.
      steps: the number of the last step of the run.
      begin: the number of steps before the run.
    """
    if not isinstance(tx, core.Transform) or steps <= begin:
        return
    name, positional, arguments = tx.call
    schedule = arguments.get("learning_rate", positional[0] if positional else None)
    if callable(schedule):
        _warn_of_schedule(name, schedule, steps, begin)
    if name == "accumulate":  # the schedule inside counts its steps, not the microbatches
        every = arguments["every"] if "every" in arguments else positional[1]
        steps, begin = steps // every, begin // every
    for inner in tx.inner:
        warn_of_schedules(inner, steps, begin)


def _warn_of_schedule(
    name: str, schedule: Callable[[np.int32], Any], steps: int, begin: int
) -> None:
    """Try one schedule at some steps, and warn if it is negative, not finite, or 0 in all steps of
    a run that begins after step 0."""

    def values(count: int) -> dict[int, float]:
        chosen = {begin + int(k * (steps - 1 - begin) / (count - 1)) for k in range(count)}
        return {step: float(schedule(np.int32(step))) for step in sorted(chosen)}

    tried = values(9)
    for step, value in tried.items():
        if not 0 <= value < np.inf:
            checks.warn(
                f"the schedule of {name} is {value:g} at step {step} of {steps}: a rate below "
                "zero goes uphill. Let it end at 0, as the schedules of optfn.schedules do"
            )
            return
    is_over = 0 < begin < steps - 1 and not any(tried.values())
    if is_over and not any(values(109).values()):
        checks.warn(
            f"the schedule of {name} is 0 in all steps of this run, {begin} to {steps - 1}, so "
            "params will not change: it counts the steps of the state. For a schedule that begins "
            f"with this run pass lambda step: schedule(step - {begin})"
        )


def warn_of_lazy(tx: optax.GradientTransformation, params: Params) -> None:
    """Warn of each optimizer whose call sets `lazy`, which has no effect on dense gradients, unless
    no leaf has two axes, as a table has."""
    if not any(np.ndim(x) > 1 for x in jax.tree.leaves(params)):
        return
    for name, lazy in dict.fromkeys(_find_lazy_calls(tx)):
        checks.warn(
            f"{name}(lazy={lazy!r}) has no effect without tables=, since all gradients of loss_fn "
            "are then dense. Name the embeddings, as in make_train_step(…, tables='embed/.*')"
        )


def warn_of_lazy_sums(tx: optax.GradientTransformation) -> None:
    """Warn of an optimizer with `lazy` inside `accumulate`, which gives it dense gradients."""
    sums = (link for link in iterate_links(tx) if link.call[0] == "accumulate")
    for name, lazy in dict.fromkeys(found for link in sums for found in _find_lazy_calls(link)):
        checks.warn(
            f"{name}(lazy={lazy!r}) has no effect inside accumulate, which adds gradients up "
            "as dense arrays: all rows of a table are updated. Pass microbatches= to the "
            "step in place of accumulate: rows then stay rows"
        )


def _find_lazy_calls(tx: optax.GradientTransformation) -> Iterator[tuple[str, bool | str]]:
    """Yield (name, lazy) of each optimizer in `tx` whose call turns `lazy` on."""
    for link in iterate_links(tx):
        name, _, arguments = link.call
        if arguments.get("lazy"):
            yield name, arguments["lazy"]


def count_waiting_gradients(opt_state: OptState) -> int:
    """Return the count of gradients that an accumulation has summed for its next step, the largest
    of several accumulations, or 0 without one."""

    def find_counter(x: object) -> jax.Array | None:
        if isinstance(x, optax.MultiStepsState):
            return x.mini_step
        return getattr(x, "micro_step", None) if traits_of(x).link == "accumulate" else None

    found = [*iterate_nodes(lambda x: find_counter(x) is not None, opt_state)]
    counters = [jax.tree.leaves(find_counter(x))[0] for x in found]  # local steps have a PerWorker
    return max((int(np.max(reports.read_local(x))) for x in counters), default=0)


def warn_of_replicas(params: Params, mesh: Mesh | None) -> None:
    """Warn if params for a mesh come from a pmap, with equal copies of each leaf, one on each
    device, but never without a mesh or while params are traced."""
    leaves = jax.tree.leaves(params)
    if mesh is None or checks.is_traced(params) or not leaves:
        return
    if all(map(_is_on_each_device, leaves)) and all(map(_has_equal_rows, leaves)):
        checks.warn(
            f"params come from a pmap: each leaf has {leaves[0].shape[0]} equal copies, one on "
            "each device, and they would be trained as one array. Pass one of them, "
            "jax.tree.map(lambda x: x[0], params)"
        )


def _is_on_each_device(x: Leaf) -> bool:
    """Tell whether each of several devices has one row of an array."""
    if not isinstance(x, jax.Array) or not x.ndim or not x.is_fully_addressable:
        return False
    count = len(x.sharding.device_set)
    return 1 < count == x.shape[0] and x.sharding.shard_shape(x.shape) == (1, *x.shape[1:])


def _has_equal_rows(x: jax.Array) -> bool:
    first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
    return all(first.tobytes() == other.tobytes() for other in others)
