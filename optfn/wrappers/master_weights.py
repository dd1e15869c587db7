"""Float32 masters of parameters of a narrower dtype, as copies or as remainders."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import core
from optfn.core import checks, errors, tree
from optfn.core.traits import Report, traits
from optfn.core.types import DType, Leaf, OptState, Params, Stepped, Updates
from optfn.core.updates import apply_updates
from optfn.transforms import codes
from optfn.wrappers.attributes import without_frozen
from optfn.wrappers.moved_params import error_of_moved, first_moved, raise_if_moved
from optfn.wrappers.uncounted import drop_uncounted


@traits(
    link="masters",
    passes_own_gradients=True,
    made_of_params={"master": ""},
    counts_weight=True,
    reports={
        "moved": Report(
            "moved_param",
            "max",
            "max",
            error=lambda state, number: error_of_moved(state.master, number),
            is_lasting=True,
        )
    },
)
class MasterWeightsState(NamedTuple):
    """State of `master_weights`: 4 bytes per narrow parameter, the inner state, and `moved`, 4
    bytes.

    moved: 1 + the index, among leaves with a master, of the leaf that was found not to be its
      master, rounded; 0 if none was.
    """

    master: Params
    inner_state: OptState
    moved: jax.Array


_of_remainders = traits(
    link="masters",
    passes_own_gradients=True,
    made_of_params={"remainder": None},
    counts_weight=True,
)


@_of_remainders
class MasterWeights32State(NamedTuple):
    """State of `master_weights(bits=32)`: 2 bytes per narrow parameter, and the inner state."""

    remainder: Params
    inner_state: OptState


@_of_remainders
class MasterWeights24State(NamedTuple):
    """State of `master_weights(bits=24)`: 1 byte per narrow parameter, step, and inner state."""

    remainder: Params
    inner_state: OptState
    step: jax.Array


class MasterForm(NamedTuple):
    """How masters are stored.

    state_type: the class of the state.
    start: p -> the array to store for a master that equals p.
    read: (p, stored) -> the master.
    write: (p, master, *numbers) -> (u, stored), so that read(p + u, stored) is the master.
    numbers: the numbers of a fresh state besides the stored arrays: `moved`, `step` or none.
    advance: (numbers, all stored arrays, params) -> the numbers of this step.
    """

    state_type: type[MasterWeightsState | MasterWeights32State | MasterWeights24State]
    start: Callable[[jax.Array], jax.Array]
    read: Callable[[jax.Array, jax.Array], jax.Array]
    write: Callable[..., tuple[jax.Array, jax.Array]]
    numbers: Callable[[], tuple[jax.Array, ...]]
    advance: Callable[[Sequence[jax.Array], Params, Params], list[jax.Array]]


@without_frozen
@core.record_call
def master_weights(
    tx: optax.GradientTransformation, dtype: DType = jnp.float32, *, bits: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to run on masters in `dtype` of narrower parameters, kept as copies or,
    with `bits`, as remainders, so that small updates add up.

        M = M + tx(g, M)
        u = M − p      in float32; p + u, rounded to the dtype of p, is M rounded

    The state has a copy of M. With `bits`, it has only a remainder e, and M is computed from the
    parameter and e:

        bits(|M|) = bits(|p|)·2ᵏ + e,  k = bits − 16

    Nothing may change a parameter besides the update, added as `apply_updates` adds it. With
    copies, each update compares up to 1,024 entries of each leaf with its master: if you edited the
    parameter by hand, or a link behind the masters changed the update, `make_train_step`,
    `minimize` and eager updates raise a ValueError that names the leaf, and so does a jitted loop
    that you write, on a CPU. On a TPU or GPU the state of such a loop keeps the finding in `moved`,
    and `metrics` raises it. No update is changed. With a remainder your change is kept, and M is
    the edited parameter moved by e, which is at most half a unit of its last place.

    Args:
      tx: an optimizer of optfn or optax; its params are the masters.
      dtype: the dtype of the masters, float32 or float64. Leaves that are at least as wide have no
        master.
      bits: 32 or 24, for bfloat16 parameters and float32 masters; None keeps copies. With 32 the
        remainder is int16, and masters have the bits of copies; at an exact tie, the
        parameter is the larger neighbour. With 24 the remainder is int8, and masters are rounded at
        random to 24 bits in each step; their mean is exact, so small steps are not lost.

    If a master changes by a factor above 2 in one step, as where it crosses zero, p + u is rounded,
    and M may be off by 2⁻²⁴ of the larger of its old and its new value. Masters below 2⁻¹²⁶ lose
    digits if XLA flushes denormals.

    State: per narrow parameter 4 bytes for a copy, 2 or 1 for a remainder, and the state of `tx`;
    for copies also the number of a moved leaf, with 24 bits the step. The update of a leaf with a
    master has the dtype of the master. Needs params.

    Raises:
      ValueError: `dtype` is neither float32 nor float64, or is float64 with `bits`; or `bits` is
        another number. At init: `dtype` is float64 without jax_enable_x64; or with `bits`, a leaf
        is narrower than float32 but not bfloat16.
      TypeError: `tx` is not a gradient transformation.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, §3.1; fluid's multi_precision. Remainders of
    24 and 32 bits: FlashOptim's `master_weight_bits`, here on the bits of the numbers.
    """
    wide_dtype = _wide_dtype(dtype)
    form = _choose_form(wide_dtype, bits)
    inner = core.check_transform("master_weights: tx", tx)

    def init(params: Params) -> OptState:
        if jax.dtypes.canonicalize_dtype(wide_dtype) != wide_dtype:  # JAX would shorten it
            raise ValueError("master_weights: dtype float64 needs jax_enable_x64")
        # The inner optimizer starts from the masters, so its state has their dtype.
        wide, kept = tree.map_to(2, partial(_widen, form, wide_dtype, bits), params)
        return form.state_type(kept, inner.init(wide), *form.numbers())

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        core.check_params_given("master_weights", params)
        errors.check_state("master_weights", state, form.state_type)
        kept, inner_state, *numbers = state
        tree.check_same_structure("master_weights", "the state", kept, "params", params)
        # The inner optimizer sees masters as its params, so decay and norms are exact too.
        wide = tree.map(lambda k, p: p if tree.is_masked(k) else form.read(p, k), kept, params)
        updates, new = inner.update(updates, inner_state, wide, **extra)
        # A master stays where its update is dropped, and moves where it counts: in a batch without
        # weight, with the leaves that an `accumulate` of one label has summed before.
        weight = extra.get("weight")
        updates, inner_state, dropped = drop_uncounted(updates, new, inner_state, weight)
        before, numbers = numbers, form.advance(numbers, kept, params)
        if bits == 24 and dropped is not None:  # the count of updates, the seed of their rounding
            numbers = [
                jnp.where(dropped, old, new) for old, new in zip(before, numbers, strict=True)
            ]
        # A training step, which passes `value_fn`, reads the number in the state and stops.
        if bits is None and "value_fn" not in extra:
            raise_if_moved(kept, *numbers)

        after = apply_updates(wide, updates)
        move = _make_move(form, numbers, dropped)
        updates, kept = tree.map_to(2, move, kept, params, updates, after)
        return updates, form.state_type(kept, inner_state, *numbers)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(
    form: MasterForm, dtype: np.dtype[Any], bits: int | None, place: tree.Place, p: Leaf
) -> tuple[Leaf, Leaf]:
    """Return the master that a leaf begins with, and its stored form; a leaf that is not narrower
    than `dtype` is returned itself."""
    p = tree.as_array(p)
    if not _is_narrower(p, dtype):
        return p, optax.MaskedNode()
    _check_dtype(place, p, bits)
    kept = form.start(p)
    return form.read(p, kept), kept


