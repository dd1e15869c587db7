"""Warnings of transforms whose position in a chain, or in a step, defeats their purpose.

None of these fails, but each does something else than intended: an average averages other params, a
rate counts twice or not at all, gradients are exchanged a second time, a clip sees gradients that
are still scaled, a rule for row-sparse gradients never sees one, or no parameter is trained.
"""

from collections.abc import Iterator

import jax
import numpy as np
import optax

from optfn import core
from optfn.core import checks, tree
from optfn.core.traits import traits_of
from optfn.core.types import OptState, Params
from optfn.state.names import nested
from optfn.state.per_worker import Exchanged, nodes_of
from optfn.transforms import learning_rate as rates
from optfn.transforms.rates import largest
from optfn.wrappers.attributes import resolve
from optfn.wrappers.averaging import is_average
from optfn.wrappers.loss_scale import DynamicLossScaleState


def warn_of_order(opt_state: OptState) -> None:
    """Warn of transforms at the wrong position in a chain or wrapper, as the state shows it."""
    for message in _around_scales(opt_state):
        checks.warn(message)
    for links in _chains(opt_state):
        for message in (*_averages(links), *_rates(links), *_exchanges(links), *_scales(links)):
            checks.warn(message)


def _chains(state: OptState) -> Iterator[tuple[OptState, ...]]:
    """Yield for each chain, also inside wrappers, the states of its transforms."""
    if not isinstance(state, tuple):
        return
    if type(state) is tuple:
        yield state
    for entry in state:
        yield from _chains(entry)


def _averages(links: tuple[OptState, ...]) -> Iterator[str]:
    are_averages = list(map(is_average, links))
    if True in are_averages and not all(are_averages[are_averages.index(True) :]):
        yield (
            "an average is followed by other transforms in its chain, so it does not average the "
            "next params: updates are final only after the last transform. Put the average last"
        )


def _rates(links: tuple[OptState, ...]) -> Iterator[str]:
    # Masked optimizers may each have leaves that no second one has.
    descends = [
        i for i, x in enumerate(links) if _descends(x) and not isinstance(x, optax.MaskedState)
    ]
    if len(descends) > 1:
        yield (
            f"a chain applies a learning rate in part {descends[0]} and another in part "
            f"{descends[1]}. Each turns the direction round, so that the step goes uphill: keep one"
        )
    is_plateau = [
        isinstance(getattr(x, "rate", None), rates.PlateauLearningRateState) for x in links
    ]
    if True not in is_plateau:
        return
    before = nodes_of(rates.LearningRateState, links[: is_plateau.index(True)])
    # Multiplying a schedule is intended.
    given = [x.learning_rate for x in before if type(x) is rates.LearningRateState]
    for rate in (largest(x) for x in given if not checks.is_traced(x)):
        if rate != 1:
            yield (
                "reduce_on_plateau multiplies updates by its own rate, but the optimizer before it "
                f"has already applied a learning rate of {float(rate):g}: give that optimizer the "
                "rate 1, as in adam(1.0)"
            )


def _descends(state: OptState) -> bool:
    """Tell whether a state has a learning rate that turns a direction into a step."""
    kinds = rates.LearningRateState, rates.GivenLearningRateState
    found = [x for kind in kinds for x in nodes_of(kind, state)]
    return any(not isinstance(x, rates.PlateauLearningRateState) for x in found)


def _exchanges(links: tuple[OptState, ...]) -> Iterator[str]:
    if sum(bool(nodes_of(Exchanged, x)) for x in links) > 1:
        yield (
            "a chain has two transforms that exchange gradients between workers. The second one "
            "compresses a mean that all workers have already: remove one of them"
        )


def _scales(links: tuple[OptState, ...]) -> Iterator[str]:
    if any(nodes_of(DynamicLossScaleState, links[1:])):
        yield (
            "dynamic_loss_scale is not the first part of its chain, so the parts before it get "
            "gradients that are multiplied by the scale: put them inside, as in "
            "dynamic_loss_scale(chain(clip_by_global_norm(1.0), adam(1e-3)))"
        )


def _around_scales(state: OptState) -> Iterator[str]:
    for node in nested(lambda x: traits_of(x).misplaced_around_loss_scale, state):
        if any(nodes_of(DynamicLossScaleState, tuple(node))):
            yield traits_of(node).misplaced_around_loss_scale


def warn_of_ascent(argument: str, tx: optax.GradientTransformation, opt_state: OptState) -> None:
    """Warn of an optimizer that goes uphill, since no learning rate turns its direction round.

    Only transforms of optfn are judged, because a foreign one may turn a direction itself.
    """
    if _is_of_optfn(tx) and not _descends(opt_state):
        checks.warn(
            f"{argument}={tx!r} applies no learning rate, so its steps go uphill: end it with one, "
            "as in chain(exchange(...), sgd(1.0)) or chain(scale_by_adam(), "
            "scale_by_learning_rate(1e-3))"
        )


def _is_of_optfn(tx: optax.GradientTransformation) -> bool:
    """Tell whether a transformation and all links of its chain are made by factories of optfn."""
    made_here = isinstance(tx, core.Transform) and checks.package(tx.module) == "optfn"
    return made_here and all(map(_is_of_optfn, tx.inner))


def warn_of_frozen(tx: optax.GradientTransformation, params: Params) -> None:
    """Warn of an optimizer that freezes all leaves of `params`, or of params without leaves.

    Attributes are found in optimizers of optfn, inside wrappers and chains of optfn too.
    """
    frozen = _frozen(tx, params)
    if not frozen and any(map(tree.is_inexact, jax.tree.leaves(params))):
        return
    if all(name in frozen for name, x in tree.leaves_with_names(params) if tree.is_inexact(x)):
        why = f"{tx!r} freezes all of them" if frozen else "params have no leaves"
        checks.warn(f"no parameter is trained, because {why}: steps will change nothing")


def _frozen(tx: object, params: Params) -> set[str]:
    """Return the names of the leaves of `params` that never change."""
    if not isinstance(tx, core.Transform):
        return set()
    _, positional, named = tx.call  # of a chain or wrapper; `others` of muon trains only some
    found = set().union(*(_frozen(part, params) for part in (*positional, named.get("tx"))))
    if tx.param_attrs:
        attrs = resolve(tx.param_attrs, params)
        found |= {name for name, x in attrs.items() if not (x.trainable and x.learning_rate)}
    return found


def warn_of_lazy(tx: optax.GradientTransformation, params: Params) -> None:
    """Warn of an optimizer with `lazy` if all gradients are dense and a leaf may be a table.

    `lazy` counts only if the call of the optimizer names it, not if it is the default.
    """
    if not any(np.ndim(x) > 1 for x in jax.tree.leaves(params)):
        return
    for name, lazy in dict.fromkeys(_lazy_calls(tx)):
        checks.warn(
            f"{name}(lazy={lazy!r}) has no effect without tables=, since all gradients of loss_fn "
            "are then dense. Name the embeddings, as in make_train_step(…, tables='embed/.*')"
        )


def _lazy_calls(tx: optax.GradientTransformation) -> Iterator[tuple[str, bool | str]]:
    if not isinstance(tx, core.Transform):
        return
    name, _, arguments = tx.call
    if arguments.get("lazy"):
        yield name, arguments["lazy"]
    for link in tx.inner:
        yield from _lazy_calls(link)
