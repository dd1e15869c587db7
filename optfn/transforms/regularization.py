"""Weight decay: penalties added to the gradient, and decay decoupled from it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.leaves import patterns, tensors
from optfn.leaves.patterns import Pattern
from optfn.transforms.scheduled import evaluate_schedule

_DENSE = "a regularizer changes all rows, so a row-sparse gradient becomes dense"


def l1_penalty(g: jax.Array, p: jax.Array, *, coeff: Scalar) -> jax.Array:
    """Return g + coeff·sign(p), with sign(0) = 0."""
    return g + numerics.scalar(coeff, g) * jnp.sign(p)


def l2_penalty(g: jax.Array, p: jax.Array, *, coeff: Scalar) -> jax.Array:
    """Return g + coeff·p."""
    return g + numerics.scalar(coeff, g) * p


def decay_of_leaves(
    exclude: Pattern | None, coeff: Scalar, updates: Updates, factors: Mapping[str, float] | None
) -> leafwise.PerLeaf:
    """Return the decay of each leaf as a PerLeaf, which is `coeff` times the leaf's factor, by
    default 1, or 0 if `exclude` selects the leaf.

    Args:
      exclude: the leaves whose decay is 0.
      coeff: the decay of the remaining leaves.
      updates: a tree with their paths.
      factors: by path, factors of `coeff`, which an optimizer with `param_attrs` passes.
    """
    excluded, factors = patterns.match_names(exclude, updates, "exclude"), factors or {}
    # One product per distinct factor, not one per leaf, in the compiled step.
    coeffs = {factor: coeff * factor for factor in set(factors.values())} | {1.0: coeff}

    def of_leaf(path: str) -> Scalar:
        return 0.0 if path in excluded else coeffs[factors.get(path, 1.0)]

    return tensors.scalars_of_leaves(of_leaf, updates)


@traits(link="penalty")
class L1DecayState(NamedTuple):
    """State of `l1_decay`: empty."""


@traits(link="penalty")
class L2DecayState(NamedTuple):
    """State of `l2_decay`: empty."""


@traits(link="decay")
class AddDecayedWeightsByNumberState(NamedTuple):
    """State of `add_decayed_weights` with a number: empty."""


@traits(link="pass")
class ZeroDecayState(NamedTuple):
    """State of a penalty or a decay whose coefficient is the number 0: empty."""


@traits(link="decay")
class AddDecayedWeightsState(NamedTuple):
    """State of `add_decayed_weights` with a schedule: the step, 4 bytes."""

    step: jax.Array


def check_weight_decay(argument: str, weight_decay: Number | Schedule) -> Scalar | Schedule:
    """Return `weight_decay` if it is a number ≥ 0, a real 0-d array or a schedule, else raise a
    TypeError or a ValueError."""
    return weight_decay if callable(weight_decay) else checks.nonnegative(argument, weight_decay)


def is_zero(coeff: Scalar | Schedule) -> bool:
    """Tell whether a coefficient is the Python or NumPy number 0, and not an array or a
    schedule."""
    return checks.is_host_number(coeff) and coeff == 0


def weight_decay_at(argument: str, coeff: Scalar | Schedule, step: jax.Array) -> Scalar:
    """Return the coefficient of a step: the value of a schedule, and anything else unchanged."""
    if callable(coeff):
        return evaluate_schedule(argument, coeff, step, numerics.scalar_dtype())
    return coeff


def decay_rule(
    argument: str,
    coeff: Scalar | Schedule,
    decay: Callable[[Updates, Params, Scalar, Mapping[str, float] | None], Updates],
    states: tuple[OptState, Callable[[jax.Array], OptState]],
    exclude: Pattern | None,
) -> core.Unchecked:
    """Return an unchecked transform that decays updates by `decay` with the coefficient of the
    step, and counts steps only if `coeff` is a schedule.

    Args:
      argument: the name of the coefficient in errors.
      coeff: a number or a schedule.
      decay: the rule.
      states: the state of a number, which is empty, and the function from the step to the state of
        a schedule.
      exclude: a pattern of leaves, which `init` checks.
    """
    of_number, of_schedule = states

    def init(params: Params) -> OptState:
        patterns.match_names(exclude, params, "exclude")
        return of_schedule(core.first_step()) if callable(coeff) else of_number

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        factors = extra.get("decay_factors")
        # Only a schedule needs the step: the state of a number is empty.
        if not callable(coeff):
            return decay(updates, params, coeff, factors), of_number
        value = weight_decay_at(argument, coeff, state.step)
        updates = decay(updates, params, value, factors)
        return updates, of_schedule(core.next_step(state.step))

    return core.Unchecked(init, update, decays=True)


@core.transform(needs_params=True)
def l1_decay(coeff: Number) -> core.Unchecked:
    """Add the gradient of coeff·‖p‖₁, so that g = g + coeff·sign(p) with sign(0) = 0, and make
    row-sparse gradients dense, with a warning.

    Args:
      coeff: the coefficient, ≥ 0.

    No state. Needs params; real leaves.

    Source: fluid.regularizer.L1Decay.
    """
    return _make_penalty_rule(l1_penalty, coeff, L1DecayState())


@core.transform(needs_params=True, complex_leaves=True)
def l2_decay(coeff: Number) -> core.Unchecked:
    """Add the gradient of coeff/2·‖p‖₂², so that g = g + coeff·p, and make row-sparse gradients
    dense, with a warning.

    Args:
      coeff: the coefficient, ≥ 0.

    No state. Needs params; real and complex leaves.

    Source: fluid.regularizer.L2Decay.
    """
    return _make_penalty_rule(l2_penalty, coeff, L2DecayState())


def _make_penalty_rule(
    penalty: Callable[..., jax.Array], coeff: Number, state: OptState
) -> core.Unchecked:
    """Return an unchecked transform that adds a penalty's gradient by the function `penalty`, with
    `state`, or with a ZeroDecayState if `coeff` is the number 0."""
    coeff = checks.nonnegative("coeff", coeff)
    return core.stateless(
        lambda updates, params: leafwise.apply(
            penalty, leafwise.densify_rows(updates, _DENSE), params=params, coeff=coeff
        ),
        ZeroDecayState() if is_zero(coeff) else state,
    )


@core.transform(needs_params=True, complex_leaves=True)
def add_decayed_weights(
    weight_decay: Number | Schedule, *, exclude: Pattern | None = None
) -> core.Unchecked:
    """Add decoupled weight decay to a direction, u = u + weight_decay·p, except to excluded leaves
    and to the rows that a row-sparse direction lacks.

    Unlike `l2_decay`, put it after the moments, so that they do not scale the decay. Directions are
    row-sparse in Adam's lazy mode.

    Args:
      weight_decay: the coefficient, a number ≥ 0 or a schedule of the 0-based step.
      exclude: the leaves without decay: a regular expression that matches their whole path, or a
        function path -> bool.

    `update` takes `decay_factors`, factors of weight_decay by path, which an optimizer with
    `param_attrs` passes.

    No state; with a schedule the step, 4 bytes. Needs params; real and complex leaves.

    Source: Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2.
    """
    wd = check_weight_decay("weight_decay", weight_decay)
    exclude = patterns.check_pattern("exclude", exclude)
    # With 0 the link changes nothing, and may stand anywhere in a chain (`optfn.train.order`).
    state = ZeroDecayState() if is_zero(wd) else AddDecayedWeightsByNumberState()

    def update(
        updates: Updates, params: Params, coeff: Scalar, factors: Mapping[str, float] | None
    ) -> Updates:
        coeffs = decay_of_leaves(exclude, coeff, updates, factors)
        return leafwise.apply(l2_penalty, updates, params=params, rows="touched", coeff=coeffs)

    return decay_rule("weight_decay", wd, update, (state, AddDecayedWeightsState), exclude)
