"""The solver of jaxopt that takes a transformation of optax, in its loop and step by step."""

import jax
import jax.numpy as jnp
import jaxopt
from clients import assert_same_run, with_rules

X = jax.random.normal(jax.random.key(0), (20, 3))
Y = jnp.sin(X[:, 0]) + X[:, 1]
START = {"w": jnp.ones(3), "b": jnp.zeros(())}


def loss(params):
    return jnp.mean((X @ params["w"] + params["b"] - Y) ** 2)


@with_rules()
def test_a_whole_run_of_the_solver(rule):
    def run(tx):
        solver = jaxopt.OptaxSolver(loss, tx, maxiter=20, tol=0.0)
        return solver.run(START).params

    assert_same_run(run, rule, 0.02)


@with_rules("adam")
def test_the_steps_of_the_solver(rule):
    def run(tx):
        solver = jaxopt.OptaxSolver(loss, tx, maxiter=20, tol=0.0)
        params, state = START, solver.init_state(START)
        for _ in range(10):
            params, state = solver.update(params, state)
        return params

    assert_same_run(run, rule, 0.02)
