"""Adam's moments: rules on arrays, and the transform that maps them over a tree.

Accumulators are float32 or wider, as in `optfn.transforms.moment`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.transforms.late_steps import Steps, advance_by_leaf


@traits(link="moments", counted="mu")
class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`: 8 bytes per parameter, and the step."""

    step: Steps
    mu: Params
    nu: Params


def adam_moments(
    g: jax.Array, m: jax.Array, v: jax.Array, *, b1: Scalar, b2: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g, m, v) with g unchanged, m = β₁m + (1 − β₁)g and v = β₂v + (1 − β₂)|g|²."""
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
    """Return scale·m/(root·√v + eps), which is NaN or ∞ where the denominator is 0."""
    denominator = numerics.scalar(root, v) * numerics.sqrt(v) + numerics.scalar(eps, v)
    return numerics.scalar(scale, v) * m / denominator


def adam_factors(
    b1: Scalar, b2: Scalar, step: jax.Array, eps_hat: bool
) -> tuple[jax.Array, Scalar]:
    """Return the (scale, root) of `adam_direction` that correct the bias of a step, where with
    `eps_hat` the root is 1, so that eps is added to the uncorrected √v."""
    # √(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps): with eps_hat both corrections move before the quotient.
    scale = 1 / numerics.bias_correction(b1, step)
    root = jax.lax.rsqrt(numerics.bias_correction(b2, step))
    return (scale / root, 1.0) if eps_hat else (scale, root)


def init_moments(state_type: Callable[..., OptState], params: Params) -> OptState:
    """Return the state of step 0 with two moments of zeros; the second is real for a complex
    leaf."""
    zeros = leafwise.zeros_like(params), leafwise.zeros_like(params, real=True)
    return state_type(core.first_step(), *zeros)


def make_moments_link(
    rule: Callable[..., Any],
    of_step: Callable[[jax.Array], dict[str, Scalar]],
    state_type: Callable[..., OptState],
    rows: str = "dense",
) -> core.Unchecked:
    """Return the unchecked link that maps `rule`, with the numbers of `of_step`, over gradients and
    two moments that start at 0, and counts its steps.

    Args:
      rule: (g, m, v, **numbers) -> (update, m, v), on arrays.
      of_step: from the number of steps to the numbers.
      state_type: makes the state, (step, m, v).
      rows: as in `leafwise.apply`.
    """

    def update(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
        step, numbers = advance_by_leaf(of_step, state.step, updates)
        updates, *moments = leafwise.apply(rule, updates, *state[1:], rows=rows, **numbers)
        return updates, state_type(step, *moments)

    return core.Unchecked(partial(init_moments, state_type), update)


@core.transform(complex_leaves=True)
def scale_by_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    eps_hat: bool = True,
    bias_correction: bool = True,
    lazy: bool = False,
) -> core.Unchecked:
    """Divide the moving average of the gradient, elementwise, by the root of the moving average of
    its square, with both biases corrected unless `bias_correction` is False.

        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)|g|²
        eps_hat:      u = √(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps)
        otherwise:    u = m̂/(√v̂ + eps),  m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)
        uncorrected:  u = m/(√v + eps)

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0; with 0, an element whose gradient has always been 0 becomes NaN, as in optax.
      eps_hat: whether eps is added to √v (True) or to √v̂ (False).
      bias_correction: whether to correct the bias of the moments, which start at zero; LAMB does
        not.
      lazy: whether a row-sparse gradient changes only the moments of the rows that it touches. If
        not, it becomes dense, and the moments of all rows decay. All rows share one step count.

    State: step, and mu (m) and nu (v), 8 bytes per parameter; nu of a complex leaf is real.

    Source: Kingma & Ba 2015, arXiv 1412.6980. eps_hat=True is the form of §2, "efficiency", and of
    fluid's documentation; eps_hat=False is Algorithm 1, as in optax and torch.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.nonnegative("eps", eps)
    eps_hat = checks.flag("eps_hat", eps_hat)
    bias_correction = checks.flag("bias_correction", bias_correction)
    lazy = checks.flag("lazy", lazy)

    def of_step(step: jax.Array) -> dict[str, Scalar]:
        corrected = adam_factors(b1, b2, step, eps_hat) if bias_correction else (1.0, 1.0)
        return dict(zip(("scale", "root"), corrected, strict=True))

    rule = partial(adam_rule, b1=b1, b2=b2, eps=eps)

    return make_moments_link(rule, of_step, ScaleByAdamState, rows="touched" if lazy else "dense")
