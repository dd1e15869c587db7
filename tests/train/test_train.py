"""make_train_step and minimize: what they compute, in place, and what they show."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from grids import nightly

import optfn

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)


def params():
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def test_state_is_donated_and_the_callers_arrays_are_not():
    start = params()
    step = optfn.make_train_step(loss_fn, optfn.adam(0.1))
    state = step.init(start)
    old = state.params["w"]
    step(state, X)
    assert old.is_deleted()
    np.testing.assert_array_equal(start["w"], 0.0)
    kept = optfn.make_train_step(loss_fn, optfn.adam(0.1), donate=False)
    state = kept.init(start)
    kept(state, X)
    np.testing.assert_array_equal(state.params["w"], 0.0)


def test_arrays_that_an_optimizer_keeps_are_not_donated():
    rate, scale, kept = jnp.float32(0.1), jnp.float32(4.0), {"w": jnp.ones(3), "b": jnp.ones(())}
    own = optax.GradientTransformation(lambda p: kept, lambda u, s, p=None: (u, s))
    transforms = [
        optax.inject_hyperparams(optfn.adam)(learning_rate=rate),
        optfn.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optfn.sgd(0.1)),
        optfn.dynamic_loss_scale(optfn.adam(0.1), initial_scale=scale),
        optfn.chain(own, optfn.sgd(0.1)),
    ]
    for tx in transforms:
        step = optfn.make_train_step(loss_fn, tx)
        first, second = (step(step.init(params()), X)[0].params for _ in range(2))
        np.testing.assert_array_equal(first["w"], second["w"])
    assert not any(x.is_deleted() for x in (rate, scale, *kept.values()))


def test_integers_that_jax_would_cut_are_an_error():
    step = optfn.make_train_step(lambda p, s, x: (0.0, s), optfn.sgd(0.1), model_state=True)
    words = "model_state 'seen' has integers from 4000000000 to 4000000000, which JAX would cut"
    with pytest.raises(ValueError, match=words):
        step.init(params(), {"seen": np.int64(4_000_000_000)})
    with pytest.raises(ValueError, match="parameter 'ids' has integers"):
        step.init(params() | {"ids": np.array([2**40])})
    state = step.init(params() | {"ids": np.array([2**31 - 1, -(2**31)])}, {"seen": np.int64(7)})
    np.testing.assert_array_equal(state.params["ids"], [2**31 - 1, -(2**31)])


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_compiled_step_keeps_no_copy_of_a_parameter(dtype):
    """Temporaries are a small part of one parameter's bytes: everything is updated in place."""
    n = 1 << 18
    tx = optfn.adam(0.1, grad_clip=optfn.clip_by_global_norm(1.0))
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"].astype(jnp.float32) * x), tx)
    state = step.init({"w": jnp.zeros(n, dtype)})
    memory = step.compiled.lower(state, jnp.zeros(n)).compile().memory_analysis()
    gradient = n * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes >= n * (8 + jnp.dtype(dtype).itemsize)
    assert memory.temp_size_in_bytes <= 1.1 * gradient + n * 4  # the gradient, and its float32


def test_one_compilation_for_python_numbers_and_weak_types():
    """A weakly typed parameter does not compile the step again at step 2."""
    step = optfn.make_train_step(lambda p, x: (p - x) ** 2, optfn.sgd(0.1))
    state = step.init(jnp.asarray(2.0))
    for _ in range(3):
        state, _ = step(state, 1.0)
    assert compilations(step) == 1
    step.init(2.0)


def test_a_gradient_of_ones_own():
    def doubled(p, x):
        return jnp.sum(p * x), 2 * x

    step = optfn.make_train_step(lambda p, x: 0.0, optfn.sgd(1.0), value_and_grad=doubled)
    state, _ = step(step.init(jnp.zeros(2)), jnp.ones(2))
    np.testing.assert_array_equal(state.params, -2.0)


def test_a_loss_with_aux_is_said():
    step = optfn.make_train_step(lambda p, x: (jnp.sum(p), 1), optfn.sgd(0.1))
    with pytest.raises(TypeError, match="has_aux=True"):
        step(step.init(jnp.ones(2)), jnp.ones(2))


def test_a_state_on_the_host_goes_on():
    tx = optfn.skip_nonfinite(optfn.adam(0.1))
    step = optfn.make_train_step(loss_fn, tx, donate=False)
    state, _ = step(step.init(params()), X)
    want, _ = step(state, X)
    found, _ = step(jax.device_get(state), X)
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(want))


