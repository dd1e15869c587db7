"""Errors about leaves: each names the leaf, what came and what is needed."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optfn import checks
from optfn.leaves import tree
from optfn.leaves.types import DType, Leaf, LeafKind, Params, PyTree, Updates


def check_params(name: str, params: Params, real_only: str, what: str = "parameter") -> None:
    """Raise a TypeError that names the leaf unless each can be trained or left untrained.

    Args:
      name: the name of the transformation.
      params: a tree; masked leaves, integers and bools are accepted, and left untrained.
      real_only: the part of the rule that is not defined for complex leaves, "" if there is none.
      what: "gradient" where `params` are gradients, because there are no params.
    """
    for i, x in enumerate(tree.flatten(params)[0]):
        is_complex = tree.is_inexact(x) and jnp.iscomplexobj(x)
        if (tree.is_inexact(x) and not (real_only and is_complex)) or _may_be_untrained(x, what):
            continue
        leaf = f"{what} {tree.paths(params)[i]!r}"
        if is_complex:
            who = name if name == real_only else f"{name}: {real_only}"
            raise TypeError(f"{who} is not defined for complex leaves; {leaf} has dtype {x.dtype}")
        came = f"dtype {x.dtype}" if hasattr(x, "dtype") else checks.shown(x)
        raise TypeError(f"{name}: {leaf} must be a floating-point array; got {came}{_hint(x)}")


def _may_be_untrained(x: Leaf, what: str) -> bool:
    if tree.is_masked(x) or is_float0(x) or isinstance(x, bool | int):
        return True
    is_integer = hasattr(x, "dtype") and (
        jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    )
    return is_integer and (what != "gradient" or is_known_zero(x))


def _hint(x: object) -> str:
    if not callable(x):
        return ""
    return (
        ". A function is no parameter: split the model by params, static = equinox.partition("
        "model, equinox.is_array), and call equinox.combine(params, static) in the loss"
    )


def check_gradients(name: str, updates: Updates, params: Params) -> None:
    """Raise an error that names the leaf unless `updates` are gradients of `params`."""
    tree.check_same_structure(name, "updates", updates, "params", params)
    pairs = zip(tree.flatten(updates)[0], tree.flatten(params)[0], strict=True)
    for i, (g, p) in enumerate(pairs):
        fits = tree.is_masked(g) or is_float0(g) or is_known_zero(g)
        if tree.is_inexact(p):
            fits = tree.is_inexact(g) and jnp.iscomplexobj(g) <= jnp.iscomplexobj(p)
        leaf = "" if fits and not isinstance(g, LeafKind) else tree.paths(updates)[i]
        if isinstance(g, LeafKind):
            g.check(f"{name}: the gradient of {leaf!r}")
        if fits and (not tree.is_inexact(p) or g.shape == jnp.shape(p)):
            continue
        came = _came(g)
        needed = "is masked"
        if not tree.is_masked(p):
            needed = f"has shape {jnp.shape(p)} and dtype {jnp.result_type(p)}"
        hint = ""
        if not (tree.is_masked(p) or tree.is_inexact(p)):
            hint = ": an integer leaf cannot be trained (its gradient may be None or float0)"
        error = ValueError if fits or tree.is_masked(g) or tree.is_masked(p) else TypeError
        raise error(
            f"{name}: the gradient of {tree.paths(updates)[i]!r} is {came}; the parameter "
            f"{needed}{hint}"
        )


def _came(g: Leaf) -> str:
    """Return a gradient's kind, dtype and shape as text; None and numbers have none."""
    if isinstance(g, jax.Array | np.ndarray):
        return f"an array of shape {g.shape} and dtype {g.dtype}"
    if not hasattr(g, "shape"):
        return "None" if g is None else type(g).__name__
    return f"{type(g).__name__} of shape {g.shape} and dtype {g.dtype}"


@contextlib.contextmanager
def naming_integer_leaves(updates: Updates) -> Iterator[None]:
    """Name the integer leaves in the error of an update that computes with float0 gradients.

    Transformations of optfn hold such leaves; others, such as `optax.adam`, may not.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        leaves, names = jax.tree.leaves(updates, is_leaf=tree.is_leaf), tree.paths(updates)
        integers = [names[i] for i, g in enumerate(leaves) if is_float0(g)]
        if not integers or "float0 array" not in str(error):
            raise
        raise TypeError(
            "the optimizer computes with the gradients of the integer leaves "
            f"{tree.listed(integers)}, which are float0: put optax.masked around "
            "it, or leave these leaves out of params"
        ) from error


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
        if _shape(g) != _shape(p):
            raise ValueError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} has shape {_shape(g)}; "
                f"in {what} it is {_shape(p)}"
                + (": made for other params" if "state" in what else "")
            )
        if _is_complex(g) and not _is_complex(p):
            raise TypeError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} is complex; in {what} the "
                f"dtype is {_dtype(p)}"
            )


def _shape(x: Leaf) -> tuple[int, ...]:
    return x.shape if isinstance(x, LeafKind) else jnp.shape(x)


def _dtype(x: Leaf) -> DType:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _is_complex(x: Leaf) -> bool:
    return bool(jnp.issubdtype(_dtype(x), jnp.complexfloating))


def is_float0(x: Leaf) -> bool:
    """Tell whether `x` is a float0, JAX's gradient of an integer."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def no_gradient(shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of integers of this shape as JAX gives it, a float0."""
    return np.zeros(shape, jax.dtypes.float0)


def is_known_zero(x: Leaf) -> bool:
    """Tell whether `x` is a NumPy array of integer zeros, as from `numerics.integer_zeros`."""
    return (
        isinstance(x, np.ndarray)
        and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_)
        and not x.any()
    )
