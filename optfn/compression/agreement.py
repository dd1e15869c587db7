"""Checks and reductions before an exchange: leaves, axes, own and finite gradients, the step."""

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compression.bits import pack_mask
from optfn.leaves import numerics, tree
from optfn.leaves.types import Leaf, LeafKind, Updates
from optfn.mesh import Axes


def is_compressible(p: jax.Array, min_size: int) -> bool:
    """Tell whether a leaf has at least `min_size` elements and is accumulated in float32."""
    # NumPy's float64 becomes float32 where JAX has no wider floats.
    dtype = numerics.accumulator_dtype(jax.dtypes.canonicalize_dtype(p.dtype))
    return bool(dtype == jnp.float32 and p.size >= min_size)


def check_own_gradients(name: str, updates: Updates, axis_name: Axes) -> None:
    """Raise unless the axes are bound and each gradient is the worker's own, as far as is known."""
    mesh.check_axis(name, axis_name)
    checked = set(mesh.checked_axes(axis_name))
    for place, g in tree.items(updates):
        values = g.values if isinstance(g, LeafKind) else g
        if tree.is_masked(g) or checked <= mesh.varying_axes(values):
            continue
        raise ValueError(
            f"{name}: the gradient of {place!r} is the same on all workers of "
            f"axis {axis_name!r}: it is already summed or averaged, and there is nothing to "
            "compress. Inside shard_map take the gradient of jax.lax.pcast(params, "
            f'{axis_name!r}, to="varying"), or pass check_vma=False'
        )


def check_state_of_leaf(name: str, place: object, x: Leaf, shape: tuple[int, ...]) -> None:
    """Raise unless x, the state of the leaf at a place, is one worker's and has this shape."""
    if tree.is_masked(x) or jnp.shape(x) != shape:
        found = None if tree.is_masked(x) else jnp.shape(x)
        raise ValueError(
            f"{name}: the state of leaf {place!r} has shape {found}, not {shape}: it was made for "
            "other params, or is not laid out over the workers (see init_state and state_specs)"
        )


def agree(updates: Updates, step: jax.Array, axis_name: Axes) -> tuple[jax.Array, jax.Array]:
    """Return whether any worker's gradient is not finite, and the step: the same on all workers.

    Under `vmap` neither of them has a batch axis, so that a branch on them stays a branch.
    """
    arrays = [g.values if isinstance(g, LeafKind) else g for g in tree.flatten(updates)[0]]
    # One pass over each leaf into bits, and one reduction over the bits of all leaves.
    bits = [pack_mask(~jnp.isfinite(g.reshape(-1))) for g in arrays if not tree.is_masked(g)]
    nonfinite = jnp.any(jnp.concatenate(bits) > 0) if bits else jnp.asarray(False)
    axes = axis_name
    flags = jnp.stack([nonfinite.astype(jnp.int32), step])
    nonfinite, step = lax.pmax(mesh.vary(flags, mesh.checked_axes(axes)), axes)
    return nonfinite > 0, step
