"""The protocol: a transformation of gradients is a rule inside a boundary.

A transformation is an `optax.GradientTransformationExtraArgs`, a pair (init, update). A `Rule` is
such a pair that may assume checked inputs: gradients match params leaf by leaf, in float32 or
wider; everything else is masked. The boundary around the rule checks and casts gradients, and
gives updates the dtypes of the params. The rules of an optimizer have no boundary between them, so
a gradient passes one boundary per optimizer; in a `chain` of your own, each link keeps its own:

    @transform(complex_leaves=True)
    def scale(factor):
        def update(updates, state, params, **extra):
            return leafwise.apply(lambda g: factor * g, updates), state

        return Rule(lambda params: optax.EmptyState(), update)
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from optfn.core import boundary, checks, errors, leafwise
from optfn.core.checks import T
from optfn.core.printing import call_text
from optfn.core.types import OptState, Params, Stepped, Updates

P = ParamSpec("P")
Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]


class Rule(NamedTuple):
    """Init and update on checked trees: gradients match params, in float32 or wider.

    init: params -> state.
    update: (updates, state, params, **extra) -> (updates, state).
    needs_params: whether update reads params; without them it is an error.
    real_only: the name of the rule that is not defined for complex leaves, "" if there is none.
    reads_state: whether update reads its state, see `transform`.
    links: the rules of a chain, () if it is none.
    decays: whether there is a weight decay, which the extra argument `decay_factors` scales by
      path.
    name: the name of the factory that made it.
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    needs_params: bool = False
    real_only: str = ""
    reads_state: bool = True
    links: "tuple[Rule, ...]" = ()
    decays: bool = False
    name: str = ""


rule = Rule  # the name by which docs/own-transform.md makes one


