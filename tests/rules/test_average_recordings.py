"""The averages of the parameters, step by step as the real Paddle kept them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite
from recorded import CASES, arrays

import optfn

pytestmark = pytest.mark.optimized  # float32 as users compile it

EMA = [name for name, case in CASES.items() if case["family"] == "ema"]
WINDOWS = [name for name, case in CASES.items() if case["family"] == "model_average"]


def tree(a, prefix):
    return {k.removeprefix(prefix): v for k, v in a.items() if k.startswith(prefix)}


def follow(average, rate, params, gradients):
    """Run sgd and the average; return the states and the readings after each step."""
    tx = optfn.chain(optfn.sgd(rate), average)

    def step(carry, g):
        p, state = carry
        updates, state = tx.update(g, state, p)
        p = optax.apply_updates(p, updates)
        return (p, state), (p, state[1], optfn.averaged_params(state, p))

    run = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])
    return jax.device_get(run(params, gradients))


def close(found, expected, what, rtol=1e-5, atol=1e-6):
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=rtol, atol=atol, err_msg=f"{what} {name}"
        )


@pytest.mark.parametrize("name", suite(EMA, "fluid18_ema", "p26_ema_multi_apply"))
def test_exponential_moving_average_follows_paddle(name):
    """The sums at every step; the readings where Paddle's correction is 1 − ∏d."""
    a, decay = arrays(name), CASES[name]["hyper"]["decay"]
    thres_steps = len(np.unique(a["decay"])) > 1
    average = optfn.exponential_moving_average(decay, thres_steps=thres_steps)
    params, states, readings = follow(average, 0.1, tree(a, "p0/"), tree(a, "g/"))
    applied = a["apply_steps"]
    # 1.8.5 leaves the average in the parameters' place when it is read.
    end = len(a["decay"]) if "ema_apply_mutates_state" not in str(CASES[name]["quirks"]) else None
    end = applied[0] + 1 if end is None else end
    close(params, tree(a, "p/"), "parameter")
    close({k: v[:end] for k, v in states.average.items()}, {
        k: v[:end] for k, v in tree(a, "ema/").items()
    }, "average")  # fmt: skip
    if not thres_steps:
        read = [k for k in range(len(applied)) if applied[k] < end]
        close(
            {k: v[applied[read]] for k, v in readings.items()},
            {k: v[read] for k, v in tree(a, "applied/").items()},
            "reading",
        )


@pytest.mark.parametrize("name", suite(WINDOWS, "fluid18_ma_window", "fluid18_ma_kmax"))
def test_model_average_follows_paddle(name):
    """Three sums, three counters and the reading, at every step that was recorded."""
    a, hyper = arrays(name), dict(CASES[name]["hyper"])
    rate = hyper.pop("sgd_lr", a["lr"][0] if "lr" in a else 0.1)
    average = optfn.model_average(hyper.pop("average_window_rate"), **hyper)
    at = slice(None)
    if "steps" in a:  # a constant gradient for many steps, of which some were recorded
        at = a["steps"] - 1
        gradients = {"w": np.broadcast_to(a["g_const/w"], (int(a["steps"][-1]), 3))}
    else:
        gradients = tree(a, "g/")
    start = {k: jnp.asarray(v) for k, v in tree(a, "p0/").items()}
    params, states, readings = follow(average, float(rate), start, gradients)
    # Sums of thousands of float32 numbers: the order of rounding is Paddle's own.
    bound = {"rtol": 2e-5, "atol": 1e-5}
    close({k: v[at] for k, v in params.items()}, tree(a, "p/"), "parameter", **bound)
    close({k: v[at] for k, v in readings.items()}, tree(a, "applied/"), "reading", **bound)
    for field in ("sum_1", "sum_2", "sum_3"):
        found = {k: v[at] for k, v in getattr(states, field).items()}
        close(found, tree(a, f"s/{field}/"), field, **bound)
    for field in ("num_updates", "num_accumulates", "old_num_accumulates"):
        for k, expected in tree(a, f"s/{field}/").items():
            np.testing.assert_array_equal(
                getattr(states, field)[at], expected[:, 0], f"{field} {k}"
            )
