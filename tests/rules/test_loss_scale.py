"""dynamic_loss_scale against torch's GradScaler, written out in NumPy; and in training steps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn


class GradScaler:
    """The scale of torch.amp.GradScaler: unscale_, step and update."""

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.scale, self.tracker, self.skipped = np.float32(scale), 0, 0
        self.growth, self.backoff, self.interval = growth, backoff, interval

    def __call__(self, grads):
        """Return the unscaled gradients, None where the step is skipped."""
        unscaled = [g.astype(np.float32) / self.scale for g in grads]
        if not all(np.all(np.isfinite(g)) for g in unscaled):
            self.scale, self.tracker = np.float32(self.scale * self.backoff), 0
            self.skipped += 1
            return None
        self.tracker += 1
        if self.tracker == self.interval:
            with np.errstate(over="ignore"):
                larger = np.float32(self.scale * self.growth)
            self.scale = larger if np.isfinite(larger) else self.scale
            self.tracker = 0
        return unscaled


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"scale": 1000.0, "growth": 1.7, "backoff": 0.3, "interval": 2}, np.float16),
        ({"scale": 2.0**126, "interval": 1}, np.float32),
    ],
    ids=["other factors", "a scale that would overflow"],
)
def test_scale_and_steps_are_those_of_grad_scaler(options, dtype):
    rng = np.random.default_rng(0)
    names = {"scale": "initial_scale", "growth": "growth_factor", "backoff": "backoff_factor"}
    names["interval"] = "growth_interval"
    tx = optfn.dynamic_loss_scale(
        optfn.momentum(0.1, 0.9), **{names[k]: x for k, x in options.items()}
    )
    reference = GradScaler(**options)
    params = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    want, velocity = [np.ones(3), np.zeros((2, 2))], [0.0, 0.0]
    state, update = tx.init(params), jax.jit(tx.update)
    bad = {0: np.inf, 1: np.nan, 6: -np.inf, 13: np.nan, 14: np.inf}
    for i in range(25):
        grads = [rng.normal(size=x.shape).astype(dtype) for x in want]
        if i in bad:
            grads[i % 2].flat[0] = bad[i]
        updates, state = update(dict(zip("ab", grads, strict=True)), state, params)
        params = optfn.apply_updates(params, updates)
        unscaled = reference(grads)
        if unscaled is not None:
            velocity = [0.9 * v + g for v, g in zip(velocity, unscaled, strict=True)]
            want = [p - 0.1 * v for p, v in zip(want, velocity, strict=True)]
        assert float(state.scale) == pytest.approx(float(reference.scale), rel=1e-6)
        assert int(state.good_steps) == reference.tracker
        assert int(state.inner_state.skipped) == reference.skipped
    for found, x in zip(jax.tree.leaves(params), want, strict=True):
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)
    assert float(optfn.loss_scale(state)) == float(state.scale)


X = np.random.default_rng(0).normal(size=(12, 16, 3)).astype(np.float32)


def half_loss(w, x):
    """A loss whose gradient, without a scale, is below float16's least number, 6e-8."""
    product = (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)
    return 1e-9 * jnp.sum(product)


def test_small_gradients_in_float16_reach_the_optimizer():
    """The scale begins above float16's range, falls until gradients are finite, and grows."""
    tx = optfn.dynamic_loss_scale(optfn.sgd(1e3), initial_scale=2.0**50, growth_interval=4)
    step = optfn.make_train_step(half_loss, tx)
    state, want, reference = step.init(jnp.zeros(3)), np.zeros(3), GradScaler(2.0**50, interval=4)
    scales = []
    for x in np.concatenate([X, X])[:, :1]:
        with np.errstate(over="ignore", invalid="ignore"):
            cotangent = (np.float32(1e-9) * reference.scale).astype(np.float16)
            grad = cotangent * x[0].astype(np.float16)
        loss = 1e-9 * np.sum(want.astype(np.float16) * x.astype(np.float16), dtype=np.float32)
        unscaled = reference([grad])
        if unscaled is not None:
            want = want - 1e3 * unscaled[0]
        state, metrics = step(state, x)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-3)
        np.testing.assert_allclose(state.params, want, rtol=1e-5)
        assert metrics["loss_scale"] == reference.scale
        scales.append(float(reference.scale))
    assert 0 < np.argmin(scales) < 23 and scales[-1] < 2.0**50
    plain = optfn.make_train_step(half_loss, optfn.sgd(1e3))
    assert not np.any(plain(plain.init(jnp.zeros(3)), X[0])[0].params)


