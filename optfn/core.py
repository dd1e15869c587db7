"""The protocol: what a gradient transformation does with leaves before and after its rule.

A transformation is an `optax.GradientTransformationExtraArgs`, a pair (init, update). Inside it is
a rule: such a pair again, which may take for granted what users need not provide. Gradients and
parameters match leaf by leaf, in one dtype of float32 or wider; what there is nothing to update in
is masked. The edge around the rule checks what comes, casts it, and restores the updates. Rules
chain without an edge between them, so that a gradient meets one edge per optimizer:

    @transform(complex_leaves=True)
    def scale(factor):
        def update(updates, state, params, **extra):
            return leafwise.apply(lambda g: factor * g, updates), state

        return rule(lambda params: optax.EmptyState(), update)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import checks
from optfn.leaves import leafwise, mismatch, numerics, tree
from optfn.leaves.types import Leaf, LeafKind, OptState, Params, PyTree, Updates

P = ParamSpec("P")
# init and update on clean trees; called so where it stands without an edge.
Rule: TypeAlias = optax.GradientTransformationExtraArgs
rule = optax.GradientTransformationExtraArgs


class Transform(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows the call that made it, and what stands behind its edge.

    call: the factory's name, its positional and its keyword arguments; `repr` shows it.
    rule: the rule behind the edge, None for what wraps other transformations.
    needs_params: whether the rule reads params.
    real_only: the part of the rule that is not defined for complex leaves, "" if there is none.
    param_attrs: the attributes that an optimizer gives to leaves, by pattern.
    """

    call: tuple[str, tuple[Any, ...], dict[str, Any]] = ("Transform", (), {})
    rule: Rule | None = None
    needs_params: bool = False
    real_only: str = ""
    param_attrs: Any = None

    def __repr__(self) -> str:
        return call_text(*self.call)

    @property
    def parts(self) -> list[optax.GradientTransformation]:
        """The transformations among the arguments of the call."""
        arguments = [*self.call[1], *self.call[2].values()]
        return [x for x in arguments if isinstance(x, optax.GradientTransformation)]

    @property
    def links(self) -> list[optax.GradientTransformation]:
        """The parts of a chain; the transformation alone where it is none."""
        return self.parts if self.call[0] == "chain" else [self]


