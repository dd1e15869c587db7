"""A batch in microbatches: the step is that of the whole batch, with less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from problems import trained as trained_on

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh, scan_layers, sharded

EXAMPLES, WIDTH, LAYERS = 64, 16, 3


PARAMS = {
    "table": weights(0, 32, WIDTH),
    "layers": optfn.Stacked({"w": weights(1, LAYERS, WIDTH, WIDTH)}),
    "count": np.arange(3),  # not trained
}
BATCH = {"ids": np.arange(EXAMPLES) % 32, "target": weights(2, EXAMPLES), "rate": np.float32(0.7)}


def loss_fn(params, batch):
    x = params["table"][batch["ids"]]
    x = scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"]), params["layers"], x)
    return batch["rate"] * jnp.mean((jnp.mean(x, -1) - batch["target"]) ** 2)


@pytest.mark.nightly
def test_the_step_of_a_round_is_that_of_the_whole_batch():
    """tests/reference_run draws the others."""

    def trained(microbatches):
        step = optfn.make_train_step(
            loss_fn, optfn.adam(1e-3), microbatches=microbatches, mesh=data_mesh(4), local_steps=2
        )
        state, losses = trained_on(step, step.init(PARAMS), [BATCH] * 3)
        return jax.device_get((state.params, losses))

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trained(4), trained(1)
    )


def test_parts_have_keys_and_a_model_state_in_turn():
    def loss_fn(w, seen, x, key):
        noise = jax.random.uniform(key)
        loss = jnp.mean((w - x) ** 2) * noise
        return loss, (0.5 * seen + jnp.mean(x), {"noise": noise, "count": jnp.int32(x.size)})

    options = {"rng": 3, "model_state": True, "has_aux": True}
    step = optfn.make_train_step(loss_fn, optfn.sgd(1.0), microbatches=2, **options)
    x = np.asarray([1.0, 3.0, 5.0, 9.0], np.float32)
    state, metrics = step(step.init(jnp.zeros(()), jnp.ones(())), x)
    key = jax.random.fold_in(jax.random.key(3), 0)
    u = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(2)]
    assert float(metrics["loss"]) == pytest.approx((u[0] * 5 + u[1] * 53) / 2, rel=1e-6)
    assert float(state.params) == pytest.approx(2 * (u[0] * 2 + u[1] * 7) / 2, rel=1e-6)
    assert float(state.model_state) == pytest.approx((0.5 + 2) / 2 + 7)
    assert float(metrics["aux"]["noise"]) == pytest.approx(np.mean(u), rel=1e-6)
    assert int(metrics["aux"]["count"]) == 4


def test_gradients_of_bfloat16_are_added_in_float32():
    x = np.asarray([256.0] + [1.0] * 63, np.float32)
    step = optfn.make_train_step(
        lambda w, x: jnp.sum(w.astype(jnp.float32) * x), optfn.sgd(1.0), microbatches=64
    )
    state, _ = step(step.init(jnp.zeros((), jnp.bfloat16)), x)
    assert float(state.params) == float(jnp.bfloat16(-319 / 64))


@pytest.mark.parametrize(
    ("microbatches", "kind", "words"),
    [
        (3, ValueError, r"microbatches=3 must divide .* leaf 'ids' has length 64"),
        (0, ValueError, "microbatches must be"),
        (1.5, TypeError, "microbatches must be"),
    ],
)
def test_bad_numbers(microbatches, kind, words):
    with pytest.raises(kind, match=words):
        step = optfn.make_train_step(loss_fn, optfn.adam(1e-3), microbatches=microbatches)
        step(step.init(PARAMS), BATCH)


@pytest.mark.optimized
def test_memory_and_bytes():
    batch = {"ids": np.arange(4096) % 32, "target": weights(2, 4096), "rate": np.float32(1)}

    def compiled(microbatches, **options):
        step = optfn.make_train_step(
            loss_fn, optfn.adam(1e-3), microbatches=microbatches, mesh=data_mesh(4), **options
        )
        program = step.lower(PARAMS, batch).compile()
        return program.memory_analysis().temp_size_in_bytes, wire.bytes_sent(program, 4)

    whole, sent = compiled(1)
    parts, sent_by_parts = compiled(4)
    assert parts <= 0.35 * whole
    assert sent_by_parts == pytest.approx(sent, rel=1e-3)
    _, fsdp = compiled(1, shard="params")
    _, once = compiled(4, shard=sharded("params", gather_once=True))
    _, each = compiled(4, shard="params")
    assert each <= 4 * fsdp
    assert once < 1.01 * fsdp