class Transform(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows the call that made it, and the rule inside its boundary.

    JAX and equinox flatten a transformation that is passed as an argument, and rebuild it. If it is
    rebuilt from the same two functions, it is the same object.

    rule: the rule inside the boundary; None for a wrapper of other transformations.
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

    def __new__(cls, init: Any, update: Any, **fields: Any) -> "Transform":
        """Return the transformation of two functions, with some of the fields above."""
        tx = super().__new__(cls, init, update)
        vars(tx).update(fields)
        return tx

    def __repr__(self) -> str:
        return call_text("Transform", tuple(self), {}) if self.origin else call_text(*self.call)

    @property
    def inner(self) -> list[optax.GradientTransformation]:
        """The transformations among the arguments of the call."""
        arguments = [*self.call[1], *self.call[2].values()]
        return [x for x in arguments if isinstance(x, optax.GradientTransformation)]


def _rebuilt(origin: Transform, functions: Iterable[Any]) -> Transform:
    """Return `origin` if these are its functions, or else a transformation without its rule."""
    init, update = functions
    if init is origin.init and update is origin.update:
        return origin
    return Transform(init, update, origin=origin)


jax.tree_util.register_pytree_node(Transform, lambda tx: (tuple(tx), tx.origin or tx), _rebuilt)


def called(factory: Callable[P, T], args: Any, kwargs: Any) -> T:
    """Return factory(*args, **kwargs); an error of the call lists the arguments."""
    try:
        return factory(*args, **kwargs)
    except TypeError as error:
        checks.check_call(factory, args, kwargs, error)
        raise


def described(tx: optax.GradientTransformation, **fields: Any) -> Transform:
    """Return `tx` with other fields."""
    known = vars(tx) if isinstance(tx, Transform) else {}
    return Transform(*optax.with_extra_args_support(tx), **{**known, **fields})


def named(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory, so that the `repr` of its transformations is the call that made them."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        made = called(factory, args, kwargs)
        return described(made, call=(factory.__name__, args, kwargs), module=factory.__module__)

    return make


class Factory(Protocol[P]):
    """A factory of gradient transformations; `rule` has the same arguments, and makes the rule."""

    rule: Callable[P, Rule]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        """Return the transformation."""


def transform(
    *, needs_params: bool = False, complex_leaves: bool = False, reads_state: bool = True
) -> Callable[[Callable[P, Rule]], Factory[P]]:
    """Decorate a factory of rules so that it returns transformations, each with a boundary.

    Args:
      needs_params: whether the rule reads params, so that an update without them is an error.
      complex_leaves: whether the rule is defined for complex leaves; otherwise they are an error.
        If only some argument excludes them, the rule says so in its `real_only`.
      reads_state: whether update reads its state. If not, or if the state is empty, update also
        takes None, () and `optax.EmptyState()` as the state.
    """

    def decorate(factory: Callable[P, Rule]) -> Factory[P]:
        name = factory.__name__

        def rule(*args: P.args, **kwargs: P.kwargs) -> Rule:
            made = called(factory, args, kwargs)
            real_only = made.real_only if complex_leaves else name
            return Rule(*made[:2], needs_params, real_only, reads_state, (), made.decays, name)

        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
            call = (name, args, kwargs)
            return with_boundary(name, rule(*args, **kwargs), call=call, module=factory.__module__)

        factory_of_both = cast("Factory[P]", make)
        factory_of_both.rule = rule
        return factory_of_both

    return decorate


@named
def chain(*links: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply gradient transformations one after the other, like `optax.chain`, but with a repr.

    Each link has its boundary; the rules of an optimizer have one boundary together.

    Args:
      *links: transformations of optfn or optax, at least one.

    Raises:
      TypeError: a link is not a gradient transformation.
      ValueError: there are no links.
    """
    if not links:
        raise ValueError("chain needs at least one gradient transformation")
    links = tuple(check_transform(f"chain: part {i}", link) for i, link in enumerate(links))
    with_boundaries = chained([Rule(*link) for link in links])
    return Transform(*with_boundaries[:2], rule=chained(list(map(rule_of, links))))


def chained(links: Sequence[Rule]) -> Rule:
    """Return the rule that applies `links` one after the other."""

    def init(params: Params) -> OptState:
        return tuple(link.init(params) for link in links)

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        if type(state) is not tuple or len(state) != len(links):
            errors.check_length("chain", state, len(links))
        new = []
        for link, old in zip(links, state, strict=True):
            updates, after = link.update(updates, old, params, **extra)
            new.append(after)
        return updates, tuple(new)

    needs_params = any(link.needs_params for link in links)
    real_only = next((link.real_only for link in links if link.real_only), "")
    decays = any(link.decays for link in links)
    return Rule(init, update, needs_params, real_only, True, tuple(links), decays)


def check_params_given(name: str, params: Params | None) -> None:
    """Raise a ValueError if a transformation that needs params is called without."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")


def rule_of(tx: optax.GradientTransformation | Rule) -> Rule:
    """Return the rule of `tx` without its boundary, or the pair itself if it has none."""
    if isinstance(tx, Rule):
        return tx
    known = tx.rule if isinstance(tx, Transform) else None
    return known or Rule(*optax.with_extra_args_support(tx))


def links_of(made: list[Rule] | optax.GradientTransformation) -> Sequence[Rule]:
    """Return the rules of a chain, given as such or as a transformation."""
    return made if isinstance(made, list) else rule_of(made).links or [rule_of(made)]


def with_boundary(name: str, rule: Rule, **fields: Any) -> Transform:
    """Return the gradient transformation of a rule.

    Leaves that are not floating point are masked from the rule: they have no state, and their
    update is zero. Updates have the dtype of the parameter, or without params that of the gradient.

    Args:
      name: the name of the transformation in errors.
      rule: init and update on checked trees.
      **fields: those of the transformation.

    Raises, at init and update, with the name of the leaf:
      ValueError: structures or shapes differ, or params are missing.
      TypeError: leaves are not numbers, gradients are of the wrong kind, or the state is that of
        another rule.
    """

    def init(params: Params) -> OptState:
        return rule.init(boundary.mask_untrained(name, rule.real_only, params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        if rule.needs_params:
            check_params_given(name, params)
        if _kinds(state) != expected_kinds():
            _check_kinds(name, rule, state)
        grads, wide, leave = boundary.enter(name, rule.real_only, updates, params)
        new, state = rule.update(grads, state, wide, **extra)
        return leave(new), state

    expected_kinds = functools.cache(lambda: _kinds(_state_of_no_params(rule)))
    return Transform(init, update, rule=rule, **fields)


def _kinds(state: OptState) -> Any:
    """Return the types of the states of the links of a chain, or that of the state."""
    return [_kinds(x) for x in state] if type(state) is tuple else type(state)


def _state_of_no_params(rule: Rule) -> OptState:
    """Return a state whose types every state of this rule has; None if the rule needs leaves.

    It is the state of an empty tree.
    """
    try:
        return jax.eval_shape(rule.init, ())
    except Exception:  # the rule needs leaves; then its state is not checked
        return None


def _check_kinds(name: str, rule: Rule, state: OptState) -> None:
    """Raise a TypeError if the state is that of another rule."""
    if rule.reads_state or not errors.is_empty(state):
        errors.check_state_types(name, state, _state_of_no_params(rule))


_EMPTY = optax.EmptyState()


def stateless(update: Callable[[Updates, Params], Updates], state: OptState = _EMPTY) -> Rule:
    """Return a rule from (updates, params) -> updates; its state, without arrays, is `state`."""

    def update_rule(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
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

    def update(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
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
    return tx if isinstance(tx, Transform) else _accepted(argument, tx, factory)


def _accepted(argument: str, tx: Any, factory: str) -> optax.GradientTransformationExtraArgs:
    from optfn.interop import third_party

    tx = third_party.accepted(argument, tx, factory)
    if not isinstance(tx, Transform):
        tx = third_party.with_errors(argument, tx)
    return optax.with_extra_args_support(tx)
