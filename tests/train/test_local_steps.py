"""Local steps: what a round computes, whose state is whose, and what it cannot be combined with."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from problems import trained

import optfn
from optfn.distributed import data_mesh, exchange, quantize, rescale_residuals
from optfn.mesh.state.per_worker import PerWorker

N, H = 4, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 24, 5)).astype(np.float32)
TARGET = RNG.normal(size=(5, 2)).astype(np.float32)
PARAMS = {"w": np.zeros((5, 2), np.float32), "b": np.zeros(2, np.float32)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TARGET) ** 2)


def run(step, rounds=3, params=PARAMS, state=None):
    return trained(step, state or step.init(params), X[:rounds])


def make(tx=None, **options):
    return optfn.make_train_step(
        loss_fn, tx or optfn.momentum(0.05, 0.9), mesh=data_mesh(N), local_steps=H, **options
    )


def momentum_by_a_scan():
    """Momentum 0.05, 0.9 that goes over the rows of a leaf in a lax.scan, and counts them."""

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        def row(count, pair):
            velocity, g = pair
            return count + 1, 0.9 * velocity + g

        count, velocity = state
        for name in velocity:
            count, new = jax.lax.scan(row, count, (velocity[name], grads[name]))
            velocity = {**velocity, name: new}
        return jax.tree.map(lambda u: -0.05 * u, velocity), (count, velocity)

    return optax.GradientTransformation(init, update)


def test_an_optimizer_with_a_scan_is_followed_through_it():
    (state, losses), (expected, expected_losses) = run(make(momentum_by_a_scan())), run(make())
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    count, velocity = state.opt_state.inner.inner_state
    assert int(count) == 3 * H * (5 + 2)  # the same on all workers: it depends on no gradient
    assert all(isinstance(v, PerWorker) for v in velocity.values())


def test_one_worker_alone_makes_ordinary_steps():
    mesh = data_mesh(1)
    tx = optax.contrib.muon(0.01)
    ordinary = optfn.make_train_step(loss_fn, tx, mesh=mesh)
    state = ordinary.init(PARAMS)
    for x in X[:2]:
        for part in np.split(x, H):
            state, _ = ordinary(state, part)
    rounds, _ = run(optfn.make_train_step(loss_fn, tx, mesh=mesh, local_steps=H), 2)
    # θ − (θ − θ') is θ' up to rounding.
    chex.assert_trees_all_close(rounds.params, state.params, rtol=1e-4, atol=1e-5)


def test_moments_are_the_workers_own_and_counters_and_rates_are_shared():
    tx = optfn.adam(optfn.schedules.noam(8, 10), grad_clip=optfn.clip_by_global_norm(1.0))
    state, _ = run(make(tx, outer=optfn.adagrad(0.5)))
    arrays = optfn.state_dict(state.opt_state)
    names = {k: v.shape for k, v in arrays.items() if k not in ("version", "per_worker")}
    assert names == {
        "inner/num_workers": (),
        "inner/clip/factor": (4,),
        "inner/scale_by_adam/step": (),
        "inner/scale_by_adam/mu/b": (8,),
        "inner/scale_by_adam/mu/w": (20, 2),
        "inner/scale_by_adam/nu/b": (8,),
        "inner/scale_by_adam/nu/w": (20, 2),
        "inner/scale_by_learning_rate/step": (),
        "inner/scale_by_learning_rate/learning_rate": (),
        "outer/scale_by_adagrad/accumulator/b": (2,),
        "outer/scale_by_adagrad/accumulator/w": (5, 2),
        "outer/scale_by_learning_rate/step": (),
        "outer/scale_by_learning_rate/learning_rate": (),
    }
    assert set(arrays["per_worker"].tolist()) == {
        k for k, v in names.items() if k.startswith("inner/") and v
    }
    assert arrays["inner/num_workers"] == N
    assert arrays["inner/scale_by_adam/step"] == 3 * H
    mu = arrays["inner/scale_by_adam/mu/w"].reshape(N, -1)
    assert len(np.unique(mu[:, 0])) == N
    inner = state.opt_state.inner.inner_state
    owned = [x for x in jax.tree.leaves(inner) if len(x.sharding.device_set) == N and x.ndim]
    assert all(x.addressable_shards[0].data.shape[0] * N == x.shape[0] for x in owned)


def test_rates_and_metrics_are_the_inner_ones_unless_outer_is_asked_for():
    step = make(optfn.record_metrics(optfn.adam(0.1)), outer=optfn.record_metrics(optfn.sgd(0.5)))
    state, _ = run(step, 1)
    assert float(optfn.get_learning_rate(state.opt_state)) == pytest.approx(0.1)
    assert float(optfn.get_learning_rate(state.opt_state, "outer")) == 0.5
    new = optfn.set_learning_rate(state.opt_state, 0.01)
    assert float(optfn.get_learning_rate(new)) == pytest.approx(0.01)
    assert float(optfn.get_learning_rate(new, "outer")) == 0.5
    new = optfn.set_learning_rate(new, 0.25, "outer")
    assert float(optfn.get_learning_rate(new, "outer")) == 0.25
    inner, outer = optfn.metrics(state.opt_state), optfn.metrics(state.opt_state, "outer")
    drift = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(state.params))) / 0.5
    assert float(outer["grad_norm"]) == pytest.approx(float(drift), rel=1e-5)
    norms = optfn.state_dict(state.opt_state)["inner/record_metrics/grad_norm"]
    assert float(inner["grad_norm"]) == pytest.approx(np.sqrt(np.mean(norms**2)), rel=1e-5)
    # The rate of the inner optimizer is what the next round uses.
    before = np.asarray(state.params["w"])
    still, _ = run(step, 1, state=state._replace(opt_state=optfn.set_learning_rate(new, 0.0)))
    np.testing.assert_array_equal(still.params["w"], before)


def test_params_come_back_where_a_drift_is_not_finite_and_training_goes_on():
    step = make(optfn.adam(0.1), outer=optfn.momentum(1.0, 0.5))
    state, _ = run(step, 2)
    before = jax.device_get((state.params, state.opt_state.outer))
    x = X[2].copy()
    x[0] = np.inf
    state, metrics = step(state, x)
    assert not np.isfinite(metrics["loss"])
    chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state.outer)), before)
    assert int(state.step) == 3 * H
    mu = optfn.state_dict(state.opt_state)["inner/scale_by_adam/mu/w"].reshape(N, -1)
    assert not mu[0].any() and mu[1:].all()  # the worker that went astray begins anew
    state, metrics = step(state, X[3])
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(state.params["w"]).all()
    assert not np.array_equal(state.params["w"], before[0]["w"])


def test_integers_have_no_drift_and_narrow_params_are_exchanged_in_float32():
    params = {"w": jnp.ones((5, 2), jnp.bfloat16), "b": jnp.zeros(2), "n": jnp.int32(3)}
    seen = []

    def look():
        def update(updates, state, params=None, **extra):
            seen.append(jax.tree.map(lambda u: u.dtype, updates))
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)

    step = make(optfn.sgd(0.1), outer=optax.chain(look(), optfn.sgd(1.0)))
    state, _ = run(step, 1, params)
    assert seen[0] == {"w": jnp.float32, "b": jnp.float32, "n": jax.dtypes.float0}
    assert int(state.params["n"]) == 3 and state.params["w"].dtype == jnp.bfloat16


def levels(codes, start):
    """Return the fraction of the scale that each 8-bit code stands for; see `codes.Code`."""
    numbers = [(1 + k % 8 / 8) * 2.0 ** (k // 8 + start) - 2.0**start for k in range(codes)]
    return np.array(numbers) / numbers[-1]


SIGNED = np.concatenate([-levels(128, -16)[:0:-1], levels(128, -16)])
UNSIGNED = levels(256, -32)


def decoded(codes, scale, workers):
    """Return the numbers of each worker's part of 8-bit moments, flat, in float64."""
    table, zero = (SIGNED, 127) if codes.dtype == np.int8 else (UNSIGNED, 0)
    fractions = table[np.asarray(codes, int).reshape(workers, -1) + zero]
    rows = np.asarray(scale, np.float64).reshape(workers, -1)
    return fractions * np.repeat(rows, fractions.shape[1] // rows.shape[1], axis=1)


def nearest(x, scale, table):
    """Return the nearest numbers that codes can stand for, under scales of rows."""
    each = np.repeat(scale, x.size // scale.size)
    choice = np.abs(table[:, None] * each - x).argmin(0)
    return table[choice] * each


WIDE = {"w": np.ones((30, 256), np.float32), "b": np.float32(0.5)}
ROUNDS = np.random.default_rng(1).normal(size=(3, 8 * H, 30)).astype(np.float32)


def wide(workers, dtype, **options):
    tx = optfn.adam(1e-2, moment_dtype=dtype)
    step = optfn.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2), tx, mesh=data_mesh(workers),
        local_steps=H, **options,
    )  # fmt: skip
    return step, step.init(WIDE)


