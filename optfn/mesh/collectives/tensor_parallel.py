"""The two collectives of a tensor-parallel layer: f and g of Megatron-LM.

A mesh axis divides the weights of such a layer. The layer begins with `copy_to`, each device
computes with its shard, and the layer ends with `sum_over`:

    h = copy_to(x, "model")            # x is the same on all devices
    y = relu(h @ w_in) @ w_out         # columns of w_in, rows of w_out
    return sum_over(y, "model")        # the same on all devices again

Where JAX does not track which arrays vary (`shard_map(check_vma=False)`, pmap), a plain
`jax.lax.psum` would have the wrong derivative: it sums cotangents that are the same on all devices.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax import lax

from optfn.core import tree
from optfn.core.types import PyTree
from optfn.mesh.collectives import axes as mesh_axes
from optfn.mesh.collectives.axes import Axes, AxisName

# (x, axes) -> x
Function: TypeAlias = Callable[[PyTree, Axes], PyTree]


def copy_to(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return x unchanged, and sum its cotangents over an axis in the backward pass, or raise a
    ValueError if the axis is not bound.

    A tensor-parallel layer begins with it; see `sum_over` for its end.

    Args:
      x: arrays that are the same on all devices of the axis.
      axis_name: a mesh axis, or a tuple of axes, bound by shard_map, pmap or vmap.

    Raises:
      ValueError: the axis is not bound.

    Source: Shoeybi et al. 2019, arXiv 1909.08053, §3: f.
    """
    names = mesh_axes.check_axis_names("axis_name", axis_name)
    mesh_axes.check_axes_bound("copy_to", names)
    # Where JAX tracks variation, JAX's transpose of the mark is the sum.
    if mesh_axes.vma_axes(names):
        return jax.tree.map(lambda leaf: mesh_axes.mark_varying(leaf, names), x)
    leaves, structure = jax.tree.flatten(x)
    # The cotangent of integers, such as tokens, is no array.
    copied = iter(_copy_to(names, [leaf for leaf in leaves if tree.is_inexact(leaf)]))
    found = [next(copied) if tree.is_inexact(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def sum_over(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return the sum of x over an axis, and its cotangents unchanged in the backward pass, or raise
    a ValueError if the axis is not bound.

    A tensor-parallel layer ends with it, and begins with `copy_to`:

        h = copy_to(x, "model")            # x is the same on all devices
        y = relu(h @ w_in) @ w_out         # columns of w_in, rows of w_out
        return sum_over(y, "model")        # the same on all devices again

    Args:
      x: arrays; each device of the axis has a term of the sum.
      axis_name: a mesh axis, or a tuple of axes, bound by shard_map, pmap or vmap.

    Raises:
      ValueError: the axis is not bound.

    Source: Shoeybi et al. 2019, arXiv 1909.08053, §3: g.
    """
    names = mesh_axes.check_axis_names("axis_name", axis_name)
    mesh_axes.check_axes_bound("sum_over", names)
    return lax.psum(x, names) if mesh_axes.vma_axes(names) else _sum_over(names, x)


def _make_linear(forward: Function, backward: Function) -> Callable[[Axes, PyTree], PyTree]:
    """Return the function (axes, x) -> forward(x, axes), whose backward pass returns
    backward(cotangent, axes)."""
    fn = jax.custom_vjp(lambda axes, x: forward(x, axes), nondiff_argnums=(0,))
    fn.defvjp(
        lambda axes, x: (forward(x, axes), None),
        lambda axes, residual, cotangent: (backward(cotangent, axes),),
    )
    return fn


# Each is the transpose of its counterpart.
_copy_to = _make_linear(lambda x, axes: x, lax.psum)
_sum_over = _make_linear(lax.psum, lambda x, axes: x)
