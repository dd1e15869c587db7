"""`reduce_on_plateau(monitor="evaluation")`: a loop of one's own, and what it needs of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_schedules

import optfn
from optfn.schedules import record_evaluation, reduce_on_plateau

EVERY = 3
OPTIONS = {"decay_rate": 0.5, "patience": 1}
VALUES = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.5, 1.6, 1.7, 1.8, 0.5, 0.7]
X = np.ones((8, 3), np.float32)


def loss_fn(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


def optimizer(**options):
    plateau = reduce_on_plateau(0.1, monitor="evaluation", **OPTIONS | options)
    return optfn.chain(optfn.sgd(1.0), plateau)


def test_a_loop_of_ones_own_records_evaluations():
    step = optfn.make_train_step(loss_fn, optimizer())
    state, rates = step.init(jnp.zeros(3)), []
    for value in VALUES:
        for _ in range(EVERY):
            state, metrics = step(state, X)
            rates.append(metrics["learning_rate"])
        state = record_evaluation(state, value)
    want = reference_schedules.reduce_on_plateau(VALUES, 0.1, **OPTIONS)
    np.testing.assert_allclose(rates, np.repeat(want, EVERY), rtol=1e-6)


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
    def fit(tx, **options):
        optfn.minimize(loss_fn, tx, jnp.zeros(3), [X] * EVERY, progress=False, **options)

    evaluated = {"evaluate": lambda w: 1.0, "evaluate_every": EVERY}
    with pytest.raises(ValueError, match="needs evaluate and evaluate_every"):
        fit(optimizer())
    with pytest.raises(ValueError, match="mode is 'max' in this run, and 'min'"):
        fit(optimizer(), mode="max", **evaluated)
    with pytest.raises(ValueError, match="mode is 'min' in this run, and 'max'"):
        fit(optimizer(mode="max"), keep_best=True, **evaluated)
    with pytest.raises(ValueError, match="no reduce_on_plateau with monitor"):
        record_evaluation(optfn.adam(1e-3).init(jnp.zeros(3)), 1.0)
    with pytest.raises(ValueError, match="value must be a scalar"):
        record_evaluation(optimizer().init(jnp.zeros(3)), np.ones(2))
    with pytest.raises(ValueError, match="monitor must be"):
        reduce_on_plateau(0.1, monitor="loss")
