"""Errors about leaves and states: each names the value that was passed and the one needed."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks, numerics, tree
from optfn.core.types import Leaf, LeafKind, OptState, Params, PyTree, Updates


def check_params(name: str, params: Params, real_only: str, kind: str = "parameter") -> None:
    """Raise a TypeError that names the first leaf that can be neither trained nor frozen, such as a
    string or a tensor of torch; or the first complex leaf, if `real_only` names a link.

    Args:
      name: the name of the transformation.
      params: a tree; masked leaves, integers and bools are accepted, and frozen.
      real_only: the name of its link that is not defined for complex leaves, "" if all are.
      kind: "gradient" where `params` are gradients, because there are no params.
    """
    for place, x in tree.items(params):
        if _is_of_another_library(x):
            raise TypeError(
                f"{name}: {kind} {place!r} must be an array of JAX or NumPy; got a "
                f"{type(x).__name__} of {checks.package(type(x).__module__)}. Convert it, as in "
                "np.asarray(x.detach())"
            )
        is_complex = tree.is_inexact(x) and jnp.iscomplexobj(x)
        if (tree.is_inexact(x) and not (real_only and is_complex)) or _may_be_untrained(x, kind):
            continue
        leaf = f"{kind} {place!r}"
        if is_complex:
            who = name if name == real_only else f"{name}: {real_only}"
            raise TypeError(f"{who} is not defined for complex leaves; {leaf} has dtype {x.dtype}")
        came = f"dtype {x.dtype}" if tree.is_array(x) else checks.show(x)
        raise TypeError(
            f"{name}: {leaf} must be a floating-point array; got {came}{_split_hint(x)}"
        )


def _is_of_another_library(x: object) -> bool:
    """Tell whether `x` is an array of another library than JAX and NumPy, such as torch."""
    # ml_dtypes has bfloat16 and float8, also for arrays of NumPy.
    packages = ("numpy", "jax", "ml_dtypes")
    return tree.is_array(x) and checks.package(type(x.dtype).__module__) not in packages


def _may_be_untrained(x: Leaf, kind: str) -> bool:
    """Tell whether a leaf may be frozen, as a masked one, a float0, an integer, a bool or an array
    of these may, which as a gradient must be zeros."""
    if tree.is_masked(x) or tree.is_float0(x) or isinstance(x, bool | int):
        return True
    is_integer = tree.is_array(x) and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_)
    return is_integer and (kind != "gradient" or numerics.is_known_zero(x))


def _split_hint(x: object) -> str:
    """Return the advice to split a model for a leaf that is a function or text, and "" for an
    array."""
    if not (callable(x) or isinstance(x, str)):
        return ""
    # The leaves of an equinox module are its functions and names too, unless it is split.
    noun = "text" if isinstance(x, str) else "function"
    return (
        f". A {noun} is not a parameter. Split the model, params, static = eqx.partition(model, "
        "eqx.is_inexact_array), and call eqx.combine(params, static) in the loss"
    )


def check_gradients(name: str, updates: Updates, params: Params) -> None:
    """Raise a ValueError or a TypeError that names the leaf unless `updates` are gradients of
    `params`."""
    tree.check_same_structure(name, "updates", updates, "params", params)
    for place, g, p in tree.items(updates, params):
        if isinstance(g, LeafKind):
            g.check(f"{name}: the gradient of {place!r}")
        # For an integer leaf: no gradient, JAX's float0, or the zeros that `frozen_update` gives.
        fits = tree.is_masked(g) or tree.is_float0(g) or numerics.is_known_zero(g)
        if tree.is_inexact(p):
            fits = tree.is_inexact(g) and jnp.iscomplexobj(g) <= jnp.iscomplexobj(p)
        if fits and (not tree.is_inexact(p) or g.shape == jnp.shape(p)):
            continue
        needed = "is masked"
        if not tree.is_masked(p):
            needed = f"has shape {jnp.shape(p)} and dtype {jnp.result_type(p)}"
            if not tree.is_inexact(p):
                needed += ": an integer leaf cannot be trained (its gradient may be None or float0)"
        # A gradient of the right kind in a wrong place or shape is a ValueError, and one of a wrong
        # kind a TypeError.
        error = ValueError if fits or tree.is_masked(g) or tree.is_masked(p) else TypeError
        raise error(f"{name}: the gradient of {place!r} is {_kind_of(g)}; the parameter {needed}")


def _kind_of(g: Leaf) -> str:
    """Return a gradient's kind, dtype and shape as text, or the kind alone for None and numbers."""
    if not tree.is_array(g):
        return "None" if g is None else type(g).__name__
    kind = "an array" if isinstance(g, jax.Array | np.ndarray) else type(g).__name__
    return f"{kind} of shape {g.shape} and dtype {g.dtype}"


