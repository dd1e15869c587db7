"""The forms of an update between the links of a chain, and how each kind of link changes them.

A kind of link maps each form that it takes to the form that it gives. The type of a link's state
declares its kind (`Traits.link`); optax's types are in `OPTAX`. The remaining links are unknown:
they take every form, and the form that they give is unknown.
"""

from collections.abc import Mapping
from typing import NamedTuple

import optax
from optax import contrib

SCALED = "a gradient times the loss scale"
GRADIENT = "a gradient"
DIRECTION = "a direction"  # complete but for the learning rate
COMPRESSED = "a direction with momentum"  # of DGC, which keeps the momentum of each worker
STEP = "a step"
AVERAGED = "a step that an average has read"
DIFFERENCE = "the difference between masters and params"
UNKNOWN = ""

UPHILL = GRADIENT, DIRECTION, COMPRESSED

# Marks that links leave in an update until the end of the chain.
ADAPTED = "adapted"  # by moments: it is not linear in the gradient
OPTIMIZED = "optimized"  # the step of a complete optimizer with moments
EXCHANGED = "exchanged"
PAUSED = "paused"  # zero between the steps of an accumulation


class LinkKind(NamedTuple):
    """A kind of link, and how it changes an update.

    takes: from each form that the link takes to the form that it gives.
    why: the warning at a form that the link does not take, with a remedy. {link} and {by} stand for
      the link and for the link before it that gave the form.
    marks: the marks that the link leaves.
    refuses: the marks that the link does not take, each with its warning, as in `why`.
    of_unknown: the form that it gives if the form before it is unknown.
    """

    takes: Mapping[str, str]
    why: Mapping[str, str] = {}
    marks: tuple[str, ...] = ()
    refuses: Mapping[str, str] = {}
    of_unknown: str = UNKNOWN


def _keep_forms(*forms: str) -> dict[str, str]:
    """Return the `takes` of a link that takes these forms, and gives each of them unchanged."""
    return {form: form for form in forms}


# At these forms, all links that do not take them have the same warning.
REFUSED = {
    SCALED: "{link} stands before {by}, so it gets gradients that are multiplied by the scale of "
    "the loss. Put it inside, as in dynamic_loss_scale(chain({link}, …))",
    AVERAGED: "{by} is an average, but {link} follows it and changes the update, so it averages "
    "other params than the next ones. Put the average last: chain(…, {link}, {by})",
    DIFFERENCE: "{link} changes the update of {by}, which keeps masters. Params would move by "
    "another step than their masters, and the masters would pull them back. Put it inside the "
    "masters: master_weights(chain(…, {link})), with the optimizer without multi_precision",
}

OTHERWISE = "{link} cannot take the result of {by} before it, {form}: exchange the two"

TWO_RATES = {
    STEP: "{by} has already applied a learning rate, and {link} applies another. Each turns the "
    "direction round, so that the step goes uphill: keep one"
}
_RATE_LOST = {
    STEP: "{link} divides the step of {by} by its own size, so the learning rate before it has no "
    "effect. Write chain({link}, {by})"
}
_GROWS = {
    STEP: "{link} adds to the step of {by}, which points downhill, so params grow instead of "
    "decaying. Write chain({link}, {by}), or use adamw"
}
_MOMENTUM_TWICE = {COMPRESSED: "{by} has momentum already, and {link} adds a second one: keep one"}
_TWO_RULES = {
    DIRECTION: "{by} and {link} both divide by moments, so that one undoes the other: keep one"
}
_PAUSES = {
    PAUSED: "{by} gives zeros between its steps, which {link} takes for gradients. Put it inside, "
    "as in accumulate(chain(…, {link}), steps)"
}
_EXCHANGED_TWICE = {
    EXCHANGED: "{by} and {link} both exchange gradients between workers. The second one compresses "
    "a mean that all workers have already: keep one"
}
_STEPS_ADD_UP = {
    OPTIMIZED: "{link} adds up the steps of {by}, and no rate scales the sum, so that steps are "
    "1/(1 − momentum) times as long. Put it before the rate, or use the optimizer's own momentum"
}

