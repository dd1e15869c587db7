"""Transforms that keep moments of the gradient.

Each rule is a function of arrays in the symbols of its source (g gradient, m and v moments); the
transform below it maps the rule over a tree. Accumulators are float32 or wider, whatever the dtype
of the leaf; the state sizes given are for float32, in bytes per parameter.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, numerics
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import Params
from optfn.mesh.state.encoded import declare_encoded
from optfn.transforms.stored import check_moment_dtype, declare_codes, quantize_moments


@traits(link="momentum")
class ScaleByMomentumState(NamedTuple):
    """State of `scale_by_momentum`: 4 bytes per parameter."""

    velocity: Params


@traits(link="pass")
class WithoutMomentumState(ScaleByMomentumState):
    """State of `scale_by_momentum(0)`: a masked leaf."""


@traits(link="momentum")
class ScaleByNarrowMomentumState(NamedTuple):
    """State of `scale_by_momentum` in bfloat16: 2 bytes per parameter, and the step."""

    step: jax.Array
    velocity: Params


@traits(link="momentum", spans_buffers=True)
@declare_encoded(declare_codes("velocity", signed=True))
class ScaleByInt8MomentumState(NamedTuple):
    """State of `scale_by_momentum` in int8: 1.00 to 1.02 bytes per parameter, and the step."""

    step: jax.Array
    velocity: Params
    velocity_scale: Params


_MOMENTUM_STATES = {"bfloat16": ScaleByNarrowMomentumState, "int8": ScaleByInt8MomentumState}


def momentum_rule(
    g: jax.Array, v: jax.Array, *, momentum: Number, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (update, v) with v = μv + g and the update v, or g + μv with nesterov."""
    v = numerics.scalar(momentum, g) * v + g
    return momentum_direction(g, v, momentum=momentum, nesterov=nesterov), v


def momentum_direction(
    g: jax.Array, v: jax.Array, *, momentum: Number, nesterov: bool
) -> jax.Array:
    """Return g + μv with nesterov, else v, where v is the new velocity."""
    return g + numerics.scalar(momentum, g) * v if nesterov else v


def velocity_rule(momentum: Scalar, nesterov: bool, moment_dtype: str | None) -> core.Unchecked:
    """Return the unchecked rule of `scale_by_momentum`, which keeps a velocity even if μ is 0, in
    float32 or, stochastically rounded, in `moment_dtype`."""
    leaf_rule = partial(momentum_rule, momentum=momentum, nesterov=nesterov)
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is None:
        return core.accumulating(leaf_rule, ScaleByMomentumState)
    return quantize_moments(
        dtype,
        _MOMENTUM_STATES,
        lambda g, v: leaf_rule(g, v)[1:],
        partial(momentum_direction, momentum=momentum, nesterov=nesterov),
        signed=(True,),
    )


@core.transform(complex_leaves=True)
def scale_by_momentum(
    momentum: Number, *, nesterov: bool = False, moment_dtype: str | None = None
) -> core.Unchecked:
    """Replace the gradient by a velocity that accumulates the gradients, or by g + μv with
    `nesterov`, or return it unchanged if `momentum` is the number 0.

        v = μv + g;  u = v, or g + μv with nesterov

    There is no dampening. If the learning rate is part of the velocity (LARS, RMSProp), put this
    transform after `scale_by_learning_rate`.

    Args:
      momentum: μ, in [0, 1]; with 1 the velocity is the sum of all gradients.
      nesterov: whether to use Nesterov's momentum.
      moment_dtype: "bfloat16" or "int8" stores v in 16 or 8 bits, stochastically rounded, as
        `scale_by_quantized_adam` does; None is float32.

    State: velocity, 4 bytes per parameter; in bfloat16 2, in int8 1.00 to 1.02, with its scales;
    in both also the step. None for a Python or NumPy 0: the update is then the gradient. Real
    leaves, and without `moment_dtype` complex ones.

    Source: Sutskever et al. 2013, "On the importance of initialization and momentum"; fluid's
    MomentumOptimizer.
    """
    mu = checks.number("momentum", momentum, checks.UNIT)
    nesterov = checks.flag("nesterov", nesterov)
    check_moment_dtype("moment_dtype", moment_dtype)
    # Only of a known number: a traced μ may become 0 without a change of the state.
    if isinstance(mu, float) and mu == 0:
        return core.stateless(
            lambda updates, params: updates, WithoutMomentumState(optax.MaskedNode())
        )
    return velocity_rule(mu, nesterov, moment_dtype)


@traits(link="moments")
class ScaleByAdagradState(NamedTuple):
    """State of `scale_by_adagrad`: 4 bytes per parameter."""

    accumulator: Params


def adagrad_rule(g: jax.Array, m: jax.Array, *, eps: Scalar) -> tuple[jax.Array, jax.Array]:
    """Return (g/(√m + eps), m) with m = m + |g|², where the quotient is g if its divisor is 0."""
    m = m + numerics.abs_squared(g)
    # Where all gradients so far were 0, the direction is 0 and not NaN.
    divisor = numerics.sqrt(m) + numerics.scalar(eps, g)
    return g / jnp.where(divisor == 0, 1, divisor), m