@contextlib.contextmanager
def name_integer_leaves(updates: Updates) -> Iterator[None]:
    """Raise the error of an update that computes with float0 gradients with the names of the
    integer leaves, and pass every further error on.

    Transformations of optfn freeze integer leaves; transformations of optax may not.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        # JAX's message has the dtype, but names no leaf.
        integers = [str(place) for place, g in tree.items(updates) if tree.is_float0(g)]
        if not integers or "float0 array" not in str(error):
            raise
        raise TypeError(
            "the optimizer computes with the gradients of the integer leaves "
            f"{tree.list_names(integers)}, which are float0. Wrap it in optax.masked, or leave "
            "these leaves out of params"
        ) from error


def check_state(name: str, state: OptState, kind: type) -> None:
    """Raise a TypeError unless `state` is of the type that the transformation's init returns,
    or derived from it."""
    if not isinstance(state, kind):
        raise _state_error(name, f"a {kind.__name__}", state)


def check_state_types(name: str, state: OptState, expected: OptState) -> None:
    """Raise a TypeError unless the links of `state` have exactly the types that `expected` has,
    where all empty states count as one type."""
    if type(expected) is not tuple:
        # Exactly this type: a type derived from it keeps different arrays.
        fits = type(state) is type(expected) or (is_empty(expected) and is_empty(state))
        if hasattr(expected, "_fields") and not fits:
            raise _state_error(name, f"a {type(expected).__name__}", state)
        return
    check_length(name, state, len(expected))
    for link, expected_link in zip(state, expected, strict=True):
        check_state_types(name, link, expected_link)


def is_empty(state: OptState) -> bool:
    """Tell whether a state is None, () or an EmptyState, as users of optax pass for no state."""
    return state is None or (isinstance(state, tuple) and not state)


def check_length(name: str, state: OptState, length: int) -> None:
    """Raise a TypeError unless `state` is a tuple of the states of `length` transformations."""
    if not isinstance(state, tuple | list) or len(state) != length:
        raise _state_error(name, f"a tuple of {length}", state)


def _state_error(name: str, expected: str, state: OptState) -> TypeError:
    """Return the error that a state has another type than `expected`, with the type that came."""
    kind, package = type(state).__name__, checks.package(type(state).__module__)
    came = kind if package == "optfn" else f"{kind} of {package}"
    came = f"a {kind} of {len(state)}" if type(state) in (tuple, list, dict) else came
    return TypeError(
        f"{name}: the state must be {expected}, which its init returns; got {came}, which was "
        "made by another optimizer"
    )


def shape_error(
    i: int, updates: Updates, accumulators: Sequence[Leaf], expected: Sequence[tuple[int, ...]]
) -> ValueError:
    """Return the error that accumulators of leaf i lack the expected shapes, because it was frozen
    or the state is of different params."""
    g, came = tree.leaves(updates)[i], [x.shape if tree.is_array(x) else None for x in accumulators]
    shape = next(a for a, b in zip(came, expected, strict=True) if a != b)
    if shape is None:
        return ValueError(
            f"update: the state has no array for leaf {tree.paths(updates)[i]!r}, which was frozen "
            "when the state was made. Make a new one by init, and load the old one into it by "
            "load_state_dict(..., strict=False)"
        )
    return ValueError(
        f"update: the state of leaf {tree.paths(updates)[i]!r} has shape {shape}, but its gradient "
        f"has {g.shape}: the state was made for other params"
    )


def update_error(name: str, new: Updates, u: Leaf, g: Leaf) -> ValueError:
    """Return the error that a rule's update `u`, a leaf of `new`, does not have the shape of g."""
    path = next((str(place) for place, x in tree.items(new) if x is u), "")
    came = f"shape {u.shape}" if tree.is_array(u) else f"type {type(u).__name__}"
    return ValueError(
        f"{name}: its rule returned an update of {came} for leaf {path!r}, whose gradient has "
        f"shape {g.shape}; an update has the shape of its gradient"
    )