def test_progress_without_a_terminal_prints_lines(capsys):
    optfn.minimize(loss_fn, optfn.adam(0.1), params(), [X] * 20, steps=20)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1 loss 1.0000 rate 0.1")
    assert lines[-1].startswith("step 20 loss ")
    assert len(lines) == 11


def test_a_key_for_each_step():
    """The same run twice, other keys in every step."""

    def loss_fn(params, batch, key):
        noise = jax.random.uniform(key)
        return jnp.sum(params * batch.mean()) + noise, noise

    def run(rng):
        step = optfn.make_train_step(loss_fn, optfn.sgd(0.0), has_aux=True, rng=rng)
        state, found = step.init(jnp.zeros(2)), []
        for _ in range(3):
            state, metrics = step(state, jnp.ones((4, 1)))
            found.append(float(metrics["aux"]))
        return found

    first = run(True)
    assert first == run(0) == run(jax.random.key(0))
    assert len({*first, *run(1)}) == 6


def test_rng_must_be_a_key():
    loss_fn = lambda params, batch, key: jnp.sum(params)  # noqa: E731
    for rng, error in ((jnp.ones(2), TypeError), ("0", TypeError), (-1, ValueError)):
        with pytest.raises(error, match="rng must be"):
            optfn.make_train_step(loss_fn, optfn.sgd(0.1), rng=rng)
    with pytest.raises(
        ValueError, match=r"rng=.* cannot be combined with value_and_grad: it concerns loss_fn"
    ):
        optfn.make_train_step(
            loss_fn, optfn.sgd(0.1), rng=True, value_and_grad=lambda p, b: (0.0, p)
        )
    with pytest.raises(ValueError, match=r"recompute .* value_and_grad: .* optfn.recompute\(stage"):
        optfn.make_train_step(
            None, optfn.sgd(0.1), recompute=["x"], value_and_grad=lambda p, b: (0.0, p)
        )


@pytest.mark.parametrize("options", [nightly({"microbatches": 2}), {"mesh": 4, "shard": "params"}])
def test_sophia_differentiates_the_loss_twice(options):
    batches = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
    tx = optax.contrib.sophia(0.1, update_interval=2)

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)

    @jax.jit
    def step_of_optax(w, opt_state, x):
        obj_fn = functools.partial(loss, x=x)
        u, opt_state = tx.update(jax.grad(loss)(w, x), opt_state, w, obj_fn=obj_fn)
        return optax.apply_updates(w, u), opt_state

    want = np.full(3, 0.1, np.float32)
    opt_state = tx.init(want)
    for x in batches:
        want, opt_state = step_of_optax(want, opt_state, x)
    mesh = {"mesh": optfn.distributed.data_mesh(4)} if "mesh" in options else {}
    step = optfn.make_train_step(loss, tx, **options | mesh)
    state = step.init(jnp.full(3, 0.1))
    for x in batches:
        state, _ = step(state, x)
    np.testing.assert_allclose(state.params, want, rtol=1e-4)


def test_the_last_steps_of_int32_have_their_index():
    def loss(params, x, step):
        return jnp.mean(x @ params), jnp.float32(step)

    step = optfn.make_train_step(loss, optfn.sgd(0.1), has_aux=True, pass_step=True, microbatches=4)
    _, metrics = step(step.init(jnp.ones(3))._replace(step=jnp.int32(2**31 - 2)), X)
    assert metrics["aux"] == 2.0**31


def test_the_last_argument_comes_after_model_state_and_key():
    seen = []

    def loss_fn(params, model_state, batch, key, step):
        seen.append((model_state, batch, key, step))
        return jnp.sum(params * batch), model_state + 1

    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), model_state=True, rng=0, pass_step=True)
    step(step.init(np.ones(3, np.float32), jnp.zeros(())), np.ones(3, np.float32))
    model_state, batch, key, index = seen[0]
    assert (model_state.shape, batch.shape, key.shape) == ((), (3,), ())
    assert (index.shape, index.dtype) == ((), jnp.int32)


def test_a_loss_without_the_argument_is_said():
    with pytest.raises(TypeError, match=r"\(params, batch, step\).*pass_step=True the index"):
        optfn.make_train_step(lambda params, batch: 0.0, optfn.sgd(0.1), pass_step=True)
