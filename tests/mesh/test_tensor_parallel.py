"""copy_to and sum_over: a tensor-parallel layer has the gradient of the whole one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.distributed import copy_to, sum_over

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4))
W_IN, W_OUT = RNG.normal(size=(4, 8)), RNG.normal(size=(8, 4))
SPECS = (P(), P(None, "model"), P("model"))


def layer(x, w_in, w_out):
    """Two layers, the second of the same weights, so that a wrong cotangent is passed on."""
    for _ in range(2):
        hidden = jnp.tanh(copy_to(x, "model") @ w_in)
        x = x + sum_over(hidden @ w_out, "model")
    return x


def loss(x, w_in, w_out):
    return jnp.sum(jnp.sin(layer(x, w_in, w_out)))


def expected():
    """Return the value and the gradients of the whole layer, in NumPy float64."""
    tape, x = [], X
    for _ in range(2):
        hidden = np.tanh(x @ W_IN)
        tape.append((x, hidden))
        x = x + hidden @ W_OUT
    value, dx = np.sin(x).sum(), np.cos(x)
    d_in, d_out = np.zeros_like(W_IN), np.zeros_like(W_OUT)
    for x, hidden in reversed(tape):
        d_out += hidden.T @ dx
        d_hidden = dx @ W_OUT.T * (1 - hidden**2)
        d_in += x.T @ d_hidden
        dx = dx + d_hidden @ W_IN.T
    return value, (dx, d_in, d_out)


@pytest.mark.parametrize("check_vma", [nightly(False), True])
def test_the_gradient_is_that_of_the_whole_layer(check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    run = jax.shard_map(
        jax.value_and_grad(loss, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=SPECS,
        out_specs=(P(), SPECS),
        check_vma=check_vma,
    )
    value, grads = jax.jit(run)(*map(jnp.float32, (X, W_IN, W_OUT)))
    want, want_grads = expected()
    np.testing.assert_allclose(value, want, rtol=1e-5)
    chex.assert_trees_all_close(grads, jax.tree.map(np.float32, want_grads), rtol=1e-4, atol=1e-5)


def test_under_pmap_and_for_trees():
    def tree_loss(x, w_in, w_out):
        for _ in range(2):
            hidden = jnp.tanh(copy_to({"x": x}, "model")["x"] @ w_in)
            x = x + sum_over((hidden @ w_out,), "model")[0]
        return jnp.sum(jnp.sin(x))

    parts = W_IN.reshape(4, 2, 4).transpose(1, 0, 2), W_OUT.reshape(2, 4, 4)
    gradient = jax.value_and_grad(tree_loss, argnums=(0, 1, 2))
    run = jax.pmap(gradient, axis_name="model", in_axes=(None, 0, 0))
    value, (dx, d_in, d_out) = run(*map(jnp.float32, (X, *parts)))
    want, want_grads = expected()
    np.testing.assert_allclose(value, [want] * 2, rtol=1e-5)
    np.testing.assert_allclose(dx[0], dx[1])
    found = dx[0], np.concatenate(list(d_in), 1), np.concatenate(list(d_out))
    chex.assert_trees_all_close(found, jax.tree.map(np.float32, want_grads), rtol=1e-4, atol=1e-5)


def test_an_axis_that_is_not_bound_is_named():
    for fn in (copy_to, sum_over):
        with pytest.raises(ValueError, match=f"{fn.__name__}: the axis 'model' is not bound"):
            fn(jnp.ones(2), "model")
        with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis"):
            fn(jnp.ones(2), 3)


def test_integers_beside_activations_are_copied_too():
    def loss(x):
        copied, ids = copy_to((x, jnp.arange(3)), "model")
        return jnp.sum(copied * ids)

    grads = jax.vmap(jax.grad(loss), axis_name="model")(jnp.ones((2, 3)))
    np.testing.assert_array_equal(grads, [[0, 2, 4]] * 2)