def result_error(result: object, accumulators: Sequence[Leaf]) -> ValueError:
    """Return the error of a rule on arrays that did not return an update and all accumulators."""
    values = result if isinstance(result, tuple | list) else (result,)
    came = [x.shape if tree.is_array(x) else type(x).__name__ for x in values]
    shapes = [x.shape for x in accumulators]
    needed = f"{len(shapes)} accumulators, of shapes {shapes}"
    if len(shapes) == 1:
        needed = f"1 accumulator, of shape {shapes[0]}"
    arrays = "1 array" if len(came) == 1 else f"{len(came)} arrays"
    return ValueError(f"a rule must return 1 update and {needed}; it returned {arrays}: {came}")


def name_rule(error: Exception, rule: Any, i: int, updates: Updates, p: Any) -> Exception:
    """Add the names of a rule on arrays and of leaf i as a note to an error that the rule raised,
    and return the error.

    The name of a lambda has the function around it. `p` is empty if the rule got no parameter.
    """
    name, hint = getattr(rule, "__qualname__", rule), "" if p else ", which got no parameter"
    if hint and "required positional argument" in str(error):
        hint += ". If it reads params, declare core.transform(needs_params=True), and pass them"
    error.add_note(f"in the rule {name} of leaf {tree.paths(updates)[i]!r}{hint}")
    return error


def structure_error(updates: Updates, states: Sequence[PyTree], error: ValueError) -> ValueError:
    """Raise a ValueError for the first state tree whose structure differs from `updates`, or return
    `error`, which JAX raised, if none differs."""
    for state in states:
        tree.check_same_structure("update", "the state", state, "updates", updates)
    return error


def check_entering(
    name: str, real_only: str, updates: Updates, params: Params | None, kind: str = "gradient"
) -> None:
    """Raise a ValueError or a TypeError that names the first leaf that may not cross the boundary,
    and do nothing if all may."""
    updates = tree.map_arrays(tree.as_array, updates)
    if params is None:
        check_params(name, updates, real_only, kind)
        return
    params = tree.map_arrays(tree.as_array, params)
    check_params(name, params, real_only)
    check_gradients(name, updates, params)


def check_shapes(name: str, updates: Updates, source: str, like: PyTree) -> None:
    """Raise a ValueError unless `updates` has the structure of `like`, named `source`, and its
    shapes where neither is masked, and a TypeError for a complex gradient of a real leaf.

    A masked leaf fits any leaf: whether a leaf may have no gradient is decided by the optimizer
    that a wrapper calls.
    """
    tree.check_same_structure(name, "updates", updates, source, like)
    for place, g, p in tree.items(updates, like):
        if not (tree.is_inexact(g) and tree.is_inexact(p)):
            continue
        if tree.shape_of(g) != tree.shape_of(p):
            raise ValueError(
                f"{name}: the gradient of {place!r} has shape {tree.shape_of(g)}; "
                f"in {source} it is {tree.shape_of(p)}"
                + (": made for other params" if "state" in source else "")
            )
        if jnp.iscomplexobj(g) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"{name}: the gradient of {place!r} is complex; "
                f"in {source} the dtype is {jnp.result_type(p)}"
            )
