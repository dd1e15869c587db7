"""Averaged params are evaluated with averaged batch statistics, by the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly

import optfn

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
