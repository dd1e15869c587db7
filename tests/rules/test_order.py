"""Links of a chain that stand at the wrong place: the warnings, and that right chains give none."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
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
    "two learning rates": (
        lambda: optfn.chain(optfn.adam(1e-3), optfn.record_metrics(optfn.sgd(1.0))),
        "learning rate in part 0 and another in part 1",
    ),
    "a clip before a scale of the loss": (
        lambda: optfn.chain(
            optfn.clip_by_global_norm(1.0), optfn.dynamic_loss_scale(optfn.sgd(0.1))
        ),
        "not the first part of its chain",
    ),
    "a guard around a scale of the loss": (
        lambda: optfn.skip_nonfinite(optfn.dynamic_loss_scale(optfn.sgd(0.1))),
        "the scale never falls",
    ),
    "norms around a scale of the loss": (
        lambda: optfn.record_metrics(optfn.dynamic_loss_scale(optfn.sgd(0.1))),
        "norms are multiplied by the scale",
    ),
    "no learning rate": (
        lambda: optfn.chain(optfn.clip_by_global_norm(1.0), optfn.scale_by_adam()),
        "applies no learning rate",
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
    "a rate for some leaves, one for others": lambda: optfn.chain(
        optax.masked(optfn.adam(1e-3), {"w": True}), optax.masked(optfn.sgd(0.1), {"w": False})
    ),
    "a scale around a clip, norms and a guard": lambda: optfn.accumulate(
        optfn.dynamic_loss_scale(
            optfn.skip_nonfinite(
                optfn.record_metrics(optfn.sgd(0.1, grad_clip=optfn.clip_by_global_norm(1.0)))
            )
        ),
        2,
    ),
    "a direction of optfn and a rate of optax": lambda: optfn.chain(
        optfn.scale_by_adam(), optax.scale(-1e-3)
    ),
    "a user's own rule without a rate": lambda: halved_gradient(),
} | {name: x.make for name, x in OPTIMIZERS.items()}


@optfn.core.transform()
def halved_gradient():
    return optfn.core.stateless(lambda updates, params: jax.tree.map(lambda g: -g / 2, updates))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_chain_gives_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(RIGHT[name]())


def test_an_exchange_alone_as_the_outer_optimizer_warns():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def step(outer):
        return optfn.make_train_step(
            lambda p, x: jnp.mean((p["w"] - x) ** 2), optfn.sgd(0.1),
            mesh=mesh, local_steps=2, outer=outer,
        )  # fmt: skip

    with pytest.warns(UserWarning, match="outer=exchange.* applies no learning rate"):
        state = step(exchange(quantize(8))).init(PARAMS)
    batch = np.zeros((4, 4), np.float32)
    state, _ = step(exchange(quantize(8)))(state, batch)
    assert np.sum(state.params["w"] ** 2) > np.sum(PARAMS["w"] ** 2)
