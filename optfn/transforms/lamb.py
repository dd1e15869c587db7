"""LAMB's direction: Adam's with weight decay, scaled to the norm of each tensor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core
from optfn.checks import Number, Scalar
from optfn.leaves import leafwise, numerics, tree
from optfn.leaves.tree import Pattern
from optfn.leaves.types import OptState, Params, PyTree, Updates
from optfn.transforms.in_place import when
from optfn.transforms.moment import ScaleByAdamState, adam_factors, adam_moments
from optfn.transforms.regularization import decay_of_leaves
from optfn.transforms.scaling import trust_ratio


def lamb_direction(
    m: jax.Array,
    v: jax.Array,
    p: jax.Array,
    *,
    eps: Scalar,
    scale: Scalar,
    weight_decay: Scalar,
    one: Scalar = 1.0,
) -> jax.Array:
    """Return r/scale, where r = scale·m/(√v + eps) + wd·p."""
    eps = numerics.scalar(eps * one, v)
    return m / (jnp.sqrt(v) + eps) + numerics.scalar(weight_decay / scale * one, v) * p


@core.transform(needs_params=True)
def scale_by_lamb(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    *,
    weight_decay: Number = 0.01,
    bias_correction: bool = False,
    exclude: Pattern | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale Adam's direction, with weight decay, to the norm of each tensor.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)g²
        r = m/(√v + eps) + wd·p,  or m̂/(√v̂ + eps) + wd·p with bias_correction
        u = q·r,  q = ‖p‖/‖r‖  where both > 0, else 1

    It is the chain scale_by_adam → add_decayed_weights → scale_by_trust_ratio, with the same names
    in the state, without temporary memory: r is computed from the new moments twice, for its norm
    and for u, and kept neither time.

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0.
      weight_decay: wd, ≥ 0.
      bias_correction: whether to correct the bias of the moments.
      exclude: the leaves with wd = 0: a regular expression that matches their whole path, or a
        function path -> bool.

    State: step, and mu (m) and nu (v), 8 bytes per parameter. Needs params; real leaves.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2; fluid's LambOptimizer.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.positive("eps", eps)
    wd = checks.nonnegative("weight_decay", weight_decay)
    bias_correction = checks.flag("bias_correction", bias_correction)
    exclude = tree.check_pattern("exclude", exclude)

    def init(params: Params) -> ScaleByAdamState:
        moments = (leafwise.zeros_like(params) for _ in range(2))
        return ScaleByAdamState(core.first_step(), *moments)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del extra
        step, updates = core.next_step(state.step), leafwise.densify(updates)
        scale, root = adam_factors(b1, b2, step, False) if bias_correction else (1.0, 1.0)
        wds = decay_of_leaves(exclude, wd, updates)
        scale = scale / root
        scalars: dict[str, Any] = {"scale": scale, "eps": eps / root, "weight_decay": wds}

        def moments(m: PyTree, v: PyTree, q: PyTree, g: Updates, p: Params) -> tuple[PyTree, ...]:
            return *leafwise.apply(adam_moments, g, m, v, b1=b1, b2=b2)[1:], q

        def ratios(m: PyTree, v: PyTree, q: PyTree, g: Updates, p: Params) -> tuple[PyTree, ...]:
            r_norms = leafwise.norms(m, v, p, of=lamb_direction, one=q, **scalars)
            return m, v, leafwise.combine(trust_ratio, leafwise.norms(p), r_norms, coeff=1 / scale)

        # The condition is always true. Computed in one program, r would be kept for its second use.
        # The ones are scalars that XLA does not know: eps and wd are then an operand of its own
        # for each leaf, and not an array of the leaf's shape that equal leaves share.
        ones = leafwise.combine(jnp.ones_like, leafwise.norms(params))
        mu, nu, q = when(step > 0, [moments, ratios], (state.mu, state.nu, ones), updates, params)
        factors = leafwise.combine(lambda q: q * scale, q)
        updates = leafwise.apply(
            _scaled_direction, updates, mu, nu, params=params, factor=factors, **scalars
        )[0]
        return updates, ScaleByAdamState(step, mu, nu)

    return core.rule(init, update)


def _scaled_direction(
    g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, *, factor: Scalar, **scalars: Scalar
) -> tuple[jax.Array, ...]:
    return numerics.scalar(factor, m) * lamb_direction(m, v, p, **scalars), m, v
