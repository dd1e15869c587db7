"""The net in flax nnx: the model state is all that is not a Param, dropout's keys among it."""

from typing import Any

import jax
from flax import nnx


class Net(nnx.Module):
    """A block with a shortcut, the mean over places, dropout, and a linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def conv(inputs: int, strides: int = 1) -> nnx.Conv:
            return nnx.Conv(inputs, 8, (3, 3), strides=strides, rngs=rngs)

        self.convs = nnx.List([conv(1, 2), conv(8), conv(8)])
        self.norms = nnx.List([nnx.BatchNorm(8, momentum=0.9, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) of images (batch, 8, 8, 1)."""
        x = nnx.relu(self.norms[0](self.convs[0](x)))
        y = nnx.relu(self.norms[1](self.convs[1](x)))
        y = self.norms[2](self.convs[2](y))
        return self.head(self.dropout(nnx.relu(x + y).mean((1, 2))))


def make(images: jax.Array) -> Any:
    """Return params, model state, and forward(params, model_state, images, train)."""
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def forward(params: Any, rest: Any, images: jax.Array, train: bool) -> Any:
        net = nnx.merge(graph, params, rest)
        net.train() if train else net.eval()
        logits = net(images)
        return logits, nnx.split(net, nnx.Param, ...)[2]

    return params, rest, forward
