"""Errors about leaves: each names the leaf, what came and what is needed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optfn.leaves import tree
from optfn.leaves.types import Leaf, LeafKind, Params, PyTree, Updates


def check_untrained(name: str, what: str, of: Params, i: int, x: Leaf, real_only: str) -> None:
    """Raise a TypeError unless leaf number i, which the rule does not see, may be left untrained.

    Args:
      name: the name of the transformation.
      what: "parameter", or "gradient" where there are no params.
      of: the tree that contains the leaf.
      i: the number of the leaf.
      x: the leaf; a masked leaf, an integer or a bool is accepted.
      real_only: the part of the rule that is not defined for complex leaves, "" if there is none.
    """
    if tree.is_masked(x) or is_float0(x):
        return
    leaf = f"{what} {tree.paths(of)[i]!r}"
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        hint = ""
        if callable(x):
            hint = (
                ". A function is no parameter: split the model by params, static = "
                "equinox.partition(model, equinox.is_array), and call equinox.combine(params, "
                "static) in the loss"
            )
        came = f"{x!r} of type {type(x).__name__}"
        raise TypeError(f"{name}: {leaf} must be an array; got {came}{hint}")
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and real_only:
        who = name if name == real_only else f"{name}: {real_only}"
        raise TypeError(f"{who} is not defined for complex leaves; {leaf} has dtype {x.dtype}")
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
        raise TypeError(f"{name}: {leaf} must be numeric; got dtype {x.dtype}")
    if what == "gradient" and not is_known_zero(x):
        raise TypeError(f"{name}: {leaf} must be floating point; got {x.dtype}")


def check_gradient(name: str, updates: Updates, i: int, g: Leaf, p: Leaf, trained: bool) -> None:
    """Raise an error that names leaf number i unless g is a gradient of p."""
    leaf = f"{name}: the gradient of {tree.paths(updates)[i]!r}"
    came = "None" if g is None else f"{type(g).__name__} {getattr(g, 'dtype', '')}".strip()
    if not trained:
        if tree.is_masked(g) or is_float0(g) or is_known_zero(g):
            return
        if tree.is_masked(p):
            raise ValueError(f"{leaf} is {came}, but that leaf of params is masked")
        raise TypeError(
            f"{leaf} is {came}, but the parameter has dtype {p.dtype}: an integer leaf cannot be "
            "trained (its gradient may be None or float0)"
        )
    if tree.is_masked(g):
        raise ValueError(
            f"{leaf} is {came}, but the parameter is a {p.dtype} array of shape {p.shape}"
        )
    if isinstance(g, LeafKind):
        g.check(leaf)
    if not hasattr(g, "dtype") or not jnp.issubdtype(g.dtype, jnp.inexact):
        raise TypeError(f"{leaf} is {came}; it must be a floating-point array of shape {p.shape}")
    if jnp.issubdtype(g.dtype, jnp.complexfloating) and not jnp.iscomplexobj(p):
        raise TypeError(f"{leaf} is {came}, complex, but the parameter has dtype {p.dtype}")
    if g.shape != p.shape:
        raise ValueError(f"{leaf} is {came} of shape {g.shape}; the parameter has shape {p.shape}")


def state_error(
    accumulators: list[Leaf], shapes: Sequence[tuple[int, ...]], updates: Updates, i: int
) -> ValueError:
    """Return the error for leaf number i, whose accumulators should have these shapes."""
    pairs = zip(accumulators, shapes, strict=True)
    came = [getattr(x, "shape", None) for x, shape in pairs if getattr(x, "shape", None) != shape]
    return ValueError(
        f"update: the state of leaf {tree.paths(updates)[i]!r} has shape {came[0]}, its gradient "
        f"{tree.flatten(updates)[0][i].shape}: it was made for other params"
    )


def check_shapes(name: str, updates: Updates, what: str, like: PyTree) -> None:
    """Raise an error unless `updates` has the structure and the shapes of `like`, named `what`.

    A masked leaf fits any leaf: whether a leaf may have no gradient is decided by the optimizer
    that a wrapper calls.
    """
    tree.check_same_structure(name, "updates", updates, what, like)
    pairs = zip(tree.flatten(updates)[0], tree.flatten(like)[0], strict=True)
    for i, (g, p) in enumerate(pairs):
        if not (tree.is_inexact(g) and tree.is_inexact(p)):
            continue
        if jnp.shape(g) != jnp.shape(p) if not _is_kind(g, p) else g.shape != p.shape:
            raise ValueError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} has shape {g.shape}; "
                f"in {what} it is {p.shape}"
                + (": made for other params" if "state" in what else "")
            )
        if _is_complex(g) and not _is_complex(p):
            raise TypeError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} is complex; in {what} the "
                f"dtype is {p.dtype}"
            )


def _is_kind(*leaves: Leaf) -> bool:
    return any(isinstance(x, LeafKind) for x in leaves)


def _is_complex(x: Leaf) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x.dtype), jnp.complexfloating))


def is_float0(x: Leaf) -> bool:
    """Tell whether `x` is a float0, JAX's gradient of an integer."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def is_known_zero(x: Leaf) -> bool:
    """Tell whether `x` is a NumPy array of integer zeros, as from `numerics.integer_zeros`."""
    return (
        isinstance(x, np.ndarray)
        and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_)
        and not x.any()
    )
