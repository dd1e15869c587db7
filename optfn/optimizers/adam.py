"""The Adam family: adam, adamw, adamax, lamb."""

import optax

from optfn.checks import Number, Schedule
from optfn.core import chain
from optfn.leaves.tree import Pattern
from optfn.optimizers.assembly import dense_rows, optimizer
from optfn.transforms.adam import scale_by_adam, scale_by_adamax
from optfn.transforms.catch_up_adam import scale_by_catch_up_adam
from optfn.transforms.lamb import scale_by_lamb
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.quantized_adam import scale_by_quantized_adam
from optfn.transforms.regularization import add_decayed_weights
from optfn.transforms.scaling import scale_by_trust_ratio
from optfn.transforms.stored import check_moment_dtype
from optfn.wrappers.attributes import ParamAttrs


def scale_by_adam_in(
    b1: Number,
    b2: Number,
    eps: Number,
    eps_hat: bool,
    moment_dtype: str | None,
    lazy: bool | str,
) -> optax.GradientTransformationExtraArgs:
    """Return the transform of Adam's moments for these options of storage and laziness."""
    if not (isinstance(lazy, bool) or (isinstance(lazy, str) and lazy == "exact")):
        raise ValueError(f'lazy must be False, True or "exact"; got {lazy!r}')
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is not None:
        if lazy:
            raise ValueError(f"lazy={lazy!r} needs float32 moments; got {moment_dtype=}")
        return scale_by_quantized_adam(b1, b2, eps, eps_hat=eps_hat, dtype=dtype)
    if lazy == "exact":
        return scale_by_catch_up_adam(b1, b2, eps, eps_hat=eps_hat)
    return scale_by_adam(b1, b2, eps, eps_hat=eps_hat, lazy=bool(lazy))


@optimizer
def adam(
    learning_rate: Number | Schedule = 1e-3,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    lazy: bool | str = False,
    eps_hat: bool = True,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> optax.GradientTransformationExtraArgs:
    """Adam: divide the mean of gradients by the root of the mean of their squares.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        p −= lr·√(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps)  with eps_hat
        p −= lr·m̂/(√v̂ + eps)  otherwise; m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0, and > 0 with lazy="exact" or `moment_dtype`. With 0, an element whose gradient has
        always been 0 becomes NaN, as in optax.
      lazy: how the row-sparse gradient of an embedding table is applied. False: like the dense
        gradient, at the cost of the whole table. True: only the rows in the gradient change
        (lazy_mode in fluid). "exact": only these rows change, and they make up for the steps that
        they missed; see `scale_by_catch_up_adam`. For dense gradients all three are the same.
      eps_hat: where eps is added. True is the form of fluid's documentation and of §2 of Kingma &
        Ba; False is their Algorithm 1, as in optax, torch and Paddle 2.
      moment_dtype: "bfloat16" or "int8" stores the moments in 16 or 8 bits, stochastically rounded;
        see `scale_by_quantized_adam`. None is float32.

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.03. Real leaves, and
    complex ones except with lazy="exact" or `moment_dtype`.

    Source: Kingma & Ba 2015, arXiv 1412.6980; fluid's AdamOptimizer.
    """
    return chain(
        scale_by_adam_in(b1, b2, eps, eps_hat, moment_dtype, lazy),
        scale_by_learning_rate(learning_rate),
    )


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
) -> optax.GradientTransformationExtraArgs:
    """AdamW: Adam with decoupled weight decay.

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

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.03. Leaves as in `adam`.

    Source: Loshchilov & Hutter 2019, arXiv 1711.05101; Paddle's AdamW.
    """
    return chain(
        scale_by_adam_in(b1, b2, eps, eps_hat, moment_dtype, lazy),
        add_decayed_weights(weight_decay, exclude=exclude),
        scale_by_learning_rate(learning_rate),
    )


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
) -> optax.GradientTransformationExtraArgs:
    """Adamax: Adam with the infinity norm.

        m = β₁m + (1 − β₁)g;  u = max(|g|, β₂u + eps)
        p −= lr/(1 − β₁ᵗ)·m/u

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0. With 0, an element whose gradient has always been 0 becomes NaN, as in optax.
      moment_dtype: "bfloat16" or "int8" for m and u, as in `adam`.

    State: m and u, 8 bytes per parameter; in bfloat16 4, in int8 2.03. Real leaves, and without
    `moment_dtype` complex ones.

    Source: Kingma & Ba 2015, arXiv 1412.6980, algorithm 2; fluid's AdamaxOptimizer.
    """
    return chain(
        dense_rows("adamax"),
        scale_by_adamax(b1, b2, eps, moment_dtype=moment_dtype),
        scale_by_learning_rate(learning_rate),
    )


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
) -> optax.GradientTransformationExtraArgs:
    """LAMB: Adam's direction, scaled by the norm of each tensor, for large batches.

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

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.03. Real leaves, and without
    `moment_dtype` complex ones.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2; fluid's LambOptimizer.
    """
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is not None:
        return chain(
            dense_rows("lamb"),
            scale_by_quantized_adam(
                b1, b2, eps, eps_hat=False, bias_correction=bias_correction, dtype=dtype
            ),
            add_decayed_weights(weight_decay, exclude=exclude),
            scale_by_trust_ratio(),
            scale_by_learning_rate(learning_rate),
        )
    return chain(
        dense_rows("lamb"),
        scale_by_lamb(
            b1,
            b2,
            eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            exclude=exclude,
        ),
        scale_by_learning_rate(learning_rate),
    )
