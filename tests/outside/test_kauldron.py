"""The training step of kauldron, around a flax model whose inputs and losses are found by key."""

import jax
import jax.numpy as jnp
import numpy as np
from clients import assert_same_run, with_rules
from flax import linen
from kauldron import kd


class Model(linen.Module):
    x: kd.kontext.Key = "batch.x"

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(x)


@with_rules()
def test_the_training_step(rule):
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(10, 8, 3)).astype(np.float32)

    def run(tx):
        step = kd.train.TrainStep(
            model=Model(),
            optimizer=tx,
            rng_streams=kd.train.RngStreams(seed=0),
            sharding=kd.sharding.ShardingStrategy(),
            init_transform=kd.ckpts.NoopTransform(),
            aux=kd.train.Auxiliaries(
                losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
                metrics={},
                summaries={},
            ),
        )
        batches = [{"x": jnp.asarray(x), "y": jnp.tanh(x[:, :1])} for x in xs]
        state = step.init(jax.eval_shape(lambda: batches[0]))
        for batch in batches:
            state, _ = step.step(state, batch)
        return state.params

    assert_same_run(run, rule, 0.01)
