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

    def __init__(self, scale, interval):
        self.scale, self.interval, self.tracker = np.float32(scale), interval, 0

    def __call__(self, grad):
        """Return the unscaled gradient, None where the step is skipped."""
        unscaled = grad.astype(np.float32) / self.scale
        if not np.all(np.isfinite(unscaled)):
            self.scale, self.tracker = self.scale * np.float32(0.5), 0
            return None
        self.tracker += 1
        if self.tracker == self.interval:
            self.scale, self.tracker = self.scale * np.float32(2), 0
        return unscaled


def test_a_scale_that_would_overflow_stays():
    options = {"initial_scale": 2.0**126, "growth_interval": 1}
    tx, params = optfn.dynamic_loss_scale(optfn.sgd(0.1), **options), jnp.ones(3)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
    assert float(optfn.loss_scale(state)) == 2.0**127


X = np.random.default_rng(0).normal(size=(12, 16, 3)).astype(np.float32)


def half_loss(w, x):
    """A loss whose gradient, without a scale, is below float16's least number, 6e-8."""
    product = (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)
    return 1e-9 * jnp.sum(product)


def test_small_gradients_in_float16_reach_the_optimizer():
    """The scale begins above float16's range, falls until gradients are finite, and grows."""
    tx = optfn.dynamic_loss_scale(optfn.sgd(1e3), initial_scale=2.0**50, growth_interval=4)
    step = optfn.make_train_step(half_loss, tx)
    state, want, reference = step.init(jnp.zeros(3)), np.zeros(3), GradScaler(2.0**50, 4)
    scales = []
    for x in np.concatenate([X, X])[:, :1]:
        with np.errstate(over="ignore", invalid="ignore"):
            cotangent = (np.float32(1e-9) * reference.scale).astype(np.float16)
            grad = cotangent * x[0].astype(np.float16)
        loss = 1e-9 * np.sum(want.astype(np.float16) * x.astype(np.float16), dtype=np.float32)
        unscaled = reference(grad)
        if unscaled is not None:
            want = want - 1e3 * unscaled
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
