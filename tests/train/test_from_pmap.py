"""A state of a pmap script in `make_train_step`; docs/moving/optax.md has one that goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh

N = 8
PARAMS = {"w": np.zeros((16, 4), np.float32), "b": np.zeros(4, np.float32)}
BATCHES = np.asarray(normal(0, 6, N, 4, 16))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 1.0) ** 2)


def dgc(axis_name):
    return optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=16, axis_name=axis_name)


def replicate(tree):
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * N), tree)


def run_pmap():
    """Take steps as a script does; return params and state of all devices."""
    tx = dgc("batch")

    def step(params, opt_state, x):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step, state = jax.pmap(step, axis_name="batch"), (replicate(PARAMS), replicate(tx.init(PARAMS)))
    for x in BATCHES:
        state = step(*state, x)
    return state


def test_a_state_of_pmap_moves_to_fewer_workers():
    """The mean residual and the mean velocity of all workers stay."""
    workers = 4
    params, opt_state = run_pmap()
    step = optfn.make_train_step(loss_fn, dgc("data"), mesh=data_mesh(workers))
    new = step.init(jax.tree.map(lambda x: np.asarray(x)[0], params))
    saved = optfn.state_dict(opt_state)
    found = optfn.distributed.rescale_residuals(saved, workers)
    new = optfn.load_state_dict(new, optfn.state_dict(new) | found)
    loaded = optfn.state_dict(new.opt_state)
    for name in ("residual/w", "local_velocity/w"):
        key = f"deep_gradient_compression/{name}"
        want = np.mean(saved[key], 0, dtype=np.float64)
        np.testing.assert_allclose(loaded[key].reshape(workers, -1), [want] * workers, rtol=1e-6)
    assert int(loaded["deep_gradient_compression/num_workers"]) == workers


def test_copies_that_differ_are_an_error():
    tx = optfn.adam(1e-2)
    state = replicate(tx.init(PARAMS))
    for x in jax.tree.leaves(state):
        x[3] += 1
    with pytest.raises(ValueError, match=r"'scale_by_adam/step' has 8 copies.* they differ"):
        optfn.load_state_dict(tx.init(PARAMS), optfn.state_dict(state))


def test_other_shapes_stay_errors():
    """An array with an axis too much beside counters of one worker."""
    tx = optfn.adam(1e-2)
    found = optfn.state_dict(tx.init(PARAMS))
    found["scale_by_adam/mu/b"] = np.zeros((N, 4), np.float32)
    with pytest.raises(ValueError, match=r"'scale_by_adam/mu/b' has shape \(8, 4\)"):
        optfn.load_state_dict(tx.init(PARAMS), found)
    found["scale_by_adam/step"] = np.zeros((N,), np.int32)
    found["scale_by_learning_rate/step"] = np.zeros((2,), np.int32)
    with pytest.raises(ValueError, match=r"'scale_by_learning_rate/step' has shape \(2,\)"):
        optfn.load_state_dict(tx.init(PARAMS), found)


def test_params_of_a_pmap_that_are_not_unreplicated_are_said():
    copies, _ = run_pmap()
    step = optfn.make_train_step(loss_fn, dgc("data"), mesh=data_mesh(N))
    with pytest.warns(UserWarning, match=r"each leaf has 8 equal copies.*lambda x: x\[0\]"):
        step.init(copies)


@pytest.mark.filterwarnings("error")
def test_stacks_that_devices_divide_are_no_copies():
    """Stages of a pipeline, and layers that start equal in one leaf."""
    by_row = NamedSharding(data_mesh(N), P("data"))
    layers = {"w": jnp.asarray(normal(0, N, 4, 4)), "b": jnp.zeros((N, 4))}
    placed = jax.tree.map(lambda x: jax.device_put(x, by_row), layers)
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["w"]) * jnp.mean(x), optfn.sgd(0.1), mesh=data_mesh(N)
    )
    step.init(placed)
    step.init({"w": jnp.ones((N, 4))})