def moved(how, state, workers, template, directory):
    """Return a state for another number of workers, in each of the ways there are."""
    if how == "state":
        return rescale_residuals(state, workers)
    if how == "mapping":
        return optfn.load_state_dict(template, rescale_residuals(optfn.state_dict(state), workers))
    if how == "orbax":
        pytest.importorskip("orbax.checkpoint")
    optfn.save_checkpoint(directory, state, sharded=how == "orbax")
    return optfn.restore_checkpoint(directory, template)[0]


@pytest.mark.parametrize(
    ("how", "workers"),
    [("npz", 2), nightly("state", 8), nightly("orbax", 8), nightly("mapping", 2)],
)
def test_the_mean_of_8_bit_moments_is_that_of_their_numbers(how, workers, tmp_path):
    step, state = wide(N, "int8")
    for x in ROUNDS[:2]:
        state, _ = step(state, x)
    other, template = wide(workers, "int8")
    before = optfn.state_dict(state)
    state = moved(how, state, workers, template, tmp_path)
    after = optfn.state_dict(state)
    for moment, table in (("mu", SIGNED), ("nu", UNSIGNED)):
        for leaf in "wb":
            code, scale = (
                f"inner/scale_by_int8_adam/{moment}{part}/{leaf}" for part in ("", "_scale")
            )
            mean_scale = before[scale].reshape(N, -1).mean(0, dtype=np.float64)
            want = nearest(decoded(before[code], before[scale], N).mean(0), mean_scale, table)
            got = decoded(after[code], after[scale], workers)
            np.testing.assert_allclose(got, np.tile(want, (workers, 1)), rtol=1e-5)
    _, metrics = other(jax.device_get(state), ROUNDS[2])
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("how", ["state", nightly("npz"), nightly("mapping")])
def test_the_mean_of_bfloat16_moments_is_that_of_their_numbers(how, tmp_path):
    """In a mapping their bits are 16-bit integers."""
    step, state = wide(N, "bfloat16")
    state, _ = step(state, ROUNDS[0])
    before = [np.asarray(x["w"].value) for x in state.opt_state.inner.inner_state[0][1:]]
    state = moved(how, state, 2, wide(2, "bfloat16")[1], tmp_path)
    after = [np.asarray(x["w"].value) for x in state.opt_state.inner.inner_state[0][1:]]
    for x, y in zip(before, after, strict=True):
        assert y.dtype == jnp.bfloat16
        mean = x.reshape(N, 30, 256).astype(np.float64).mean(0).astype(jnp.bfloat16)
        np.testing.assert_array_equal(y.reshape(2, 30, 256), [mean, mean])


