"""LAMB's direction: Adam's with weight decay, scaled to the norm of each tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.types import OptState, Params, PyTree, Stepped, Updates
from optfn.leaves import patterns, tensors
from optfn.leaves.patterns import Pattern
from optfn.transforms import in_place, late_steps, scaling
from optfn.transforms.adam import ScaleByAdamState, adam_factors, adam_moments, init_moments
from optfn.transforms.regularization import check_weight_decay, decay_of_leaves, weight_decay_at


def lamb_direction(
    m: jax.Array, v: jax.Array, p: jax.Array, *, eps: Scalar, scale: Scalar, weight_decay: Scalar
) -> jax.Array:
    """Return r/scale, where r = scale·m/(√v + eps) + wd·p."""
    wd = numerics.scalar(weight_decay / scale, v)
    return m / (numerics.sqrt(v) + numerics.scalar(eps, v)) + wd * p


@core.transform(needs_params=True, complex_leaves=True)
def scale_by_lamb(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    *,
    weight_decay: Number | Schedule = 0.01,
    bias_correction: bool = False,
    exclude: Pattern | None = None,
) -> core.Unchecked:
    """Scale, for each tensor, Adam's direction plus weight decay to the norm of the parameters, or
    by 1 where either norm is 0.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        r = m/(√v + eps) + wd·p,  or m̂/(√v̂ + eps) + wd·p with bias_correction
        u = q·r,  q = ‖p‖/‖r‖  where both > 0, else 1

    It is the chain scale_by_adam → add_decayed_weights → scale_by_trust_ratio, with the same names
    in the state, but without temporary memory: r is computed from the new moments twice, for its
    norm and for u, instead of being stored.

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0; with 0, an element whose gradient has always been 0 becomes NaN, as in optax.
      weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step.
      bias_correction: whether to correct the bias of the moments.
      exclude: the leaves with wd = 0: a regular expression that matches their whole path, or a
        function path -> bool.

    State: step, and mu (m) and nu (v), 8 bytes per parameter; nu of a complex leaf is real. Needs
    params.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2; fluid's LambOptimizer.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.nonnegative("eps", eps)
    wd = check_weight_decay("weight_decay", weight_decay)
    bias_correction = checks.flag("bias_correction", bias_correction)
    exclude = patterns.check_pattern("exclude", exclude)

    def of_step(step: jax.Array) -> dict[str, Scalar]:
        if not bias_correction:
            return {"scale": 1.0, "eps": eps, "inverse": 1.0}
        scale, root = adam_factors(b1, b2, step, False)
        # `lamb_direction` has no root: numerator and eps are divided by it instead.
        scale = scale / root
        return {"scale": scale, "eps": eps / root, "inverse": 1 / scale}

    def init(params: Params) -> OptState:
        patterns.match_names(exclude, params, "exclude")
        return init_moments(ScaleByAdamState, params)

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        updates = leafwise.densify_rows(updates)
        step, scalars = late_steps.advance_by_leaf(of_step, state.step, updates)
        decay = weight_decay_at("weight_decay", wd, late_steps.global_count(state.step))
        factors = extra.get("decay_factors")
        scalars["weight_decay"] = decay_of_leaves(exclude, decay, updates, factors)
        moments = partial(adam_moments, b1=b1, b2=b2)
        updates, mu, nu = _update(moments, updates, (state.mu, state.nu), params, **scalars)
        return updates, ScaleByAdamState(step, mu, nu)

    return core.Unchecked(init, update, decays=True)


def _update(
    moments: Callable[..., tuple[jax.Array, ...]],
    updates: Updates,
    old: tuple[PyTree, PyTree],
    params: Params | None,
    *,
    inverse: PyTree,
    scale: PyTree,
    **scalars: PyTree,
) -> tuple[PyTree, ...]:
    """Return the updates q·r of all leaves and their new moments, by one pass for the moments, one
    for the ratios q of all tensors, and then the direction.

    Args:
      moments: (g, m, v) -> (g, m, v) with the new moments.
      updates: gradients, dense.
      old: the moments before, m and v.
      params: p.
      inverse: 1/scale.
      scale: see `lamb_direction`; a number, or one for each leaf, as all scalars are.
      **scalars: eps and weight_decay of `lamb_direction`.
    """

    def advance(m: PyTree, v: PyTree, q: PyTree, g: Updates, p: Params) -> tuple[PyTree, ...]:
        """Return the new moments, and q unchanged, in pass 1."""
        return *leafwise.apply(moments, g, m, v)[1:], q

    def ratios(m: PyTree, v: PyTree, q: PyTree, g: Updates, p: Params) -> tuple[PyTree, ...]:
        """Return the moments unchanged, and q of each tensor from the norms of p and r, in pass
        2."""
        own = {k: tensors.combine(jnp.multiply, q, x) for k, x in scalars.items()}
        r_norms = tensors.tensor_norms(m, v, p, of=lamb_direction, scale=scale, **own)
        q = tensors.combine(scaling.trust_ratio, tensors.tensor_norms(p), r_norms, coeff=inverse)
        return m, v, q

    # In one program XLA would store r between its two uses, hence two passes. eps and wd are
    # multiplied by q, which is 1 at first, to give each leaf a separate scalar; XLA would broadcast
    # a shared one to an array.
    ones = tensors.combine(jnp.ones_like, tensors.tensor_norms(params))
    mu, nu, q = in_place.run_in_passes([advance, ratios], (*old, ones), updates, params)
    factor = tensors.combine(lambda q, scale: q * scale, q, scale=scale)
    return leafwise.apply(
        _scale_direction, updates, mu, nu, params=params, factor=factor, scale=scale, **scalars
    )


def _scale_direction(
    g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, *, factor: Scalar, **scalars: Scalar
) -> tuple[jax.Array, ...]:
    """Return (factor·r/scale, m, v) with r/scale by `lamb_direction`, m and v unchanged and without
    a use of g, as a rule for `leafwise.apply`."""
    return numerics.scalar(factor, m) * lamb_direction(m, v, p, **scalars), m, v
