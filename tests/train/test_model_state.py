"""Model state beside params, also that of a ResNet with BatchNorm in four libraries.

And the extra arguments of the update that transforms of optax ask for.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import by_name

import optfn
from optfn.distributed import data_mesh

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype(np.float32)
Y = RNG.normal(size=8).astype(np.float32)
START = {"mean": np.zeros(3, np.float32), "count": np.int32(0), "key": jax.random.key(7)}


def loss_fn(w, model_state, batch):
    """Least squares on centred inputs; the mean is a moving average."""
    x, y = batch
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
    new = {
        "mean": mean,
        "count": model_state["count"] + 1 + (x[0, 0] > X[0, 0]),  # of one worker only
        "key": jax.random.split(model_state["key"])[0],
    }
    return jnp.mean(((x - mean) @ w - y) ** 2), new


def run(step, steps=3, batch=(X, Y), start=START):
    state = step.init(jnp.zeros(3), start)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


def test_on_a_mesh_it_is_the_mean_of_floats_and_worker_0s_of_the_rest():
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), model_state=True, mesh=data_mesh(4))
    state, _ = run(step, steps=1)
    np.testing.assert_allclose(state.model_state["mean"], 0.1 * X.mean(0), rtol=1e-5)
    assert int(state.model_state["count"]) == 1  # worker 1 to 3 may have counted 2
    assert any(X[2 * k, 0] > X[0, 0] for k in range(1, 4))
    key = jax.random.fold_in(jax.random.key(7), 0)  # the loss got it with the worker's number in it
    key = jax.random.key_data(jax.random.split(key)[0])
    np.testing.assert_array_equal(jax.random.key_data(state.model_state["key"]), key)
    for x in jax.tree.leaves(state.model_state):
        assert x.sharding.is_fully_replicated


def test_aux_and_a_value_and_grad_of_ones_own():
    def with_aux(w, model_state, batch):
        loss, new = loss_fn(w, model_state, batch)
        return loss, (new, {"twice": 2 * loss})

    step = optfn.make_train_step(with_aux, optfn.sgd(0.1), model_state=True, has_aux=True)
    state, metrics = run(step)
    assert float(metrics["aux"]["twice"]) == pytest.approx(2 * float(metrics["loss"]))
    own = jax.value_and_grad(loss_fn, has_aux=True)
    step = optfn.make_train_step(None, optfn.sgd(0.1), model_state=True, value_and_grad=own)
    again, _ = run(step)
    chex.assert_trees_all_equal(state.params, again.params)
    np.testing.assert_array_equal(state.model_state["mean"], again.model_state["mean"])


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda w, s, b: jnp.sum(w), TypeError, r"model_state=True, loss_fn must return \(loss, "),
        (lambda w, s, b: (jnp.sum(w), {}), ValueError, "new model_state"),
        (
            lambda w, s, b: (jnp.sum(w), {"m": jnp.ones(2)}),
            ValueError,
            r"float32\[2\] at 'm', but the",
        ),
        (lambda w, s, b: (jnp.sum(w), {"m": jnp.ones(3, int)}), ValueError, r"int32\[3\] at 'm'"),
    ],
)
def test_losses_that_give_another_model_state(loss, error, words):
    step = optfn.make_train_step(loss, optfn.sgd(0.1), model_state=True)
    with pytest.raises(error, match=words):
        step(step.init(jnp.zeros(3), {"m": jnp.zeros(3)}), X)


def test_a_model_state_that_the_step_does_not_expect():
    with pytest.raises(TypeError, match="made with model_state=False; got a model_state"):
        optfn.make_train_step(lambda w, x: jnp.sum(w), optfn.sgd(1.0)).init(jnp.zeros(3), START)
    with pytest.raises(TypeError, match="made with model_state=True; got none"):
        optfn.make_train_step(loss_fn, optfn.sgd(1.0), model_state=True).init(jnp.zeros(3))


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["linen", "nnx", "equinox", "haiku"])
def test_a_resnet_with_batch_norm_learns_digits(library):
    """The net of each library in examples/digits, trained by the example."""
    for needed in ("sklearn", "flax", "equinox", "haiku"):
        pytest.importorskip(needed)
    from examples.digits import __main__ as digits

    assert library in digits.LIBRARIES
    state, history = digits.train(library, 60, progress=False)
    assert history["loss"][-5:].mean() < 0.5 * history["loss"][:5].mean()
    assert history["evaluation"][-1] > 0.55 > history["evaluation"][0]
    _, stats, _ = digits.net(library)(np.zeros((2, 8, 8, 1), np.float32))
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(state.model_state), strict=True)
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    assert all(moved) and len(moved) >= 6


def squares(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


LINEAR = {"w": np.zeros(3, np.float32), "b": np.float32(0)}


def keeping_extra():
    """A transform whose state is what the update was given beside gradients and params."""

    def measure(params, value, grad, value_fn):
        found, slope = jax.value_and_grad(value_fn)(params)
        return {"value": value, "grad": grad, "value_fn": found, "slope": slope}

    def init(params):
        zero = jnp.zeros(())
        return measure(params, zero, params, lambda p: sum(map(jnp.sum, jax.tree.leaves(p))))

    def update(updates, state, params, *, value, grad, value_fn, **extra):
        return updates, measure(params, value, grad, value_fn)

    return optax.GradientTransformationExtraArgs(init, update)


OPTIONS = {
    "one device": lambda: {},
    "mesh": lambda: {"mesh": data_mesh(4)},
    "explicit mesh": lambda: {"mesh": jax.make_mesh((4,), ("data",))},
    "packed": lambda: {"packed": True},
    "own value_and_grad": lambda: {"value_and_grad": jax.value_and_grad(squares)},
}


@pytest.mark.parametrize("options", by_name(OPTIONS, "explicit mesh", "packed"))
def test_the_update_gets_value_grad_and_value_fn(options):
    step = optfn.make_train_step(squares, optax.chain(keeping_extra(), optfn.sgd(0.1)), **options())
    state, _ = step(step.init(LINEAR), (X, Y))
    assert_of_the_whole_batch(state.opt_state[0])


def assert_of_the_whole_batch(found):
    """Compare the arguments that `keeping_extra` got with loss and gradients of one device."""
    loss, slope = jax.value_and_grad(squares)(LINEAR, (X, Y))
    for key in ("value", "value_fn"):
        np.testing.assert_allclose(found[key], loss, rtol=1e-6)
    for key in ("grad", "slope"):
        chex.assert_trees_all_close(optfn.unpack(found[key]), slope, rtol=1e-5, atol=1e-7)


def test_they_are_means_around_a_transform_that_takes_own_gradients():
    dgc = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, sparsity=(0.99,), min_size=2)
    step = optfn.make_train_step(squares, optax.chain(dgc, keeping_extra()), mesh=data_mesh(4))
    state, _ = step(step.init(LINEAR), (X, Y))
    assert_of_the_whole_batch(state.opt_state[1])


def test_value_fn_is_of_the_old_model_state_and_of_this_steps_key():
    def noisy(params, model_state, batch, key):
        loss = squares(params, batch) + jax.random.normal(key) + model_state
        return loss, model_state + 1.0

    tx = optax.chain(keeping_extra(), optfn.sgd(0.1))
    step = optfn.make_train_step(noisy, tx, model_state=True, rng=3)
    state = step.init(LINEAR, jnp.zeros(()))
    for _ in range(2):
        state, _ = step(state, (X, Y))
    found = state.opt_state[0]
    np.testing.assert_allclose(found["value_fn"], found["value"], rtol=1e-6)
    assert float(state.model_state) == 2.0


CONTRIB = {
    "lbfgs": optax.lbfgs,
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "polyak": optax.polyak_sgd,
    "muon": lambda: optax.contrib.muon(0.2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "prodigy": lambda: optax.contrib.prodigy(estim_lr0=0.1),
    "dog": lambda: optax.contrib.dog(1.0, ("distance", 0.1)),
    # Its update takes no extra arguments, which optax's type for it says it does.
    "sam": lambda: optax.GradientTransformation(
        *optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*CONTRIB])
def test_optimizers_of_optax_train_on_a_mesh_as_on_one_device(name):
    outputs = {"w": RNG.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
    batch = X, X @ RNG.normal(size=(3, 2)).astype(np.float32)
    runs = [
        optfn.minimize(squares, CONTRIB[name](), outputs, [batch] * 12, mesh=mesh, progress=False)
        for mesh in (None, data_mesh(4))
    ]
    (alone, history), (spread, _) = runs
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    chex.assert_trees_all_close(spread.params, alone.params, rtol=1e-3, atol=1e-4)


def test_accumulate_leaves_out_what_it_cannot_pass():
    def strict():
        def update(updates, state, params=None, *, value, **extra):
            assert not extra.keys() & {"grad", "value_fn"}
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    step = optfn.make_train_step(squares, optfn.accumulate(strict(), 2))
    step(step.init(LINEAR), (X, Y))
