"""Trust ratios, which scale the step of a tensor by its norm, as in LAMB and LARS."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.traits import traits
from optfn.core.types import Params, Updates
from optfn.leaves import patterns, tensors
from optfn.leaves.patterns import Pattern
from optfn.transforms import regularization


def trust_ratio(
    p_norm: jax.Array,
    u_norm: jax.Array,
    *,
    coeff: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    eps: Scalar = 0.0,
) -> jax.Array:
    """Return coeff·‖p‖/(‖u‖ + wd·‖p‖ + eps) where both norms are positive and ‖p‖ is finite, else
    1.

    Where ‖p‖² overflows, ∞/∞ would turn finite parameters into NaN.
    """
    coeff, weight_decay, eps = (numerics.scalar(x, p_norm) for x in (coeff, weight_decay, eps))
    valid = (p_norm > 0) & (u_norm > 0) & (p_norm < jnp.inf)
    # A divisor of 1 where the quotient is not taken: 0/0 would make its derivative NaN.
    denominator = jnp.where(valid, u_norm + weight_decay * p_norm + eps, 1)
    return jnp.where(valid, coeff * p_norm / denominator, 1)


@traits(link="trust_ratio")
class ScaleByTrustRatioState(NamedTuple):
    """State of `scale_by_trust_ratio`: empty."""


@core.transform(needs_params=True, complex_leaves=True)
def scale_by_trust_ratio() -> core.Unchecked:
    """Scale the update of each tensor to the norm of its parameters, u = q·u with q = ‖p‖/‖u‖, or
    with q = 1 if either norm is 0.

    No state. Needs params; real and complex leaves.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2 (with φ the identity).
    """

    def update(updates: Updates, params: Params) -> Updates:
        updates = leafwise.densify_rows(updates)
        p_norms, u_norms = tensors.tensor_norms(params), tensors.tensor_norms(updates)
        return leafwise.scale(updates, tensors.combine(trust_ratio, p_norms, u_norms))

    return core.stateless(update, ScaleByTrustRatioState())


@traits(link="trust_ratio")
class ScaleByLarsState(NamedTuple):
    """State of `scale_by_lars` with a schedule: the step, 4 bytes."""

    step: jax.Array


@traits(link="trust_ratio")
class ScaleByLarsByNumberState(NamedTuple):
    """State of `scale_by_lars` whose decay is a number: empty."""


@core.transform(needs_params=True, complex_leaves=True)
def scale_by_lars(
    lars_coeff: Number = 1e-3,
    lars_weight_decay: Number | Schedule = 5e-4,
    eps: Number = 0.0,
    *,
    exclude: Pattern | None = None,
) -> core.Unchecked:
    """Add weight decay to each tensor's gradient and scale the sum by the tensor's norms, u = L·(g
    + wd·p), with L = 1 if either norm is 0.

        L = coeff·‖p‖/(‖g‖ + wd·‖p‖ + eps)     where ‖p‖ > 0 and ‖g‖ > 0, else 1

    The ratio also applies with wd = 0, and to excluded leaves (in Paddle 2 it does not).

    Args:
      lars_coeff: coeff, > 0.
      lars_weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step.
      eps: ≥ 0.
      exclude: the leaves with wd = 0: a regular expression that matches their whole path, or a
        function path -> bool.

    No state; with a schedule the step, 4 bytes. Needs params; real and complex leaves.

    Source: You et al. 2017, arXiv 1708.03888, algorithm 1; fluid's LarsMomentumOptimizer.
    """
    coeff = checks.positive("lars_coeff", lars_coeff)
    wd = regularization.check_weight_decay("lars_weight_decay", lars_weight_decay)
    eps = checks.nonnegative("eps", eps)
    exclude = patterns.check_pattern("exclude", exclude)

    def update(
        updates: Updates, params: Params, coefficient: Scalar, decay: Mapping[str, float] | None
    ) -> Updates:
        updates = leafwise.densify_rows(updates)
        wds = regularization.decay_of_leaves(exclude, coefficient, updates, decay)
        p_norms, g_norms = tensors.tensor_norms(params), tensors.tensor_norms(updates)
        factors = tensors.combine(
            trust_ratio, p_norms, g_norms, coeff=coeff, weight_decay=wds, eps=eps
        )
        # The norms of g are taken before, since L has wd·‖p‖ in a separate term.
        updates = leafwise.apply(regularization.l2_penalty, updates, params=params, coeff=wds)
        return leafwise.scale(updates, factors)

    return regularization.decay_rule(
        "lars_weight_decay", wd, update, (ScaleByLarsByNumberState(), ScaleByLarsState), exclude
    )
