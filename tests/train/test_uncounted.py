"""An update that does not count changes nothing behind a guard, in a label, in an average.

Such an update has no weight, because those of its loss, a `Mean`, add up to 0, or a guard drops it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn

RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=(32, 8)).astype(np.float32)
PARAMS = {"w": np.zeros((32, 8), np.float32), "b": np.zeros(8, np.float32)}


def loss_fn(p, batch):
    x, weight = batch
    errors = jnp.sum((x @ p["w"] + p["b"] - x @ TRUTH) ** 2, -1)
    return optfn.Mean(jnp.sum(weight * errors), jnp.sum(weight))


XS = RNG.normal(size=(6, 8, 32)).astype(np.float32)
FULL = [(x, np.ones(8, np.float32)) for x in XS]
BROKEN = np.full_like(FULL[0][0], np.nan), np.ones(8, np.float32)


def train(tx, batches, params=PARAMS, loss=loss_fn, **options):
    """Return the last state and the metrics of each call."""
    step = optfn.make_train_step(loss, tx, **options)
    state, found = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return jax.device_get(state), found


def partition(**labels):
    return optax.partition(labels, {"w": "one", "b": "two"})


def guarded(tx):
    return optfn.skip_nonfinite(tx)


BESIDE = {
    "behind": lambda: optfn.chain(guarded(optfn.adam(0.1)), optfn.exponential_moving_average(0.5)),
    "of optax": lambda: optax.chain(
        optax.apply_if_finite(optax.adam(0.1), 5), optax.trace(0.5), optax.scale(-1.0)
    ),
    "labels": lambda: partition(one=guarded(optfn.momentum(0.01, 0.9)), two=optfn.adam(0.1)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BESIDE)
def test_what_a_guard_drops_no_other_part_counts(name):
    """Only the guard's own counters differ."""
    want, _ = train(BESIDE[name](), FULL)
    found, _ = train(BESIDE[name](), [x for batch in FULL for x in (BROKEN, batch)])
    states = [optfn.state_dict(x.opt_state) for x in (found, want)]
    counters = [
        k for k in states[0] if k.split("/")[-1] in ("skipped", "total_notfinite", "last_finite")
    ]
    assert counters
    for k in set(states[1]) - set(counters):
        np.testing.assert_array_equal(*(x[k] for x in states), k)
    jax.tree.map(np.testing.assert_array_equal, found.params, want.params)


def test_a_gradient_whose_square_overflows_is_finite_where_no_squares_are_kept():
    tx = guarded(optfn.momentum(0.1, 0.9))
    _, metrics = train(tx, np.float32([1e20, 1, 1]), np.float32(0), lambda p, g: g * p)
    assert metrics[0]["skipped"] == 0


def test_a_mean_of_integers_is_exact_in_float64():
    with jax.enable_x64(True):

        def loss(p, x):
            return (jnp.sum(p * x), {"n": optfn.Mean(jnp.int64(2**24 + 1), jnp.int64(3))})

        _, metrics = train(optfn.sgd(0.1), [np.ones(2)], np.zeros(2), loss, has_aux=True)
    assert float(metrics[0]["aux"]["n"]) == (2**24 + 1) / 3
