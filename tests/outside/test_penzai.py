"""The trainer of penzai, which keeps parameters by name."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from penzai import pz
from penzai.models.simple_mlp import MLP
from penzai.toolshed.basic_training import StatefulTrainer


@with_rules()
def test_the_trainer(rule):
    x = jax.random.normal(jax.random.key(0), (8, 2))

    def loss(model, state, rng, x):
        named = pz.nx.wrap(x).tag("batch", "features")
        y = model(named).unwrap("batch", "features")
        return jnp.mean((y[:, 0] - jnp.sin(x[:, 0])) ** 2), state, {}

    def run(tx):
        model = MLP.from_config(jax.random.key(1), [2, 8, 1], activation_fn=jnp.tanh)
        trainer = StatefulTrainer.build(jax.random.key(2), model, tx, loss)
        for _ in range(10):
            trainer.step(x=x)
        return [p.value.unwrap(*p.value.named_shape) for p in pz.unbind_params(model)[1]]

    assert_same_run(run, rule, 0.01)
