"""Transforms that set the length of the step: learning rate, trust ratios, and FTRL's own step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core, numerics
from optfn.checks import Number, Schedule
from optfn.leaves import leafwise, tree
from optfn.leaves.tree import Pattern
from optfn.transforms import learning_rate as rates
from optfn.transforms.regularization import without


class ScaleByLearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`: the step and the rate, 8 bytes."""

    rate: rates.LearningRateState


ScaleByLearningRateState.passes_rows = True  # type: ignore[attr-defined]


def scale_by_learning_rate(
    learning_rate: Number | Schedule,
) -> optax.GradientTransformationExtraArgs:
    """Turn an ascent direction into a step: u = −lr·u.

    Args:
      learning_rate: lr ≥ 0: a Python or NumPy number, which the state owns and
        `set_learning_rate` changes; or a 0-d array or a schedule step -> lr, which drive it from
        outside. A schedule is given the 0-based step, int32.

    `update` takes `rate_factors`, a factor of the rate for each leaf, from an optimizer with
    `param_attrs`.

    State: the step and the rate last used (after init, that of step 0), float32. Real and complex
    leaves.
    """
    lr = rates.check(learning_rate)

    def init(params: Any) -> ScaleByLearningRateState:
        del params
        return ScaleByLearningRateState(rates.init(lr))

    def rule(u: jax.Array, *, rate: Any, factor: Any) -> jax.Array:
        return -numerics.scalar(rate * factor, u) * u

    def update(
        updates: Any, state: Any, params: Any, *, rate_factors: Any = 1.0, **extra: Any
    ) -> tuple[Any, Any]:
        del params, extra
        rate, new = rates.advance(lr, state.rate)
        updates = leafwise.apply(rule, updates, linear=True, rate=rate, factor=rate_factors)
        return updates, ScaleByLearningRateState(new)

    return core.transform("scale_by_learning_rate", init, update, complex_leaves=True)


def trust_ratio(
    p_norm: jax.Array,
    u_norm: jax.Array,
    *,
    coeff: Any = 1.0,
    weight_decay: Any = 0.0,
    eps: Any = 0.0,
) -> jax.Array:
    """Return coeff·‖p‖/(‖u‖ + wd·‖p‖ + eps) where ‖p‖ > 0 and ‖u‖ > 0, else 1.

    Also 1 where ‖p‖² is beyond float32: ∞/∞ would make a NaN of parameters that are finite.
    """
    valid = (p_norm > 0) & (u_norm > 0) & (p_norm < jnp.inf)
    denominator = jnp.where(valid, u_norm + weight_decay * p_norm + eps, 1)
    return jnp.where(valid, coeff * p_norm / denominator, 1)


def scale_by_trust_ratio() -> optax.GradientTransformationExtraArgs:
    """Give each tensor a step as long as its parameters: u = q·u, q = ‖p‖/‖u‖.

    q = 1 where either norm is 0.

    No state. Needs params; real leaves.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2 (with φ the identity).
    """

    def rule(u: jax.Array, p: jax.Array) -> jax.Array:
        return trust_ratio(numerics.norm(p), numerics.norm(u)) * u

    return core.stateless(
        "scale_by_trust_ratio",
        lambda updates, params: leafwise.apply(rule, updates, params=params, whole=True),
        needs_params=True,
    )


def lars_rule(
    g: jax.Array, p: jax.Array, *, lars_coeff: Any, weight_decay: Any, eps: Any
) -> jax.Array:
    """Return L·(g + wd·p) with L = coeff·‖p‖/(‖g‖ + wd·‖p‖ + eps), 1 where ‖p‖ or ‖g‖ is 0."""
    coeff, wd, eps = (numerics.scalar(h, g) for h in (lars_coeff, weight_decay, eps))
    ratio = trust_ratio(numerics.norm(p), numerics.norm(g), coeff=coeff, weight_decay=wd, eps=eps)
    return ratio * (g + wd * p)


