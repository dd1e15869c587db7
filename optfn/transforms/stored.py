"""Storage of moments in 8 or 16 bits, for every rule that keeps moments of a gradient."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optfn import core
from optfn.core import checks, leafwise, tree
from optfn.core.checks import Scalar
from optfn.core.types import DType, OptState, Params, PyTree, Stepped, Updates
from optfn.mesh.collectives.mesh import make_zeros
from optfn.mesh.state.encoded import Encoded
from optfn.transforms import codes, in_place, late_steps

Arrays: TypeAlias = tuple[jax.Array, ...]
# (g, *moments) -> the moments after g: elementwise, and increasing in |g| and in each |moment|.
Moments: TypeAlias = Callable[..., Arrays]

MOMENT_DTYPES = ("bfloat16", "int8")


def check_moment_dtype(argument: str, moment_dtype: str | None) -> str | None:
    """Return `moment_dtype` if it is None, "bfloat16" or "int8", else raise a ValueError."""
    return None if moment_dtype is None else checks.choice(argument, moment_dtype, MOMENT_DTYPES)


def declare_codes(field: str, *, signed: bool) -> Encoded:
    """Declare that `field` of a state has int8 codes if `signed`, else uint8 ones, and
    `<field>_scale` their scales."""
    return Encoded(field, f"{field}_scale", *_codes(signed), codes.row_max)


def _codes(signed: bool) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Return the functions that decode and encode int8 codes if `signed`, else uint8 ones."""
    if signed:
        return codes.decode_signed, codes.encode_signed
    return codes.decode_unsigned, codes.encode_unsigned


class Part(NamedTuple):
    """An array of a moment: its dtype, and whether it has one value per element, or per row."""

    dtype: DType
    per_element: bool = True


