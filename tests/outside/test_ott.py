"""The network of ott-jax that learns to begin Sinkhorn's iterations."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from flax import linen
from ott.geometry import pointcloud
from ott.initializers.neural.meta_initializer import MetaInitializer


@with_rules()
def test_a_network_that_predicts_potentials(rule):
    geometry = pointcloud.PointCloud(jnp.linspace(0, 1, 6)[:, None], epsilon=0.1)

    def run(tx):
        learner = MetaInitializer(geometry, linen.Dense(6), opt=tx, rng=jax.random.key(0))
        state = learner.state
        for k in jax.random.split(jax.random.key(1), 10):
            a, b = jax.nn.softmax(jax.random.normal(k, (2, 6)))
            _, _, state = learner.update(state, a, b)
        return state.params

    assert_same_run(run, rule, 0.01, tolerance=1e-3)
