"""The average of the last gradients of all batches (ASGD)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.transforms import late_steps


@traits(link="filter", counted="gradients")
class ScaleByAsgdState(NamedTuple):
    """State of `scale_by_asgd`: 4·batch_num bytes per parameter, and the step."""

    step: late_steps.Steps
    gradients: Params


@traits(link="pass")
class WithoutGradientsState(ScaleByAsgdState):
    """State of `scale_by_asgd(1)`: masked leaves."""


@core.transform(complex_leaves=True)
def scale_by_asgd(batch_num: int = 1) -> core.Unchecked:
    """Replace the gradient by the mean of the latest gradients of the `batch_num` batches of an
    epoch, as far as seen, or return it unchanged for one batch.

        i = (t − 1) mod n;  y_i = g;  d = ∑_j y_j;  u = d/min(t, n)

    d is summed again in each step. Fluid updates it by d += g − y_i, which in float32 keeps the
    rounding error of the largest gradient forever.

    Args:
      batch_num: n, ≥ 1, static; the batches must come in the same order in every epoch.

    State: step, and gradients (y), shape (n, *leaf), 4·n bytes per parameter; none for n = 1, with
    which the update is the gradient. Real and complex leaves.

    Source: Schmidt et al. 2017, arXiv 1309.2388, eq. 3 ("SAG"); Paddle's ASGD.
    """
    n = checks.count("batch_num", batch_num)
    if n == 1:
        empty = WithoutGradientsState(optax.MaskedNode(), optax.MaskedNode())
        return core.stateless(lambda updates, params: updates, empty)

    def init(params: Params) -> ScaleByAsgdState:
        return ScaleByAsgdState(core.first_step(), leafwise.zeros_like(params, leading=(n,)))

    def update(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
        place = late_steps.global_count(state.step) % n
        step, counts = late_steps.advance_by_leaf(
            lambda t: {"divisor": jnp.minimum(t, n)}, state.step, updates
        )

        def average(
            g: jax.Array, y: jax.Array, *, divisor: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # The oldest gradient is of the same batch of the previous epoch, and is overwritten.
            y = jax.lax.dynamic_update_index_in_dim(y, g.astype(y.dtype), place, 0)
            return jnp.sum(y, axis=0) / numerics.scalar(divisor, g), y

        updates, gradients = leafwise.apply(
            average, updates, state.gradients, shapes=lambda shape: [(n, *shape)], **counts
        )
        return updates, ScaleByAsgdState(step, gradients)

    return core.Unchecked(init, update)
