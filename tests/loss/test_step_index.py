"""`pass_step=True`: the loss gets the index of the step, in every way of dividing the work."""

import jax.numpy as jnp
import numpy as np
import pytest

import optfn

X = np.random.default_rng(0).normal(size=(6, 16, 4)).astype(np.float32)


def loss_fn(params, x, step):
    weight = jnp.minimum(1.0, (step + 1) / 4)
    return weight * jnp.mean((x @ params["w"] - 1) ** 2), {"step": jnp.float32(step)}


def test_the_last_steps_of_int32_have_their_index():
    step = optfn.make_train_step(
        loss_fn, optfn.sgd(0.1), has_aux=True, pass_step=True, microbatches=4
    )
    state = step.init({"w": jnp.ones(4)})._replace(step=jnp.int32(2**31 - 2))
    _, metrics = step(state, X[0])
    assert metrics["aux"]["step"] == 2.0**31


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
