"""Adam's moments in 8 or 16 bits."""

from typing import Any, NamedTuple

import jax

from optfn import core
from optfn.core import checks
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import Params
from optfn.mesh.state.encoded import declare_encoded
from optfn.transforms.adam import ScaleByAdamState, adam_direction, adam_factors, adam_moments
from optfn.transforms.late_steps import Steps
from optfn.transforms.stored import MOMENT_DTYPES, Arrays, declare_codes, quantize_moments


@traits(link="moments", spans_buffers=True, counted="mu")
@declare_encoded(declare_codes("mu", signed=True), declare_codes("nu", signed=False))
class ScaleByInt8AdamState(NamedTuple):
    """State of `scale_by_quantized_adam("int8")`: 2.00 to 2.03 bytes per parameter."""

    step: Steps
    mu: Params
    mu_scale: Params
    nu: Params
    nu_scale: Params


_STATES = {"bfloat16": ScaleByAdamState, "int8": ScaleByInt8AdamState}


@core.transform()
def scale_by_quantized_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    eps_hat: bool = True,
    bias_correction: bool = True,
    dtype: str = "int8",
) -> core.Unchecked:
    """Compute Adam's direction in float32 from moments that are stored in 8 bits, or in 16 for
    "bfloat16", by stochastic rounding that keeps their mean exact.

        m, v = decode(state)
        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)g²
        state = encode(m, v)                  rounded up or down at random, exact in the mean
        m, v = decode(state);  u as in `scale_by_adam`

    The random bits are a hash of step and element, so a run can be repeated bit for bit; all leaves
    use the same bits. Moments are computed in float32, also for wider leaves.

    "int8" stores rows: the last axes of a leaf, as few as have 256 elements together; a vector,
    such as a packed buffer, is one row. Each row has a scale s that no element exceeds
    (s = βs + (1 − β)·max|g|).
    The codes have three bits of mantissa, for m down to 2⁻¹⁹·s and for v down to 2⁻³⁵·s. A v > 0
    never rounds to zero. A gradient that is not finite spoils its whole row, so use
    `skip_nonfinite`. Devices that divide the axes before a row divide the scales too; those that
    divide a row agree on its maximum.

    The moments are updated in place, in a separate pass over the leaf on a CPU. Besides the
    gradient, a step needs less than half a byte of temporary memory per parameter.

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0.
      eps_hat: where eps is added, as in `scale_by_adam`.
      bias_correction: whether to correct the bias of the moments.
      dtype: "bfloat16" or "int8".

    State: step, mu and nu, 4 bytes per parameter; in int8 also their scales, 2.00 to
    2.03 bytes in all, of leaves of 256 elements and more. Real leaves.

    Source: Dettmers et al. 2022, arXiv 2110.02861 (scales, dynamic code); Gupta et al. 2015, arXiv
    1502.02551 (stochastic rounding). The code, the scales and the hash are our own.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.positive("eps", eps)
    eps_hat = checks.flag("eps_hat", eps_hat)
    checks.choice("dtype", dtype, MOMENT_DTYPES)
    bias_correction = checks.flag("bias_correction", bias_correction)

    def moments(g: jax.Array, m: jax.Array, v: jax.Array) -> Arrays:
        return adam_moments(g, m, v, b1=b1, b2=b2)[1:]

    def direction(g: jax.Array, m: jax.Array, v: jax.Array, **factors: Any) -> jax.Array:
        del g
        return adam_direction(m, v, eps=eps, **factors)

    def of_step(step: jax.Array) -> dict[str, Scalar]:
        scale, root = adam_factors(b1, b2, step, eps_hat) if bias_correction else (1.0, 1.0)
        return {"scale": scale, "root": root}

    # v has no sign, and so all of its bits for the magnitude.
    return quantize_moments(
        dtype, _STATES, moments, direction, signed=(True, False), of_step=of_step
    )
