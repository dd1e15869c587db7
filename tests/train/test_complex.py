"""Complex params in a training step: against NumPy, in every way in which a step takes gradients.

jax.grad gives the conjugate of the direction in which a loss rises.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite
from jax.sharding import Mesh

import optfn

TARGET = np.asarray([1 + 2j, -1j, 3, 0.5 - 0.5j], np.complex64)
START = {"z": np.full(4, 0.5 + 0.5j, np.complex64), "r": np.float32(0)}
STEPS, RATE = 20, 0.25


def loss_fn(p, x):
    distance = jnp.sum(jnp.abs(p["z"] - TARGET) ** 2) + (p["r"] - 1) ** 2
    return distance + 0 * jnp.mean(x)


def solve():
    """Return z after descent in NumPy: the gradient of |z − t|² is 2(z − t)."""
    z = np.full(4, 0.5 + 0.5j)
    for _ in range(STEPS):
        z -= RATE * 2 * (z - TARGET)
    return z


def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("data",))


WAYS = {
    "one device": dict,
    "packed": lambda: {"packed": True},
    "microbatches": lambda: {"microbatches": 2},
    "mesh": lambda: {"mesh": mesh()},
    "divided": lambda: {"mesh": mesh(), "shard": "params"},
    "compiler": lambda: {"mesh": mesh(), "partitioner": "compiler"},
    "value_and_grad": lambda: {"value_and_grad": jax.value_and_grad(loss_fn)},
    "local steps": lambda: {"mesh": mesh(), "local_steps": 2},
}


@pytest.mark.parametrize("way", suite(WAYS, "divided", "packed", "local steps"))
def test_complex_params_go_downhill(way):
    options, tx = WAYS[way](), optax.sgd(RATE) if way == "divided" else optfn.sgd(RATE)
    fn = None if "value_and_grad" in options else loss_fn
    step = optfn.make_train_step(fn, tx, **options)
    state = step.init(START)
    for _ in range(STEPS // options.get("local_steps", 1)):
        state, metrics = step(state, np.zeros(4, np.float32))
    params = optfn.unpack(state.params) if "packed" in options else state.params
    np.testing.assert_allclose(params["z"], solve(), rtol=1e-5)
    assert metrics["loss"] < 1e-3
