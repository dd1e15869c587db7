"""Adam, and the choice of the link with its moments, which `adamw` and `muon` share."""

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.optimizers.assembly import optimizer
from optfn.transforms.adam import scale_by_adam
from optfn.transforms.catch_up_adam import scale_by_catch_up_adam
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.quantized_adam import scale_by_quantized_adam
from optfn.transforms.stored import check_moment_dtype
from optfn.wrappers.attributes import ParamAttrs


def choose_adam(
    b1: Number, b2: Number, eps: Number, eps_hat: bool, moment_dtype: str | None, lazy: bool | str
) -> core.Unchecked:
    """Return Adam's link, which is `scale_by_adam` if `moment_dtype` is None and `lazy` is a bool,
    else the exact lazy or the quantized one.

    Raises:
      ValueError: `lazy` is set together with `moment_dtype`, or another value.
    """
    if moment_dtype is None and isinstance(lazy, bool):
        return scale_by_adam.unchecked(b1, b2, eps, eps_hat=eps_hat, lazy=lazy)
    if not (isinstance(lazy, bool) or (isinstance(lazy, str) and lazy == "exact")):
        raise ValueError(f'lazy must be False, True or "exact"; got {lazy!r}')
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is None:
        return scale_by_catch_up_adam.unchecked(b1, b2, eps, eps_hat=eps_hat)
    if lazy:
        raise ValueError(f"lazy={lazy!r} needs float32 moments; got {moment_dtype=}")
    return scale_by_quantized_adam.unchecked(b1, b2, eps, eps_hat=eps_hat, dtype=dtype)


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
) -> list[core.Unchecked]:
    """Return the Adam optimizer, which divides the mean of gradients by the root of the mean of
    their squares, in all rows of a table unless `lazy`.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        p −= lr·√(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps)  with eps_hat
        p −= lr·m̂/(√v̂ + eps)  otherwise; m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)

    The default follows fluid's page; pass eps_hat=False for the steps of optax, torch and `adamw`.
    With eps_hat, eps acts as eps/√(1 − β₂ᵗ) would in the second form: in the first step as 32·eps
    if β₂ is 0.999.

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

    State: m and v, 8 bytes per parameter; in bfloat16 4, in int8 2.00 to 2.03. Real leaves, and
    complex ones except with lazy="exact" or `moment_dtype`.

    Source: Kingma & Ba 2015, arXiv 1412.6980; fluid's AdamOptimizer.
    """
    return [
        choose_adam(b1, b2, eps, eps_hat, moment_dtype, lazy),
        scale_by_learning_rate.unchecked(learning_rate),
    ]
