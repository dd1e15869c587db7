"""The minimiser of optimistix, which turns the functions of a transformation into a pytree."""

import jax.numpy as jnp
import optimistix
from clients import assert_same_run, with_rules


@with_rules()
def test_the_minimum_of_a_valley(rule):
    def valley(p, steepness):
        return (1.0 - p["x"]) ** 2 + steepness * (p["y"] - p["x"] ** 2) ** 2

    start = {"x": jnp.array(-1.2), "y": jnp.array(1.0)}

    def run(tx):
        solver = optimistix.OptaxMinimiser(tx, rtol=1e-9, atol=1e-9)
        found = optimistix.minimise(valley, solver, start, args=5.0, max_steps=20, throw=False)
        return found.value

    assert_same_run(run, rule, 0.01)
