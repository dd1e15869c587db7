"""Gradient descent of dynamax on minibatches; its `update` gets no params."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from dynamax.utils.optimize import run_sgd


@with_rules("momentum", "adam")
def test_descent_on_minibatches(rule):
    data = jax.random.normal(jax.random.key(0), (12, 3))

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - params["b"]) ** 2)

    def run(tx):
        params = {"w": jnp.ones(3), "b": jnp.array(0.5)}
        return run_sgd(loss, params, data, tx, batch_size=4, num_epochs=5, shuffle=True)

    assert_same_run(run, rule, 0.01)
