"""Adam's moments in 8 or 16 bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import checks, core, numerics
from optfn.autodiff.in_place import when
from optfn.checks import Number
from optfn.leaves import leafwise, tree
from optfn.leaves.types import OptState, Params, PyTree, Updates
from optfn.transforms import codes
from optfn.transforms.moment import ScaleByAdamState, adam_direction, adam_factors


class ScaleByInt8AdamState(NamedTuple):
    """State of `scale_by_quantized_adam("int8")`: 2.03 bytes per parameter, and the step."""

    step: jax.Array
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


class _Storage(NamedTuple):
    """How the moments of a leaf are kept: as some arrays."""

    state_type: Any  # (step, *trees of those arrays)
    init: Callable[[Any], tuple[Any, ...]]  # params -> trees
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    advance: Callable[..., tuple[jax.Array, ...]]  # (g, *arrays, b1, b2, seed) -> arrays
    moments: Callable[..., tuple[jax.Array, jax.Array]]  # (*arrays) -> m, v


def _init_bfloat16(params: Any) -> tuple[Any, ...]:
    return tuple(leafwise.zeros_like(params, dtype=jnp.bfloat16) for _ in range(2))


def _advance_bfloat16(
    g: jax.Array, mu: jax.Array, nu: jax.Array, *, b1: Any, b2: Any, seed: jax.Array
) -> tuple[jax.Array, ...]:
    noise = codes.random_bits(g.shape, seed)
    m = numerics.moving_average(mu.astype(jnp.float32), g, b1)
    v = numerics.moving_average(nu.astype(jnp.float32), jnp.square(g), b2)
    return (
        codes.to_bfloat16(m, noise >> 16),
        codes.to_bfloat16(v, noise & 0xFFFF),
    )


def _moments_bfloat16(mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
    return mu.astype(jnp.float32), nu.astype(jnp.float32)


def _init_int8(params: Any) -> tuple[Any, ...]:
    def scale(p: Any) -> jax.Array:
        return jnp.zeros(codes.num_blocks(p.size), jnp.float32)

    def zero_codes(dtype: Any) -> Any:
        return leafwise.zeros_like(params, dtype=dtype)

    scales = (tree.map_arrays(scale, params) for _ in range(2))
    return zero_codes(jnp.int8), next(scales), zero_codes(jnp.uint8), next(scales)


def _advance_int8(
    g: jax.Array,
    mu: jax.Array,
    mu_scale: jax.Array,
    nu: jax.Array,
    nu_scale: jax.Array,
    *,
    b1: Any,
    b2: Any,
    seed: jax.Array,
) -> tuple[jax.Array, ...]:
    noise = codes.random_bits(g.shape, seed)
    # By the same recursion as the moment, a scale stays above all of its block, and the block's
    # new moments need not be known before they are stored.
    largest = codes.block_max(jnp.abs(g))
    m_scale = numerics.moving_average(mu_scale, largest, b1)
    v_scale = numerics.moving_average(nu_scale, jnp.square(largest), b2)
    m = numerics.moving_average(codes.decode_signed(mu, mu_scale), g, b1)
    v = numerics.moving_average(codes.decode_unsigned(nu, nu_scale), jnp.square(g), b2)
    return (
        codes.encode_signed(m, m_scale, noise >> 16),
        m_scale,
        codes.encode_unsigned(v, v_scale, noise & 0xFFFF),
        v_scale,
    )


def _moments_int8(
    mu: jax.Array, mu_scale: jax.Array, nu: jax.Array, nu_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return codes.decode_signed(mu, mu_scale), codes.decode_unsigned(nu, nu_scale)


def _blocked(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    blocks = (codes.num_blocks(int(np.prod(shape))),)
    return [shape, blocks, shape, blocks]


_STORAGES = {
    "bfloat16": _Storage(
        ScaleByAdamState,
        _init_bfloat16,
        lambda shape: [shape, shape],
        _advance_bfloat16,
        _moments_bfloat16,
    ),
    "int8": _Storage(ScaleByInt8AdamState, _init_int8, _blocked, _advance_int8, _moments_int8),
}
MOMENT_DTYPES = tuple(_STORAGES)


@core.transform()
def scale_by_quantized_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    eps_hat: bool = True,
    dtype: str = "int8",
) -> optax.GradientTransformationExtraArgs:
    """Divide the mean of the gradient by the root of the mean of its square, both in few bits.

        m, v = decode(state)
        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)g²
        state = encode(m, v)                  rounded up or down at random, the mean is exact
        m, v = decode(state);  u as `scale_by_adam` has it

    The random bits are a hash of step and element, so a run repeats itself bit for bit; leaves of
    one shape have the same. Moments and gradients are float32 here, also those of wider leaves.

    "int8" keeps blocks of 256 consecutive elements, each with a scale s that no element exceeds
    (s = βs + (1 − β)·max|g|), and a code with three bits of mantissa: m down to 2⁻¹⁹·s, v down to
    2⁻³⁵·s. v rounds to zero only where it is zero. A gradient that is not finite spoils its block.

    The moments change in place, in a pass of their own: beside the gradient there are temporaries
    of less than half a byte per parameter.

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0.
      eps_hat: which form of the step, as in `scale_by_adam`.
      dtype: "bfloat16" or "int8".

    State: step, mu and nu, 4 bytes per parameter; in int8 also their scales, 2.03 bytes in all.
    Real leaves.

    Source: Dettmers et al. 2022, arXiv 2110.02861 (blocks, dynamic code); Gupta et al. 2015, arXiv
    1502.02551 (stochastic rounding). The code, the scales and the hash are our own.
    """
    b1, b2 = checks.decay("b1", b1), checks.decay("b2", b2)
    eps = checks.positive("eps", eps)
    eps_hat = checks.flag("eps_hat", eps_hat)
    storage = _STORAGES[checks.choice("dtype", dtype, MOMENT_DTYPES)]

    def init(params: Params) -> Any:
        return storage.state_type(core.first_step(), *storage.init(params))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        step, updates = core.next_step(state.step), leafwise.densify(updates)

        def advance(*arguments: PyTree) -> PyTree:
            *moments, g = arguments
            return leafwise.apply(
                _narrow(storage.advance),
                g,
                *moments,
                shapes=storage.shapes,
                b1=b1,
                b2=b2,
                seed=step.astype(jnp.uint32) * np.uint32(0x85EBCA6B),
            )[1:]

        # Always due. The loop's single iteration keeps XLA from computing the new moments once more
        # where they are read, which would need the old ones beside them.
        moments = when(step > 0, advance, tuple(state[1:]), updates)

        def direction(g: jax.Array, *moments: jax.Array, **factors: Any) -> Any:
            u = adam_direction(*storage.moments(*moments), **factors)
            return u.astype(g.dtype), *moments

        scale, root = adam_factors(b1, b2, step, eps_hat)
        updates = leafwise.apply(
            direction, updates, *moments, shapes=storage.shapes, eps=eps, scale=scale, root=root
        )[0]
        return updates, storage.state_type(step, *moments)

    return core.rule(init, update)


def _narrow(advance: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a rule for `leafwise.apply` that works in float32, whatever the gradient is."""

    def rule(g: jax.Array, *moments: jax.Array, **scalars: Any) -> tuple[jax.Array, ...]:
        return g, *advance(g.astype(jnp.float32), *moments, **scalars)

    return rule