def _make_move(
    form: MasterForm, numbers: Sequence[jax.Array], dropped: jax.Array | None
) -> Callable[..., tuple[Leaf, Leaf]]:
    """Return the function of a leaf, from the stored form, p, u and the new master to u and the new
    stored form.

    Args:
      form: how masters are stored.
      numbers: the numbers of this step.
      dropped: whether an update may have been dropped; None if each counts.
    """

    def move(place: tree.Place, k: Leaf, p: Leaf, u: Leaf, w: Leaf) -> tuple[Leaf, Leaf]:
        if tree.is_masked(k):
            return u, k
        u, new = form.write(p, w, *numbers)
        if dropped is not None:  # the distance from a param to its master is no update
            u = jnp.where(dropped & (w == form.read(p, k)), -0.0, u)
        return u, new

    return move


def _is_narrower(p: Leaf, than: np.dtype[Any]) -> bool:
    """Tell whether p is a real floating-point leaf of fewer bits than a dtype."""
    is_real = tree.is_inexact(p) and jnp.issubdtype(p.dtype, jnp.floating)
    return bool(is_real and jnp.finfo(p.dtype).bits < jnp.finfo(than).bits)


def _check_dtype(place: tree.Place, p: jax.Array, bits: int | None) -> None:
    """Raise a ValueError that names the leaf if `bits` asks for remainders and the leaf is not
    bfloat16."""
    if bits is not None and p.dtype != jnp.bfloat16:
        raise ValueError(
            f"master_weights: bits={bits} needs bfloat16 parameters, because their exponent is "
            f"that of float32; leaf {place!r} is {p.dtype}. Leave bits out to keep float32 copies"
        )


