"""A training step inside other transformations, on every kind of mesh, and used wrongly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.sharding import AxisType
from problems import trained

import optfn
from optfn.distributed import data_mesh


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1.0) ** 2)


def start():
    return {"w": np.full((16, 4), 0.1, np.float32)}


BATCHES = np.random.default_rng(0).standard_normal((3, 8, 16), np.float32)


def losses_of(step):
    return trained(step, step.init(start()), BATCHES)[1]


@pytest.mark.parametrize(
    "tx",
    [optfn.adam(1e-2), optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=4)],
    ids=["adam", "dgc"],
)
def test_one_compilation_on_an_explicit_mesh(tx):
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    steps = [optfn.make_train_step(loss_fn, tx, mesh=mesh) for mesh in (explicit, data_mesh(4))]
    np.testing.assert_allclose(*map(losses_of, steps), rtol=1e-6)
    assert compilations(steps[0]) == 1


def test_a_state_that_was_used_up_is_named():
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), mesh=data_mesh(4))
    state = step.init(start())
    new, _ = step(state, BATCHES[0])
    with pytest.raises(ValueError, match="the state has been used up: an earlier call"):
        step(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"'params/.*' has been deleted: an earlier call"):
        step(new._replace(params=state.params), BATCHES[0])


def test_multi_steps_as_an_object():
    made = optax.MultiSteps(optax.sgd(0.1), 2)
    losses = losses_of(optfn.make_train_step(loss_fn, made))
    want = losses_of(optfn.make_train_step(loss_fn, made.gradient_transformation()))
    assert losses == want and losses[0] != losses[2]


def test_the_array_of_a_batch_that_workers_cannot_split_is_named():
    """One array alone has no name; another one may be beside a None."""
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), mesh=data_mesh(4))
    x = np.zeros((7, 16), np.float32)
    for batch, words in ((x, "it"), ({"mask": None, "x": x}, "leaf 'x'")):
        with pytest.raises(ValueError, match=rf"4 workers; {words} has shape \(7, 16\)"):
            step(step.init(start()), batch)


def test_a_loss_beside_value_and_grad_is_not_needed():
    step = optfn.make_train_step(None, optfn.sgd(0.1), value_and_grad=jax.value_and_grad(loss_fn))
    assert losses_of(step) == losses_of(optfn.make_train_step(loss_fn, optfn.sgd(0.1)))
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        optfn.make_train_step(None, optfn.sgd(0.1))
