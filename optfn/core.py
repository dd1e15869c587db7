"""The protocol: what every transform does with leaves before and after its rule.

A transform is an `optax.GradientTransformationExtraArgs`. `transform` makes one from a rule on
trees and gives the rule clean input: gradients and parameters that match leaf by leaf, in float32
or wider; holes where there is nothing to update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import numerics
from optfn.leaves import leafwise, rows, tree
from optfn.leaves.rows import Rows


def transform(
    name: str,
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    *,
    needs_params: bool = False,
    complex_leaves: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return the gradient transformation of a rule.

    The rule sees trees in which every leaf is a real (or complex) array of at least float32, or a
    hole. Leaves that are held (integers) are holes to it: they get no state, and the update zero.
    Updates come back in the dtype of the parameter, or of the gradient where no params are given.

    Args:
      name: how the transform is called in errors.
      init: params -> state.
      update: (updates, state, params, **extra) -> (updates, state).
      needs_params: whether the rule reads params; without them it is an error.
      complex_leaves: whether the rule is defined for complex leaves; else they are an error.

    Raises, at init and update, naming the leaf:
      ValueError: structures or shapes that differ, params that are missing.
      TypeError: leaves that are not numbers, gradients of the wrong kind.
    """

    def init_fn(params: Any) -> Any:
        leaves, structure = tree.flatten(params)
        live = []
        for i, p in enumerate(map(_as_array, leaves)):
            kind = _kind(name, "parameter", p, params, i, complex_leaves)
            live.append(p if kind == "live" else optax.MaskedNode())
        return init(structure.unflatten(live))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None and needs_params:
            raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
        leaves = _align(name, updates, params, complex_leaves)
        clean = leaves.structure.unflatten
        new, state = update(
            clean(leaves.updates), state, None if params is None else clean(leaves.params), **extra
        )
        return leaves.restore(new), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Leaves(NamedTuple):
    """Gradients and parameters leaf by leaf, as a rule sees them, and what a hole gets back."""

    structure: Any
    updates: list[Any]
    params: list[Any]
    dtypes: list[Any]  # of the update that comes back
    held: list[Any]  # the update of a leaf that the rule does not see

    def restore(self, updates: Any) -> Any:
        return self.structure.unflatten(
            [
                held if tree.is_hole(u) else leafwise.cast(u, dtype)
                for u, dtype, held in zip(
                    tree.flatten(updates)[0], self.dtypes, self.held, strict=True
                )
            ]
        )


def _align(name: str, updates: Any, params: Any, complex_leaves: bool) -> _Leaves:
    if params is not None:
        tree.check_same_structure(name, "updates", updates, "params", params)
    gradients, structure = tree.flatten(updates)
    gradients = list(map(_as_array, gradients))
    parameters = [None] * len(gradients)
    if params is not None:
        parameters = list(map(_as_array, tree.flatten(params)[0]))
    out = _Leaves(structure, [], [], [], [])
    for i, (g, p) in enumerate(zip(gradients, parameters, strict=True)):
        if params is None:
            like, live = g, _kind(name, "gradient", g, updates, i, complex_leaves) == "live"
        else:
            like, live = p, _kind(name, "parameter", p, params, i, complex_leaves) == "live"
            _check_gradient(name, g, p, live, updates, i)
        if live:
            dtype = numerics.accumulator_dtype(like.dtype)
            out.updates.append(leafwise.cast(_as_jax(g), dtype))
            out.params.append(p if p is None else leafwise.cast(_as_jax(p), dtype))
            out.dtypes.append(like.dtype)
            out.held.append(None)
        else:
            out.updates.append(optax.MaskedNode())
            out.params.append(optax.MaskedNode())
            out.dtypes.append(None)
            out.held.append(_held_update(g, p))
    return out


def _held_update(g: Any, p: Any) -> Any:
    """Return the update of a leaf that no rule sees: an integer zero, or the hole that came."""
    if not tree.is_hole(p) and hasattr(p, "dtype"):
        return numerics.integer_zeros(jnp.shape(p), p.dtype)
    # Without params the dtype is unknown; int8 is the one that promotes no integer.
    return numerics.integer_zeros(g.shape, np.int8) if _is_float0(g) else g


