"""The state of an optimizer goes through orbax's checkpoints, and on from there."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from clients import assert_same_run, with_rules


@with_rules()
def test_a_state_saved_and_restored(rule, tmp_path):
    def loss(params):
        return jnp.sum((params["w"] - 1.0) ** 4) + params["b"] ** 2

    def steps(tx, params, state):
        for _ in range(5):
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    def run(tx):
        start = {"w": jnp.array([0.1, 2.0]), "b": jnp.array(0.5)}
        saved = steps(tx, start, tx.init(start))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, saved)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(folder, jax.eval_shape(lambda: (start, tx.init(start))))
        jax.tree.map(lambda a, b: None, restored, saved)
        return steps(tx, *restored)[0]

    assert_same_run(run, rule, 0.01)