class Storage(NamedTuple):
    """An encoding of the moments of a leaf.

    parts: the arrays, moment after moment.
    advance: (moments, g, arrays, noise) -> the arrays after a float32 gradient.
      noise: 32 random bits per element, 16 for each of two moments.
    decode: arrays -> moments, float32.
    """

    parts: tuple[Part, ...]
    advance: Callable[[Moments, jax.Array, Arrays, jax.Array], Arrays]
    decode: Callable[[Arrays], Arrays]

    def init(self, params: Params) -> tuple[PyTree, ...]:
        """Return a tree of zeros for each part, in the shape of the leaf, or of its scales if the
        part has one value per row."""

        def zeros(part: Part, p: jax.Array) -> jax.Array:
            if part.per_element:
                return jnp.zeros_like(p, dtype=part.dtype)
            return make_zeros(codes.scale_shape(p.shape), jnp.float32, p)

        return tuple(tree.map_arrays(partial(zeros, part), params) for part in self.parts)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shape of each part for a leaf of `shape`: the same shape, or the shape of its
        scales if the part has one value per row."""
        return [shape if part.per_element else codes.scale_shape(shape) for part in self.parts]


def _split_noise(noise: jax.Array) -> Arrays:
    """Return the upper and the lower 16 of 32 random bits as two arrays, so that one hash serves
    two moments."""
    return noise >> 16, noise & 0xFFFF


def _make_bfloat16_storage(signed: Sequence[bool]) -> Storage:
    """Return the storage of moments, at most two, rounded to bfloat16 by random bits, whether they
    are signed or not."""

    def advance(moments: Moments, g: jax.Array, arrays: Arrays, noise: jax.Array) -> Arrays:
        pairs = zip(moments(g, *decode(arrays)), _split_noise(noise), strict=False)
        return tuple(codes.to_bfloat16(x, bits) for x, bits in pairs)

    def decode(arrays: Arrays) -> Arrays:
        return tuple(x.astype(jnp.float32) for x in arrays)

    return Storage((Part(jnp.bfloat16),) * len(signed), advance, decode)


def _make_int8_storage(signed: Sequence[bool]) -> Storage:
    """Return the storage of moments as 8-bit codes, int8 if signed, else uint8, with a float32
    scale per row that follows the recursion of its moment."""

    def advance(moments: Moments, g: jax.Array, arrays: Arrays, noise: jax.Array) -> Arrays:
        # A scale follows the same recursion as its moment, so that no moment of the row exceeds
        # it, and moments can be encoded without computing the maximum of the row first.
        scales = moments(codes.row_max(jnp.abs(g)), *arrays[1::2])
        new: list[jax.Array] = []
        of_moments = zip(
            moments(g, *decode(arrays)), scales, signed, _split_noise(noise), strict=False
        )
        for x, scale, is_signed, bits in of_moments:
            new += [_codes(is_signed)[1](x, scale, bits), scale]
        return tuple(new)

    def decode(arrays: Arrays) -> Arrays:
        moments = zip(arrays[::2], arrays[1::2], signed, strict=True)
        return tuple(_codes(is_signed)[0](x, scale) for x, scale, is_signed in moments)

    parts: list[Part] = []
    for is_signed in signed:
        parts += [Part(jnp.int8 if is_signed else jnp.uint8), Part(jnp.float32, False)]
    return Storage(tuple(parts), advance, decode)


def quantize_moments(
    moment_dtype: str,
    state_types: Mapping[str, Callable[..., OptState]],
    moments: Moments,
    direction: Callable[..., jax.Array],
    *,
    signed: Sequence[bool],
    of_step: Callable[[jax.Array], dict[str, Scalar]] = lambda step: {},
) -> core.Unchecked:
    """Return an unchecked transform with the updates of `direction`, whose moments are stored by
    stochastic rounding in bfloat16, or in 8 bits with scales per row.

        moments = moments(g, *decode(state));  state = encode(moments)
        u = direction(g, *decode(state))

    Args:
      moment_dtype: "bfloat16" or "int8".
      state_types: for each dtype the class of the state, (step, *trees of the parts).
      moments: (g, *moments) -> moments, elementwise, computed in float32. Applied to the largest
        |g| of a row and the scales, it gives the new scales, so it must increase in all of them.
      direction: (g, *moments, **scalars) -> u, elementwise.
      signed: whether each moment, at most two, has a sign.
      of_step: from the number of steps to the scalars.

    The random bits are a hash of step and element, so that a run can be repeated bit for bit. The
    moments change in place, in a separate pass over the leaf.
    """
    make_storage = _make_int8_storage if moment_dtype == "int8" else _make_bfloat16_storage
    storage = make_storage(signed)
    state_type = state_types[moment_dtype]

    def init(params: Params) -> OptState:
        return state_type(core.first_step(), *storage.init(params))

    def narrow(g: jax.Array, *arrays: jax.Array, seed: jax.Array) -> Arrays:
        wide = g.astype(jnp.float32)  # for gradients of any dtype
        return g, *storage.advance(moments, wide, arrays, codes.random_bits(g.shape, seed))

    def advance(*arguments: PyTree) -> PyTree:
        *arrays, g, step = arguments
        # Another multiplier than in master_weights, so that both round with independent bits.
        seed = step.astype(jnp.uint32) * np.uint32(0x85EBCA6B)
        return leafwise.apply(narrow, g, *arrays, shapes=storage.shapes, seed=seed)[1:]

    def apply_direction(g: jax.Array, *arrays: jax.Array, **scalars: Any) -> Arrays:
        return direction(g, *storage.decode(arrays), **scalars).astype(g.dtype), *arrays

    def update(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
        updates = leafwise.densify_rows(updates)
        step, scalars = late_steps.advance_by_leaf(of_step, state.step, updates)
        # In one program XLA on CPU would recompute the new moments where they are read, and for
        # that keep the old ones.
        count = late_steps.global_count(step)
        arrays = in_place.run_in_passes([advance], tuple(state[1:]), updates, count)
        updates = leafwise.apply(
            apply_direction, updates, *arrays, shapes=storage.shapes, **scalars
        )[0]
        return updates, state_type(step, *arrays)

    return core.Unchecked(init, update, real_only=f"moment_dtype={moment_dtype!r}")
