"""An update that does not count changes nothing, in every link, label, exchange and round.

Such an update has no weight, because those of its loss, a `Mean`, add up to 0, or a guard drops it.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn.distributed import data_mesh, exchange, quantize, top_k
from optfn.schedules import reduce_on_plateau

RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=(32, 8)).astype(np.float32)
PARAMS = {"w": np.zeros((32, 8), np.float32), "b": np.zeros(8, np.float32)}


def loss_fn(p, batch):
    x, weight = batch
    errors = jnp.sum((x @ p["w"] + p["b"] - x @ TRUTH) ** 2, -1)
    return optfn.Mean(jnp.sum(weight * errors), jnp.sum(weight))


def make_batches(count, *, weights=None):
    xs = RNG.normal(size=(count, 8, 32)).astype(np.float32)
    weights = np.ones((count, 8), np.float32) if weights is None else weights
    return list(zip(xs, weights, strict=True))


FULL = make_batches(6)
EMPTY = FULL[0][0], np.zeros(8, np.float32)
BROKEN = np.full_like(FULL[0][0], np.nan), np.ones(8, np.float32)
MIXED = [x for batch in FULL for x in (EMPTY, batch, EMPTY)]


def train(tx, batches, params=PARAMS, loss=loss_fn, **options):
    """Return the last state and the metrics of each call."""
    step = optfn.make_train_step(loss, tx, **options)
    state, found = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return jax.device_get(state), found


def assert_same_state(found, want):
    """Compare params and the state of the optimizer, bit for bit."""
    found, want = found._replace(step=0), want._replace(step=0)
    jax.tree.map(np.testing.assert_array_equal, found, want)


def partition(**labels):
    return optax.partition(labels, {"w": "one", "b": "two"})


def guarded(tx):
    return optfn.skip_nonfinite(tx)


CHAINS = {
    "adam, ema": lambda: optfn.chain(optfn.adam(0.1), optfn.exponential_moving_average(0.5)),
    "plateau, model_average": lambda: optfn.chain(
        optfn.momentum(1.0, 0.9), reduce_on_plateau(0.01, patience=0), optfn.model_average(0.5)
    ),
    "optax": lambda: optax.chain(optax.scale_by_adam(), optax.ema(0.5), optax.scale(-0.1)),
    "labels": lambda: partition(one=optfn.momentum(0.01, 0.9), two=optfn.adam(0.1)),
    "guards": lambda: optfn.skip_spikes(guarded(optfn.adam(optfn.schedules.noam(8, 4)))),
    "scale": lambda: optfn.dynamic_loss_scale(optfn.adam(0.1), growth_interval=4),
    "metrics": lambda: optfn.record_metrics(optfn.lamb(0.1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_updates_without_weight_leave_no_trace(name):
    want, _ = train(CHAINS[name](), FULL)
    found, metrics = train(CHAINS[name](), MIXED)
    assert_same_state(found, want)
    assert [np.isnan(x["loss"]) for x in metrics] == [True, False, True] * 6


EXCHANGES = {
    "dgc": lambda: optfn.dgc_momentum(0.02, 0.9, rampup_begin_step=2, sparsity=[0.98], min_size=16),
    "top_k, ema": lambda: optfn.chain(
        exchange(top_k(0.05), min_size=16), optfn.sgd(0.1), optfn.exponential_moving_average(0.5)
    ),
    "parts": lambda: optfn.chain(
        exchange(quantize(1), min_size=16, route="parts"), optfn.adam(0.1)
    ),
    "accumulated": lambda: optfn.accumulate(
        optfn.chain(exchange(top_k(0.05), min_size=16), optfn.sgd(0.1)), 3
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_sends_nothing_that_is_not_applied(name):
    # An accumulation of three calls has one with weight.
    batches = [x for x in FULL for _ in range(3 if name == "accumulated" else 1)]
    states = [
        optfn.state_dict(train(EXCHANGES[name](), x, mesh=data_mesh(4))[0]._replace(step=0))
        for x in (MIXED, batches)
    ]
    assert any(np.any(x) for k, x in states[1].items() if "/residual/" in k)
    skipped = "version", "per_worker", "dtypes"
    skipped += ("accumulate/total", "accumulate/weight", "accumulate/value")
    for k in states[1]:
        if not k.startswith(skipped):
            np.testing.assert_allclose(*(x[k] for x in states), rtol=1e-5, atol=1e-5, err_msg=k)


def test_an_exchange_keeps_what_a_later_guard_drops():
    spike = 1e4 * FULL[0][0], FULL[0][1]
    tx = optfn.chain(
        exchange(top_k(0.05), min_size=16), optfn.skip_spikes(optfn.sgd(0.01), 3.0, window=2)
    )
    want, _ = train(tx, FULL, mesh=data_mesh(4))
    found, metrics = train(tx, [*FULL[:3], spike, *FULL[3:]], mesh=data_mesh(4))
    assert metrics[3]["spike_ratio"] > 3
    names = [k for k in optfn.state_dict(want.opt_state) if k.split("/")[-1] != "skipped"]
    for k in names:
        np.testing.assert_array_equal(*(optfn.state_dict(x.opt_state)[k] for x in (found, want)))
    jax.tree.map(np.testing.assert_array_equal, found.params, want.params)


BESIDE = {
    "before": lambda: optax.chain(optax.trace(0.9), guarded(optfn.adam(0.1))),
    "behind": lambda: optfn.chain(guarded(optfn.adam(0.1)), optfn.exponential_moving_average(0.5)),
    "of optax": lambda: optax.chain(
        optax.apply_if_finite(optax.adam(0.1), 5), optax.trace(0.5), optax.scale(-1.0)
    ),
    "labels": lambda: partition(one=guarded(optfn.momentum(0.01, 0.9)), two=optfn.adam(0.1)),
    "accumulated": lambda: optfn.accumulate(
        optfn.chain(guarded(optfn.sgd(0.1)), optfn.exponential_moving_average(0.5)), 1
    ),
}


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


def test_a_label_that_accumulates_counts_a_call_without_weight_and_others_do_not_step():
    tx = partition(one=optfn.accumulate(optfn.sgd(0.1), 2), two=optfn.momentum(0.1, 0.9))
    step = optfn.make_train_step(loss_fn, tx)
    states = [step.init(PARAMS)]
    for batch in (FULL[0], EMPTY, EMPTY, FULL[1]):
        states.append(jax.device_get(step(jax.tree.map(jnp.copy, states[-1]), batch)[0]))
    changes = [
        [bool(np.any(a.params[k] != b.params[k])) for k in ("w", "b")]
        for a, b in itertools.pairwise(states)
    ]
    assert changes == [[False, True], [True, False], [False, False], [True, True]]
    one_big, _ = train(optfn.sgd(0.1), FULL[:1])
    np.testing.assert_allclose(states[2].params["w"], one_big.params["w"], rtol=1e-6)


NESTED = {
    "one": lambda: optfn.accumulate(optfn.sgd(1.0), 4),
    "two": lambda: optfn.accumulate(optfn.accumulate(optfn.sgd(1.0), 2), 2),
    "guarded": lambda: optfn.accumulate(guarded(optfn.accumulate(optfn.sgd(1.0), 2)), 2),
}


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e-12, 1e9])
@pytest.mark.parametrize("name", NESTED)
def test_calls_count_by_their_weights_nested_and_at_any_scale(name, scale):
    g, weights = np.array([1.0, 2.0, 5.0, 7.0]), scale * np.array([1.0, 0.0, 6.0, 2.0])
    batches = list(zip(np.float32(g), np.float32(weights), strict=True))

    def loss(p, b):
        return optfn.Mean(b[1] * b[0] * p, b[1])

    state, _ = train(NESTED[name](), batches, np.float32(0), loss)
    assert state.params == pytest.approx(-(g * weights).sum() / weights.sum(), rel=1e-5)


def test_a_plateau_in_an_accumulation_sees_the_loss_of_the_update():
    values, weights = [1.0, 9.0, 3.0, 2.0], [1.0, 3.0, 0.0, 2.0]
    inner = optfn.chain(optfn.sgd(1.0), reduce_on_plateau(0.1))

    def loss(p, b):
        return optfn.Mean(b[1] * b[0] + 0 * p, b[1])

    batches = list(zip(np.float32(values), np.float32(weights), strict=True))
    state, _ = train(optfn.accumulate(inner, 2), batches, np.float32(0), loss)
    plateau = state.opt_state.inner_state[1]
    assert (plateau.best, plateau.value) == (7.0, 2.0)


def model_loss(p, s, batch):
    x, weight = batch
    mean = jnp.sum(weight[:, None] * x, 0) / jnp.sum(weight)  # NaN of nothing
    return loss_fn(p, batch), {"mean": 0.9 * s["mean"] + 0.1 * mean}


@pytest.mark.parametrize("every", [None, 1, 2])
def test_the_model_state_of_nothing_is_not_kept(every):
    tx = optfn.adam(0.1) if every is None else optfn.accumulate(optfn.adam(0.1), every)
    step, means = optfn.make_train_step(model_loss, tx, model_state=True), []
    for batches in (FULL, MIXED):
        state = step.init(PARAMS, {"mean": np.ones(32, np.float32)})
        for batch in batches:
            state, _ = step(state, batch)
        means.append(np.asarray(state.model_state["mean"]))
    np.testing.assert_array_equal(*means)


# Local steps: each worker has its own weights.
def rounds(*own):
    """Return a batch of a round of two local steps: the weight of each worker in each."""
    weights = np.repeat(np.array(own, np.float32).reshape(-1), 2)
    return RNG.normal(size=(len(weights), 32)).astype(np.float32), weights


@pytest.mark.parametrize("outer", [None, optfn.momentum(0.7, 0.9)])
def test_a_local_step_without_weight_does_not_count_for_its_worker(outer, tmp_path):
    options = {"mesh": data_mesh(2), "local_steps": 2, "outer": outer}

    def make():
        return optfn.make_train_step(loss_fn, optfn.adam(0.01), **options)

    batches = [rounds(0, 1, 1, 1), rounds(0, 0, 0, 1), rounds(0, 0, 0, 0), rounds(1, 1, 1, 1)]
    step = make()
    state = step.init(PARAMS)
    for batch in batches[:2]:
        state, _ = step(state, batch)
    assert optfn.state_dict(state)["inner/scale_by_adam/step"].tolist() == [1, 3]
    for x in jax.tree.leaves(state):
        if x.sharding.is_fully_replicated:
            copies = [np.asarray(y.data) for y in x.addressable_shards]
            np.testing.assert_array_equal(*copies)
    before = jax.device_get(state)
    state, metrics = step(state, batches[2])
    assert_same_state(jax.device_get(state), before)
    assert np.isnan(metrics["loss"]) and metrics["weight"] == 0
    optfn.save_checkpoint(tmp_path, state)
    resumed, _ = optfn.restore_checkpoint(tmp_path, make().init(PARAMS))
    assert_same_state(jax.device_get(resumed), jax.device_get(state))
    ends = [jax.device_get(s(x, batches[3])[0]) for s, x in ((step, state), (make(), resumed))]
    assert_same_state(*ends)
    assert step.compiled._cache_size() == 1


def test_local_steps_of_a_worker_that_has_no_weight_are_those_of_the_other():
    tx, options = optfn.momentum(0.01, 0.9), {"mesh": data_mesh(2), "local_steps": 2}
    batch = rounds(0, 0, 1, 1)
    state, _ = train(tx, [batch], **options)
    alone, _ = train(tx, [(batch[0][4:6], batch[1][4:6]), (batch[0][6:], batch[1][6:])])
    # The mean of one worker's params and of those that did not move.
    np.testing.assert_allclose(state.params["w"], alone.params["w"] / 2, rtol=1e-5, atol=1e-7)


# Judges of values.
@pytest.mark.parametrize(
    ("name", "skipped"),
    [("adam", 1), ("rmsprop", 1), ("adagrad", 1), ("adadelta", 1), ("momentum", 0), ("sgd", 0)],
)
def test_a_gradient_whose_square_overflows_is_not_finite_where_squares_are_kept(name, skipped):
    arguments = (0.1, 0.9) if name == "momentum" else (0.1,)
    tx = optfn.skip_nonfinite(getattr(optfn, name)(*arguments))
    state, metrics = train(tx, np.float32([1e20, 1, 1]), np.float32(0), lambda p, g: g * p)
    assert metrics[0]["skipped"] == skipped
    want, _ = train(
        getattr(optfn, name)(*arguments), np.float32([1, 1]), np.float32(0), lambda p, g: g * p
    )
    if skipped:
        assert state.params == want.params and want.params != 0


def test_a_mean_of_integers_is_exact_in_float64():
    with jax.enable_x64(True):

        def loss(p, x):
            return (jnp.sum(p * x), {"n": optfn.Mean(jnp.int64(2**24 + 1), jnp.int64(3))})

        _, metrics = train(optfn.sgd(0.1), [np.ones(2)], np.zeros(2), loss, has_aux=True)
    assert float(metrics[0]["aux"]["n"]) == (2**24 + 1) / 3


def test_tables_accumulate_by_weight():
    params = {"table": np.float32(RNG.normal(size=(9, 4))), "w": np.ones(4, np.float32)}

    def loss(p, batch):
        ids, weight = batch
        errors = (p["table"][ids] @ p["w"] - 1) ** 2
        return optfn.Mean(jnp.sum(weight * errors), jnp.sum(weight))

    batches = [
        (np.array([0, 2, 5]), np.float32(w)) for w in ([1, 0, 2], [0, 0, 0], [3, 1, 1], [1, 1, 1])
    ]
    found, want = (
        train(optfn.accumulate(optfn.sgd(0.1), 2), batches, params, loss, tables=tables)[0]
        for tables in ("table", None)
    )
    jax.tree.map(np.testing.assert_allclose, found.params, want.params)
