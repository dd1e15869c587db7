"""A guard that skips an update if a gradient is not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, errors
from optfn.core.traits import Report, traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.leaves import tensors
from optfn.mesh.collectives.axes import AxisName, check_axis_names
from optfn.mesh.state.names import iterate_nodes
from optfn.mesh.state.per_worker import join_agreeing_workers
from optfn.wrappers.attributes import without_frozen
from optfn.wrappers.uncounted import drop_uncounted, select_unless_skipped


@traits(
    passes_own_gradients=True,
    passes_rows=True,
    counts_weight=True,
    reports={
        "consecutive": None,
        "skipped": Report("skipped", "max", "max"),
        "gave_up": Report(
            "gave_up",
            "any",
            "any",
            error=lambda state, flag: FloatingPointError(
                "skip_nonfinite: more than max_consecutive gradients in a row were not finite; "
                "the last one has been applied to the parameters"
            ),
        ),
    },
    goes_on=("consecutive", "skipped", "gave_up"),
    link="guard",
)
class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: two counters, a flag, and the inner state."""

    consecutive: jax.Array
    skipped: jax.Array
    gave_up: jax.Array
    inner_state: OptState


# The fields of states, also of optax's, that keep squares of gradients.
_SQUARES = {
    "nu", "accumulator", "mean_square", "squared_gradient", "sum_of_squares", "e_g", "exp_avg_sq",
    "grad_sum_sq", "v_row",
}  # fmt: skip


def _keeps_squares(state: OptState) -> bool:
    """Tell whether a state keeps squares of gradients."""
    found = iterate_nodes(lambda x: not _SQUARES.isdisjoint(getattr(x, "_fields", ())), state)
    return any(True for _ in found)


@without_frozen
@core.record_call
def skip_nonfinite(
    tx: optax.GradientTransformation, *, max_consecutive: int = 10, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that a gradient with a NaN or ∞ on any worker changes nothing, unless
    more than `max_consecutive` of them come in a row.

        bad = any gradient is NaN or infinite, on any worker
        consecutive = consecutive + 1 if bad else 0
        skip = bad and consecutive ≤ max_consecutive
        u, state = (−0.0, state) if skip else tx(g, state)

    Where `tx` keeps squares of gradients, as adam does, a gradient whose square overflows is bad
    too: from 1.8e19 on in float32. It would stop that parameter for ever.

    If the extra argument `weight` of `update` is 0, the gradient is of nothing: the counters and
    the state of `tx` stay, but for an `accumulate` in it, which counts the call.

    After `max_consecutive` bad gradients in a row, the next ones are applied, as in
    `optax.apply_if_finite`. `make_train_step` and `minimize` then raise a FloatingPointError, and
    the state is not saved.

    Args:
      tx: an optimizer of optfn or optax.
      max_consecutive: how many bad gradients in a row are skipped, ≥ 0.
      axis_name: if each worker has a private gradient, the mesh axes of the workers, which must
        agree; they must be bound by shard_map, pmap or vmap. `make_train_step` adds its axes, and
        an exchange in `tx` adds its `axis_name`.

    State: consecutive and skipped (int32), gave_up (bool), and the state of `tx`.
    """
    most = checks.count("max_consecutive", max_consecutive, low=0)
    check_axis_names("skip_nonfinite: axis_name", axis_name, optional=True)
    inner = core.check_transform("skip_nonfinite: tx", tx)

    def init(params: Params) -> SkipNonfiniteState:
        zero = core.first_step
        return SkipNonfiniteState(zero(), zero(), jnp.zeros((), jnp.bool_), inner.init(params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        errors.check_state("skip_nonfinite", state, SkipNonfiniteState)
        workers = join_agreeing_workers("skip_nonfinite", axis_name, state, extra)
        weight = extra.get("weight")
        bad = workers.any(~tensors.all_finite(updates, squared=_keeps_squares(state)))
        consecutive = jnp.where(bad, core.next_step(state.consecutive), 0)
        skip = bad & (consecutive <= most)
        # Compute both and select: the select fuses with the update, where a cond would write new
        # arrays.
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        updates, inner_state, _ = drop_uncounted(updates, inner_state, state.inner_state, weight)
        skipped = jnp.where(skip, core.next_step(state.skipped), state.skipped)
        counters = (consecutive, skipped, bad & ~skip)
        if weight is not None:  # the gradient of nothing is no evidence
            counters = optax.tree.where(weight == 0, state[:3], counters)
            skip &= weight != 0
        updates, inner_state = select_unless_skipped(skip, updates, inner_state, state.inner_state)
        return updates, SkipNonfiniteState(*counters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
