"""A Gaussian process fitted by gpjax, in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from clients import assert_same_run, with_rules

# Its models are equinox modules from 1.0 on, which does not allow the newest JAX.
gpjax = pytest.importorskip("gpjax", "1.0")


@with_rules()
def test_a_gaussian_process(rule):
    def run(tx):
        x = jnp.linspace(0, 1, 20)[:, None]
        data = gpjax.Dataset(X=x, y=jnp.sin(6 * x))
        prior = gpjax.gps.Prior(
            mean_function=gpjax.mean_functions.Constant(), kernel=gpjax.kernels.RBF()
        )
        posterior = prior * gpjax.likelihoods.Gaussian()
        model, history = gpjax.fit(
            model=posterior, train_data=data, optim=tx, num_iters=10, verbose=False,
            objective=lambda model, data: -gpjax.objectives.conjugate_mll(model, data),
        )  # fmt: skip
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        assert all(x.dtype == jnp.float64 for x in arrays)
        return arrays, history

    with jax.enable_x64(True):
        assert_same_run(run, rule, 0.001, tolerance=1e-7)
