"""Models of keras on its backend JAX."""

import os

import jax
import pytest

from zoo.model import LENGTH, ROWS, WIDTH, Model, mean_square

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras")


def stateless_call():
    """A functional model with `Embedding` and `BatchNormalization`, by `stateless_call`."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(ROWS, WIDTH)(ids)
    x = keras.layers.Dense(WIDTH, "tanh")(keras.layers.BatchNormalization(momentum=0.9)(x))
    net = keras.Model(ids, keras.layers.Dense(WIDTH)(x))
    params = [v.value for v in net.trainable_variables]
    state = [v.value for v in net.non_trainable_variables]

    def loss(params, state, batch):
        y, state = net.stateless_call(params, state, batch["ids"], training=True)
        return mean_square(y, batch), state

    return Model(loss, params, state, table="0")


def dropout():
    """`Dropout`, whose seed is model state, with the key of `rng=True` added in the loss."""
    keras.utils.set_random_seed(0)
    x = keras.Input((WIDTH,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(WIDTH, "tanh")(x))
    net = keras.Model(x, keras.layers.Dense(WIDTH)(hidden))
    params = [v.value for v in net.trainable_variables]
    state = [v.value for v in net.non_trainable_variables]
    is_seed = [v.path.endswith("seed_generator_state") for v in net.non_trainable_variables]
    assert any(is_seed)

    def loss(params, state, batch, key):
        seeds = jax.random.bits(key, (len(state),), "uint32")
        drawn = [s.at[0].add(r) if b else s for s, r, b in zip(state, seeds, is_seed, strict=True)]
        y, new = net.stateless_call(params, drawn, batch["x"], training=True)
        new = [old if b else s for s, old, b in zip(new, state, is_seed, strict=True)]
        return mean_square(y, batch), new

    return Model(loss, params, state, rng=True)
