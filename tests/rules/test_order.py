"""Links of a chain that stand at the wrong place: the warnings, and that right chains give none."""

import warnings

import jax.numpy as jnp
import optax
import pytest
from registry import OPTIMIZERS

import optfn
from optfn.distributed import exchange, quantize

PARAMS = {"w": jnp.arange(1.0, 5.0)}


def init(tx):
    return optfn.make_train_step(lambda p, x: jnp.sum((p["w"] - x) ** 2), tx).init(PARAMS)


def ema():
    return optfn.exponential_moving_average(0.9)


MISPLACED = {
    "an average before a rule": (
        lambda: optfn.chain(ema(), optfn.sgd(0.1)),
        "an average is followed by other transforms",
    ),
    "in optax's chain, inside a wrapper": (
        lambda: optfn.skip_nonfinite(optax.chain(ema(), optax.sgd(0.1))),
        "an average is followed by other transforms",
    ),
    "a plateau after a rate of its own": (
        lambda: optfn.chain(optfn.adam(1e-3), optfn.schedules.reduce_on_plateau(1e-3)),
        "already applied a learning rate of 0.001",
    ),
    "two exchanges": (
        lambda: optfn.chain(exchange(quantize(8)), exchange(quantize(1)), optfn.sgd(0.1)),
        "two transforms that exchange gradients",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_misplaced_link_warns_at_the_users_line(name):
    make, message = MISPLACED[name]
    with pytest.warns(UserWarning, match=message) as caught:
        init(make())
    assert len(caught) == 1
    assert caught[0].filename == __file__


RIGHT = {
    "averages last": lambda: optfn.chain(
        optfn.sgd(0.1), ema(), optfn.model_average(0.5, min_average_window=1)
    ),
    "a plateau after rate 1, before an average": lambda: optfn.chain(
        optfn.adam(1.0), optfn.schedules.reduce_on_plateau(1e-3), ema()
    ),
    "a plateau after a schedule": lambda: optfn.chain(
        optfn.adam(lambda step: 1 / (1 + step)), optfn.schedules.reduce_on_plateau(1e-3)
    ),
    "one exchange for some leaves, one for others": lambda: optax.partition(
        {
            "a": optfn.chain(exchange(quantize(8)), optfn.sgd(0.1)),
            "b": optfn.chain(exchange(quantize(1)), optfn.sgd(0.1)),
        },
        {"w": "a"},
    ),
} | {name: x.make for name, x in OPTIMIZERS.items()}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_chain_gives_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(RIGHT[name]())
