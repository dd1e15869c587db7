"""Warnings of transforms whose position in a chain, or in a step, defeats their purpose.

None of these fails, but each does something else than intended: an average averages other params, a
rate counts twice, gradients are exchanged a second time, or a rule for row-sparse gradients never
sees one.
"""

from collections.abc import Iterator

import jax
import numpy as np
import optax

from optfn import checks, core
from optfn.leaves.types import OptState, Params
from optfn.state.per_worker import Exchanged, nodes_of
from optfn.transforms import learning_rate as rates
from optfn.wrappers.averaging import is_average


def warn_of_order(opt_state: OptState) -> None:
    """Warn of transforms at the wrong position in a chain, as the chain's state shows it."""
    for links in _chains(opt_state):
        for message in (*_averages(links), *_rates(links), *_exchanges(links)):
            checks.warn(message)


def _chains(state: OptState) -> Iterator[tuple[OptState, ...]]:
    """Yield for each chain, also inside wrappers, the states of its transforms."""
    if not isinstance(state, tuple):
        return
    if type(state) is tuple:
        yield state
    for part in state:
        yield from _chains(part)


def _averages(links: tuple[OptState, ...]) -> Iterator[str]:
    are_averages = list(map(is_average, links))
    if True in are_averages and not all(are_averages[are_averages.index(True) :]):
        yield (
            "an average is followed by other transforms in its chain, so it does not average the "
            "next params: updates are final only after the last transform. Put the average last"
        )


def _rates(links: tuple[OptState, ...]) -> Iterator[str]:
    is_plateau = [isinstance(x, rates.PlateauLearningRateState) for x in map(_rate_of, links)]
    if True not in is_plateau:
        return
    before = nodes_of(rates.LearningRateState, links[: is_plateau.index(True)])
    # Multiplying a schedule is intended.
    own = [x.learning_rate for x in before if type(x) is rates.LearningRateState]
    for rate in (rates.largest(x) for x in own if not checks.is_traced(x)):
        if rate != 1:
            yield (
                "reduce_on_plateau multiplies updates by its own rate, but the optimizer before it "
                f"has already applied a learning rate of {float(rate):g}: give that optimizer the "
                "rate 1, as in adam(1.0)"
            )


def _rate_of(link: OptState) -> OptState:
    return getattr(link, "rate", None)


def _exchanges(links: tuple[OptState, ...]) -> Iterator[str]:
    if sum(bool(nodes_of(Exchanged, x)) for x in links) > 1:
        yield (
            "a chain has two transforms that exchange gradients between workers. The second one "
            "compresses a mean that all workers have already: remove one of them"
        )


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
    for part in tx.parts:
        yield from _lazy_calls(part)
