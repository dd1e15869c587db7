"""The protocol: a transformation of gradients is a rule behind an edge.

A transformation is an `optax.GradientTransformationExtraArgs`, a pair (init, update). A `Rule` is
such a pair that may assume checked inputs: gradients match params leaf by leaf, in float32 or
wider; other leaves are masked. The edge around the rule checks and casts gradients, and gives
updates the dtypes of the params. Rules in a chain have no edge between them, so a gradient passes
one edge per optimizer:

    @transform(complex_leaves=True)
    def scale(factor):
        def update(updates, state, params, **extra):
            return leafwise.apply(lambda g: factor * g, updates), state

        return Rule(lambda params: optax.EmptyState(), update)
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import checks
from optfn.leaves import leafwise, mismatch, numerics, third_party, tree
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates
from optfn.leaves.updates import apply_updates as apply_updates

P = ParamSpec("P")
Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]


class Rule(NamedTuple):
    """Init and update on checked trees: gradients match params, in float32 or wider.

    init: params -> state.
    update: (updates, state, params, **extra) -> (updates, state).
    needs_params: whether update reads params; without them it is an error.
    real_only: the part of the rule that is not defined for complex leaves, "" if there is none.
    reads_state: whether update reads its state, see `transform`.
    links: the rules of a chain.
    decays: whether there is a weight decay, which the extra argument `decay_factors` scales by
      path.
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    needs_params: bool = False
    real_only: str = ""
    reads_state: bool = True
    links: "tuple[Rule, ...]" = ()
    decays: bool = False


rule = Rule  # the name by which docs/own-transform.md makes one


