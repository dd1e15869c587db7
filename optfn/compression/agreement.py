"""Checks before an exchange: shapes, axes, gradients of one worker, finite values, equal steps."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import leafwise, numerics, tree
from optfn.core.types import Leaf, Updates
from optfn.mesh.collectives.axes import Axes, axis_size, check_axes_bound, mark_varying, vma_axes
from optfn.mesh.compilers import groups, xla


def is_compressible(p: jax.Array, min_size: int) -> bool:
    """Tell whether a leaf has at least `min_size` elements and a dtype that accumulates in float32,
    since leaves of wider dtypes, such as float64 and complex ones, are sent dense."""
    # NumPy's float64 becomes float32 unless jax_enable_x64 is set.
    dtype = numerics.accumulator_dtype(jax.dtypes.canonicalize_dtype(p.dtype))
    return bool(dtype == jnp.float32 and p.size >= min_size)


def check_worker_gradients(name: str, updates: Updates, axis_name: Axes) -> None:
    """Raise a ValueError if an axis is unbound, or if JAX tracks variation and an unmasked gradient
    does not vary over every axis, because it is then already summed."""
    check_axes_bound(name, axis_name)
    checked = set(vma_axes(axis_name))
    for place, g in tree.items(updates):
        # Without check_vma, `checked` is empty and each gradient passes: JAX then cannot tell.
        if tree.is_masked(g) or checked <= groups.varying_axes(leafwise.numbers_of(g)):
            continue
        raise ValueError(
            f"{name}: the gradient of {place!r} is already summed or averaged over axis "
            f"{axis_name!r}, so there is nothing left to compress. Inside shard_map, take the "
            f'gradient with respect to jax.lax.pcast(params, {axis_name!r}, to="varying"), or pass '
            "check_vma=False"
        )


def check_state_of_leaf(name: str, place: object, x: Leaf, shape: tuple[int, ...]) -> None:
    """Raise a ValueError that names the leaf at `place`, unless its state `x` is unmasked and has
    this shape, the shape of one worker's state."""
    found = None if tree.is_masked(x) else jnp.shape(x)
    if found != shape:
        raise ValueError(
            f"{name}: the state of leaf {place!r} must have shape {shape}; got {found}. Either it "
            "was made for other params, or it is not divided over the workers: see "
            "optfn.distributed.init_state and state_specs"
        )


def agree(
    updates: Updates, step: jax.Array, weight: jax.Array | None, axis_name: Axes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether an exchange is skipped, whether any worker has a gradient that is not finite,
    and the largest step of any worker, all from one all-reduce over `axis_name`.

    An exchange is skipped for a gradient that is not finite, or if no worker's update has a weight.
    All three are the same on all workers. Under `vmap` they have no batch axis, so `lax.cond` on
    them remains a branch.
    """
    nonfinite = xla.any_nonfinite(list(map(leafwise.numbers_of, tree.arrays(updates))))
    counts = [] if weight is None else [jnp.asarray(weight) != 0]
    # One collective for all; several small ones would pay the latency of the link each time.
    flags = jnp.stack([step, *(x.astype(jnp.int32) for x in (nonfinite, *counts))])
    step, *agreed = lax.pmax(mark_varying(flags, vma_axes(axis_name)), axis_name)
    nonfinite, *counts = (x > 0 for x in agreed)
    return nonfinite | ~counts[0] if counts else nonfinite, nonfinite, step


def warn_of_equal_gradients(name: str, updates: Updates, step: jax.Array, axis_name: Axes) -> None:
    """Warn in step 0 of a CPU program if all workers have the same nonzero gradient, by checksums
    on the host. Nothing is compared where JAX tracks variation, with one worker, or with several
    processes.

    Workers with equal gradients, as after a `pmean`, send the same entries. Where JAX tracks which
    arrays vary, `check_worker_gradients` has told it already. The host compares, so that no
    collective is added; programs for TPUs and GPUs do not call it, see
    `moved_params.raise_if_moved`, and processes do not know the workers of another.
    """
    leaves = [leafwise.numbers_of(x) for x in tree.arrays(updates) if tree.is_inexact(x)]
    count = axis_size(axis_name)
    if vma_axes(axis_name) or count == 1 or not leaves:
        return
    seen: dict[int, int] = {}

    def see(is_first: Any, worker: Any, checksum: Any) -> None:
        if not is_first:  # under vmap both branches run
            return
        seen[int(worker)] = int(checksum)
        if len(seen) < count:
            return
        found = {*seen.values()}
        seen.clear()
        # A gradient of zeros, as of a loss that is at its minimum, tells nothing.
        if len(found) == 1 and found != {0}:
            warnings.warn(
                f"{name}: all workers have the same gradient in the first step, so they send the "
                "same entries, and few of them. Leave out lax.pmean or lax.psum of gradients, "
                f"because {name} averages them itself; or give each worker examples of its own",
                stacklevel=1,
            )

    def report(leaves: list[jax.Array]) -> None:
        jax.debug.callback(see, step == 0, lax.axis_index(axis_name), _checksum(leaves))

    def call_host(step: jax.Array) -> jax.Array:
        lax.cond(step == 0, report, lambda leaves: None, leaves)
        return step

    xla.call_for_platform(call_host, lambda step: step, step)


def _checksum(leaves: list[jax.Array]) -> jax.Array:
    """Return ∑ (2i + 1)·bᵢ modulo 2³², where bᵢ are the bits of entry i of a leaf cast to float32:
    0 if all entries are +0, or one of them is not finite."""
    found, is_finite = jnp.zeros((), jnp.uint32), jnp.bool_(True)
    for x in (x for leaf in leaves for x in (jnp.real(leaf), jnp.imag(leaf))):
        is_finite &= jnp.all(jnp.isfinite(x))
        bits = lax.bitcast_convert_type(x.astype(jnp.float32).reshape(-1), jnp.uint32)
        places = lax.iota(jnp.uint32, bits.size)
        found += jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)
    return jnp.where(is_finite, found, 0)
