"""A wrapper that optfn does not know reports a number: its state's type says all that is needed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn.core.traits import Report, traits
from optfn.distributed import data_mesh, exchange
from optfn.workers import join_workers

X = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
START = np.float32([1.0, -2.0, 3.0])


@traits(
    passes_own_gradients=True,
    reports={
        "largest": Report("largest_entry", several="max", rounds="max"),
        "by_sign": Report("entry", several="max"),
        "alarm": Report("alarm", several="any", rounds="any"),
    },
)
class LargestEntryState(NamedTuple):
    largest: jax.Array
    by_sign: dict[str, jax.Array]
    alarm: jax.Array
    inner_state: optax.OptState


def largest_entry(tx):
    """Report the largest entry of a gradient, over all workers."""
    tx = optax.with_extra_args_support(tx)

    def init(params):
        zero = jnp.float32(0)
        by_sign = {"above": zero, "below": zero}
        return LargestEntryState(zero, by_sign, jnp.asarray(False), tx.init(params))

    def update(updates, state, params=None, **extra):
        workers = join_workers("largest_entry", None, extra)
        above, below = workers.max(jnp.max(updates)), workers.min(jnp.min(updates))
        new, inner = tx.update(updates, state.inner_state, params, **extra)
        by_sign = {"above": above, "below": below}
        return new, LargestEntryState(jnp.maximum(above, -below), by_sign, above > 0, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_fn(w, x):
    return jnp.mean(x @ w)  # its gradient is the mean of the rows of x, wherever w is


def history_of(tx, **options):
    return optfn.minimize(loss_fn, tx, START, X, progress=False, **options)[1]


@pytest.mark.parametrize("kind", ["one device", "own gradients"])
def test_metrics_and_history_have_the_number(kind):
    workers = 1 if kind == "one device" else 4
    inner = optfn.sgd(0.01)
    options = {}
    if kind == "own gradients":
        inner = optfn.chain(exchange(None), inner)
        options = {"mesh": data_mesh(workers)}
    history = history_of(largest_entry(inner), **options)
    grads = X.reshape(6, workers, 8 // workers, 3).mean(axis=2)
    np.testing.assert_allclose(history["largest_entry"], abs(grads).max((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(history["entry/above"], grads.max((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(history["entry/below"], grads.min((1, 2)), rtol=1e-5)
    assert "alarm" not in history


def test_several_have_the_largest_also_inside_each_other():
    """The second one gets four times the gradient, and the one inside of it half of that."""
    inside = optfn.chain(optax.scale(0.5), largest_entry(optfn.sgd(0.01)))
    tx = optfn.chain(largest_entry(optax.scale(4.0)), largest_entry(inside))
    history = history_of(tx)
    np.testing.assert_allclose(history["largest_entry"], 4 * abs(X.mean(1)).max(1), rtol=1e-5)


def test_a_round_has_the_largest_of_its_steps_and_workers():
    step = optfn.make_train_step(
        loss_fn, largest_entry(optfn.sgd(0.01)), mesh=data_mesh(2), local_steps=2
    )
    _, metrics = step(step.init(START), X[0])
    of_steps = X[0].reshape(2, 2, 2, 3).mean(axis=2)  # two workers of two steps of two examples
    np.testing.assert_allclose(metrics["largest_entry"], abs(of_steps).max(), rtol=1e-5)
    assert bool(metrics["alarm"]) and "entry/above" not in metrics
    history = history_of(largest_entry(optfn.sgd(0.01)), mesh=data_mesh(2), local_steps=2)
    np.testing.assert_allclose(history["largest_entry"][0], abs(of_steps).max(), rtol=1e-5)


def test_a_number_without_a_reduction_is_that_of_the_only_state():
    one = optfn.record_metrics(optfn.sgd(0.01))
    assert "grad_norm" in history_of(one)
    two = optfn.chain(optfn.record_metrics(optax.scale(1.0)), one)
    assert "grad_norm" not in history_of(two)
    assert "grad_norm" not in history_of(optfn.record_metrics(one))
