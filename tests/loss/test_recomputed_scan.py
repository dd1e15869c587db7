"""The values and derivatives of `scan_recomputed` are those of a scan over checkpoints."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import nightly
from jax import lax

from optfn.loss.jaxprs.recomputed_scan import Order, scan_recomputed

LAYERS, WIDTH = 5, 8
W, B, X = normal(0, LAYERS, WIDTH, WIDTH), normal(1, LAYERS, WIDTH), normal(2, 3, WIDTH)
SCALE = np.float32(0.7)


def body(operands):
    """Results of a layer: its number, x, the mean of x and a random number."""
    scale, number, key, x, w, b = operands
    key, own = jax.random.split(key)
    x = jnp.tanh(scale * (x @ w + b) + 0.1 * number + 0.1 * jax.random.normal(own))
    return [number + 1, key, x, jnp.mean(x), key]


def run(scan, order, scale, x, w, b):
    """Return a number and random bits from all results of a scan."""
    init = [0, jax.random.key(0), x]
    number, key, x, means, keys = scan(body, [scale], init, [w, b], order)
    bits = jax.random.key_data(key).sum() + jax.random.key_data(keys).sum()
    return jnp.sum(x**2) + jnp.sum(means * jnp.arange(LAYERS)) * number, bits


def scan_of_jax(run, constants, init, stacks, order):
    def step(carry, layer):
        results = jax.checkpoint(run)([*constants, *carry, *layer])
        return results[: len(init)], results[len(init) :]

    carry, results = lax.scan(step, init, stacks, reverse=order.reverse, unroll=order.unroll)
    return [*carry, *results]


ORDERS = [Order(LAYERS, False, 1), Order(LAYERS, True, 2), Order(LAYERS, False, LAYERS)]


@pytest.mark.parametrize("order", [*map(nightly, ORDERS[:-1]), ORDERS[-1]])
def test_values_and_gradients_are_those_of_a_scan(order):
    def found(scan):
        fn = jax.value_and_grad(
            lambda *args: run(scan, order, *args), argnums=(0, 1, 2, 3), has_aux=True
        )
        return jax.jit(fn)(SCALE, X, W, B)

    chex.assert_trees_all_close(found(scan_recomputed), found(scan_of_jax), rtol=1e-5)


def test_a_gradient_has_a_gradient():
    def found(scan):
        def slope(w):
            gradient = jax.grad(lambda w: run(scan, ORDERS[0], SCALE, X, w, B)[0])(w)
            return jnp.sum(gradient * W)

        return jax.jit(jax.grad(slope))(W)

    chex.assert_trees_all_close(found(scan_recomputed), found(scan_of_jax), rtol=1e-4, atol=1e-5)


def test_forward_mode_is_an_error():
    def fn(w):
        return run(scan_recomputed, ORDERS[0], SCALE, X, w, B)[0]

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fn, (W,), (W,))


def test_a_loss_alone_keeps_no_inputs():
    stacks = [np.zeros((64, WIDTH, WIDTH), np.float32)]

    def fn(x, w):
        operands = ([], [x], [w], Order(64, False, 1))
        return scan_recomputed(lambda o: [jnp.tanh(o[0] @ o[1])], *operands)[0]

    x = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)
    program = jax.jit(fn).lower(x, stacks[0]).compile()
    assert program.memory_analysis().temp_size_in_bytes < 8 * 4 * 256 * WIDTH
