"""Adamax's moments, in float32, in 16 or in 8 bits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, numerics
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import Params
from optfn.mesh.state.encoded import declare_encoded
from optfn.transforms.adam import make_moments_link
from optfn.transforms.late_steps import Steps
from optfn.transforms.stored import check_moment_dtype, declare_codes, quantize_moments


@traits(link="moments", counted="mu")
class ScaleByAdamaxState(NamedTuple):
    """State of `scale_by_adamax`: 8 bytes per parameter, and the step."""

    step: Steps
    mu: Params
    infinity_norm: Params


@traits(link="moments", spans_buffers=True, counted="mu")
@declare_encoded(declare_codes("mu", signed=True), declare_codes("infinity_norm", signed=False))
class ScaleByInt8AdamaxState(NamedTuple):
    """State of `scale_by_adamax` in int8: 2.00 to 2.03 bytes per parameter, and the step."""

    step: Steps
    mu: Params
    mu_scale: Params
    infinity_norm: Params
    infinity_norm_scale: Params


_ADAMAX_STATES = {"bfloat16": ScaleByAdamaxState, "int8": ScaleByInt8AdamaxState}


def adamax_rule(
    g: jax.Array, m: jax.Array, u: jax.Array, *, b1: Scalar, b2: Scalar, eps: Scalar, scale: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (scale·m/u, m, u) with m = β₁m + (1 − β₁)g and u = max(|g|, β₂u + eps)."""
    m, u = adamax_moments(g, m, u, b1=b1, b2=b2, eps=eps)
    return adamax_direction(g, m, u, scale=scale), m, u


def adamax_moments(
    g: jax.Array, m: jax.Array, u: jax.Array, *, b1: Scalar, b2: Scalar, eps: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return m = β₁m + (1 − β₁)g and u = max(|g|, β₂u + eps)."""
    m = numerics.moving_average(m, g, b1)
    # eps is added to the decayed maximum, as in fluid, and not to the divisor.
    return m, jnp.maximum(jnp.abs(g), numerics.scalar(b2, g) * u + numerics.scalar(eps, g))


def adamax_direction(g: jax.Array, m: jax.Array, u: jax.Array, *, scale: Scalar) -> jax.Array:
    """Return scale·m/u, without a use of the gradient g, which `quantize_moments` passes."""
    del g
    return numerics.scalar(scale, m) * m / u


@core.transform(complex_leaves=True)
def scale_by_adamax(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, *, moment_dtype: str | None = None
) -> core.Unchecked:
    """Divide the bias-corrected moving average of the gradient by its decaying maximum,
    elementwise, where 0/0 is NaN if eps is 0.

        m = β₁m + (1 − β₁)g;  u = max(|g|, β₂u + eps);  direction = m/u/(1 − β₁ᵗ)

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: ≥ 0, added to the decayed maximum at every step; with 0, 0/0 is NaN, as in optax.
      moment_dtype: "bfloat16" or "int8" stores m and u in 16 or 8 bits, stochastically rounded, as
        `scale_by_quantized_adam` does; None is float32.

    State: step, mu (m) and infinity_norm (u), 8 bytes per parameter; in bfloat16 4, in int8 2.00 to
    2.03. u of a complex leaf is real; with `moment_dtype` leaves are real.

    Source: Kingma & Ba 2015, arXiv 1412.6980, algorithm 2; eps as in fluid's AdamaxOptimizer.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.nonnegative("eps", eps)

    def of_step(step: jax.Array) -> dict[str, Scalar]:
        return {"scale": 1 / numerics.bias_correction(b1, step)}

    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is not None:
        # u has no sign, and so all of its bits for the magnitude.
        moments = partial(adamax_moments, b1=b1, b2=b2, eps=eps)
        return quantize_moments(
            dtype, _ADAMAX_STATES, moments, adamax_direction, signed=(True, False), of_step=of_step
        )
    rule = partial(adamax_rule, b1=b1, b2=b2, eps=eps)
    return make_moments_link(rule, of_step, ScaleByAdamaxState)
