"""Models of haiku."""

import jax
import jax.numpy as jnp
import pytest

from zoo.model import BATCH, LAYERS, ROWS, WIDTH, Model, mean_square

hk = pytest.importorskip("haiku")


def layer_stack():
    """Layers in `hk.experimental.layer_stack` with `hk.remat`, an `hk.Embed`."""

    def layer(x):
        return x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))

    def forward(ids):
        stack = hk.experimental.layer_stack(LAYERS)
        return stack(hk.remat(layer))(hk.Embed(ROWS, WIDTH)(ids))

    net = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(net.init)(jax.random.key(0), BATCH["ids"])

    def loss(params, batch):
        return mean_square(net.apply(params, batch["ids"]), batch)

    return Model(loss, params, table="embed/embeddings")


def stateful():
    """`hk.BatchNorm` and `hk.dropout`, by `transform_with_state` and `rng=True`."""

    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(WIDTH)(x), is_training=True)
        return hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), 0.5, jnp.tanh(x)))

    net = hk.transform_with_state(forward)
    params, state = jax.jit(net.init)(jax.random.key(0), BATCH["x"])

    def loss(params, state, batch, key):
        y, state = net.apply(params, state, key, batch["x"])
        return mean_square(y, batch), state

    return Model(loss, params, state, rng=True)
