"""A guard that skips an update whose norm is far above the norms of the previous updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import core
from optfn.core import checks, errors, leafwise
from optfn.core.checks import Number
from optfn.core.traits import Report, traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.mesh.collectives.axes import AxisName, check_axis_names
from optfn.mesh.state.per_worker import join_agreeing_workers
from optfn.transforms.rates import largest_rate
from optfn.wrappers.attributes import without_frozen
from optfn.wrappers.uncounted import drop_uncounted, select_unless_skipped


@traits(
    link="reader",
    passes_own_gradients=True,
    passes_rows=True,
    counts_weight=True,
    goes_on=("consecutive", "skipped"),
    applies_nonfinite=True,
    reports={
        "consecutive": None,
        "skipped": None,
        "ratio": Report("spike_ratio", several="max"),
        "norms": None,
    },
)
class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`: two counters, the last ratio, the last norms, and the inner state."""

    consecutive: jax.Array
    skipped: jax.Array
    ratio: jax.Array
    norms: jax.Array
    inner_state: OptState


@without_frozen
@core.record_call
def skip_spikes(
    tx: optax.GradientTransformation,
    factor: Number = 10.0,
    *,
    window: int = 100,
    max_consecutive: int = 10,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to skip an update whose norm exceeds `factor` times the median of the last
    `window` norms, unless more than `max_consecutive` come in a row.

        n = ‖tx(g)‖ / α                    the L2 norm over all parameters
        m = median of n of the last `window` updates that were made
        spike = n > factor·m
        consecutive = consecutive + 1 if spike else 0
        skip = spike and consecutive ≤ max_consecutive
        u, state = (−0.0, state) if skip else tx(g, state)

    α is the learning rate of this update in the state of `tx`, the largest if there are several, so
    a schedule that begins anew makes no spike. α is 1 if the state has no rate, as with optimizers
    of optax, or if the rate is 0.

    Norms before the first update count as infinite, so nothing is a spike until more than half of
    the window is filled. After `max_consecutive` spikes in a row, the next ones are applied, and
    their norms enter the window. Norms that are zero (between the steps of `accumulate`) or not
    finite do not enter it. Put `skip_nonfinite` around this guard to skip non-finite updates from
    the first step on.

    Args:
      tx: an optimizer of optfn or optax.
      factor: how many times the median a spike exceeds, > 1.
      window: the median is taken of so many norms, ≥ 1.
      max_consecutive: how many spikes in a row are skipped, ≥ 0. With 0, the ratio n/m is only
        recorded.
      axis_name: if each worker has a private update, the mesh axes of the workers, to average the
        squares of the norms; they must be bound by shard_map, pmap or vmap. `make_train_step` adds
        its axes, and an exchange in `tx` adds its `axis_name`.

    The metrics of a training step have "spike_ratio", n/m.

    State: consecutive and skipped (int32), ratio and norms (float32), 12 + 4·window bytes, and the
    state of `tx`.
    """
    times = checks.number("factor", factor, checks.ABOVE_ONE)
    length = checks.count("window", window)
    most = checks.count("max_consecutive", max_consecutive, low=0)
    check_axis_names("skip_spikes: axis_name", axis_name, optional=True)
    inner = core.check_transform("skip_spikes: tx", tx)

    def init(params: Params) -> SkipSpikesState:
        zero, norms = core.first_step, jnp.full(length, np.inf, jnp.float32)
        ratio = jnp.zeros((), jnp.float32)
        return SkipSpikesState(zero(), zero(), ratio, norms, inner.init(params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        errors.check_state("skip_spikes", state, SkipSpikesState)
        weight = extra.get("weight")
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        # The norm is of the leaves that change: in a batch without weight, those that `accumulate`
        # has summed in the calls before.
        updates, inner_state, _ = drop_uncounted(updates, inner_state, state.inner_state, weight)
        norm = leafwise.global_norm(leafwise.merge_rows(leafwise.keep_inexact(updates)))
        workers = join_agreeing_workers("skip_spikes", axis_name, state, extra)
        norm = workers.root_mean_square(norm.astype(jnp.float32))
        rate = largest_rate(inner_state).astype(jnp.float32)
        norm = norm / jnp.where(rate > 0, rate, 1.0)
        # A median, because a mean of norms would follow the spikes themselves.
        in_order = jnp.sort(state.norms)
        median = (in_order[(length - 1) // 2] + in_order[length // 2]) / 2
        spike = norm > times * median
        consecutive = jnp.where(spike, core.next_step(state.consecutive), 0)
        skip = spike & (consecutive <= most)
        # The steps of `accumulate` without an update have norm 0, and would pull the median down.
        counts = ~skip & jnp.isfinite(norm) & (norm > 0)
        norms = jnp.where(counts, jnp.append(state.norms[1:], norm), state.norms)
        updates, inner_state = select_unless_skipped(skip, updates, inner_state, state.inner_state)
        skipped = jnp.where(skip, core.next_step(state.skipped), state.skipped)
        own = (consecutive, skipped, norm / median, norms)
        if weight is not None:
            own = optax.tree.where((weight == 0) & (norm == 0), state[:4], own)
        return updates, SkipSpikesState(*own, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
