"""The two functions that a tensor-parallel layer is made of: Megatron's f and g.

A layer whose weights are divided over the devices of an axis begins with `copy_to`, computes its
part, and ends with `sum_over`:

    h = copy_to(x, "model")            # x is the same on all devices
    y = relu(h @ w_in) @ w_out         # columns of w_in, rows of w_out
    return sum_over(y, "model")        # the same on all devices again

Where JAX does not track which arrays vary (`shard_map(check_vma=False)`, pmap), a plain
`jax.lax.psum` has the wrong derivative here: it sums cotangents that are the same on all devices.
"""

import functools

import jax
from jax import lax

from optfn import mesh
from optfn.leaves.types import PyTree
from optfn.mesh import AxisName


def copy_to(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return x, whose cotangents are summed over an axis in the backward pass.

    Args:
      x: arrays that are the same on all devices of the axis.
      axis_name: a mesh axis, or a tuple of axes, bound by shard_map, pmap or vmap.

    Raises:
      ValueError: the axis is not bound.

    Source: Shoeybi et al. 2019, arXiv 1909.08053, §3: f.
    """
    names = mesh.check_names("axis_name", axis_name)
    mesh.check_axis("copy_to", names)
    if mesh.checked_axes(names):
        return jax.tree.map(lambda leaf: mesh.vary(leaf, names), x)
    return _copy_to(names, x)


def sum_over(x: PyTree, axis_name: AxisName) -> PyTree:
    """Return the sum of x over an axis; each device's cotangent is that of the sum.

    Args:
      x: arrays, another part of the sum on each device of the axis.
      axis_name: a mesh axis, or a tuple of axes, bound by shard_map, pmap or vmap.

    Raises:
      ValueError: the axis is not bound.

    Source: Shoeybi et al. 2019, arXiv 1909.08053, §3: g.
    """
    names = mesh.check_names("axis_name", axis_name)
    mesh.check_axis("sum_over", names)
    if mesh.checked_axes(names):
        return lax.psum(x, names)
    return _sum_over(names, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_to(axes: tuple[str, ...], x: PyTree) -> PyTree:
    del axes
    return x


_copy_to.defvjp(
    lambda axes, x: (x, None),
    lambda axes, residual, cotangent: (lax.psum(cotangent, axes),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over(axes: tuple[str, ...], x: PyTree) -> PyTree:
    return lax.psum(x, axes)


_sum_over.defvjp(
    lambda axes, x: (lax.psum(x, axes), None),
    lambda axes, residual, cotangent: (cotangent,),
)
