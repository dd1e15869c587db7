"""`reduce_on_plateau(monitor="evaluation")` in a run: its patience counts evaluations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_schedules

import optfn
from optfn.schedules import record_evaluation, reduce_on_plateau

EVERY, STEPS = 3, 36
OPTIONS = {"decay_rate": 0.5, "patience": 1}
# What the evaluations return, one after another: the run does not depend on its params.
VALUES = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.5, 1.6, 1.7, 1.8, 0.5, 0.7]
BATCHES = np.ones((STEPS, 8, 3), np.float32)


def loss_fn(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


def optimizer(**options):
    plateau = reduce_on_plateau(0.1, monitor="evaluation", **OPTIONS | options)
    return optfn.chain(optfn.sgd(1.0), plateau)


def make_evaluate(values=VALUES, done=0):
    """Return a function that returns one value after another, from evaluation `done` on."""
    remaining = iter(values[done:])
    return lambda w: next(remaining)


def train(tx, evaluate, **options):
    return optfn.minimize(
        loss_fn, tx, jnp.zeros(3), options.pop("batches", BATCHES), evaluate=evaluate,
        evaluate_every=EVERY, progress=False, **options,
    )  # fmt: skip


def expected_rates(values=VALUES, **options):
    """Return the rate of each step: an evaluation counts from the step after it on."""
    rates = reference_schedules.reduce_on_plateau(values, 0.1, **OPTIONS | options)
    return np.repeat(rates, EVERY)


def test_a_loop_of_ones_own_records_evaluations():
    step = optfn.make_train_step(loss_fn, optimizer())
    state, rates = step.init(jnp.zeros(3)), []
    for i, batch in enumerate(BATCHES):
        state, metrics = step(state, batch)
        rates.append(metrics["learning_rate"])
        if (i + 1) % EVERY == 0:
            state = record_evaluation(state, VALUES[i // EVERY])
    np.testing.assert_allclose(rates, expected_rates(), rtol=1e-6)


def test_each_member_of_a_partition_falls():
    body = optfn.chain(optfn.adam(1.0), reduce_on_plateau(1e-2, monitor="evaluation", **OPTIONS))
    tx = optax.partition({"a": optimizer(), "b": body}, {"x": "a", "y": "b"})
    state = tx.init({"x": jnp.zeros(2), "y": jnp.zeros(2)})
    grads = {"x": jnp.ones(2), "y": jnp.ones(2)}
    for value in (1.0, 2.0, 3.0):
        state = record_evaluation(state, value)
        _, state = jax.jit(tx.update)(grads, state)
    rates = {k: float(optfn.get_learning_rate(state, k)) for k in "ab"}
    assert rates == {"a": pytest.approx(0.05), "b": pytest.approx(5e-3)}


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="needs evaluate and evaluate_every"):
        optfn.minimize(loss_fn, optimizer(), jnp.zeros(3), BATCHES, progress=False)
    with pytest.raises(ValueError, match="mode is 'max' in this run, and 'min'"):
        train(optimizer(), make_evaluate(), mode="max")
    with pytest.raises(ValueError, match="mode is 'min' in this run, and 'max'"):
        train(optimizer(mode="max"), make_evaluate(), keep_best=True)
    with pytest.raises(ValueError, match="no reduce_on_plateau with monitor"):
        record_evaluation(optfn.adam(1e-3).init(jnp.zeros(3)), 1.0)
    with pytest.raises(ValueError, match="value must be a scalar"):
        record_evaluation(optimizer().init(jnp.zeros(3)), np.ones(2))
    with pytest.raises(ValueError, match="monitor must be"):
        reduce_on_plateau(0.1, monitor="loss")
