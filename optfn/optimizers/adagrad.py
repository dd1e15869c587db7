"""Optimizers that divide by the root of squared gradients: adagrad, adadelta, rmsprop."""

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.optimizers.assembly import dense_rows, optimizer
from optfn.transforms import moment
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.wrappers.attributes import ParamAttrs


@optimizer
def adagrad(
    learning_rate: Number | Schedule,
    *,
    eps: Number = 1e-6,
    initial_accumulator_value: Number = 0.0,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the Adagrad optimizer, which divides the gradient by the root of the sum of its
    squares so far, and changes no element whose gradients were all 0.

        m = m + |g|²
        p −= lr·g/(√m + eps)

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      eps: ≥ 0. With 0, an element whose gradients so far are all 0 does not change.
      initial_accumulator_value: m before the first step, ≥ 0.

    State: m, 4 bytes per parameter. Real and complex leaves.

    Source: Duchi et al. 2011; fluid's AdagradOptimizer.
    """
    return [
        moment.scale_by_adagrad.unchecked(
            eps=eps, initial_accumulator_value=initial_accumulator_value
        ),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def decayed_adagrad(
    learning_rate: Number | Schedule,
    *,
    decay: Number = 0.95,
    eps: Number = 1e-6,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the decayed Adagrad optimizer, which divides the gradient by the root of the moving
    average of its squares.

        m = d·m + (1 − d)·|g|²
        p −= lr·g/(√m + eps)

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      decay: d, in [0, 1).
      eps: ≥ 0, outside the root. With 0, an element whose gradient has always been 0 becomes NaN.

    State: m, 4 bytes per parameter. Real and complex leaves.

    Source: fluid's DecayedAdagradOptimizer.
    """
    return [
        moment.scale_by_decayed_adagrad.unchecked(decay=decay, eps=eps),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def adadelta(
    learning_rate: Number | Schedule,
    *,
    rho: Number = 0.95,
    eps: Number = 1e-6,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the Adadelta optimizer, which scales the gradient by the ratio of past updates to past
    gradients, and makes row-sparse ones dense, with a warning.

        a = ρa + (1 − ρ)|g|²
        Δ = √((u + eps)/(a + eps))·g
        u = ρu + (1 − ρ)|Δ|²
        p −= lr·Δ

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate; 1 in the paper.
      rho: ρ, in [0, 1).
      eps: > 0.

    State: a and u, 8 bytes per parameter. Real and complex leaves.

    Source: Zeiler 2012, arXiv 1212.5701; fluid's AdadeltaOptimizer.
    """
    return [
        # Both means decay in all rows, also in rows without a gradient.
        dense_rows.unchecked("adadelta"),
        moment.scale_by_adadelta.unchecked(rho=rho, eps=eps),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def rmsprop(
    learning_rate: Number | Schedule,
    *,
    rho: Number = 0.95,
    eps: Number = 1e-6,
    momentum: Number = 0.0,
    centered: bool = False,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the RMSProp optimizer, which divides the gradient by the root of the moving average of
    its squares, or if `centered` of its variance, with momentum.

        r = ρr + (1 − ρ)|g|²;  centered: q = ρq + (1 − ρ)g
        v = μv + lr·g/√(r + eps),  centered: lr·g/√(max(r − |q|², 0) + eps)
        p −= v

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate. It is part of v, so a
        new rate acts on new gradients only.
      rho: ρ, in [0, 1).
      eps: ≥ 0, inside the root. With 0, an element whose gradient has always been 0 becomes NaN, as
        in optax.
      momentum: μ, in [0, 1].
      centered: whether to divide by the root of the variance instead of the mean square.
      moment_dtype: "bfloat16" or "int8" stores r and v in 16 or 8 bits, stochastically rounded;
        None is float32. It cannot be combined with `centered`.

    State: r, 4 bytes per parameter; 8 with momentum (v) or if centered (q), 12 with both. If μ is a
    Python or NumPy 0, there is no v. Each of r and v takes 2 bytes in bfloat16, 1.00 to 1.02 in
    int8. Real leaves, and without `moment_dtype` complex ones.

    Source: Hinton 2012; Graves 2013, arXiv 1308.0850; fluid's RMSPropOptimizer.
    """
    return [
        moment.scale_by_rms.unchecked(
            rho=rho, eps=eps, centered=centered, moment_dtype=moment_dtype
        ),
        # Before the momentum, as in fluid: the rate is part of the velocity.
        scale_by_learning_rate.unchecked(learning_rate),
        moment.scale_by_momentum.unchecked(momentum, moment_dtype=moment_dtype),
    ]
