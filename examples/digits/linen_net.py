"""The net in flax linen: the model state is the collection `batch_stats`."""

from typing import Any

import jax
from flax import linen


class Net(linen.Module):
    """A block with a shortcut, the mean over places, and a linear layer."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return logits (batch, 10) of images (batch, 8, 8, 1)."""

        def norm(y: jax.Array) -> jax.Array:
            return linen.BatchNorm(use_running_average=not train, momentum=0.9)(y)

        x = linen.relu(norm(linen.Conv(8, (3, 3), strides=2)(x)))
        y = norm(linen.Conv(8, (3, 3))(linen.relu(norm(linen.Conv(8, (3, 3))(x)))))
        return linen.Dense(10)(linen.relu(x + y).mean((1, 2)))


def make(images: jax.Array) -> Any:
    """Return params, model state, and forward(params, model_state, images, train)."""
    net = Net()
    variables = net.init(jax.random.key(0), images, train=True)

    def forward(params: Any, stats: Any, images: jax.Array, train: bool) -> Any:
        logits, new = net.apply(
            {"params": params, "batch_stats": stats}, images, train, mutable=["batch_stats"]
        )
        return logits, new["batch_stats"]

    return variables["params"], variables["batch_stats"], forward
