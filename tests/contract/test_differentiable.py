"""A loss after an update can be differentiated through the update, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry
from grids import nightly, suite

import optfn

# Rounding to few bits has no derivative. The transforms are those of the optimizers.
NAMES = [k for k, v in (registry.OPTIMIZERS | registry.WRAPPERS).items() if not v.quantized]


def after(entry, x):
    """Return a loss of the params after two steps with gradients that depend on x, some of which
    are 0, as of a dead unit."""
    tx, params = entry.make(), {"w": 1.5 + jnp.sin(x), "z": jnp.float32(0.5), "dead": x[:2]}
    state = tx.init(params)
    live = {"w": jnp.array([1.0, 0.0, 1.0]), "z": 1.0, "dead": 0.0}
    for k in range(2):
        grads = jax.tree.map(lambda p, q, k=k: q * (0.3 * (k + 1) * p + 0.2), params, live)
        updates, state = tx.update(grads, state, params, **dict(entry.extra))
        params = optfn.apply_updates(params, updates)
    return jnp.sum(params["w"] ** 2) + params["z"] + jnp.sum(params["dead"])


@pytest.mark.parametrize(
    "name", suite(NAMES, "lars", "adam", "adamax", "skip_nonfinite", "exponential_moving_average")
)
def test_derivatives_are_those_of_finite_differences(name):
    assert_derivatives(name)


@pytest.mark.parametrize("name", ["ftrl", "lamb"])
def test_derivatives_of_plain_expressions(name, plain_expressions):
    """Of what TPUs and GPUs compile in place of the passes of a CPU."""
    assert_derivatives(name)


def assert_derivatives(name):
    entry, x = registry.EVERYTHING[name], np.array([0.3, -0.4, 0.9], np.float32)
    direction, h = np.array([1.0, -0.5, 0.25], np.float32), np.float32(1e-2)

    loss = jax.jit(lambda x: after(entry, x))

    @jax.jit
    def derivatives(x, direction):
        return jax.grad(loss)(x) @ direction, jax.jvp(loss, (x,), (direction,))[1]

    reverse, forward = derivatives(x, direction)
    difference = (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)
    np.testing.assert_allclose(forward, reverse, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(forward, difference, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", ["ftrl", "accumulate"])
def test_a_loop_keeps_them_in_place_all_the_same(name):
    """The derivative is not paid for by a step that is not differentiated."""
    tx = {"ftrl": optfn.ftrl(0.1), "accumulate": optfn.accumulate(optfn.adam(0.1), 2)}[name]
    step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), tx)
    lowered = step.compiled.lower(step.init(jnp.zeros(10_000)), jnp.ones(10_000))
    text = lowered.compile().as_text()
    assert " while(" in text and " conditional(" not in text


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_a_rate_that_an_accumulated_optimizer_closes_over(mode):
    """The derivative of two half steps of descent with respect to the rate."""

    def loss(rate):
        tx, p = optfn.accumulate(optfn.sgd(rate), 2), jnp.float32(3.0)
        state = tx.init(p)
        for g in (1.0, 3.0):
            updates, state = tx.update(jnp.float32(g), state, p)
            p = optfn.apply_updates(p, updates)
        return p**2

    found = jax.jit(mode(loss))(np.float32(0.5))
    np.testing.assert_allclose(found, 2 * (3 - 0.5 * 2) * -2, rtol=1e-6)


@pytest.mark.parametrize("wrap", [nightly(lambda tx: tx), lambda tx: optfn.accumulate(tx, 1)])
def test_a_hyper_parameter_that_a_loop_closes_over(wrap):
    """The derivative with respect to a power of FTRL's recursion is that of finite differences."""

    def loss(power):
        tx, p = wrap(optfn.ftrl(0.5, lr_power=power)), jnp.float32(2.0)
        state = tx.init(p)
        for g in (1.5, -0.7):
            updates, state = tx.update(jnp.float32(g), state, p)
            p = optfn.apply_updates(p, updates)
        return p**2

    jitted = jax.jit(loss)
    difference = (jitted(np.float32(-0.59)) - jitted(np.float32(-0.61))) / 0.02
    for mode in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(mode(loss))(np.float32(-0.6)), difference, rtol=0.01)


def test_quantized_moments_do_not_keep_others_from_being_differentiated():
    def loss(rate, b1):
        tx = optfn.accumulate(optfn.adam(rate, b1=b1, moment_dtype="int8"), 1)
        p = jnp.ones(3)
        return jnp.sum(tx.update(p, tx.init(p), p)[0])

    of_rate, of_b1 = jax.jit(jax.grad(loss, argnums=(0, 1)))(0.1, 0.9)
    np.testing.assert_allclose(of_rate, -3.0, rtol=0.01)
    assert np.isfinite(of_b1)


def test_rows_that_missed_no_step_have_the_derivatives_of_dense_adam():
    def loss(b1, lazy):
        tx, p = optfn.adam(0.1, b1=b1, lazy=lazy), jnp.array([1.0, -2.0])
        state = tx.init(p)
        for factor in (1.0, 0.3):
            updates, state = tx.update(factor * p, state, p)
            p = p + updates
        return jnp.sum(p**2)

    dense, exact = (jax.grad(loss)(0.9, lazy) for lazy in (False, "exact"))
    np.testing.assert_allclose(exact, dense, rtol=1e-5)
