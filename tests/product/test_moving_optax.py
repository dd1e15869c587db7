"""The rows of docs/moving/optax.md: where optfn takes the steps of optax, and where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn import schedules

PARAMS = {"w": np.arange(12, dtype=np.float32).reshape(4, 3) / 10, "b": np.ones(3, np.float32)}
BATCHES = list(np.random.default_rng(0).normal(size=(10, 8, 4)).astype(np.float32))
EPS = 1e-2  # large, so that its place shows


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


def train(tx):
    state, _ = optfn.minimize(loss_fn, tx, PARAMS, BATCHES, progress=False)
    return jax.tree.leaves(state.params)


def agree(ours, theirs):
    pairs = zip(train(ours), train(theirs), strict=True)
    return all(np.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)


SAME = {
    "sgd": (optfn.momentum(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
    "adam": (optfn.adam(0.1, eps=EPS, eps_hat=False), optax.adam(0.1, eps=EPS)),
    "adamw": (
        optfn.adamw(0.1, eps=EPS, weight_decay=0.1), optax.adamw(0.1, eps=EPS, weight_decay=0.1)
    ),
    "adadelta": (optfn.adadelta(1.0, rho=0.9, eps=EPS), optax.adadelta(1.0, 0.9, EPS)),
    "rmsprop": (optfn.rmsprop(0.1, rho=0.9, eps=EPS), optax.rmsprop(0.1, 0.9, EPS)),
    "lamb": (
        optfn.lamb(0.1, weight_decay=0.1, bias_correction=True), optax.lamb(0.1, weight_decay=0.1)
    ),
    "lars": (optfn.lars(0.1, 0.9, lars_weight_decay=0.0), optax.lars(0.1)),
}  # fmt: skip
OTHERS = {
    "adam": (optfn.adam(0.1, eps=EPS), optax.adam(0.1, eps=EPS)),
    "adagrad": (
        optfn.adagrad(0.1, eps=EPS, initial_accumulator_value=0.1), optax.adagrad(0.1, 0.1, EPS)
    ),
    "adamax": (optfn.adamax(0.1, eps=EPS), optax.adamax(0.1, eps=EPS)),
    "lars": (optfn.lars(0.1, 0.9, lars_weight_decay=0.1), optax.lars(0.1, 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_optimizers_take_the_steps_of_optax(name):
    assert agree(*SAME[name])


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_the_page_calls_different_are(name):
    assert not agree(*OTHERS[name])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedules.exponential(0.1, 10, 0.5), optax.exponential_decay(0.1, 10, 0.5)),
        (schedules.polynomial(0.1, 50, 0.01, 2.0), optax.polynomial_schedule(0.1, 0.01, 2, 50)),
        (
            schedules.warmup_cosine(0.1, 5, 30, end=0.01),
            optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01),
        ),
        (schedules.cosine(0.1, 1, 50), optax.cosine_decay_schedule(0.1, 50)),
        (schedules.multi_step(0.1, [10]), optax.piecewise_constant_schedule(0.1, {10: 0.1})),
    ],
)
def test_schedules_are_those_of_optax(ours, theirs):
    i = np.arange(40)
    np.testing.assert_allclose(jax.vmap(ours)(i), jax.vmap(theirs)(i), rtol=1e-5)