class Transform(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows the call that made it, and the rule behind its edge.

    JAX and equinox flatten a transformation that is passed as an argument, and rebuild it. If it is
    rebuilt from the same two functions, it is the same object.

    rule: the rule behind the edge; None for a wrapper of other transformations.
    param_attrs: the attributes that an optimizer gives to leaves, by pattern.
    call: the factory's name, its positional and its keyword arguments; `repr` shows it.
    module: the module of the factory.
    origin: the transformation that JAX has flattened, if its functions are replaced.
    """

    rule: Rule | None = None
    param_attrs: Any = None
    call: Call = ("Transform", (), {})
    module: str = ""
    origin: "Transform | None" = None

    def __new__(
        cls,
        init: Callable[..., OptState],
        update: Callable[..., tuple[Updates, OptState]],
        *,
        rule: Rule | None = None,
        param_attrs: Any = None,
        call: Call = call,
    ) -> "Transform":
        """Return the transformation of two functions."""
        tx = super().__new__(cls, init, update)
        tx.rule, tx.param_attrs, tx.call = rule, param_attrs, call
        return tx

    def __repr__(self) -> str:
        return call_text("Transform", tuple(self), {}) if self.origin else call_text(*self.call)

    @property
    def parts(self) -> list[optax.GradientTransformation]:
        """The transformations among the arguments of the call."""
        arguments = [*self.call[1], *self.call[2].values()]
        return [x for x in arguments if isinstance(x, optax.GradientTransformation)]


def _rebuilt(origin: Transform, functions: Iterable[Any]) -> Transform:
    """Return `origin` if these are its functions, or else a transformation without its rule."""
    init, update = functions
    if init is origin.init and update is origin.update:
        return origin
    tx = Transform(init, update)
    tx.origin = origin
    return tx


jax.tree_util.register_pytree_node(Transform, lambda tx: (tuple(tx), tx.origin or tx), _rebuilt)


def call_text(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a call as it might be written: "adam(0.001, eps_hat=False)"."""

    def text(x: Any) -> str:
        if callable(x) and hasattr(x, "__qualname__"):
            return str(x.__qualname__)
        is_tracer = isinstance(x, jax.Array) and checks.is_traced(x)
        return f"<traced {x.aval.str_short()}>" if is_tracer else repr(x)

    return (
        f"{name}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs.items())])})"
    )


def named(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory, so that the `repr` of its transformations is the call that made them."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        with checks.naming_arguments(factory, args, kwargs):
            made = factory(*args, **kwargs)
        known = made if isinstance(made, Transform) else Transform(*made)
        functions, call = optax.with_extra_args_support(made), (factory.__name__, args, kwargs)
        tx = Transform(*functions, rule=known.rule, param_attrs=known.param_attrs, call=call)
        tx.module = factory.__module__
        return tx

    return make


def transform(
    *, needs_params: bool = False, complex_leaves: bool = False, reads_state: bool = True
) -> Callable[[Callable[P, Rule]], Callable[P, optax.GradientTransformationExtraArgs]]:
    """Decorate a factory of rules so that it returns gradient transformations, with an edge each.

    Args:
      needs_params: whether the rule reads params, so that an update without them is an error.
      complex_leaves: whether the rule is defined for complex leaves; otherwise they are an error.
        If only some argument excludes them, the rule says so in its `real_only`.
      reads_state: whether update reads its state. If not, or if the state is empty, update also
        takes None, () and `optax.EmptyState()` as the state.
    """

    def decorate(factory: Callable[P, Rule]) -> Callable[P, optax.GradientTransformationExtraArgs]:
        @named
        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
            made, name = factory(*args, **kwargs), factory.__name__
            real_only = made.real_only if complex_leaves else name
            given = Rule(*made[:2], needs_params, real_only, reads_state, decays=made.decays)
            return behind_edge(name, given)

        return make

    return decorate


@named
def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply gradient transformations one after the other, like `optax.chain`, but with a repr.

    Args:
      *parts: transformations of optfn or optax, at least one.

    Raises:
      TypeError: a part is not a gradient transformation.
      ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("chain needs at least one gradient transformation")
    parts = tuple(check_transform(f"chain: part {i}", part) for i, part in enumerate(parts))
    with_edges = chained([Rule(*part) for part in parts])
    links = [rule_of(part) for part in parts]
    return Transform(*with_edges[:2], rule=chained(links)._replace(links=tuple(links)))


def chained(links: Sequence[Rule]) -> Rule:
    """Return the rule that applies `links` one after the other."""

    def init(params: Params) -> OptState:
        return tuple(link.init(params) for link in links)

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        mismatch.check_length("chain", state, len(links))
        new = []
        for link, old in zip(links, state, strict=True):
            updates, after = link.update(updates, old, params, **extra)
            new.append(after)
        return updates, tuple(new)

    needs_params = any(link.needs_params for link in links)
    real_only = next((link.real_only for link in links if link.real_only), "")
    decays = any(link.decays for link in links)
    return Rule(init, update, needs_params, real_only, decays=decays)


def check_params_given(name: str, params: Params | None) -> None:
    """Raise a ValueError if a transformation that needs params is called without."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")


def rule_of(tx: optax.GradientTransformation) -> Rule:
    """Return the rule behind the edge of `tx`, or its own init and update if it has none."""
    known = tx.rule if isinstance(tx, Transform) else None
    return known or Rule(*optax.with_extra_args_support(tx))


def behind_edge(name: str, rule: Rule) -> Transform:
    """Return the gradient transformation of a rule.

    Leaves that are not floating point are masked from the rule: they have no state, and their
    update is zero. Updates have the dtype of the parameter, or without params that of the gradient.

    Args:
      name: the name of the transformation in errors.
      rule: init and update on checked trees.

    Raises, at init and update, with the name of the leaf:
      ValueError: structures or shapes differ, or params are missing.
      TypeError: leaves are not numbers, gradients are of the wrong kind, or the state is that of
        another rule.
    """

    def init(params: Params) -> OptState:
        params = _as_arrays(params)
        mismatch.check_params(name, params, rule.real_only)
        return rule.init(leafwise.inexact(params))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        if rule.needs_params:
            check_params_given(name, params)
        if rule.reads_state or not mismatch.is_empty(state):
            mismatch.check_state_types(name, state, expected_state())
        updates = _as_arrays(updates)
        if params is None:
            mismatch.check_params(name, updates, rule.real_only, "gradient")
            new, state = rule.update(_widened(updates, updates), state, None, **extra)
            return _restored(new, updates, updates), state
        params = _as_arrays(params)
        mismatch.check_params(name, params, rule.real_only)
        mismatch.check_gradients(name, updates, params)
        clean = _widened(updates, params), state, _widened(params, params)
        new, state = rule.update(*clean, **extra)
        return _restored(new, updates, params), state

    expected_state = functools.cache(functools.partial(_state_of_no_params, rule))
    return Transform(init, update, rule=rule)


def _state_of_no_params(rule: Rule) -> OptState:
    """Return the state for an empty tree, which has the types of any state; None if it fails."""
    try:
        return jax.eval_shape(rule.init, ())
    except Exception:  # a user's rule may need leaves; then its state is not checked
        return None


def _as_arrays(values: PyTree) -> PyTree:
    """Return a tree with numbers and floating-point NumPy arrays converted to JAX arrays."""

    def convert(x: Leaf) -> Leaf:
        is_array = isinstance(x, np.ndarray) and tree.is_inexact(x)
        return jnp.asarray(x) if is_array or isinstance(x, int | float | complex) else x

    return tree.map_arrays(convert, values)


def _widened(values: PyTree, like: PyTree) -> PyTree:
    """Return a tree in float32 or wider, masked where `like` is not floating point."""

    def widen(x: Leaf, p: Leaf) -> Leaf:
        wide = tree.is_inexact(p)
        return leafwise.cast(x, numerics.accumulator_dtype(p.dtype)) if wide else optax.MaskedNode()

    return tree.map(widen, values, like)


def _restored(new: Updates, updates: Updates, like: PyTree) -> Updates:
    """Return updates in the dtypes of `like`, and with those of leaves masked from the rule."""

    def restore(g: Leaf, u: Leaf, p: Leaf) -> Leaf:
        return leafwise.frozen_update(g, p) if tree.is_masked(u) else leafwise.cast(u, p.dtype)

    return tree.map(restore, updates, new, like)


_EMPTY = optax.EmptyState()


def stateless(update: Callable[[Updates, Params], Updates], state: OptState = _EMPTY) -> Rule:
    """Return a rule from (updates, params) -> updates; its state, without arrays, is `state`."""

    def update_rule(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del extra
        return update(updates, params), state

    return Rule(lambda params: state, update_rule)


def accumulating(
    leaf_rule: Callable[..., Any],
    state_type: Any,
    *,
    fill: Any = 0.0,
    rows: str = "dense",
    real: Sequence[str] = (),
) -> Rule:
    """Return a rule that keeps one accumulator per field of `state_type`.

    Args:
      leaf_rule: (g, *accumulators) -> (update, *accumulators), on arrays.
      state_type: a NamedTuple class; its fields, in order, are the accumulators.
      fill: the initial value of the accumulators.
      rows: how row-sparse gradients are treated; see `leafwise.apply`.
      real: the fields that stay real for a complex leaf, such as means of |g|².
    """

    def init(params: Params) -> OptState:
        return state_type(
            *(leafwise.zeros_like(params, fill=fill, real=k in real) for k in state_type._fields)
        )

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        del params, extra
        updates, *accumulators = leafwise.apply(leaf_rule, updates, *state, rows=rows)
        return updates, state_type(*accumulators)

    return Rule(init, update)


def first_step() -> jax.Array:
    """Return the step counter of a fresh state, int32 zero."""
    return jnp.zeros((), jnp.int32)


def next_step(step: jax.Array) -> jax.Array:
    """Return step + 1, which stays at the largest int32 instead of wrapping round."""
    return optax.safe_increment(step)


def check_transform(
    argument: str, tx: Any, factory: str = ""
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` if it is a gradient transformation; raise an error that names `argument`.

    An object that can make one, such as `optax.MultiSteps`, is converted.

    Args:
      argument: the name of the argument.
      tx: its value.
      factory: the factory that the error suggests for a number.
    """
    if isinstance(tx, optax.MultiSteps):
        # MultiSteps.gradient_transformation() drops extra arguments.
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if hasattr(tx, "gradient_transformation"):
        tx = tx.gradient_transformation()
    if factory and checks.is_host_number(tx):
        raise TypeError(
            f"{argument} must be a gradient transformation, not the number {tx!r}. "
            f"Did you mean {factory}({tx!r})?"
        )
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a gradient transformation, such as optfn.adam(1e-3), "
            "optfn.clip_by_norm(1.0) or optfn.l2_decay(1e-4); "
            f"got {checks.shown(tx)}"
        )
    if not isinstance(tx, Transform):
        tx = third_party.with_errors(argument, tx)
    return optax.with_extra_args_support(tx)
