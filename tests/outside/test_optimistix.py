"""The minimiser of optimistix, which turns the functions of a transformation into a pytree."""

import jax.numpy as jnp
import numpy as np
import optax
import optimistix
from clients import assert_same_run, with_rules

import optfn


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


def test_gradients_are_accumulated_as_in_multi_steps():
    """Its loop keeps what is not an array of a state aside, and the types must not change."""

    def bowl(p, center):
        return (p - center) ** 2

    def run(tx):
        solver = optimistix.OptaxMinimiser(tx, rtol=1e-9, atol=1e-9)
        return optimistix.minimise(bowl, solver, jnp.array(1.0), 3.0, max_steps=20, throw=False)

    theirs = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    found = run(optfn.accumulate(optfn.sgd(0.1), 2)).value
    np.testing.assert_allclose(found, run(theirs).value, rtol=1e-6)
