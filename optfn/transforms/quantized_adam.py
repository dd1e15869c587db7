"""Adam's moments in 8 or 16 bits."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optfn import checks, core
from optfn.checks import Number, Scalar
from optfn.leaves import leafwise, numerics, tree
from optfn.leaves.traits import traits
from optfn.leaves.types import DType, OptState, Params, PyTree, Updates
from optfn.state.encoded import Encoded, encodes
from optfn.transforms import codes, late_steps
from optfn.transforms.adam import ScaleByAdamState, adam_direction, adam_factors
from optfn.transforms.in_place import in_passes


@traits(spans_buffers=True, counted="mu")
@encodes(
    Encoded("mu", "mu_scale", codes.decode_signed, codes.encode_signed),
    Encoded("nu", "nu_scale", codes.decode_unsigned, codes.encode_unsigned),
)
class ScaleByInt8AdamState(NamedTuple):
    """State of `scale_by_quantized_adam("int8")`: 2.03 bytes per parameter, and the step."""

    step: late_steps.Steps
    mu: Params
    mu_scale: Params
    nu: Params
    nu_scale: Params


Arrays: TypeAlias = tuple[jax.Array, ...]


class _Storage(NamedTuple):
    """An encoding of the moments of a leaf as two or four arrays.

    state_type: the NamedTuple class of the state, (step, *trees of the arrays).
    init: params -> trees of the arrays.
    shapes: the shape of a leaf -> the shapes of its arrays.
    advance: (g, arrays, b1, b2, seed) -> arrays, the moments after a float32 gradient.
    moments: arrays -> (m, v), decoded.
    """

    state_type: Callable[..., OptState]
    init: Callable[[Params], tuple[PyTree, ...]]
    shapes: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    advance: Callable[[jax.Array, Arrays, Scalar, Scalar, jax.Array], Arrays]
    moments: Callable[[Arrays], tuple[jax.Array, jax.Array]]


def _init_bfloat16(params: Params) -> tuple[PyTree, ...]:
    return tuple(leafwise.zeros_like(params, dtype=jnp.bfloat16) for _ in range(2))


def _advance_bfloat16(
    g: jax.Array, arrays: Arrays, b1: Scalar, b2: Scalar, seed: jax.Array
) -> Arrays:
    mu, nu = arrays
    noise = codes.random_bits(g.shape, seed)
    m = numerics.moving_average(mu.astype(jnp.float32), g, b1)
    v = numerics.moving_average(nu.astype(jnp.float32), jnp.square(g), b2)
    return (
        codes.to_bfloat16(m, noise >> 16),
        codes.to_bfloat16(v, noise & 0xFFFF),
    )


def _moments_bfloat16(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    mu, nu = arrays
    return mu.astype(jnp.float32), nu.astype(jnp.float32)


def _init_int8(params: Params) -> tuple[PyTree, ...]:
    def scale(p: jax.Array) -> jax.Array:
        return jnp.zeros(codes.num_blocks(p.size), jnp.float32)

    def zero_codes(dtype: DType) -> PyTree:
        return leafwise.zeros_like(params, dtype=dtype)

    scales = (tree.map_arrays(scale, params) for _ in range(2))
    return zero_codes(jnp.int8), next(scales), zero_codes(jnp.uint8), next(scales)


def _advance_int8(g: jax.Array, arrays: Arrays, b1: Scalar, b2: Scalar, seed: jax.Array) -> Arrays:
    mu, mu_scale, nu, nu_scale = arrays
    noise = codes.random_bits(g.shape, seed)
    # A scale follows the same recursion as its moment, so that no moment of the block exceeds it,
    # and moments can be encoded without computing the maximum of the block first.
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


def _moments_int8(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    mu, mu_scale, nu, nu_scale = arrays
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
) -> core.Rule:
    """Adam's direction with moments stored in 8 or 16 bits, stochastically rounded.

        m, v = decode(state)
        m = β₁m + (1 − β₁)g;  v = β₂v + (1 − β₂)g²
        state = encode(m, v)                  rounded up or down at random, exact in the mean
        m, v = decode(state);  u as in `scale_by_adam`

    The random bits are a hash of step and element, so that a run can be repeated bit for bit; all
    leaves use the same bits. Moments are computed in float32, also those of wider leaves.

    "int8" stores blocks of 256 consecutive elements. Each block has a scale s that no element
    exceeds (s = βs + (1 − β)·max|g|); the codes have three bits of mantissa, for m down to 2⁻¹⁹·s
    and for v down to 2⁻³⁵·s. A v > 0 never rounds to zero. A gradient that is not finite makes its
    whole block unusable.

    The moments change in place, in a separate pass over the leaf: beside the gradient, a step needs
    temporary memory of less than half a byte per parameter.

    Args:
      b1: β₁, in [0, 1).
      b2: β₂, in [0, 1).
      eps: > 0.
      eps_hat: the form of the step, as in `scale_by_adam`.
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

    def init(params: Params) -> OptState:
        return storage.state_type(core.first_step(), *storage.init(params))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        step, updates = late_steps.advanced(state.step), leafwise.to_dense(updates)

        def narrow(g: jax.Array, *arrays: jax.Array, seed: jax.Array) -> Arrays:
            # The moments are computed in float32 for gradients of any dtype.
            return g, *storage.advance(g.astype(jnp.float32), arrays, b1, b2, seed)

        def advance(*arguments: PyTree) -> PyTree:
            *moments, g, step = arguments
            seed = step.astype(jnp.uint32) * np.uint32(0x85EBCA6B)
            return leafwise.apply(narrow, g, *moments, shapes=storage.shapes, seed=seed)[1:]

        # In one program XLA would recompute the new moments where they are read, and for that keep
        # the old ones.
        rows = state._replace(mu=_blocks(state.mu), nu=_blocks(state.nu))
        count = late_steps.shared(step)
        moments = in_passes([advance], tuple(rows[1:]), _blocks(updates), count)
        moments = jax.tree.map(lambda new, old: new.reshape(old.shape), moments, tuple(state[1:]))

        def of_step(step: jax.Array) -> dict[str, Scalar]:
            scale, root = adam_factors(b1, b2, step, eps_hat)
            return {"scale": scale, "root": root}

        numbers = late_steps.by_leaf(of_step, step, updates)
        rule = partial(_direction, storage, eps=eps)
        updates = leafwise.apply(rule, updates, *moments, shapes=storage.shapes, **numbers)[0]
        return updates, storage.state_type(step, *moments)

    return core.Rule(init, update)


def _direction(storage: _Storage, g: jax.Array, *arrays: jax.Array, **factors: Any) -> Arrays:
    u = adam_direction(*storage.moments(arrays), **factors)
    return u.astype(g.dtype), *arrays


def _blocks(values: PyTree) -> PyTree:
    """Return arrays with one block in each row, see `codes.as_rows`."""
    return tree.map_arrays(codes.as_rows, values)