MISUSES = {
    "no mesh": ({"mesh": None}, "local_steps=3 needs mesh"),
    "outer alone": ({"local_steps": 1, "outer": optfn.sgd(1.0)}, "outer needs local_steps"),
}


@pytest.mark.parametrize(("options", "words"), MISUSES.values(), ids=MISUSES)
def test_what_rounds_cannot_be_with(options, words):
    options = {"mesh": data_mesh(N), "local_steps": H} | options
    with pytest.raises(ValueError, match=words):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), **options)


COPIES = "must not keep copies or averages of params.* Put them in outer"
APART = {
    "dgc": (optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0), "tx must not exchange gradients"),
    "masters": (optfn.master_weights(optfn.sgd(0.1)), COPIES),
    "ema": (optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average(0.9)), COPIES),
    "model_average": (optfn.chain(optfn.sgd(0.1), optfn.model_average(0.15)), COPIES),
    "schedule_free": (optax.contrib.schedule_free_adamw(0.1), COPIES),
}


@pytest.mark.parametrize(("tx", "words"), APART.values(), ids=APART)
def test_optimizers_that_workers_cannot_have_apart(tx, words):
    with pytest.raises(ValueError, match=words):
        make(tx).init(PARAMS)


def test_a_state_without_local_steps_is_refused_and_so_is_one_of_them():
    alone = optfn.make_train_step(loss_fn, optfn.adam(0.05), mesh=data_mesh(N))
    rounds = make(optfn.adam(0.05))
    words = (
        "made with local_steps=3, but the state was made without local steps. Begin with state = "
    )
    with pytest.raises(TypeError, match=words):
        rounds(alone.init(PARAMS), X[0])
    words = (
        "made with local_steps=1, but the state was made with local_steps > 1. Begin with state = "
    )
    with pytest.raises(TypeError, match=words):
        alone(rounds.init(PARAMS), X[0])