def _choose_form(dtype: np.dtype[Any], bits: int | None) -> MasterForm:
    """Return the form of masters, which are copies in `dtype` if `bits` is None, else remainders
    beside bfloat16, or raise a ValueError for unknown bits or dtypes."""
    checks.choice("master_weights: bits", bits, (None, 32, 24))
    if bits is None:
        return _make_copy_form(dtype)
    if dtype != jnp.float32:
        raise ValueError(f"master_weights: bits={bits} needs float32 masters; got dtype {dtype}")
    return _make_remainder_form(bits)


def _make_copy_form(dtype: np.dtype[Any]) -> MasterForm:
    """Return the form of masters that are arrays of `dtype`, whose state also has the number of the
    first leaf found not to be its master rounded."""

    def write(p: jax.Array, master: jax.Array, moved: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (u, M), so that p + u, rounded, is M, rounded. `moved_params` has the proof."""
        wide = p.astype(dtype)
        reached = wide + (master - wide)
        is_exact = reached.astype(p.dtype) == master.astype(p.dtype)
        # u from the new master: XLA for TPUs would write both from the old one in two kernels.
        master = jnp.where(is_exact, master, reached)
        u = master - wide
        return jnp.where(u == 0, -0.0, u), master  # p = −0.0 keeps its sign

    return MasterForm(
        MasterWeightsState,
        lambda p: p.astype(dtype),
        lambda p, master: master,
        write,
        lambda: (jnp.zeros((), jnp.int32),),
        lambda numbers, masters, params: [
            jnp.where(numbers[0] > 0, numbers[0], first_moved(masters, params))
        ],
    )


def _make_remainder_form(bits: int) -> MasterForm:
    """Return the form of float32 masters that consist of a bfloat16 parameter and a remainder,
    exact for 32 bits and rounded at random for 24."""

    def write(
        p: jax.Array, master: jax.Array, step: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (u, e), so that p + u and e read as the master, which 24 bits round."""
        noise = None
        if step is not None:
            # Another multiplier than in `stored`, so that both round with independent bits.
            noise = codes.random_bits(p.shape, step.astype(jnp.uint32) * np.uint32(0xC2B2AE35))
        target, _ = codes.split_float32(master, bits, noise)
        u = update_to(p, target.astype(jnp.float32))
        # `apply_updates` may reach a neighbour of the target; the remainder makes up for it.
        reached = (p.astype(jnp.float32) + u).astype(p.dtype)
        return u, codes.remainder_beside(reached, master, bits, noise)

    return MasterForm(
        MasterWeights32State if bits == 32 else MasterWeights24State,
        lambda p: jnp.zeros_like(p, codes.REMAINDERS[bits]),
        codes.join_float32,
        write,
        lambda: (core.first_step(),) if bits == 24 else (),
        lambda numbers, kept, params: [core.next_step(step) for step in numbers],
    )


def _wide_dtype(dtype: DType) -> np.dtype[Any]:
    """Return `dtype` as NumPy's, or raise a ValueError unless it is float32 or float64, the dtypes
    of masters."""
    wide = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float64))
    try:
        if dtype is not None and jnp.dtype(dtype) in wide:
            return jnp.dtype(dtype)
    # `dtype` is no dtype at all, such as a misspelt string.
    except TypeError:
        pass
    raise ValueError(f"master_weights: dtype must be float32 or float64; got {dtype!r}")


def update_to(p: jax.Array, master: jax.Array) -> jax.Array:
    """Return the update u, so that p + u, rounded to the dtype of p, is the rounded `master`, and
    with −0.0 where nothing changes.

    u is master − p. If this difference is itself rounded, p + u may round to a neighbour; then u is
    the difference between the rounded master and p. A zero is −0.0: p = −0.0 keeps its sign.
    """
    wide = p.astype(master.dtype)
    rounded = master.astype(p.dtype)
    u = master - wide
    is_exact = (wide + u).astype(p.dtype) == rounded
    u = jnp.where(is_exact, u, rounded.astype(master.dtype) - wide)
    return jnp.where(u == 0, -0.0, u)


def choose_masters(
    multi_precision: object,
) -> Callable[[optax.GradientTransformation], optax.GradientTransformationExtraArgs]:
    """Return the wrapper for `multi_precision`, with copies for True, remainders for 32 or 24 and
    no masters for False, or raise a TypeError."""
    if isinstance(multi_precision, bool | np.bool_):
        return master_weights if multi_precision else lambda tx: tx
    if isinstance(multi_precision, int) and multi_precision in (32, 24):
        return partial(master_weights, bits=multi_precision)
    raise TypeError(
        f"multi_precision must be True, False, 32 or 24; got {checks.show(multi_precision)}"
    )