def scale_by_lars(
    lars_coeff: Number = 1e-3,
    lars_weight_decay: Number = 5e-4,
    eps: Number = 0.0,
    *,
    exclude: Pattern | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adapt the rate of each tensor to its norms: u = L·(g + wd·p).

        L = coeff·‖p‖/(‖g‖ + wd·‖p‖ + eps)     where ‖p‖ > 0 and ‖g‖ > 0, else 1

    The ratio applies with wd = 0 as well, also to excluded leaves (Paddle 2 leaves it out there).

    Args:
      lars_coeff: coeff, > 0.
      lars_weight_decay: wd, ≥ 0.
      eps: ≥ 0.
      exclude: the leaves with wd = 0: a regular expression that matches their whole path, or a
        function path -> bool.

    No state. Needs params; real leaves.

    Source: You et al. 2017, arXiv 1708.03888, algorithm 1; fluid's LarsMomentumOptimizer.
    """
    coeff = checks.number("lars_coeff", lars_coeff, low=0.0, low_open=True)
    wd = checks.nonnegative("lars_weight_decay", lars_weight_decay)
    eps = checks.nonnegative("eps", eps)
    exclude = tree.check_pattern("exclude", exclude)

    def update(updates: Any, params: Any) -> Any:
        return leafwise.apply(
            lars_rule,
            updates,
            params=params,
            whole=True,
            lars_coeff=coeff,
            weight_decay=without(exclude, wd, updates),
            eps=eps,
        )

    return core.stateless("scale_by_lars", update, needs_params=True)


class FtrlProximalState(NamedTuple):
    """State of `ftrl_proximal`: 8 bytes per parameter, the step and the rate."""

    rate: rates.LearningRateState
    accumulator: Any
    linear: Any


def ftrl_accumulate(
    g: jax.Array,
    n: jax.Array,
    z: jax.Array,
    p: jax.Array,
    *,
    rate: Any,
    factor: Any,
    lr_power: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g, n', z') of one FTRL-Proximal step; see `ftrl_proximal`."""
    lr = numerics.scalar(rate * factor, g)
    still = lr == 0
    # A finite gradient whose square is not: σ would be infinite.
    seen = jnp.where(jnp.isfinite(g) & jnp.isinf(n + jnp.square(g)), 0, g)
    new_n = n + jnp.square(seen)
    root, new_root = numerics.power(n, -lr_power), numerics.power(new_n, -lr_power)
    sigma = (new_root - root) / jnp.where(still, 1, lr)
    return g, jnp.where(still, n, new_n), jnp.where(still, z, z + seen - sigma * p)


def ftrl_minimiser(
    n: jax.Array,
    z: jax.Array,
    p: jax.Array,
    *,
    rate: Any,
    factor: Any,
    l1: Any,
    l2: Any,
    lr_power: Any,
) -> jax.Array:
    """Return p' − p for the minimiser p' that belongs to n and z; 0 where the rate is 0."""
    lr = numerics.scalar(rate * factor, z)
    l1, l2 = numerics.scalar(l1, z) + 1e-10, numerics.scalar(l2, z) + 1e-10
    still = lr == 0
    root = numerics.power(n, -lr_power) / jnp.where(still, 1, lr)
    new_p = (l1 * jnp.sign(z) - z) / (root + 2 * l2)
    new_p = jnp.where(jnp.abs(z) <= l1, 0, new_p)  # a NaN is not ≤, and so is not hidden
    return jnp.where(still, 0, new_p - p)


def ftrl_proximal(
    learning_rate: Number | Schedule,
    *,
    l1: Number = 0.0,
    l2: Number = 0.0,
    lr_power: Number = -0.5,
) -> optax.GradientTransformationExtraArgs:
    """Step to the minimiser of the regularized sum of all gradients so far.

        n' = n + g²
        σ = (n'^(−k) − n^(−k))/lr
        z = z + g − σ·p
        p' = (l1·sign(z) − z)/(n'^(−k)/lr + 2·l2) where |z| > l1, else 0
        u = p' − p

    The rate stands inside the recursion, so no `scale_by_learning_rate` follows. Fluid adds 1e-10
    to l1 and l2, and so does this. Where lr = 0, p, n and z stay. A gradient whose square is beyond
    float32 counts as 0. An element whose gradient has always been 0 becomes 0.

    p' follows from n' and z' alone. They change in place, in a pass of their own.

    Args:
      learning_rate: lr ≥ 0, as in `scale_by_learning_rate`.
      l1: ≥ 0; makes parameters exactly zero.
      l2: ≥ 0.
      lr_power: k, ≤ 0; −½ divides by the root of n.

    State: accumulator (n) and linear (z), 8 bytes per parameter, and the rate. Needs params; real
    leaves.

    Source: McMahan et al. 2013, "Ad click prediction", algorithm 1; fluid's FtrlOptimizer. Paddle
    1.8.5 hands l1 over as l2 in Python; that is not repeated here.
    """
    lr = rates.check(learning_rate)
    l1, l2 = checks.nonnegative("l1", l1), checks.nonnegative("l2", l2)
    lr_power = checks.number("lr_power", lr_power, high=0.0)

    def init(params: Any) -> FtrlProximalState:
        return FtrlProximalState(
            rates.init(lr), leafwise.zeros_like(params), leafwise.zeros_like(params)
        )

    def update(
        updates: Any, state: Any, params: Any, *, rate_factors: Any = 1.0, **extra: Any
    ) -> tuple[Any, Any]:
        del extra
        rate, new = rates.advance(lr, state.rate)
        own = {"rate": rate, "factor": rate_factors, "lr_power": lr_power}
        updates = leafwise.densify(updates)

        def accumulate(n: Any, z: Any) -> Any:
            return leafwise.apply(ftrl_accumulate, updates, n, z, params=params, **own)[1:]

        n, z = core.when(new.step > 0, accumulate, state.accumulator, state.linear)

        def step(g: jax.Array, n: jax.Array, z: jax.Array, p: jax.Array, **scalars: Any) -> Any:
            return ftrl_minimiser(n, z, p, **scalars), n, z

        updates = leafwise.apply(step, updates, n, z, params=params, l1=l1, l2=l2, **own)[0]
        return updates, FtrlProximalState(new, n, z)

    return core.transform("ftrl_proximal", init, update, needs_params=True)
