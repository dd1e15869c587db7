"""Variational inference by numpyro, which wraps a transformation of optax."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from clients import assert_same_run, with_rules
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


@with_rules()
def test_an_approximate_posterior(rule):
    x = jax.random.normal(jax.random.key(0), (20, 3))
    y = x @ jnp.array([1.0, -2.0, 0.5])

    def run(tx):
        svi = SVI(regression, AutoNormal(regression), optax_to_numpyro(tx), Trace_ELBO())
        return svi.run(jax.random.key(1), 20, x, y, progress_bar=False).params

    assert_same_run(run, rule, 1e-3)
