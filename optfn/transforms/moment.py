"""Transforms that keep moments of the gradient.

Each rule is a function of arrays in the symbols of its source (g gradient, m and v moments); the
transform below it maps the rule over a tree. Accumulators are float32 or wider, whatever the dtype
of the leaf; the state sizes given are for float32, in bytes per parameter.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core
from optfn.checks import Number, Scalar
from optfn.leaves import leafwise, numerics
from optfn.leaves.types import OptState, Params, Updates, declares


class ScaleByMomentumState(NamedTuple):
    """State of `scale_by_momentum`: 4 bytes per parameter."""

    velocity: Params


@declares(retired=("velocity",))
class WithoutMomentumState(ScaleByMomentumState):
    """State of `scale_by_momentum(0)`: a masked leaf."""


def momentum_rule(
    g: jax.Array, v: jax.Array, *, momentum: Number, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (v or g + μv, v) with v = μv + g."""
    mu = numerics.scalar(momentum, g)
    v = mu * v + g
    return (g + mu * v if nesterov else v), v


@core.transform(complex_leaves=True)
def scale_by_momentum(
    momentum: Number, *, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Accumulate a velocity: v = μv + g; u = v, or g + μv with nesterov.

    There is no dampening. Where the learning rate belongs inside the velocity (LARS, RMSProp), this
    transform follows `scale_by_learning_rate`.

    Args:
      momentum: μ, in [0, 1).
      nesterov: whether to use Nesterov's momentum.

    State: velocity, 4 bytes per parameter; none for a Python or NumPy 0, with which the update is
    the gradient. Real and complex leaves.

    Source: Sutskever et al. 2013, "On the importance of initialization and momentum"; fluid's
    MomentumOptimizer.
    """
    mu = checks.decay("momentum", momentum)
    nesterov = checks.flag("nesterov", nesterov)
    if isinstance(mu, float) and mu == 0:
        return core.stateless(
            lambda updates, params: updates, WithoutMomentumState(optax.MaskedNode())
        )
    leaf_rule = partial(momentum_rule, momentum=mu, nesterov=nesterov)
    return core.accumulating(leaf_rule, ScaleByMomentumState)


class ScaleByAdagradState(NamedTuple):
    """State of `scale_by_adagrad`: 4 bytes per parameter."""

    accumulator: Params


def adagrad_rule(g: jax.Array, m: jax.Array, *, eps: Scalar) -> tuple[jax.Array, jax.Array]:
    """Return (g/(√m + eps), m) with m = m + g²."""
    m = m + jnp.square(g)
    return g / (jnp.sqrt(m) + numerics.scalar(eps, g)), m


@core.transform()
def scale_by_adagrad(
    *, eps: Number = 1e-6, initial_accumulator_value: Number = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Divide by the root of the sum of squares: m = m + g²; u = g/(√m + eps).

    Args:
      eps: > 0, outside the root.
      initial_accumulator_value: m before the first step, ≥ 0.

    State: accumulator, 4 bytes per parameter. Real leaves.

    Source: Duchi et al. 2011, "Adaptive subgradient methods", eq. 1; fluid's AdagradOptimizer.
    """
    eps = checks.positive("eps", eps)
    start = checks.nonnegative("initial_accumulator_value", initial_accumulator_value)

    leaf_rule = partial(adagrad_rule, eps=eps)
    return core.accumulating(leaf_rule, ScaleByAdagradState, fill=start, rows="touched")


class ScaleByDecayedAdagradState(NamedTuple):
    """State of `scale_by_decayed_adagrad`: 4 bytes per parameter."""

    accumulator: Params


def decayed_adagrad_rule(
    g: jax.Array, m: jax.Array, *, decay: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return (g/(√m + eps), m) with m = d·m + (1 − d)g²."""
    m = numerics.moving_average(m, jnp.square(g), decay)
    return g / (jnp.sqrt(m) + numerics.scalar(eps, g)), m


@core.transform()
def scale_by_decayed_adagrad(
    *, decay: Number = 0.95, eps: Number = 1e-6
) -> optax.GradientTransformationExtraArgs:
    """Divide by the root of the mean of squares: m = d·m + (1 − d)g²; u = g/(√m + eps).

    Args:
      decay: d, in [0, 1).
      eps: > 0, outside the root (`scale_by_rms` has it inside).

    State: accumulator, 4 bytes per parameter. Real leaves.

    Source: fluid's DecayedAdagradOptimizer.
    """
    decay = checks.decay("decay", decay)
    eps = checks.positive("eps", eps)

    leaf_rule = partial(decayed_adagrad_rule, decay=decay, eps=eps)
    return core.accumulating(leaf_rule, ScaleByDecayedAdagradState)


class ScaleByAdadeltaState(NamedTuple):
    """State of `scale_by_adadelta`: 8 bytes per parameter."""

    squared_gradient: Params
    squared_update: Params


def adadelta_rule(
    g: jax.Array, a: jax.Array, u: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (Δ, a', u') with Δ = √((u + eps)/(a' + eps))·g, see `scale_by_adadelta`.

    Δ is computed from u', by (u + eps)/(a' + eps) = (u' + ρ·eps)/(ρ(a' + eps) + (1 − ρ)g²): as
    nothing reads an old accumulator after its update, both change in place.
    """
    eps, rho = numerics.scalar(eps, g), numerics.scalar(rho, g)
    square = jnp.square(g)
    a = numerics.moving_average(a, square, rho)
    share = jnp.where(jnp.isinf(square), 0, square / (a + eps))  # then a' is infinite too
    u = numerics.moving_average(u, (u + eps) * share, rho)
    below = jnp.maximum(rho * (a + eps) + (1 - rho) * square, jnp.finfo(g.dtype).tiny)
    return jnp.sqrt((u + rho * eps) / below) * g, a, u


@core.transform()
def scale_by_adadelta(
    *, rho: Number = 0.95, eps: Number = 1e-6
) -> optax.GradientTransformationExtraArgs:
    """Rescale by past updates over past gradients.

        a = ρa + (1 − ρ)g²
        Δ = √((u + eps)/(a + eps))·g
        u = ρu + (1 − ρ)Δ²

    Args:
      rho: ρ, in [0, 1).
      eps: > 0.

    State: squared_gradient (a) and squared_update (u), 8 bytes per parameter. Real leaves.

    Source: Zeiler 2012, arXiv 1212.5701, algorithm 1; fluid's AdadeltaOptimizer. Paddle 1.8.5 reads
    u after writing it and leaves out the learning rate; neither is repeated here.
    """
    rho = checks.decay("rho", rho)
    eps = checks.positive("eps", eps)

    return core.accumulating(partial(adadelta_rule, rho=rho, eps=eps), ScaleByAdadeltaState)


class ScaleByRmsState(NamedTuple):
    """State of `scale_by_rms`: 4 bytes per parameter."""

    mean_square: Params


class ScaleByCenteredRmsState(NamedTuple):
    """State of `scale_by_rms(centered=True)`: 8 bytes per parameter."""

    mean_square: Params
    mean: Params


def rms_rule(
    g: jax.Array, r: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return (g/√(r + eps), r) with r = ρr + (1 − ρ)g²."""
    r = numerics.moving_average(r, jnp.square(g), rho)
    return g / jnp.sqrt(r + numerics.scalar(eps, g)), r


def centered_rms_rule(
    g: jax.Array, r: jax.Array, q: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g/√(max(r − q², 0) + eps), r, q) with q = ρq + (1 − ρ)g."""
    r = numerics.moving_average(r, jnp.square(g), rho)
    q = numerics.moving_average(q, g, rho)
    # The difference of nearly equal squares may be rounded below zero. Where r overflows, r − q²
    # would be NaN if q² does too; the variance then counts as infinite.
    variance = jnp.where(jnp.isinf(r), r, jnp.maximum(r - jnp.square(q), 0))
    return g / jnp.sqrt(variance + numerics.scalar(eps, g)), r, q


@core.transform()
def scale_by_rms(
    *, rho: Number = 0.95, eps: Number = 1e-6, centered: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Divide by the root of the mean of squares, or of the variance.

        r = ρr + (1 − ρ)g²;  u = g/√(r + eps)
        centered: q = ρq + (1 − ρ)g;  u = g/√(max(r − q², 0) + eps)

    Args:
      rho: ρ, in [0, 1).
      eps: > 0, inside the root.
      centered: whether to subtract the square of the mean.

    State: mean_square (r), 4 bytes per parameter; centered also mean (q), 8 in all. Real leaves.

    Source: Hinton 2012, "Neural networks for machine learning", lecture 6e; Graves 2013, arXiv
    1308.0850, eq. 38–41 (centered); fluid's RMSPropOptimizer.
    """
    rho = checks.decay("rho", rho)
    eps = checks.positive("eps", eps)
    if checks.flag("centered", centered):
        leaf_rule = partial(centered_rms_rule, rho=rho, eps=eps)
        return core.accumulating(leaf_rule, ScaleByCenteredRmsState)
    return core.accumulating(partial(rms_rule, rho=rho, eps=eps), ScaleByRmsState)


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`: 8 bytes per parameter, and the step."""

    step: jax.Array
    mu: Params
    nu: Params


def adam_moments(
    g: jax.Array, m: jax.Array, v: jax.Array, *, b1: Scalar, b2: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g, m, v) with m = β₁m + (1 − β₁)g, v = β₂v + (1 − β₂)|g|²."""
    m = numerics.moving_average(m, g, b1)
    return g, m, numerics.moving_average(v, numerics.abs_squared(g), b2)


def adam_rule(
    g: jax.Array,
    m: jax.Array,
    v: jax.Array,
    *,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    scale: Scalar,
    root: Scalar,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (scale·m/(root·√v + eps), m, v) with the m and v of `adam_moments`."""
    _, m, v = adam_moments(g, m, v, b1=b1, b2=b2)
    return adam_direction(m, v, eps=eps, scale=scale, root=root), m, v


def adam_direction(
    m: jax.Array, v: jax.Array, *, eps: Scalar, scale: Scalar, root: Scalar
) -> jax.Array:
    """Return scale·m/(root·√v + eps)."""
    denominator = numerics.scalar(root, v) * jnp.sqrt(v) + numerics.scalar(eps, v)
    return numerics.scalar(scale, v) * m / denominator


def adam_factors(
    b1: Scalar, b2: Scalar, step: jax.Array, eps_hat: bool
) -> tuple[jax.Array, Scalar]:
    """Return the factors of m and of √v: the bias corrections of step t, in either form."""
    scale = 1 / numerics.bias_correction(b1, step)
    root = jax.lax.rsqrt(numerics.bias_correction(b2, step))
    return (scale / root, 1.0) if eps_hat else (scale, root)


@core.transform(complex_leaves=True)
def scale_by_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    eps_hat: bool = True,
    bias_correction: bool = True,
    lazy: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Divide the mean of the gradient by the root of the mean of its square.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        eps_hat:      u = √(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps)
        otherwise:    u = m̂/(√v̂ + eps),  m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)
        uncorrected:  u = m/(√v + eps)

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0.
      eps_hat: which of the two forms; they differ in whether eps is added to √v or to √v̂.
      bias_correction: whether to correct the bias of the moments, which start at zero; LAMB does
        not.
      lazy: whether a row-sparse gradient changes only the moments of the rows that it touches; else
        it becomes dense, and the moments of all rows decay. All rows share one step count.

    State: step, and mu (m) and nu (v), 8 bytes per parameter; nu of a complex leaf is real.

    Source: Kingma & Ba 2015, arXiv 1412.6980. eps_hat is the form of §2, "efficiency", and of the
    fluid page; the other form is Algorithm 1, as in optax and torch.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.positive("eps", eps)
    eps_hat = checks.flag("eps_hat", eps_hat)
    bias_correction = checks.flag("bias_correction", bias_correction)
    lazy = checks.flag("lazy", lazy)

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            core.first_step(), leafwise.zeros_like(params), leafwise.zeros_like(params, real=True)
        )

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        step = core.next_step(state.step)
        scale, root = adam_factors(b1, b2, step, eps_hat) if bias_correction else (1.0, 1.0)
        updates, mu, nu = leafwise.apply(
            partial(adam_rule, b1=b1, b2=b2, eps=eps, scale=scale, root=root),
            updates,
            state.mu,
            state.nu,
            rows="touched" if lazy else "dense",
        )
        return updates, ScaleByAdamState(step, mu, nu)

    return core.rule(init, update)


class ScaleByAdamaxState(NamedTuple):
    """State of `scale_by_adamax`: 8 bytes per parameter, and the step."""

    step: jax.Array
    mu: Params
    infinity_norm: Params


def adamax_rule(
    g: jax.Array, m: jax.Array, u: jax.Array, *, b1: Scalar, b2: Scalar, eps: Scalar, scale: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (scale·m/u, m, u) with m = β₁m + (1 − β₁)g and u = max(|g|, β₂u + eps)."""
    m = numerics.moving_average(m, g, b1)
    u = jnp.maximum(jnp.abs(g), numerics.scalar(b2, g) * u + numerics.scalar(eps, g))
    return numerics.scalar(scale, g) * m / u, m, u


@core.transform()
def scale_by_adamax(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Divide the mean of the gradient by its decaying maximum.

        m = β₁m + (1 − β₁)g;  u = max(|g|, β₂u + eps);  direction = m/u/(1 − β₁ᵗ)

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0, added to the decayed maximum at every step.

    State: step, mu (m) and infinity_norm (u), 8 bytes per parameter. Real leaves.

    Source: Kingma & Ba 2015, arXiv 1412.6980, algorithm 2; eps as in fluid's AdamaxOptimizer.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.positive("eps", eps)

    def init(params: Params) -> ScaleByAdamaxState:
        return ScaleByAdamaxState(
            core.first_step(), leafwise.zeros_like(params), leafwise.zeros_like(params)
        )

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        step = core.next_step(state.step)
        scale = 1 / numerics.bias_correction(b1, step)
        updates, mu, infinity_norm = leafwise.apply(
            adamax_rule, updates, state.mu, state.infinity_norm, b1=b1, b2=b2, eps=eps, scale=scale
        )
        return updates, ScaleByAdamaxState(step, mu, infinity_norm)

    return core.rule(init, update)


class ScaleByAsgdState(NamedTuple):
    """State of `scale_by_asgd`: 4·batch_num bytes per parameter, and the step."""

    step: jax.Array
    gradients: Params


@core.transform()
def scale_by_asgd(batch_num: int = 1) -> optax.GradientTransformationExtraArgs:
    """Average the most recent gradients of the n batches of an epoch.

        i = (t − 1) mod n;  y_i = g;  d = ∑_j y_j;  u = d/min(t, n)

    d is summed anew at each step. Fluid updates it by d += g − y_i, which in float32 keeps the
    rounding error of the largest gradient for ever.

    Args:
      batch_num: n, ≥ 1, static; the batches must come in the same order in every epoch.

    State: step, and gradients (y), shape (n, *leaf), 4·n bytes per parameter. Real leaves.

    Source: Schmidt et al. 2017, arXiv 1309.2388, eq. 3 ("SAG"); Paddle's ASGD.
    """
    n = checks.count("batch_num", batch_num)

    def init(params: Params) -> ScaleByAsgdState:
        return ScaleByAsgdState(core.first_step(), leafwise.zeros_like(params, leading=(n,)))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        step = core.next_step(state.step)

        def average(g: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jax.lax.dynamic_update_index_in_dim(y, g.astype(y.dtype), state.step % n, 0)
            return jnp.sum(y, axis=0) / jnp.minimum(step, n).astype(g.dtype), y

        updates, gradients = leafwise.apply(
            average, updates, state.gradients, shapes=lambda shape: [(n, *shape)]
        )
        return updates, ScaleByAsgdState(step, gradients)

    return core.rule(init, update)
