"""Averaged params are evaluated with averaged batch statistics, by the same weights."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly, suite

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(9, 16, 4)).astype(np.float32)
PARAMS = {"w": np.full((4, 4), 0.3, np.float32), "v": np.ones(4, np.float32)}
STATE = {"mean": jnp.zeros(4), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(3)}


def loss(params, state, x):
    h = x @ params["w"]
    mean = jnp.mean(h, 0)
    new = {
        "mean": 0.5 * state["mean"] + 0.5 * jax.lax.stop_gradient(mean),
        "count": state["count"] + 1,
        "key": state["key"],
    }
    return jnp.mean(((h - state["mean"]) @ params["v"] - 1.0) ** 2), new


def ema(values, decay=0.8):
    average = weight = 0.0
    for x in values:
        average, weight = decay * average + (1 - decay) * x, decay * weight + (1 - decay)
    return average / weight


def window(values):
    return np.mean(values, 0)


AVERAGES = {
    "ema": (lambda: optfn.exponential_moving_average(0.8), ema),
    "window": (lambda: optfn.model_average(1.0), window),
}
WAYS = {
    "one device": dict,
    "workers": lambda: {"mesh": data_mesh()},
    "params": lambda: {"mesh": data_mesh(), "shard": "params"},
    "packed": lambda: {"packed": True},
}


@functools.cache
def by_hand():
    """Return params and statistics after each step, of a plain run."""
    step = optfn.make_train_step(loss, optfn.adam(0.05), model_state=True)
    state = step.init(PARAMS, STATE)
    found = []
    for x in X:
        state, _ = step(state, x)
        found.append(jax.device_get((state.params, state.model_state["mean"])))
    return found


@pytest.mark.parametrize(
    "kind, way", suite(itertools.product(AVERAGES, WAYS), ("ema", "params"), ("window", "packed"))
)
def test_evaluate_gets_both_averages(kind, way, tmp_path):
    make, average = AVERAGES[kind]
    seen = []

    def evaluate(params, state):
        seen.append(jax.device_get((params, {k: x for k, x in state.items() if k != "key"})))
        return 0.0

    state, _ = optfn.minimize(
        loss, optfn.chain(optfn.adam(0.05), make()), PARAMS, X, model_state=STATE, progress=False,
        evaluate=evaluate, evaluate_every=3, evaluate_average=True, checkpoint=tmp_path,
        **WAYS[way](),
    )  # fmt: skip
    steps = by_hand()
    for (params, statistics), n in zip(seen, (3, 6, 9), strict=True):
        for name in PARAMS:
            want = average([p[name] for p, _ in steps[:n]])
            np.testing.assert_allclose(params[name], want, rtol=2e-5, atol=2e-5)
        want = average([mean for _, mean in steps[:n]])
        np.testing.assert_allclose(statistics["mean"], want, rtol=2e-5, atol=2e-5)
        assert statistics["count"] == n
    # The state has the statistics of the last params; the average is beside the average of params.
    np.testing.assert_allclose(state.model_state["mean"], steps[-1][1], rtol=2e-5, atol=2e-5)


def test_guards_and_accumulation_count_statistics_as_params():
    """A step that is skipped, or is a part of another, has no weight in either average."""
    bad = X[:4].copy()
    bad[2] = np.nan
    average = optfn.chain(optfn.sgd(0.05), optfn.exponential_moving_average(0.8))
    found = []
    for batches in (bad, bad[[0, 1, 3]]):
        step = optfn.make_train_step(
            loss, optfn.skip_nonfinite(average), model_state=True, average_model_state=True
        )
        state = step.init(PARAMS, STATE)
        for x in batches:
            state, _ = step(state, x)
        node = state.opt_state.inner_state[1]
        found.append(np.asarray(node.statistics["mean"] / node.weight))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_without_the_argument_a_state_has_no_statistics():
    tx = optfn.chain(optfn.adam(0.05), optfn.exponential_moving_average(0.8))
    plain = optfn.make_train_step(loss, tx, model_state=True).init(PARAMS, STATE)
    with_average = optfn.make_train_step(loss, tx, model_state=True, average_model_state=True)
    more = set(optfn.state_dict(with_average.init(PARAMS, STATE))) - set(optfn.state_dict(plain))
    assert more == {"exponential_moving_average/statistics/mean"}


def test_what_has_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="needs an average in tx"):
        step = optfn.make_train_step(
            loss, optfn.adam(0.1), model_state=True, average_model_state=True
        )
        step.init(PARAMS, STATE)
    with pytest.raises(ValueError, match="needs model_state=True"):
        optfn.make_train_step(loss, optfn.adam(0.1), average_model_state=True)


@pytest.mark.parametrize("first", [False, nightly(True)])
def test_a_run_that_resumes_with_another_evaluate_average_names_it(first, tmp_path):
    def go(steps, evaluate_average):
        optfn.minimize(
            loss, optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average(0.8)), PARAMS,
            X[:steps], model_state=STATE, checkpoint=tmp_path, progress=False,
            evaluate=lambda p, s: 0.0, evaluate_average=evaluate_average,
        )  # fmt: skip

    go(2, first)
    with pytest.raises(ValueError, match=r"statistics/mean.*with evaluate_average"):
        go(4, not first)
