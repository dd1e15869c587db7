"""The net in haiku: `transform_with_state` gives params and state apart."""

from typing import Any

import haiku as hk
import jax


def net(x: jax.Array, train: bool) -> jax.Array:
    """Return logits (batch, 10) of images (batch, 8, 8, 1)."""

    def conv_norm(x: jax.Array, stride: int = 1) -> jax.Array:
        x = hk.Conv2D(8, 3, stride=stride)(x)
        return hk.BatchNorm(True, True, 0.9)(x, is_training=train)

    x = jax.nn.relu(conv_norm(x, 2))
    y = conv_norm(jax.nn.relu(conv_norm(x)))
    return hk.Linear(10)(jax.nn.relu(x + y).mean((1, 2)))


def make(images: jax.Array) -> Any:
    """Return params, model state, and forward(params, model_state, images, train)."""
    model = hk.transform_with_state(net)
    params, state = model.init(jax.random.key(0), images, True)

    def forward(params: Any, state: Any, images: jax.Array, train: bool) -> Any:
        return model.apply(params, state, None, images, train)

    return params, state, forward
