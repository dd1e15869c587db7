"""The learning rate as a number, an array and a schedule; reading and setting it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_schedules
from grids import nightly

import optfn
from optfn.transforms import rates

G = {"w": jnp.ones(2)}
P = {"w": jnp.ones(2)}


def rate_used(tx, state):
    """The factor of sgd's step."""
    updates, state = tx.update(G, state, P)
    return -float(updates["w"][0]), state


def test_a_number_is_set_without_recompiling():
    tx, traces = optfn.sgd(0.1), []

    @jax.jit
    def step(state):
        traces.append(1)
        return tx.update(G, state, P)

    state = tx.init(P)
    assert optfn.get_learning_rate(state).dtype == jnp.float32
    for rate in (0.1, 0.25, 0.0):
        updates, state = step(optfn.set_learning_rate(state, rate))
        np.testing.assert_allclose(updates["w"], -rate)
    assert len(traces) == 1


@pytest.mark.parametrize("number", [0.5, 1, np.float64(0.5), np.float32(0.5), np.array(0.5)])
def test_kinds_of_numbers(number):
    tx = optfn.sgd(number)
    used, state = rate_used(tx, tx.init(P))
    assert used == float(number)
    optfn.set_learning_rate(state, 0.1)


@pytest.mark.parametrize("rate", [jnp.asarray(0.5), lambda step: 0.5 / (1 + step)])
def test_driven_rates_show_and_refuse(rate):
    """The state shows the rate of step 0, then that of the k-th update; setting is an error."""
    tx = optfn.sgd(rate)
    state = tx.init(P)
    assert float(optfn.get_learning_rate(state)) == 0.5
    for k in range(3):
        expected = float(rate(k)) if callable(rate) else 0.5
        used, state = rate_used(tx, state)
        assert used == pytest.approx(expected)
        assert float(optfn.get_learning_rate(state)) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"since a schedule.*optax\.scale_by_schedule\(fraction\)"):
        optfn.set_learning_rate(state, 0.1)


@pytest.mark.parametrize("make", [optfn.sgd, optfn.ftrl, optfn.schedules.reduce_on_plateau])
def test_a_rate_that_is_an_array_stays_valid_where_the_state_is_donated(make):
    rate = jnp.float32(0.1)
    tx = make(rate)
    donate = jax.jit(lambda state: state, donate_argnums=0)
    donate(tx.init(P))
    donate(tx.update(G, tx.init(P), P, value=1.0)[1])  # not jitted
    assert float(rate) == pytest.approx(0.1)


def test_schedules_are_given_an_int32_step():
    dtypes = []

    def schedule(step):
        dtypes.append(step.dtype)
        return jnp.asarray([0.3, 0.2, 0.1])[step]  # a table look-up needs an integer

    tx = optfn.adam(schedule)
    _, state = tx.update(G, tx.init(P), P)
    assert set(dtypes) == {jnp.dtype(jnp.int32)}
    assert float(optfn.get_learning_rate(state)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("noam", (64, 10)),
        nightly("exponential", (0.1, 10**9, 0.5)),
        nightly("natural_exp", (0.1, 10**9, 0.1, True)),
        nightly("inverse_time", (0.1, 10, 0.5)),
        ("polynomial", (0.1, 700, 1e-4, 2.0, True)),
        nightly("piecewise", ([3, 5], [0.1, 0.2, 0.3])),
        nightly("cosine", (0.1, 3, 7)),
        nightly("linear_warmup", (0.1, 10, 0.0, 0.1)),
        ("step_decay", (0.1, 10**9, 0.5)),
        nightly("warmup_cosine", (0.1, 10, 2**40)),
        nightly("warmup_stable_decay", (0.1, 10, 2**32, 2**34)),
        nightly("one_cycle", (0.1, 2**34)),
        nightly("multi_step", (0.1, [3, 5])),
        ("lambda_decay", (0.1, lambda i: 1 / (1 + i))),
    ],
)
def test_a_python_step_beyond_int32_gives_the_value_of_the_formula(name, arguments):
    schedule = getattr(optfn.schedules, name)(*arguments)
    reference = getattr(reference_schedules, name)(*arguments)
    for step in (2**31, 2**31 + 5, np.int64(2**33 + 1)):
        rate = schedule(step)
        assert rate.dtype == jnp.float32
        np.testing.assert_allclose(rate, reference(int(step)), rtol=1e-6)


