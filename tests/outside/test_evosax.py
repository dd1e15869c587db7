"""An evolution strategy of evosax, whose estimates of gradients go to a transformation."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from evosax.algorithms import Open_ES


@with_rules()
def test_an_evolution_strategy(rule):
    def run(tx):
        strategy = Open_ES(population_size=8, solution=jnp.zeros(4), optimizer=tx)
        params = strategy.default_params
        key = jax.random.key(0)
        state = strategy.init(key, jnp.ones(4), params)
        for k in jax.random.split(key, 10):
            population, state = strategy.ask(k, state, params)
            fitness = jnp.sum((population - 0.3) ** 2, axis=1)
            state, _ = strategy.tell(k, population, fitness, state, params)
        return state.mean

    assert_same_run(run, rule, 0.01)
