"""Float32 masters of parameters of a narrower dtype."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import core
from optfn.leaves import tree
from optfn.leaves.traits import traits
from optfn.leaves.types import DType, Leaf, OptState, Params, Updates
from optfn.leaves.updates import apply_updates


@traits(passes_own_gradients=True, follows_params=True, copies="master")
class MasterWeightsState(NamedTuple):
    """State of `master_weights`: 4 bytes per narrow parameter, and the inner state."""

    master: Params
    inner_state: OptState


@core.named
def master_weights(
    tx: optax.GradientTransformation, dtype: DType = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on wide copies of narrow parameters.

        M = M + tx(g, M)
        u = M − p      in `dtype`; rounded to the dtype of p, p + u is M

    After an update the parameters are the rounded masters, even if they were edited before.

    Args:
      tx: an optimizer of optfn or optax; its params are the masters.
      dtype: the dtype of the masters, float32 or float64. Leaves that are at least as wide have no
        master.

    State: the masters, 4 bytes per narrow parameter, and the state of `tx`. The update of a leaf
    with a master has the dtype of the master. Needs params.

    Raises:
      ValueError: `dtype` is neither float32 nor float64; at init, `dtype` is float64 without
        jax_enable_x64.
      TypeError: `tx` is not a gradient transformation.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, §3.1; fluid's multi_precision.
    """
    wide_dtype = _wide_dtype(dtype)
    inner = core.check_transform("master_weights: tx", tx)

    def narrow(p: Leaf) -> bool:
        is_real = tree.is_inexact(p) and jnp.issubdtype(p.dtype, jnp.floating)
        return is_real and jnp.finfo(p.dtype).bits < jnp.finfo(wide_dtype).bits

    def init(params: Params) -> MasterWeightsState:
        if jax.dtypes.canonicalize_dtype(wide_dtype) != wide_dtype:
            raise ValueError("master_weights: dtype float64 needs jax_enable_x64")

        def widened(place: tree.Place, p: Leaf) -> tuple[Leaf, Leaf]:
            if not narrow(p):
                return p, optax.MaskedNode()
            wide = jnp.asarray(p).astype(wide_dtype)
            return wide, wide

        wide, masters = tree.map_to(2, widened, params)
        return MasterWeightsState(masters, inner.init(wide))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        core.check_params_given("master_weights", params)
        core.check_state("master_weights", state, MasterWeightsState)
        tree.check_same_structure("master_weights", "the state", state.master, "params", params)
        wide = tree.map(lambda m, p: p if tree.is_masked(m) else m, state.master, params)
        updates, inner_state = inner.update(updates, state.inner_state, wide, **extra)

        def moved(place: tree.Place, m: Leaf, p: Leaf, u: Leaf, w: Leaf) -> tuple[Leaf, Leaf]:
            return (u, m) if tree.is_masked(m) else (update_to(p, w), w)

        after = apply_updates(wide, updates)
        updates, masters = tree.map_to(2, moved, state.master, params, updates, after)
        return updates, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _wide_dtype(dtype: DType) -> np.dtype[Any]:
    """Return float32 or float64, the dtypes that masters may have."""
    wide = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float64))
    try:
        if dtype is not None and jnp.dtype(dtype) in wide:
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise ValueError(f"master_weights: dtype must be float32 or float64; got {dtype!r}")


def update_to(p: jax.Array, master: jax.Array) -> jax.Array:
    """Return the update u for which p + u is `master`, rounded to the dtype of p: master − p.

    Where the difference itself is rounded, p + u may round to a neighbour of that number; there u
    is the difference between the rounded master and p. A difference of zero is −0.0, so that
    p = −0.0 keeps its sign.
    """
    wide = p.astype(master.dtype)
    rounded = master.astype(p.dtype)
    u = master - wide
    is_exact = (wide + u).astype(p.dtype) == rounded
    u = jnp.where(is_exact, u, rounded.astype(master.dtype) - wide)
    return jnp.where(u == 0, -0.0, u)
