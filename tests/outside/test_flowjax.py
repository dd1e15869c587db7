"""Fitting of a normalizing flow by flowjax, an equinox module with frozen leaves."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data
from paramax import unwrap


@with_rules()
def test_a_flow_fitted_to_samples(rule):
    samples = jnp.exp(0.5 * jax.random.normal(jax.random.key(0), (60, 2)))
    flow = masked_autoregressive_flow(
        jax.random.key(1), base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8
    )

    def run(tx):
        fitted, losses = fit_to_data(
            jax.random.key(2), flow, samples, optimizer=tx, max_epochs=3, batch_size=20,
            return_best=False, show_progress=False,
        )  # fmt: skip
        return unwrap(fitted).log_prob(samples), jnp.array(losses["train"])

    assert_same_run(run, rule, 1e-3)