def test_several_rates_are_told_apart_by_path():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = optax.partition(
        {"fast": optfn.sgd(0.5), "slow": optfn.adam(0.1)}, {"a": "fast", "b": "slow"}
    )
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"several learning rates.*fast.*0\.5.*slow.*0\.1"):
        optfn.get_learning_rate(state)
    assert float(optfn.get_learning_rate(state, "fast")) == 0.5
    state = optfn.set_learning_rate(state, 0.25, "slow")
    assert float(optfn.get_learning_rate(state, "slow")) == 0.25
    assert float(optfn.get_learning_rate(state, path="fast")) == 0.5
    state = optfn.set_learning_rate(state, 0.125)
    assert float(optfn.get_learning_rate(state)) == 0.125
    with pytest.raises(ValueError, match="no learning rate at path 'missing'"):
        optfn.get_learning_rate(state, "missing")


def test_plateau_rate_is_the_one_read_and_set():
    """The optimizer before it has rate 1."""
    tx = optfn.chain(optfn.sgd(1.0), optfn.schedules.reduce_on_plateau(0.5))
    state = tx.init(P)
    assert float(optfn.get_learning_rate(state)) == 0.5
    state = optfn.set_learning_rate(state, 0.25)
    updates, state = tx.update(G, state, P, value=jnp.float32(1.0))
    np.testing.assert_array_equal(updates["w"], -0.25)


def test_a_plateau_hides_the_rates_before_it_alone():
    """The rate of another member of a partition stays."""
    plateau = optfn.schedules.reduce_on_plateau
    members = {"a": optfn.chain(optfn.sgd(1.0), plateau(0.5)), "b": optfn.sgd(0.1)}
    tx = optax.partition(members, {"w": "a", "v": "b"})
    state = tx.init(P | {"v": jnp.ones(2)})
    assert float(optfn.get_learning_rate(state, "a")) == 0.5
    assert float(optfn.get_learning_rate(state, "b")) == pytest.approx(0.1)
    plain = optax.partition(members | {"a": optfn.sgd(1.0)}, {"w": "a", "v": "b"})
    whole = optfn.chain(plain, plateau(0.25)).init(P | {"v": jnp.ones(2)})
    assert float(optfn.get_learning_rate(whole)) == 0.25


LABELS = {"w": "head", "v": "body"}
TWO = P | {"v": jnp.ones(2)}


def two_rates():
    head = optfn.sgd(lambda i: 0.1 / (1 + i))
    return optax.partition({"head": head, "body": optfn.adam(0.01)}, LABELS)


@pytest.mark.parametrize("options", [{}, {"mesh": 8, "local_steps": 2}], ids=str)
def test_the_rates_of_a_partition_are_metrics(options, tmp_path):
    mesh = {"mesh": optfn.distributed.data_mesh()} if "mesh" in options else {}
    log = tmp_path / "log.jsonl"
    _, history = optfn.minimize(
        lambda p, x: jnp.mean(x * (p["w"] + p["v"])), two_rates(), TWO, np.ones((4, 16, 1)),
        log=log, progress=False, **options | mesh,
    )  # fmt: skip
    rounds = options.get("local_steps", 1)
    heads = 0.1 / (1 + np.arange(rounds - 1, 4 * rounds, rounds))
    np.testing.assert_allclose(history["learning_rate/head"], heads, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate/body"], 0.01, rtol=1e-6)
    assert "learning_rate" not in history
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["learning_rate/head"] == pytest.approx(heads[-1])


def test_two_rates_without_labels_have_their_names():
    tx = optax.chain(optfn.scale_by_learning_rate(0.5), optfn.scale_by_learning_rate(0.1))
    found = rates.collect_rates(tx.init(P))
    assert {k: float(x) for k, x in found.items()} == {
        "learning_rate/scale_by_learning_rate": 0.5,
        "learning_rate/scale_by_learning_rate_2": pytest.approx(0.1),
    }
    assert rates.collect_rates(optax.sgd(0.1).init(P)) == {}


def test_the_train_state_of_flax_is_taken():
    train_state = pytest.importorskip("flax.training.train_state")
    tx = optfn.chain(optfn.clip_by_global_norm(1.0), optfn.sgd(0.5))
    state = train_state.TrainState.create(apply_fn=None, params=P, tx=tx)
    state = jax.jit(lambda s: optfn.set_learning_rate(s, 0.25))(state)
    assert float(optfn.get_learning_rate(state)) == 0.25
    new = state.apply_gradients(grads=G)
    assert float(P["w"][0] - new.params["w"][0]) == pytest.approx(0.25 * 2**-0.5)


def test_plateau_inside_multi_steps_gets_its_metric():
    tx = optax.MultiSteps(optfn.chain(optfn.sgd(1.0), optfn.schedules.reduce_on_plateau(0.1)), 2)
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] * x), tx)
    state = step.init(P)
    for _ in range(2):
        state, _ = step(state, jnp.float32(1.0))
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


