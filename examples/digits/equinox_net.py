"""The net in equinox: a module is params and functions; its state is a value of its own."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Net(eqx.Module):
    """A block with a shortcut, the mean over places, and a linear layer."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.convs = [
            eqx.nn.Conv2d(1 if k == 0 else 8, 8, 3, stride=2 if k == 0 else 1, padding=1, key=key)
            for k, key in enumerate(keys[:3])
        ]
        self.norms = [eqx.nn.BatchNorm(8, "batch", momentum=0.9, mode="batch") for _ in range(3)]
        self.head = eqx.nn.Linear(8, 10, key=keys[3])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        """Return logits (10,) of one image (8, 8, 1) of a batch, and the next state."""
        x, state = self.norms[0](self.convs[0](jnp.moveaxis(x, -1, 0)), state)
        y, state = self.norms[1](self.convs[1](jax.nn.relu(x)), state)
        y, state = self.norms[2](self.convs[2](jax.nn.relu(y)), state)
        return self.head(jax.nn.relu(x + y).mean((1, 2))), state


def make(images: jax.Array) -> Any:
    """Return params, model state, and forward(params, model_state, images, train)."""
    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def forward(params: Any, state: Any, images: jax.Array, train: bool) -> Any:
        net = eqx.nn.inference_mode(eqx.combine(params, static), not train)
        return jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            images, state
        )

    return params, state, forward