def _as_array(x: Any) -> Any:
    """Return a Python number as the array that JAX takes it for; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, int | float | complex) else x


def _as_jax(x: Any) -> Any:
    return x if isinstance(x, jax.Array | Rows) else jnp.asarray(x)


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _is_known_zero(x: Any) -> bool:
    """Tell whether `x` is an integer zero as `numerics.integer_zeros` makes it."""
    return (
        isinstance(x, np.ndarray)
        and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_)
        and not x.any()
    )


def _kind(name: str, what: str, x: Any, of: Any, i: int, complex_leaves: bool) -> str:
    """Return "live" for a leaf that a rule updates, "held" for one that it must not see."""
    if tree.is_hole(x) or _is_float0(x):
        return "held"
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(
            f"{name}: {what} {tree.paths(of)[i]!r} must be an array; "
            f"got {x!r} of type {type(x).__name__}"
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not complex_leaves:
        raise TypeError(
            f"{name} is not defined for complex leaves; {what} {tree.paths(of)[i]!r} "
            f"has dtype {x.dtype}"
        )
    if jnp.issubdtype(x.dtype, jnp.inexact):
        if isinstance(x, Rows):
            _check_rows(f"{name}: {what} {tree.paths(of)[i]!r}", x)
        return "live"
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_:
        if what == "gradient" and not _is_known_zero(x):
            raise TypeError(
                f"{name}: gradient {tree.paths(of)[i]!r} must be floating point; got {x.dtype}"
            )
        return "held"
    raise TypeError(f"{name}: {what} {tree.paths(of)[i]!r} has dtype {x.dtype}, not a number")


def _check_gradient(name: str, g: Any, p: Any, live: bool, updates: Any, i: int) -> None:
    """Raise unless `g` may be the gradient of the parameter `p`."""

    def what() -> str:
        came = "None" if g is None else f"{type(g).__name__} {getattr(g, 'dtype', '')}".strip()
        return f"{name}: the gradient of {tree.paths(updates)[i]!r} is {came}"

    if not live:
        if tree.is_hole(g) or _is_float0(g) or _is_known_zero(g):
            return
        if tree.is_hole(p):
            raise ValueError(f"{what()}, but params have no such leaf")
        raise TypeError(
            f"{what()}, but the parameter has dtype {p.dtype}: an integer leaf cannot be trained "
            "(its gradient may be None or float0)"
        )
    if tree.is_hole(g):
        raise ValueError(f"{what()}, but the parameter is a {p.dtype} array of shape {p.shape}")
    if isinstance(g, Rows):
        _check_rows(f"{name}: the gradient of {tree.paths(updates)[i]!r}", g)
    if not hasattr(g, "dtype") or not jnp.issubdtype(g.dtype, jnp.inexact):
        raise TypeError(f"{what()}; it must be a floating-point array of shape {p.shape}")
    if jnp.issubdtype(g.dtype, jnp.complexfloating) and not jnp.iscomplexobj(p):
        raise TypeError(f"{what()}, complex, but the parameter has dtype {p.dtype}")
    if g.shape != p.shape:
        raise ValueError(f"{what()} of shape {g.shape}; the parameter has shape {p.shape}")


def _check_rows(what: str, g: Rows) -> None:
    """Raise unless indices and values are what Rows are made of."""
    if g.indices.dtype != jnp.int32:
        raise TypeError(
            f"{what} has indices of dtype {g.indices.dtype}; they must be int32 (a transform that "
            "scales every array takes no Rows: put optfn.sparse.densify() before it)"
        )
    if g.indices.ndim != 1 or g.values.shape[:1] != g.indices.shape:
        raise ValueError(
            f"{what} has indices of shape {g.indices.shape} and values of shape {g.values.shape}; "
            "they must be (k,) and (k, …)"
        )


def stateless(
    name: str, update: Callable[[Any, Any], Any], **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Return the transform of a rule without state, (updates, params) -> updates."""

    def update_fn(updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        del extra
        return update(updates, params), state

    return transform(name, lambda params: optax.EmptyState(), update_fn, **options)


def accumulating(
    name: str,
    rule: Callable[..., Any],
    state_type: Any,
    *,
    fill: Any = 0.0,
    complex_leaves: bool = False,
    touched: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return the transform of a rule that keeps one accumulator per field of `state_type`.

    Args:
      name: how the transform is called in errors.
      rule: (g, *accumulators) -> (update, *accumulators), on arrays.
      state_type: a NamedTuple class; its fields, in order, are the accumulators.
      fill: what the accumulators start with.
      complex_leaves: whether the rule is defined for complex leaves.
      touched: see `leafwise.apply`.
    """

    def init(params: Any) -> Any:
        return state_type(*(leafwise.zeros_like(params, fill=fill) for _ in state_type._fields))

    def update(updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        del params, extra
        updates, *accumulators = leafwise.apply(rule, updates, *state, touched=touched)
        return updates, state_type(*accumulators)

    return transform(name, init, update, complex_leaves=complex_leaves)


def check_leaves(name: str, updates: Any, what: str, like: Any) -> None:
    """Raise an error unless `updates` has the structure of `like`, and its arrays their shapes.

    A hole fits anything: what wraps an optimizer leaves it to the optimizer whether a leaf may go
    without a gradient.
    """
    tree.check_same_structure(name, "updates", updates, what, like)
    pairs = zip(tree.flatten(updates)[0], tree.flatten(like)[0], strict=True)
    for i, (g, p) in enumerate(pairs):
        if leafwise.is_absent(g) or leafwise.is_absent(p):
            continue
        if _shape(g) != _shape(p):
            raise ValueError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} has shape {_shape(g)}, "
                f"{what} {_shape(p)}" + (": made for other params" if "state" in what else "")
            )
        if _is_complex(g) and not _is_complex(p):
            raise TypeError(
                f"{name}: the gradient of {tree.paths(updates)[i]!r} is complex, {what} {p.dtype}"
            )


def _shape(x: Any) -> tuple[int, ...]:
    return x.shape if isinstance(x, Rows) else jnp.shape(x)


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating) if hasattr(x, "dtype") else False


def check_axis(name: str, axis_name: Any) -> None:
    """Raise a ValueError unless all mesh axes of `axis_name` are bound here."""
    for axis in axis_name if isinstance(axis_name, tuple | list) else (axis_name,):
        try:
            jax.lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"{name}: the axis {axis!r} is not bound; run it inside shard_map, pmap or vmap "
                f"with the axis name {axis!r}, or give make_train_step a mesh with it as data_axis"
            ) from None


def when(due: jax.Array, fn: Callable[..., tuple[Any, ...]], *carry: Any) -> tuple[Any, ...]:
    """Return fn(*carry) where `due`, a bool scalar, is true, else `carry`.

    A loop of one turn or none: what a cond returns is new memory, what a loop carries is updated in
    place, and nothing that comes after is fused into it.
    """
    return jax.lax.while_loop(
        lambda state: state[0], lambda state: (jnp.zeros_like(due), *fn(*state[1:])), (due, *carry)
    )[1:]


def first_step() -> jax.Array:
    """Return the step counter of a fresh state, int32 zero."""
    return jnp.zeros((), jnp.int32)


def next_step(step: jax.Array) -> jax.Array:
    """Return step + 1, which stays at the largest int32 instead of wrapping round."""
    return optax.safe_increment(step)


def apply_updates(params: Any, updates: Any) -> Any:
    """Return params + updates, each leaf in the dtype of the parameter.

    The sum is taken in the wider of the two dtypes and rounded once. Holes stay holes. A row-sparse
    update is scattered into the parameter: in place, where that is donated.

    Args:
      params: a tree of arrays.
      updates: the tree that an update gave: same structure and shapes.

    Raises:
      ValueError: structures or shapes differ, or a parameter has no update.
    """
    tree.check_same_structure("apply_updates", "updates", updates, "params", params)
    parameters, structure = tree.flatten(params)

    def add(i: int, p: Any, u: Any) -> Any:
        if tree.is_hole(p):
            return p
        p = _as_jax(p)
        if tree.is_hole(u) or _shape(u) != p.shape:
            came = f"has shape {_shape(u)}" if not tree.is_hole(u) else "is missing"
            raise ValueError(
                f"apply_updates: the update of leaf {tree.paths(params)[i]!r} {came}; "
                f"the parameter has shape {p.shape}"
            )
        if isinstance(u, Rows):
            _check_rows(f"apply_updates: the update of {tree.paths(params)[i]!r}", u)
            return rows.add(p, u)
        u = jnp.asarray(u)
        wide = p.dtype
        if jnp.issubdtype(p.dtype, jnp.inexact) and jnp.finfo(u.dtype).bits > jnp.finfo(wide).bits:
            wide = u.dtype
        total = leafwise.cast(p, wide) + leafwise.cast(u, wide)
        return leafwise.cast(total, p.dtype)

    pairs = zip(parameters, tree.flatten(updates)[0], strict=True)
    return structure.unflatten([add(i, p, u) for i, (p, u) in enumerate(pairs)])
