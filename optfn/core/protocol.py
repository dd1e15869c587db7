"""The protocol: a gradient transformation is an unchecked pair of functions inside a boundary.

A transformation is an `optax.GradientTransformationExtraArgs`, a pair (init, update). An
`Unchecked` is such a pair that checks nothing, because the boundary around it does: gradients match
params leaf by leaf, in float32 or wider, and leaves that are not trained are masked. The boundary
casts updates to the dtypes of the params. The links of an optimizer are `Unchecked`, so a gradient
crosses one boundary per optimizer; in a `chain` that you write, each link keeps its boundary:

    @transform(complex_leaves=True)
    def scale(factor):
        def update(updates, state, params, **extra):
            return leafwise.apply(lambda g: factor * g, updates), state

        return Unchecked(lambda params: optax.EmptyState(), update)
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from optfn.core import boundary, checks, errors, leafwise, third_party
from optfn.core.checks import T
from optfn.core.printing import call_text
from optfn.core.types import OptState, Params, Stepped, Updates

P = ParamSpec("P")
Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]


class Unchecked(NamedTuple):
    """Init and update without checks: their inputs are trees that have passed a boundary.

    init: params -> state.
    update: (updates, state, params, **extra) -> (updates, state).
    needs_params: whether update reads params; a call without them is then an error.
    real_only: the name of the transformation that is not defined for complex leaves, "" if all are.
    reads_state: whether update reads its state, see `transform`.
    links: the parts of a chain, () if the pair is no chain.
    decays: whether a weight decay is in it, which the extra argument `decay_factors` scales by
      path.
    name: the name of its factory, "" for a pair without one; the tables of docs/ show it.
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    needs_params: bool = False
    real_only: str = ""
    reads_state: bool = True
    links: "tuple[Unchecked, ...]" = ()
    decays: bool = False
    name: str = ""


def rule(
    init: Callable[[Params], OptState],
    update: Callable[..., tuple[Updates, OptState]],
    needs_params: bool = False,
    real_only: str = "",
    reads_state: bool = True,
) -> Unchecked:
    """Return a rule of two functions, around which `core.transform` puts its checks and casts.

    Both get trees that have passed them: float32 or wider arrays, and masked leaves in the place of
    frozen ones. An array is a leaf, the layers of a `Stacked`, or a buffer of packed params: a step
    with `packed=True` refuses an update that takes a norm, a mean or a product of it by itself.

    Args:
      init: params -> state; `leafwise.zeros_like(params)` makes an accumulator.
      update: (updates, state, params, **extra) -> (updates, state). It ends with `**extra`, which
        has the loss, for instance; `leafwise.apply` maps a function of arrays over the leaves.
      needs_params: whether update reads params; a call without them is then an error.
      real_only: the name of the transformation, if it is not defined for complex leaves; "" if it
        is.
      reads_state: whether update reads its state, see `transform`.

    `docs/own-transform.md` has Adan as an example.
    """
    return Unchecked(init, update, needs_params, real_only, reads_state)


