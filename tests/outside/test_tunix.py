"""The trainer of tunix, around an nnx model."""

import jax
import jax.numpy as jnp
from clients import assert_same_run, with_rules
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig


@with_rules()
def test_the_trainer(rule):
    x = jax.random.normal(jax.random.key(0), (10, 4, 3))

    def run(tx):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        trainer = PeftTrainer(model, tx, TrainingConfig(eval_every_n_steps=100, max_steps=10))
        trainer = trainer.with_loss_fn(lambda model, x: jnp.mean((model(x) - 1.0) ** 2))
        trainer.with_gen_model_input_fn(lambda batch: batch).train([{"x": one} for one in x])
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    assert_same_run(run, rule, 0.01)