@core.transform(complex_leaves=True)
def scale_by_adagrad(
    *, eps: Number = 1e-6, initial_accumulator_value: Number = 0.0
) -> core.Unchecked:
    """Divide each element of the gradient by eps plus the root of the sum of all its squares so
    far, and return 0 where all of them were 0.

        m = m + |g|²;  u = g/(√m + eps)

    Args:
      eps: ≥ 0, outside the root; with 0, u = 0 where all gradients so far are 0, as in optax.
      initial_accumulator_value: m before the first step, ≥ 0.

    State: accumulator, 4 bytes per parameter, real. Real and complex leaves.

    Source: Duchi et al. 2011, "Adaptive subgradient methods", eq. 1; fluid's AdagradOptimizer.
    """
    eps = checks.nonnegative("eps", eps)
    start = checks.nonnegative("initial_accumulator_value", initial_accumulator_value)

    leaf_rule = partial(adagrad_rule, eps=eps)
    return core.accumulating(
        leaf_rule, ScaleByAdagradState, fill=start, rows="touched", real=("accumulator",)
    )


@traits(link="moments")
class ScaleByDecayedAdagradState(NamedTuple):
    """State of `scale_by_decayed_adagrad`: 4 bytes per parameter."""

    accumulator: Params


def decayed_adagrad_rule(
    g: jax.Array, m: jax.Array, *, decay: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return (g/(√m + eps), m) with m = d·m + (1 − d)|g|², where 0/0 is NaN."""
    m = numerics.moving_average(m, numerics.abs_squared(g), decay)
    return g / (numerics.sqrt(m) + numerics.scalar(eps, g)), m


@core.transform(complex_leaves=True)
def scale_by_decayed_adagrad(*, decay: Number = 0.95, eps: Number = 1e-6) -> core.Unchecked:
    """Divide each element of the gradient by eps plus the root of the moving average of its
    squares, where 0/0 is NaN.

        m = d·m + (1 − d)|g|²;  u = g/(√m + eps)

    Args:
      decay: d, in [0, 1).
      eps: ≥ 0, outside the root (`scale_by_rms` has it inside); with 0, 0/0 is NaN.

    State: accumulator, 4 bytes per parameter, real. Real and complex leaves.

    Source: fluid's DecayedAdagradOptimizer.
    """
    decay = checks.decay("decay", decay)
    eps = checks.nonnegative("eps", eps)

    leaf_rule = partial(decayed_adagrad_rule, decay=decay, eps=eps)
    return core.accumulating(leaf_rule, ScaleByDecayedAdagradState, real=("accumulator",))


@traits(link="moments")
class ScaleByAdadeltaState(NamedTuple):
    """State of `scale_by_adadelta`: 8 bytes per parameter."""

    squared_gradient: Params
    squared_update: Params


def adadelta_rule(
    g: jax.Array, a: jax.Array, u: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (Δ, a', u') with Δ = √((u + eps)/(a' + eps))·g, where a' and u' are the new moving
    averages of |g|² and |Δ|².

    See `scale_by_adadelta`. Δ is computed from u', by (u + eps)/(a' + eps) = (u' + ρ·eps)/(ρ(a' +
    eps) + (1 − ρ)|g|²): as nothing reads an old accumulator after its update, both change in place.
    """
    eps, rho = numerics.scalar(eps, g), numerics.scalar(rho, g)
    square = numerics.abs_squared(g)
    a = numerics.moving_average(a, square, rho)
    share = jnp.where(jnp.isinf(square), 0, square / (a + eps))  # then a' is infinite too
    u = numerics.moving_average(u, (u + eps) * share, rho)
    # With ρ = 0 and g = 0 it would be 0, and the direction NaN.
    below = jnp.maximum(rho * (a + eps) + (1 - rho) * square, jnp.finfo(a.dtype).tiny)
    return jnp.sqrt((u + rho * eps) / below) * g, a, u


@core.transform(complex_leaves=True)
def scale_by_adadelta(*, rho: Number = 0.95, eps: Number = 1e-6) -> core.Unchecked:
    """Scale each element of the gradient by the root mean square of its past updates, divided by
    the root mean square of its gradients so far, with eps added to both squares.

        a = ρa + (1 − ρ)|g|²
        Δ = √((u + eps)/(a + eps))·g
        u = ρu + (1 − ρ)|Δ|²

    Args:
      rho: ρ, in [0, 1).
      eps: > 0; with 0 no parameter would ever move, since u starts at 0.

    State: squared_gradient (a) and squared_update (u), 8 bytes per parameter, both real. Real and
    complex leaves.

    Source: Zeiler 2012, arXiv 1212.5701, algorithm 1; fluid's AdadeltaOptimizer. (Paddle 1.8.5
    reads u after writing it and leaves out the learning rate; neither is repeated here.)
    """
    rho = checks.decay("rho", rho)
    eps = checks.positive("eps", eps)

    leaf_rule = partial(adadelta_rule, rho=rho, eps=eps)
    return core.accumulating(leaf_rule, ScaleByAdadeltaState, real=ScaleByAdadeltaState._fields)


@traits(link="moments")
class ScaleByRmsState(NamedTuple):
    """State of `scale_by_rms`: 4 bytes per parameter."""

    mean_square: Params


@traits(link="moments")
class ScaleByCenteredRmsState(NamedTuple):
    """State of `scale_by_rms(centered=True)`: 8 bytes per parameter."""

    mean_square: Params
    mean: Params


@traits(link="moments")
class ScaleByNarrowRmsState(NamedTuple):
    """State of `scale_by_rms` in bfloat16: 2 bytes per parameter, and the step."""

    step: jax.Array
    mean_square: Params


@traits(link="moments", spans_buffers=True)
@declare_encoded(declare_codes("mean_square", signed=False))
class ScaleByInt8RmsState(NamedTuple):
    """State of `scale_by_rms` in int8: 1.00 to 1.02 bytes per parameter, and the step."""

    step: jax.Array
    mean_square: Params
    mean_square_scale: Params


_RMS_STATES = {"bfloat16": ScaleByNarrowRmsState, "int8": ScaleByInt8RmsState}


def rms_rule(
    g: jax.Array, r: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return (g/√(r + eps), r) with r = ρr + (1 − ρ)|g|²."""
    r = numerics.moving_average(r, numerics.abs_squared(g), rho)
    return rms_direction(g, r, eps=eps), r


def rms_direction(g: jax.Array, r: jax.Array, *, eps: Scalar) -> jax.Array:
    """Return g/√(r + eps), where r is the new mean of squares."""
    return g / jnp.sqrt(r + numerics.scalar(eps, g))


def centered_rms_rule(
    g: jax.Array, r: jax.Array, q: jax.Array, *, rho: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g/√(max(r − |q|², 0) + eps), r, q) with the new moving averages r of |g|² and q of g,
    where an infinite r is an infinite variance."""
    r = numerics.moving_average(r, numerics.abs_squared(g), rho)
    q = numerics.moving_average(q, g, rho)
    # The difference of nearly equal squares may be rounded below zero. Where r overflows, r − q²
    # would be NaN if q² does too; the variance then counts as infinite.
    variance = jnp.where(jnp.isinf(r), r, jnp.maximum(r - numerics.abs_squared(q), 0))
    return g / jnp.sqrt(variance + numerics.scalar(eps, g)), r, q


@core.transform(complex_leaves=True)
def scale_by_rms(
    *,
    rho: Number = 0.95,
    eps: Number = 1e-6,
    centered: bool = False,
    moment_dtype: str | None = None,
) -> core.Unchecked:
    """Divide each element of the gradient by the root of eps plus the moving average of its squares
    or, if `centered`, of its variance.

        r = ρr + (1 − ρ)|g|²;  u = g/√(r + eps)
        centered: q = ρq + (1 − ρ)g;  u = g/√(max(r − |q|², 0) + eps)

    Args:
      rho: ρ, in [0, 1).
      eps: ≥ 0, inside the root; with 0, 0/0 is NaN, as in optax.
      centered: whether to subtract the square of the mean.
      moment_dtype: "bfloat16" or "int8" stores r in 16 or 8 bits, stochastically rounded, as
        `scale_by_quantized_adam` does; None is float32. It cannot be combined with `centered`,
        whose difference of nearly equal numbers needs more bits.

    State: mean_square (r), real, 4 bytes per parameter; centered also mean (q), 8 in all. In
    bfloat16 2 bytes, in int8 1.00 to 1.02, and the step. Real leaves, and without `moment_dtype`
    complex ones.

    Raises:
      ValueError: `centered` with `moment_dtype`.

    Source: Hinton 2012, "Neural networks for machine learning", lecture 6e; Graves 2013, arXiv
    1308.0850, eq. 38–41 (centered); fluid's RMSPropOptimizer.
    """
    rho = checks.decay("rho", rho)
    eps = checks.nonnegative("eps", eps)
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if checks.flag("centered", centered):
        if dtype is not None:
            raise ValueError(f"centered=True needs float32 moments; got {moment_dtype=}")
        leaf_rule = partial(centered_rms_rule, rho=rho, eps=eps)
        return core.accumulating(leaf_rule, ScaleByCenteredRmsState, real=("mean_square",))
    plain_rule = partial(rms_rule, rho=rho, eps=eps)
    if dtype is None:
        return core.accumulating(plain_rule, ScaleByRmsState, real=("mean_square",))
    direction = partial(rms_direction, eps=eps)
    return quantize_moments(
        dtype, _RMS_STATES, lambda g, r: plain_rule(g, r)[1:], direction, signed=(False,)
    )
