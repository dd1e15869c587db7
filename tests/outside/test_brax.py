"""The update that all agents of brax make; it gets no params."""

import jax
import jax.numpy as jnp
from brax.training.gradients import gradient_update_fn
from clients import assert_same_run, with_rules


@with_rules("momentum", "adam")
def test_the_update_of_an_agent(rule):
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) - params["b"]) ** 2)

    def run(tx):
        params = {"w": jnp.ones(3), "b": jnp.array(0.2)}
        update, state = jax.jit(gradient_update_fn(loss, tx, None)), tx.init(params)
        for k in jax.random.split(jax.random.key(0), 10):
            x = jax.random.normal(k, (8, 3))
            _, params, state = update(params, x, optimizer_state=state)
        return params

    assert_same_run(run, rule, 0.01)