def square_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) - params["b"]) ** 2)


PARAMS = {"w": jnp.asarray([0.3, -0.2, 0.5]), "b": jnp.asarray(0.7)}


def run(tx):
    """Return the state after a step."""
    step = optfn.make_train_step(square_loss, tx)
    return step(step.init(PARAMS), X[0])[0]


def scaled(tx):
    return optfn.dynamic_loss_scale(tx, initial_scale=2.0**10, growth_interval=3)


def test_the_extra_arguments_are_without_the_scale():
    def init(params):
        return jax.tree.map(jnp.zeros_like, params | {"value": jnp.zeros(())})

    def update(updates, state, params=None, *, value, grad, value_fn, **extra):
        return updates, grad | {"value": value - value_fn(params)}

    seen = optax.GradientTransformationExtraArgs(init, update)
    state = run(scaled(optax.chain(seen, optfn.sgd(0.0))))
    found = jax.tree.leaves(state.opt_state.inner_state.inner_state[0])
    want = jax.tree.leaves(jax.grad(square_loss)(PARAMS, X[0]) | {"value": np.zeros(())})
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def half_sum(params, x):
    return jnp.sum(params["w"] * x).astype(jnp.float32)


HALF = {"w": np.ones(4, np.float16)}


@pytest.mark.parametrize("guard", [optfn.dynamic_loss_scale, optfn.skip_nonfinite])
def test_a_batch_that_is_bad_in_each_epoch_is_named(guard):
    batches = [np.full(4, 0.01, np.float16) for _ in range(7)]
    batches[3] = np.full(4, np.nan, np.float16)
    options = {} if guard is optfn.skip_nonfinite else {"initial_scale": 4.0, "min_scale": 1.0}
    tx = guard(optfn.sgd(0.1), **options)
    with pytest.warns(UserWarning, match="batch 3 of an epoch"):
        _, history = optfn.minimize(half_sum, tx, HALF, batches, epochs=6, progress=False)
    np.testing.assert_array_equal(history["skipped"], (np.arange(42) + 4) // 7)


# Growth makes the scale too large once in 11 steps, which is at the same place of each epoch.
@pytest.mark.parametrize("length", [11, 7])
def test_a_scale_that_grows_too_large_in_each_epoch_says_nothing(length):
    batches = [np.full(4, 10.0, np.float16) for _ in range(length)]
    tx = optfn.dynamic_loss_scale(optfn.sgd(1e-6), initial_scale=2048.0, growth_interval=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, history = optfn.minimize(half_sum, tx, HALF, batches, epochs=8, progress=False)
    skipped = history["skipped"][-1]
    assert length * 8 // 12 <= skipped <= length * 8 // 10


def test_names_in_checkpoints():
    plain, scaling = (
        optfn.state_dict(tx.init(PARAMS)) for tx in (optfn.sgd(0.1), scaled(optfn.sgd(0.1)))
    )
    guard = {f"skip_nonfinite/{name}" for name in ("consecutive", "skipped", "gave_up")}
    assert (
        scaling.keys() - plain.keys()
        == {"dynamic_loss_scale/scale", "dynamic_loss_scale/good_steps"} | guard
    )


def test_several_scales_are_refused():
    for tx in (scaled(scaled(optfn.sgd(0.1))), optax.chain(*[scaled(optfn.sgd(0.1))] * 2)):
        with (
            warnings.catch_warnings(action="ignore"),  # of the two learning rates of the chain
            pytest.raises(ValueError, match="several scales"),
        ):
            run(tx)