def call_text(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a call as it might be written: "adam(0.001, eps_hat=False)"."""

    def text(x: Any) -> str:
        if callable(x) and hasattr(x, "__qualname__"):
            return str(x.__qualname__)
        return f"<traced {x.aval.str_short()}>" if isinstance(x, jax.core.Tracer) else repr(x)

    return (
        f"{name}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs.items())])})"
    )


def named(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory so that what it makes is a `Transform` that shows its call."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        made = factory(*args, **kwargs)
        tx = Transform(*optax.with_extra_args_support(made))
        tx.__dict__.update(getattr(made, "__dict__", {}))
        tx.call = (factory.__name__, args, kwargs)
        return tx

    return make


def transform(
    *, needs_params: bool = False, complex_leaves: bool = False
) -> Callable[[Callable[P, Rule]], Callable[P, optax.GradientTransformationExtraArgs]]:
    """Decorate a factory of rules: it then makes gradient transformations, by an edge around each.

    Args:
      needs_params: whether the rule reads params; without them it is an error.
      complex_leaves: whether the rule is defined for complex leaves; else they are an error.
    """

    def decorate(factory: Callable[P, Rule]) -> Callable[P, optax.GradientTransformationExtraArgs]:
        @named
        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
            made = factory(*args, **kwargs)
            name = factory.__name__
            return behind_edge(name, made, needs_params, "" if complex_leaves else name)

        return make

    return decorate


@named
def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply gradient transformations one after the other: `optax.chain`, with a repr.

    Args:
      *parts: transformations of optfn or optax, at least one.

    Raises:
      TypeError: a part is not a gradient transformation.
      ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("chain needs at least one gradient transformation")
    parts = tuple(check_transform(f"chain: part {i}", part) for i, part in enumerate(parts))
    tx = Transform(*_checked_chain(parts))
    tx.rule = _checked_chain([rule_of(part) for part in parts])
    tx.needs_params = any(getattr(part, "needs_params", False) for part in parts)
    tx.real_only = next(filter(None, (getattr(part, "real_only", "") for part in parts)), "")
    return tx


def _checked_chain(parts: Sequence[optax.GradientTransformation]) -> Rule:
    """Return `optax.chain` of `parts`, with an error for the state of another optimizer."""
    chained = optax.with_extra_args_support(optax.chain(*parts))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        check_length("chain", state, len(parts))
        return chained.update(updates, state, params, **extra)

    return rule(chained.init, update)


def check_state(name: str, state: OptState, kind: type) -> None:
    """Raise a TypeError unless `state` is of the type that the transformation's init returns."""
    if not isinstance(state, kind):
        raise _of_another(name, f"a {kind.__name__}", state)


def check_state_types(name: str, state: OptState, expected: OptState) -> None:
    """Raise a TypeError unless the links of `state` are of the types that `expected` has."""
    if type(expected) is not tuple:
        if hasattr(expected, "_fields"):
            check_state(name, state, type(expected))
        return
    check_length(name, state, len(expected))
    for part, expected_part in zip(state, expected, strict=True):
        check_state_types(name, part, expected_part)


def check_length(name: str, state: OptState, length: int) -> None:
    """Raise a TypeError unless `state` is a tuple of the states of so many links."""
    if not isinstance(state, tuple | list) or len(state) != length:
        raise _of_another(name, f"a tuple of {length}", state)


def _of_another(name: str, expected: str, state: OptState) -> TypeError:
    kind = type(state).__name__
    came = f"a {kind} of {len(state)}" if type(state) in (tuple, list, dict) else kind
    return TypeError(
        f"{name}: the state must be {expected}, as its init returns; got {came}: it was made by "
        "another optimizer"
    )


def rule_of(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the rule behind the edge of `tx`, `tx` itself where it has none."""
    return getattr(tx, "rule", None) or tx


def behind_edge(
    name: str, rule: Rule, needs_params: bool = False, real_only: str = ""
) -> Transform:
    """Return the gradient transformation of a rule.

    Leaves that are not floating point are masked to the rule: they get no state, and the update
    zero. Updates come back in the dtype of the parameter, or of the gradient without params.

    Args:
      name: how the transformation is called in errors.
      rule: init and update on clean trees.
      needs_params: whether the rule reads params; without them it is an error.
      real_only: the part of the rule that is not defined for complex leaves; they are an error.

    Raises, at init and update, naming the leaf:
      ValueError: structures or shapes that differ, params that are missing.
      TypeError: leaves that are not numbers, gradients of the wrong kind, another rule's state.
    """

    def init(params: Params) -> OptState:
        params = _as_arrays(params)
        mismatch.check_params(name, params, real_only)
        return rule.init(leafwise.inexact(params))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        if params is None and needs_params:
            raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
        check_state_types(name, state, expected_state())
        updates = _as_arrays(updates)
        if params is None:
            mismatch.check_params(name, updates, real_only, "gradient")
            new, state = rule.update(_widened(updates, updates), state, None, **extra)
            return _restored(new, updates, updates), state
        params = _as_arrays(params)
        mismatch.check_params(name, params, real_only)
        mismatch.check_gradients(name, updates, params)
        clean = _widened(updates, params), state, _widened(params, params)
        new, state = rule.update(*clean, **extra)
        return _restored(new, updates, params), state

    expected_state = functools.cache(functools.partial(_state_of_no_params, rule))
    tx = Transform(init, update)
    tx.rule, tx.needs_params, tx.real_only = rule, needs_params, real_only
    return tx


def _state_of_no_params(rule: Rule) -> OptState:
    """Return the state for an empty tree, whose types are those for any; None if there is none."""
    try:
        return jax.eval_shape(rule.init, ())
    except Exception:  # a rule of the user's that needs leaves: its state is not checked
        return None


def _as_arrays(values: PyTree) -> PyTree:
    """Return a tree with JAX arrays in the place of numbers and floating-point NumPy arrays."""

    def convert(x: Leaf) -> Leaf:
        is_array = isinstance(x, np.ndarray) and tree.is_inexact(x)
        return jnp.asarray(x) if is_array or isinstance(x, int | float | complex) else x

    return tree.map_arrays(convert, values)


def _widened(values: PyTree, like: PyTree) -> PyTree:
    """Return a tree in float32 or wider, masked where `like` is not floating point."""
    leaves, structure = tree.flatten(values)
    return structure.unflatten(
        [
            leafwise.cast(x, numerics.accumulator_dtype(p.dtype))
            if tree.is_inexact(p)
            else optax.MaskedNode()
            for x, p in zip(leaves, tree.flatten(like)[0], strict=True)
        ]
    )


def _restored(new: Updates, updates: Updates, like: PyTree) -> Updates:
    """Return updates in the dtypes of `like`, and those of the leaves that the rule did not see."""
    leaves, structure = tree.flatten(updates)
    columns = tree.flatten(new)[0], leaves, tree.flatten(like)[0]
    return structure.unflatten(
        [
            frozen_update(g, p) if tree.is_masked(u) else leafwise.cast(u, p.dtype)
            for u, g, p in zip(*columns, strict=True)
        ]
    )


def frozen_update(g: Leaf, p: Leaf) -> Leaf:
    """Return the update of a leaf that no rule sees: −0.0, an integer zero, or what is masked.

    −0.0 is the only number that leaves p + u = p bit for bit.
    """
    p = np.asarray(p, jnp.result_type(p)) if isinstance(p, int | float | complex) else p
    if hasattr(p, "dtype") and not mismatch.is_float0(p):
        if jnp.issubdtype(p.dtype, jnp.inexact):
            return jnp.full(p.shape, -0.0, p.dtype)
        return numerics.integer_zeros(jnp.shape(p), p.dtype)
    # Without params the dtype is unknown; int8 is the one that promotes no integer.
    return numerics.integer_zeros(g.shape, np.int8) if mismatch.is_float0(g) else g


_EMPTY = optax.EmptyState()


def stateless(update: Callable[[Updates, Params], Updates], state: OptState = _EMPTY) -> Rule:
    """Return a rule from (updates, params) -> updates; its state, without arrays, is `state`."""

    def update_rule(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del extra
        return update(updates, params), state

    return rule(lambda params: state, update_rule)


def accumulating(
    leaf_rule: Callable[..., Any], state_type: Any, *, fill: Any = 0.0, rows: str = "dense"
) -> Rule:
    """Return a rule that keeps one accumulator per field of `state_type`.

    Args:
      leaf_rule: (g, *accumulators) -> (update, *accumulators), on arrays.
      state_type: a NamedTuple class; its fields, in order, are the accumulators.
      fill: what the accumulators start with.
      rows: what becomes of row-sparse gradients; see `leafwise.apply`.
    """

    def init(params: Params) -> OptState:
        return state_type(*(leafwise.zeros_like(params, fill=fill) for _ in state_type._fields))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        updates, *accumulators = leafwise.apply(leaf_rule, updates, *state, rows=rows)
        return updates, state_type(*accumulators)

    return rule(init, update)


def first_step() -> jax.Array:
    """Return the step counter of a fresh state, int32 zero."""
    return jnp.zeros((), jnp.int32)


def next_step(step: jax.Array) -> jax.Array:
    """Return step + 1, which stays at the largest int32 instead of wrapping round."""
    return optax.safe_increment(step)


def check_transform(argument: str, tx: Any) -> optax.GradientTransformation:
    """Return `tx` if it is a gradient transformation; raise an error that names `argument`.

    What makes one on request, such as `optax.MultiSteps`, is asked for it.
    """
    if isinstance(tx, optax.MultiSteps):
        return rule(tx.init, tx.update)  # what it makes by itself drops extra arguments
    if hasattr(tx, "gradient_transformation"):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a gradient transformation, such as optfn.adam(1e-3), "
            "optfn.clip_by_norm(1.0) or optfn.l2_decay(1e-4); "
            f"got {checks.shown(tx)}"
        )
    return tx


def apply_updates(params: Params, updates: Updates) -> Params:
    """Return params + updates, each leaf in the dtype of the parameter.

    The sum is taken in the wider of the two dtypes and rounded once. Masked leaves stay masked. A
    row-sparse update is scattered into the parameter: in place, where that is donated. A float0 as
    the update of an integer changes nothing.

    Args:
      params: a tree of arrays.
      updates: the tree that an update gave: same structure and shapes.

    Raises:
      ValueError: structures or shapes differ, or a parameter has no update.
      TypeError: the update of a real parameter is complex.
    """
    tree.check_same_structure("apply_updates", "updates", updates, "params", params)
    parameters, structure = tree.flatten(params)

    def shape_of(x: Leaf) -> tuple[int, ...]:
        return x.shape if isinstance(x, LeafKind) else jnp.shape(x)

    def add(i: int, p: Leaf, u: Leaf) -> Leaf:
        if tree.is_masked(p) or mismatch.is_float0(u):
            return p
        p = jnp.asarray(p)
        if tree.is_masked(u) or shape_of(u) != p.shape:
            came = f"has shape {shape_of(u)}" if not tree.is_masked(u) else "is missing"
            raise ValueError(
                f"apply_updates: the update of leaf {tree.paths(params)[i]!r} {came}; "
                f"the parameter has shape {p.shape}"
            )
        if isinstance(u, LeafKind):
            u.check(f"apply_updates: the update of {tree.paths(params)[i]!r}")
            return u.add_to(p)
        u = jnp.asarray(u)
        if jnp.iscomplexobj(u) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"apply_updates: the update of leaf {tree.paths(params)[i]!r} is complex; "
                f"the parameter has dtype {p.dtype}"
            )
        wide = p.dtype
        are_inexact = tree.is_inexact(p) and tree.is_inexact(u)
        if are_inexact and jnp.finfo(u.dtype).bits > jnp.finfo(wide).bits:
            wide = u.dtype
        total = leafwise.cast(p, wide) + leafwise.cast(u, wide)
        return leafwise.cast(total, p.dtype)

    pairs = zip(parameters, tree.flatten(updates)[0], strict=True)
    return structure.unflatten([add(i, p, u) for i, (p, u) in enumerate(pairs)])
