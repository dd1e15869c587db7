"""The rest of the Adam family: adamw, adamax, lamb."""

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.leaves.patterns import Pattern
from optfn.optimizers.adam import choose_adam
from optfn.optimizers.assembly import dense_rows, optimizer
from optfn.transforms import quantized_adam, scaling, stored
from optfn.transforms.adamax import scale_by_adamax
from optfn.transforms.lamb import scale_by_lamb
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.regularization import add_decayed_weights
from optfn.wrappers.attributes import ParamAttrs


@optimizer
def adamw(
    learning_rate: Number | Schedule = 1e-3,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number | Schedule = 0.01,
    exclude: Pattern | None = None,
    lazy: bool | str = False,
    eps_hat: bool = False,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the AdamW optimizer, which multiplies parameters, except excluded ones, by 1 − lr·wd
    and then takes the step of `adam`.

        p *= 1 − lr·wd, then the step of `adam`

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate. The decay of one step
        is lr·wd.
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: as in `adam`.
      weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step.
      exclude: the leaves without decay, such as ".*/bias": a regular expression that matches their
        whole path, or a function path -> bool.
      lazy: as in `adam`. With True or "exact" only the rows in the gradient decay.
      eps_hat: where eps is added, see `adam`.
      moment_dtype: "bfloat16" or "int8", see `adam`.

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.00 to 2.03. Leaves as in `adam`.

    Source: Loshchilov & Hutter 2019, arXiv 1711.05101; Paddle's AdamW.
    """
    return [
        choose_adam(b1, b2, eps, eps_hat, moment_dtype, lazy),
        # Behind the moments, which must not scale the decay, and before the rate, which does.
        add_decayed_weights.unchecked(weight_decay, exclude=exclude),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def adamax(
    learning_rate: Number | Schedule = 1e-3,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the Adamax optimizer, which divides the mean of gradients by their decaying maximum,
    and makes row-sparse ones dense, with a warning.

        m = β₁m + (1 − β₁)g;  u = max(|g|, β₂u + eps)
        p −= lr/(1 − β₁ᵗ)·m/u

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0. With 0, an element whose gradient has always been 0 becomes NaN, as in optax.
      moment_dtype: "bfloat16" or "int8" for m and u, as in `adam`.

    State: m and u, 8 bytes per parameter; in bfloat16 4, in int8 2.00 to 2.03. Real leaves, and
    without `moment_dtype` complex ones.

    Source: Kingma & Ba 2015, arXiv 1412.6980, algorithm 2; fluid's AdamaxOptimizer.
    """
    return [
        # The maximum decays in all rows, also in rows without a gradient.
        dense_rows.unchecked("adamax"),
        scale_by_adamax.unchecked(b1, b2, eps, moment_dtype=moment_dtype),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def lamb(
    learning_rate: Number | Schedule = 1e-3,
    *,
    weight_decay: Number | Schedule = 0.01,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    bias_correction: bool = False,
    exclude: Pattern | None = None,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the LAMB optimizer for large batches, which scales Adam's direction with weight decay
    to the norm of each tensor, or by 1 where either norm is 0.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        r = m/(√v + eps) + wd·p,  or m̂/(√v̂ + eps) + wd·p with bias_correction
        q = ‖p‖/‖r‖  where both > 0, else 1
        p −= lr·q·r

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step.
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0. With 0, an element whose gradient has always been 0 becomes NaN, as in optax.
      bias_correction: whether to correct the bias of the moments, as in the paper and in Paddle 2,
        but not in fluid's documentation.
      exclude: the leaves without decay (wd = 0): a regular expression that matches their whole
        path, or a function path -> bool. The trust ratio q still applies to them.
      moment_dtype: "bfloat16" or "int8" for m and v, as in `adam`; eps must then be > 0. The chain
        is then scale_by_quantized_adam → add_decayed_weights → scale_by_trust_ratio.

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.00 to 2.03. Real leaves, and
    without `moment_dtype` complex ones.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2; fluid's LambOptimizer.
    """
    dtype = stored.check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is not None:
        return [
            dense_rows.unchecked("lamb"),
            quantized_adam.scale_by_quantized_adam.unchecked(
                b1, b2, eps, eps_hat=False, bias_correction=bias_correction, dtype=dtype
            ),
            add_decayed_weights.unchecked(weight_decay, exclude=exclude),
            scaling.scale_by_trust_ratio.unchecked(),
            scale_by_learning_rate.unchecked(learning_rate),
        ]
    return [
        dense_rows.unchecked("lamb"),
        scale_by_lamb.unchecked(
            b1, b2, eps, weight_decay=weight_decay, bias_correction=bias_correction, exclude=exclude
        ),
        scale_by_learning_rate.unchecked(learning_rate),
    ]