class Transform(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows the call that made it, and the pair in its boundary.

    JAX and equinox flatten a transformation that is passed as an argument, and rebuild it. If it is
    rebuilt from the same two functions, it is the same object.

    unchecked: the pair inside the boundary; None for a wrapper.
    param_attrs: the attributes that an optimizer gives to leaves, by pattern.
    call: the factory's name, its positional and its keyword arguments; `repr` shows it.
    module: the module of the factory.
    origin: the transformation that JAX has flattened, if its functions are replaced.
    """

    unchecked: Unchecked | None = None
    param_attrs: Any = None
    call: Call = ("Transform", (), {})
    module: str = ""
    origin: "Transform | None" = None

    def __new__(cls, init: Any, update: Any, **fields: Any) -> "Transform":
        """Return the transformation of two functions, with some of the fields above."""
        tx = super().__new__(cls, init, third_party.watch_rows(update))
        vars(tx).update(fields)
        return tx

    def __repr__(self) -> str:
        return call_text("Transform", tuple(self), {}) if self.origin else call_text(*self.call)

    @property
    def inner(self) -> list[optax.GradientTransformation]:
        """The transformations among the arguments of the call."""
        arguments = [*self.call[1], *self.call[2].values()]
        return [x for x in arguments if isinstance(x, optax.GradientTransformation)]


def _rebuild(origin: Transform, functions: Iterable[Any]) -> Transform:
    """Return `origin` if these are its functions, else a transformation of these functions
    alone."""
    init, update = functions
    if init is origin.init and update is origin.update:
        return origin
    return Transform(init, update, origin=origin)


jax.tree_util.register_pytree_node(Transform, lambda tx: (tuple(tx), tx.origin or tx), _rebuild)


def call_factory(factory: Callable[P, T], args: Any, kwargs: Any) -> T:
    """Return factory(*args, **kwargs), or if the arguments do not fit, raise a TypeError that also
    lists the right ones."""
    try:
        return factory(*args, **kwargs)
    except TypeError as error:
        checks.check_call(factory, args, kwargs, error)
        raise


def describe(tx: optax.GradientTransformation, **fields: Any) -> Transform:
    """Return `tx` as a `Transform` with these fields replaced."""
    known = vars(tx) if isinstance(tx, Transform) else {}
    return Transform(*optax.with_extra_args_support(tx), **{**known, **fields})


def returns_transformation(make: Callable[P, T]) -> Callable[P, T]:
    """Change the annotations of a wrapped factory, so that `help` says it returns one
    transformation of optax, and return the factory."""
    one, signature = optax.GradientTransformationExtraArgs, inspect.signature(make)
    make.__annotations__ = make.__annotations__ | {"return": one}
    cast("Any", make).__signature__ = signature.replace(return_annotation=one)
    return make


def record_call(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory so that the `repr` of its transformations is the call that made them."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        made = call_factory(factory, args, kwargs)
        return describe(made, call=(factory.__name__, args, kwargs), module=factory.__module__)

    return returns_transformation(make)


class Factory(Protocol[P]):
    """A factory of gradient transformations, whose `unchecked` makes the pair without the
    boundary."""

    unchecked: Callable[P, Unchecked]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        """Return the transformation."""


def transform(
    *, needs_params: bool = False, complex_leaves: bool = False, reads_state: bool = True
) -> Callable[[Callable[P, Unchecked]], Factory[P]]:
    """Decorate a factory of `Unchecked` so that it returns transformations, with a boundary.

    Args:
      needs_params: whether update reads params, so that a call without them is an error.
      complex_leaves: whether it is defined for complex leaves; otherwise they are an error. If only
        some argument excludes them, the factory sets `real_only`.
      reads_state: whether update reads its state. If not, or if the state is empty, update also
        takes None, () and `optax.EmptyState()` as the state.
    """

    def decorate(factory: Callable[P, Unchecked]) -> Factory[P]:
        name = factory.__name__

        def make_unchecked(*args: P.args, **kwargs: P.kwargs) -> Unchecked:
            made = call_factory(factory, args, kwargs)
            real_only = made.real_only if complex_leaves else name
            # The name of this factory, also if it returns the pair of another one.
            made = made._replace(real_only=real_only, links=(), name=name)
            return made._replace(needs_params=needs_params, reads_state=reads_state)

        @functools.wraps(factory)
        def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
            made, call = make_unchecked(*args, **kwargs), (name, args, kwargs)
            return with_boundary(name, made, call=call, module=factory.__module__)

        cast("Any", make).unchecked = make_unchecked
        return cast("Factory[P]", returns_transformation(make))

    return decorate


@record_call
def chain(*links: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that applies `links` in order, like `optax.chain` but with a repr,
    or raise a ValueError without any.

    Each link keeps its boundary; the links of an optimizer have one boundary together. In
    `optfn.chain` a leaf that a link freezes by `param_attrs` is frozen for all links.

    Args:
      *links: transformations of optfn or optax, at least one.

    Raises:
      TypeError: a link is not a gradient transformation.
      ValueError: there are no links.
    """
    if not links:
        raise ValueError("chain needs at least one gradient transformation")
    links = tuple(check_transform(f"chain: part {i}", link) for i, link in enumerate(links))
    # Twice: with each link's boundary for a call, and without for an optimizer that takes the
    # chain.
    checked = chain_unchecked([Unchecked(*link) for link in links])
    unchecked = chain_unchecked(list(map(strip_boundary, links)))
    return Transform(checked.init, checked.update, unchecked=unchecked)


def chain_unchecked(links: Sequence[Unchecked]) -> Unchecked:
    """Return the pair that applies `links` in order, without a boundary, whose state is the tuple
    of their states."""

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
    return Unchecked(init, update, needs_params, real_only, links=tuple(links), decays=decays)


def check_params_given(name: str, params: Params | None) -> None:
    """Raise a ValueError if a transformation that needs params is called without."""
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")


def strip_boundary(tx: optax.GradientTransformation | Unchecked) -> Unchecked:
    """Return the pair inside the boundary of `tx`, or without a boundary the functions of `tx`."""
    if isinstance(tx, Unchecked):
        return tx
    inside = tx.unchecked if isinstance(tx, Transform) else None
    return inside or Unchecked(*optax.with_extra_args_support(tx))


def links_of(made: list[Unchecked] | optax.GradientTransformation) -> Sequence[Unchecked]:
    """Return the links of a list or of a chain, or a transformation as one link."""
    return made if isinstance(made, list) else strip_boundary(made).links or [strip_boundary(made)]


def with_boundary(name: str, unchecked: Unchecked, **fields: Any) -> Transform:
    """Put a boundary around a pair of functions, which checks and casts gradients and params, and
    refuses the state of another transformation.

    Leaves that are not floating point are masked: they have no state, and their update is zero. An
    update has the dtype of its parameter, or without params the dtype of its gradient.

    Args:
      name: the name of the transformation in errors.
      unchecked: init and update.
      **fields: the fields of the transformation.

    Raises, at init and update, with the name of the leaf:
      ValueError: structures or shapes differ, or params are missing.
      TypeError: leaves are not numbers, gradients are of the wrong kind, or another transformation
        made the state.
    """

    def init(params: Params) -> OptState:
        return unchecked.init(boundary.mask_untrained(name, unchecked.real_only, params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        if unchecked.needs_params:
            check_params_given(name, params)
        # The state of another optimizer often has fitting shapes, and would train silently.
        # An update that reads no state also takes None and ().
        is_other = _kinds(state) != expected_kinds()
        if is_other and (unchecked.reads_state or not errors.is_empty(state)):
            errors.check_state_types(name, state, _state_of_no_params(unchecked))
        grads, wide, leave = boundary.enter(name, unchecked.real_only, updates, params)
        new, state = unchecked.update(grads, state, wide, **extra)
        return leave(new), state

    expected_kinds = functools.cache(lambda: _kinds(_state_of_no_params(unchecked)))
    return Transform(init, update, unchecked=unchecked, **fields)


def _kinds(state: OptState) -> Any:
    """Return the type of a state, or for a chain, whose state is a plain tuple, a list of types."""
    return [_kinds(x) for x in state] if type(state) is tuple else type(state)


def _state_of_no_params(unchecked: Unchecked) -> OptState:
    """Return the state for an empty tree, to compare the types of states with, or None if init
    fails."""
    try:
        return jax.eval_shape(unchecked.init, ())
    except Exception:
        # An init that a user writes may read its leaves, and without any it may raise any error.
        # States of it are not checked then. Those of optfn succeed (test_a_tree_without_leaves).
        return None


_EMPTY = optax.EmptyState()


def stateless(update: Callable[[Updates, Params], Updates], state: OptState = _EMPTY) -> Unchecked:
    """Return a pair from (updates, params) -> updates, whose state is `state`, without arrays, and
    never changes."""

    def update_alone(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
        return update(updates, params), state

    return Unchecked(lambda params: state, update_alone)


def accumulating(
    leaf_rule: Callable[..., Any],
    state_type: Any,
    *,
    fill: Any = 0.0,
    rows: str = "dense",
    real: Sequence[str] = (),
) -> Unchecked:
    """Return a pair that applies an elementwise rule to each leaf, with one accumulator per field
    of `state_type`.

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

    return Unchecked(init, update)


def first_step() -> jax.Array:
    """Return the step counter of a fresh state, int32 zero."""
    return jnp.zeros((), jnp.int32)


def next_step(step: jax.Array) -> jax.Array:
    """Return step + 1, or the step unchanged if it is the largest int32, instead of wrapping round.

    An `init` that a user writes may begin with the number 0 in the place of `first_step()`.
    """
    return optax.safe_increment(step if isinstance(step, jax.Array) else jnp.asarray(step))


def check_transform(
    argument: str, tx: Any, factory: str = ""
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` if it is a gradient transformation, else raise a TypeError that names `argument`.

    An object that can make one, such as `optax.MultiSteps`, is converted.

    Args:
      argument: the name of the argument.
      tx: its value.
      factory: the factory that the error suggests for a number.
    """
    if isinstance(tx, Transform):
        return tx
    made = third_party.convert_transform(argument, tx, factory)
    if not isinstance(made, Transform):
        made = third_party.explain_errors(argument, made)
    return optax.with_extra_args_support(made)
