"""`embed=` of a pipeline: the first stage embeds the inputs, as in the model on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from grids import nightly
from jax.sharding import Mesh

from optfn.distributed import (
    PipelineParams,
    data_mesh,
    pipeline_value_and_grad,
    stack_stages,
    unstack_stages,
)

ROWS, WIDTH, LENGTH, BATCH = 11, 6, 5, 16
IDS = np.random.default_rng(0).integers(0, ROWS, (BATCH, LENGTH))
TARGETS = np.random.default_rng(1).integers(0, ROWS, (BATCH, LENGTH))
SHARED = {"table": normal(0, ROWS, WIDTH), "scale": normal(1, WIDTH)}


def blocks(n):
    return [{"w": normal([2, i], WIDTH, WIDTH), "b": normal([3, i], WIDTH)} for i in range(n)]


def embed(ids, shared):
    return shared["table"][ids]


def block(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def loss_fn(x, targets, shared):
    """The table is the head too."""
    logits = (x * shared["scale"]) @ shared["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def whole(params, batch):
    """The model on one device, with a list of blocks."""
    x = embed(batch[0], params.shared)
    for layer in params.stages:
        x = block(layer, x)
    return loss_fn(x, batch[1], params.shared)


def pipeline(p, v, schedule):
    mesh = Mesh(np.array(jax.devices()[: 2 * p]).reshape(p, 2), ("stage", "data"))
    return pipeline_value_and_grad(
        block, loss_fn, mesh=mesh, num_microbatches=4, virtual_stages=v, embed=embed,
        data_axis="data", schedule=schedule, stash="input",
    )  # fmt: skip


def test_the_embedding_draws_with_a_key_of_its_own():
    """The mask of a microbatch is that of the key in the docs, and not that of the first stage."""

    def masked(x, rng):
        return x * jax.random.bernoulli(rng, 0.5, x.shape)

    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    f = pipeline_value_and_grad(
        lambda w, x, rng: masked(x, rng) * w, lambda y, t: jnp.sum(y * t), mesh=mesh,
        num_microbatches=2, embed=masked,
    )  # fmt: skip
    x, key = np.arange(1.0, 65, dtype=np.float32).reshape(4, 16), jax.random.key(5)
    want = 0.0
    for i in range(2):
        keys = [jax.random.fold_in(jax.random.fold_in(key, i), stage) for stage in (0, 1)]
        h = x[2 * i : 2 * i + 2]
        for one in (jax.random.fold_in(keys[0], 2**31 - 1), *keys):
            h = h * np.asarray(jax.random.bernoulli(one, 0.5, h.shape))
        want += h.sum() / 2
    assert want > 0
    np.testing.assert_allclose(f(jnp.ones(2), x, np.ones_like(x), rng=key)[0], want, rtol=1e-6)


def test_an_embedding_takes_the_inputs_alone():
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    f = pipeline_value_and_grad(
        block, lambda y, t: jnp.sum(y), mesh=mesh, num_microbatches=2, embed=lambda x, more: x
    )
    with pytest.raises(TypeError, match=r"embed is called with \(inputs\); it takes .*more"):
        f(stack_stages(blocks(2)), np.ones((4, WIDTH), np.float32), np.ones(4))


@pytest.mark.parametrize(
    ("layout", "schedule"), [((2, 2), "1f1b"), ((2, 1), "zb"), nightly((4, 1), "gpipe")]
)
def test_loss_and_gradients_are_those_of_the_model(layout, schedule):
    p, v = layout
    f = pipeline(p, v, schedule)
    params = PipelineParams(stack_stages(blocks(p * v), virtual_stages=v), SHARED)
    loss, grads = f(params, IDS, TARGETS)
    want, expected = jax.jit(jax.value_and_grad(whole))(
        PipelineParams(blocks(p * v), SHARED), (IDS, TARGETS)
    )
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    got = PipelineParams(unstack_stages(grads.stages, virtual_stages=v), grads.shared)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=1e-6)  # entries of up to 0.5


def test_wrong_arguments():
    mesh = data_mesh(2, axis_name="stage")
    options = {"mesh": mesh, "num_microbatches": 4}
    with pytest.raises(TypeError, match=r"embed must be a function inputs -> x; got 3"):
        pipeline_value_and_grad(block, loss_fn, embed=3, **options)
    with pytest.raises(ValueError, match="embed belongs to equal stages"):
        pipeline_value_and_grad([block, block], loss_fn, embed=embed, **options)