@pytest.mark.parametrize("workers", [3, 8])
def test_a_state_of_other_workers_is_refused_and_converted_as_the_error_says(workers):
    """Of 3 workers it could not be divided over 4, of 8 each would have the parts of two."""
    mesh = data_mesh(workers)
    other = optfn.make_train_step(loss_fn, optfn.adam(0.05), mesh=mesh, local_steps=H)
    state, _ = other(other.init(PARAMS), np.ones((24 * H, 5), np.float32))
    step = make(optfn.adam(0.05))
    words = rf"made for {workers} workers, but the step has 4.* by .*rescale_residuals\(state, 4\)"
    for same in (state, jax.device_get(state)):
        with pytest.raises(ValueError, match=words):
            step(jax.block_until_ready(same), X[0])
    mu = np.asarray(state.opt_state.inner.inner_state[0].mu["w"].value)
    rescaled = rescale_residuals(state, N)
    found = rescaled.opt_state.inner.inner_state[0].mu["w"].value
    mean = mu.reshape(workers, 5, 2).mean(0, dtype=np.float64)
    np.testing.assert_allclose(found.reshape(N, 5, 2), np.stack([mean] * N), rtol=1e-6)
    after, metrics = step(rescaled, X[0])
    assert np.isfinite(metrics["loss"]) and int(after.step) == 2 * H


def test_a_checkpoint_goes_to_other_workers_where_only_the_outer_state_is_theirs(tmp_path):
    """That of sgd is the same for all workers, and counts none."""

    def of(workers):
        outer = optfn.chain(exchange(quantize(8, chunk=4), min_size=1), optfn.sgd(1.0))
        mesh = data_mesh(workers)
        return optfn.make_train_step(
            loss_fn, optfn.sgd(0.05), mesh=mesh, local_steps=H, outer=outer
        )

    state, _ = run(of(N), rounds=1)
    optfn.save_checkpoint(tmp_path, state)
    two = of(2)
    restored, _ = optfn.restore_checkpoint(tmp_path, two.init(PARAMS))
    before, after = (
        np.asarray(optfn.state_dict(x.opt_state)["outer/exchange/residual/w"], np.float64)
        for x in (state, restored)
    )
    assert np.any(before)
    mean = before.reshape(N, 10).mean(0)
    np.testing.assert_allclose(after.reshape(2, 10), np.stack([mean] * 2), rtol=1e-6, atol=1e-9)
    two(restored, X[1])


def test_batches_that_cannot_be_split():
    step = make()
    with pytest.raises(ValueError, match=r"by the 4 workers times 3 local steps; .*\(8, 5\)"):
        step(step.init(PARAMS), X[0][:8])
    with pytest.raises(ValueError, match=r"steps must be a multiple of local_steps, 3.*got 4"):
        optfn.fit(step, step.init(PARAMS), X, steps=4, progress=False)