# Behind masters and averages nothing may change an update, and before the loss scale nothing may
# read one; links of these kinds do neither.
_AFTER_SCALE = *UPHILL, STEP, AVERAGED, DIFFERENCE
KINDS: dict[str, LinkKind] = {
    "pass": LinkKind(_keep_forms(SCALED, *_AFTER_SCALE)),
    "reader": LinkKind(
        _keep_forms(*_AFTER_SCALE),
        {
            SCALED: "{link} is around {by}, so the norms that it reads are multiplied by the "
            "scale: put {link} inside"
        },
    ),
    "guard": LinkKind(
        _keep_forms(*_AFTER_SCALE),
        {
            SCALED: "{link} is around {by}, so the scale never falls when gradients overflow: "
            "leave {link} out, since dynamic_loss_scale skips such steps"
        },
    ),
    "clip": LinkKind(_keep_forms(*UPHILL, STEP)),
    "penalty": LinkKind(_keep_forms(*UPHILL), _GROWS, refuses=_PAUSES),
    "decay": LinkKind(_keep_forms(*UPHILL), _GROWS, refuses=_PAUSES),
    "moments": LinkKind(
        {GRADIENT: DIRECTION},
        _RATE_LOST | _MOMENTUM_TWICE | _TWO_RULES,
        marks=(ADAPTED,),
        refuses=_PAUSES,
        of_unknown=DIRECTION,
    ),
    # A mean of the last updates keeps their form: optax.ema, optax.trace, ASGD.
    "filter": LinkKind(_keep_forms(GRADIENT, DIRECTION, STEP), _MOMENTUM_TWICE),
    "momentum": LinkKind(
        _keep_forms(GRADIENT, DIRECTION, STEP), _MOMENTUM_TWICE, refuses=_PAUSES | _STEPS_ADD_UP
    ),
    "trust_ratio": LinkKind(
        dict.fromkeys([GRADIENT, DIRECTION], DIRECTION), _RATE_LOST | _MOMENTUM_TWICE
    ),
    "rate": LinkKind(dict.fromkeys(UPHILL, STEP), TWO_RATES, of_unknown=STEP),
    "plateau": LinkKind({GRADIENT: DIRECTION} | _keep_forms(DIRECTION, COMPRESSED, STEP)),
    "optimizer": LinkKind(
        {GRADIENT: STEP},
        TWO_RATES | _MOMENTUM_TWICE | _TWO_RULES,
        marks=(ADAPTED,),
        refuses=_PAUSES,
        of_unknown=STEP,
    ),
    "exchange": LinkKind(_keep_forms(*UPHILL, STEP), marks=(EXCHANGED,), refuses=_EXCHANGED_TWICE),
    "dgc": LinkKind(
        {GRADIENT: COMPRESSED},
        _TWO_RULES | _MOMENTUM_TWICE,
        marks=(EXCHANGED, ADAPTED),
        refuses=_EXCHANGED_TWICE,
        of_unknown=COMPRESSED,
    ),
    "average": LinkKind(
        dict.fromkeys([*UPHILL, STEP, AVERAGED], AVERAGED) | _keep_forms(DIFFERENCE),
        of_unknown=AVERAGED,
    ),
    # A bare schedule may be a warm-up or, if it is negative, a rate: its state does not tell.
    "unsure": LinkKind(dict.fromkeys([*UPHILL, STEP], UNKNOWN)),
}

# Wrappers, by their effect on the update before the transformation inside of them, or after it.
WRAPPERS = (
    "wrapper", "reader", "guard", "accumulate", "loss_scale", "masters", "masked", "sometimes",
)  # fmt: skip


def _find_optax_kinds() -> dict[type, str]:
    """Return the kind of link by state type of optax, without types that the installed version
    lacks."""
    names: dict[str, str] = {
        "moments": "ScaleByAdam ScaleByAdamax ScaleByAmsgrad ScaleByBelief ScaleByLion ScaleByRms "
        "ScaleByRss ScaleByRStdDev ScaleByAdaDelta ScaleByAdan ScaleByNovograd ScaleBySM3 Factored "
        "ScaleByRprop ScaleByAdemamix ScaleBySimplifiedAdEMAMix Muon Sophia",
        "filter": "Trace Ema",
        "clip": "AddNoise ZeroNans ReduceLROnPlateau",
        "optimizer": "Prodigy DAdaptAdamW ScheduleFree Momo MomoAdam Mechanic SAM COCOB",
        "pass": "Monitor Snapshot",
        "unsure": "ScaleBySchedule",
    }
    found: dict[type, str] = {}
    for kind, words in names.items():
        for word in words.split():
            for place in (optax, optax.transforms, contrib):
                state_type = getattr(place, f"{word}State", None)
                if isinstance(state_type, type):
                    found[state_type] = kind
    return found


# The kinds of optax's links that have a type of state. Its links without a state share one type,
# EmptyState.
OPTAX = _find_optax_kinds()
# Its links without a state, by the factory. A decay counts if it is positive, and a factor as a
# rate if it is negative and comes behind a direction: elsewhere it may turn the sign on purpose.
OPTAX_STATELESS = {
    "add_decayed_weights": "decay",
    "scale": "rate",
    "scale_by_trust_ratio": "trust_ratio",
    "clip": "clip",
    "clip_by_block_rms": "clip",
    "clip_by_global_norm": "clip",
    "adaptive_grad_clip": "clip",
}
# optax's wrappers: the effect of each, and the field with the state of the transformation inside.
OPTAX_WRAPPERS: dict[type, tuple[str, str]] = {
    optax.MaskedState: ("masked", "inner_state"),
    optax.InjectHyperparamsState: ("wrapper", "inner_state"),
    optax.InjectStatefulHyperparamsState: ("wrapper", "inner_state"),
    optax.transforms.ApplyIfFiniteState: ("guard", "inner_state"),
    optax.transforms.ConditionallyMaskState: ("wrapper", "inner_state"),
    optax.transforms.ConditionallyTransformState: ("sometimes", "inner_state"),
    optax.MultiStepsState: ("accumulate", "inner_opt_state"),
}
