"""A scale of the loss that adapts to the range of float16, like torch.amp.GradScaler."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, errors, leafwise, numerics, tree
from optfn.core.checks import Number
from optfn.core.traits import Report, traits
from optfn.core.types import Leaf, LeafKind, OptState, Params, Stepped, Updates
from optfn.mesh.collectives.axes import AxisName
from optfn.mesh.state.per_worker import find_nodes
from optfn.wrappers.attributes import without_frozen
from optfn.wrappers.nonfinite import skip_nonfinite


@traits(
    link="loss_scale",
    passes_own_gradients=True,
    passes_rows=True,
    counts_weight=True,
    goes_on=("scale", "good_steps"),
    reports={"scale": Report("loss_scale", is_needed=True)},
)
class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`: the scale, a counter, and the state of the guard."""

    scale: jax.Array
    good_steps: jax.Array
    inner_state: OptState

    @property
    def skipped(self) -> jax.Array:
        """The count of skipped steps, which `skip_nonfinite` inside keeps (int32)."""
        return self.inner_state.skipped


@without_frozen
@core.record_call
def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial_scale: Number = 2.0**16,
    growth_factor: Number = 2.0,
    backoff_factor: Number = 0.5,
    growth_interval: int = 2000,
    min_scale: Number = 1.0,
    max_consecutive: int = 50,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` so that it gets gradients divided by a scale of the loss, which falls, with the
    step skipped, when one is not finite, and grows after good ones.

        bad = any gradient of scale·loss is NaN or infinite, on any worker
        u, state = (−0.0, state) if bad else tx(g/scale, state)
        good_steps = 0 if bad else good_steps + 1
        if bad: scale = max(scale·backoff_factor, min_scale)
        if good_steps ≥ growth_interval: scale = scale·growth_factor;  good_steps = 0

    `make_train_step` and `minimize` find the scale in the state, multiply the loss by it before
    they differentiate, and report the unscaled loss. In a loop that you write, multiply the loss by
    `loss_scale(opt_state)`. Put everything that reads gradients, such as a clip or
    `record_metrics`, inside; only `accumulate` may also go around it. g/scale is float32 or wider.
    If a larger scale would overflow, the scale does not grow.

    Args:
      tx: an optimizer of optfn or optax; it is wrapped in `skip_nonfinite`, to skip bad gradients.
      initial_scale: the first scale, > 0.
      growth_factor: the factor of the scale after `growth_interval` good gradients, > 1.
      backoff_factor: the factor of the scale after a bad gradient, in (0, 1).
      growth_interval: after how many good gradients in a row the scale grows, ≥ 1.
      min_scale: the scale falls no further, > 0, or `initial_scale` if that is smaller. Where a
        batch now and then is bad at every scale, the scale would otherwise come to 0, and float16
        params would stop to move.
      max_consecutive: as in `skip_nonfinite`.
      axis_name: as in `skip_nonfinite`.

    State: scale (float32), good_steps (int32), and the state of `skip_nonfinite(tx)`.

    Source: torch.amp.GradScaler; Micikevicius et al. 2018, arXiv 1710.03740, §3.2.
    """
    first = checks.positive("initial_scale", initial_scale)
    growth = checks.number("growth_factor", growth_factor, checks.ABOVE_ONE)
    backoff = checks.number("backoff_factor", backoff_factor, checks.INSIDE_UNIT)
    interval = checks.count("growth_interval", growth_interval)
    least = checks.positive("min_scale", min_scale)
    core.check_transform("dynamic_loss_scale: tx", tx)
    guard = skip_nonfinite(tx, max_consecutive=max_consecutive, axis_name=axis_name)

    def init(params: Params) -> DynamicLossScaleState:
        scale = jnp.asarray(first, jnp.float32)
        return DynamicLossScaleState(scale, core.first_step(), guard.init(params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        errors.check_state("dynamic_loss_scale", state, DynamicLossScaleState)
        # optax's line searches read the gradient there too.
        if "grad" in extra:
            extra["grad"] = _unscale(extra["grad"], state.scale)
        unscaled = _unscale(updates, state.scale)
        updated, guarded = guard.update(unscaled, state.inner_state, params, **extra)
        # Unscaled gradients are float32; without params only the gradients tell the dtype of an
        # update.
        if params is None:
            updated = tree.map(_cast_update, updates, updated)
        bad = guarded.consecutive > 0
        good_steps = jnp.where(bad, 0, core.next_step(state.good_steps))
        grows = good_steps >= interval  # beyond it after a resume with a shorter one
        larger = state.scale * growth
        # An infinite scale would make each gradient NaN for ever.
        scale = jnp.where(grows & jnp.isfinite(larger), larger, state.scale)
        smaller = jnp.maximum(state.scale * backoff, jnp.minimum(least, first))
        scaling = (jnp.where(bad, smaller, scale), jnp.where(grows, 0, good_steps))
        if "weight" in extra:
            scaling = optax.tree.where(extra["weight"] == 0, state[:2], scaling)
        return updated, DynamicLossScaleState(*scaling, guarded)

    return optax.GradientTransformationExtraArgs(init, update)


def _unscale(grads: Updates, scale: jax.Array) -> Updates:
    """Return gradients divided by the scale, in float32 or wider, with integer and masked leaves
    unchanged."""

    def unscale(g: Leaf) -> Leaf:
        if isinstance(g, LeafKind):
            return g.map(unscale)
        if not tree.is_inexact(g):
            return g
        wide = leafwise.cast(g, numerics.accumulator_dtype(g.dtype))
        return wide / numerics.scalar(scale, wide)

    return tree.map(unscale, grads)


def _cast_update(like: Leaf, u: Leaf) -> Leaf:
    """Return an update cast to the dtype of its gradient `like`, or unchanged if that is not
    floating point."""
    return leafwise.cast(u, like.dtype) if tree.is_inexact(like) else u


def loss_scale(opt_state: OptState) -> jax.Array:
    """Return the scale of the loss in a state as a float32 scalar, 1 without a
    `dynamic_loss_scale`, and raise a ValueError if there are several.

    Args:
      opt_state: the state of the optimizer. In a loop that you write, multiply the loss by it.

    Raises:
      ValueError: the optimizer has several `dynamic_loss_scale`.
    """
    scale = scale_of(opt_state)
    return jnp.ones((), jnp.float32) if scale is None else scale


def has_scale(opt_state: OptState) -> bool:
    """Tell whether a state has the scale of a `dynamic_loss_scale`, or one for each worker."""
    return bool(find_nodes(DynamicLossScaleState, opt_state))


def scale_of(opt_state: OptState) -> jax.Array | None:
    """Return the scale in a state, or None if it has no `dynamic_loss_scale`, and raise a
    ValueError for several scales or one for each worker.

    Raises:
      ValueError: there are several scales, or one for each worker.
    """
    found = find_nodes(DynamicLossScaleState, opt_state)
    if not found:
        return None
    scale: jax.Array = jax.tree.leaves(found[0].scale)[0]
    if len(found) > 1 or find_nodes(DynamicLossScaleState, found[0].inner_state) or scale.ndim:
        raise ValueError(
            "the state has several scales of dynamic_loss_scale, but a loss has only one factor: "
            "put a single dynamic_loss_scale around all other transforms"
        )
    return scale
