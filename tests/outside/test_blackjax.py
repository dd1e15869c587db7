"""Samplers of blackjax that take a transformation: variational inference and Stein's gradients.

Both call `update` without params.
"""

import blackjax
import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules


def logdensity(x):
    return -0.5 * jnp.sum((x["a"] - 2.0) ** 2) - jnp.sum((x["b"] + 1.0) ** 2)


@with_rules("momentum", "adam")
def test_a_mean_field_approximation(rule):
    def run(tx):
        sampler = blackjax.meanfield_vi(logdensity, tx, num_samples=8)
        state, step = sampler.init({"a": jnp.zeros(3), "b": jnp.zeros(2)}), jax.jit(sampler.step)
        for key in jax.random.split(jax.random.key(0), 20):
            state, _ = step(key, state)
        return state.mu, state.rho

    assert_same_run(run, rule, 0.01)


@with_rules("momentum", "adam")
def test_particles_of_stein(rule):
    def run(tx):
        sampler = blackjax.svgd(jax.grad(logdensity), tx)
        particles = {"a": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.ones((4, 2))}
        particles["b"] += jnp.arange(4.0)[:, None]
        state, step = sampler.init(particles), jax.jit(sampler.step)
        for _ in range(10):
            state = step(state)
        return state.particles

    assert_same_run(run, rule, 0.05)