def test_plateau_needs_its_metric():
    tx = optfn.schedules.reduce_on_plateau(0.5, patience=0)
    state = tx.init(P)
    with pytest.raises(ValueError, match="value=metric"):
        tx.update(G, state, P)
    for value in (1.0, None, None, 1.0):  # None is no observation
        updates, state = tx.update(G, state, P, value=value)
        np.testing.assert_array_equal(updates["w"], 0.5)
    updates, state = tx.update(G, state, P, value=None)
    np.testing.assert_allclose(updates["w"], 0.05)


def test_a_float64_program_keeps_the_rate_in_float64_and_loads_float32_files():
    mapping = optfn.state_dict(optfn.sgd(0.25).init(P))  # float32
    with jax.enable_x64(True):
        p = {"w": jnp.ones(2, jnp.float64)}
        for rate in (0.1, lambda step: 0.1, np.float64(0.1)):
            state = optfn.sgd(rate).init(p)
            assert float(optfn.get_learning_rate(state)) == 0.1  # not the float32 next to it
            _, new = optfn.sgd(rate).update(p, state, p)
            assert float(optfn.get_learning_rate(new)) == 0.1
        tx = optfn.sgd(0.1)
        state = optfn.set_learning_rate(tx.init(p), 0.3)
        assert tx.update(p, state, p)[0]["w"].tolist() == [-0.3, -0.3]
        loaded = optfn.load_state_dict(state, mapping)
        assert jax.tree.map(jnp.result_type, loaded) == jax.tree.map(jnp.result_type, state)
        assert float(optfn.get_learning_rate(loaded)) == 0.25


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_schedule_or_an_array_that_begins_below_zero_or_nan_is_an_error(rate):
    for given in (lambda step: jnp.float32(rate), jnp.float32(rate)):
        for make in (optfn.sgd, optfn.adam, optfn.ftrl):
            with pytest.raises(ValueError, match=r"learning_rate: the .* must be >= 0 and finite"):
                make(given).init(P)
    jax.jit(lambda x: optfn.sgd(x).init(P))(jnp.float32(rate))  # its value is not known there


def test_a_warm_down_below_zero_within_the_run_warns():
    """Where the number of steps is known; the same schedule is right for a shorter run."""

    def minimize(tx, steps):
        batches = (np.ones(2, np.float32) for _ in range(steps))
        return optfn.minimize(
            lambda p, x: jnp.sum(p["w"] * x) ** 2, tx, P, batches, steps=steps, progress=False
        )

    def falling(step):
        return 1e-3 * (1 - step / 10)

    for tx in (optfn.sgd(falling), optfn.chain(optfn.clip_by_norm(1.0), optfn.adam(falling))):
        with pytest.warns(UserWarning, match=r"schedule of (sgd|adam) is -\S+ at step 1\d of 20"):
            minimize(tx, 20)
        minimize(tx, 10)
    minimize(optfn.accumulate(optfn.sgd(falling), 2), 20)


def test_rates_set_inside_vmap_are_those_of_runs_alone_and_can_be_set_again():
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] ** 2 * x), optfn.adam(1.0))
    rates = np.array([0.1, 0.01], np.float32)

    def run(rate):
        state = optfn.set_learning_rate(step.init(P), rate)
        return jax.lax.scan(lambda state, x: step(state, x), state, jnp.arange(1.0, 5.0))[0]

    states = jax.jit(jax.vmap(run))(rates)
    np.testing.assert_array_equal(optfn.get_learning_rate(states.opt_state), rates)
    for i, rate in enumerate(rates):
        alone = optfn.set_learning_rate(step.init(P), float(rate))
        for x in np.arange(1.0, 5.0, dtype=np.float32):
            alone, _ = step(alone, x)
        one = jax.tree.map(lambda leaf: leaf[i], states)  # noqa: B023
        np.testing.assert_allclose(one.params["w"], alone.params["w"], rtol=1e-6)
        again = optfn.set_learning_rate(one, 0.5)
        assert step(again, np.float32(1))[1]["learning_rate"] == 0.5
