"""Models of equinox."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zoo.model import LAYERS, ROWS, WIDTH, Model, mean_square

eqx = pytest.importorskip("equinox")


def stacked():
    """Layers stacked by `eqx.filter_vmap`, in a `lax.scan` with `eqx.filter_checkpoint`."""
    key, *keys = jax.random.split(jax.random.key(0), LAYERS + 1)

    @eqx.filter_vmap
    def stack(key):
        return eqx.nn.Linear(WIDTH, WIDTH, key=key)

    embed = eqx.nn.Embedding(ROWS, WIDTH, key=key)
    net = {"embed": embed, "layers": stack(jnp.stack(keys))}
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def of_example(net, ids):
        arrays, rest = eqx.partition(net["layers"], eqx.is_array)

        @eqx.filter_checkpoint
        def body(x, arrays):
            return x + jnp.tanh(jax.vmap(eqx.combine(arrays, rest))(x)), None

        return lax.scan(body, jax.vmap(net["embed"])(ids), arrays)[0]

    def loss(params, batch):
        net = eqx.combine(params, static)
        return mean_square(jax.vmap(of_example, (None, 0))(net, batch["ids"]), batch)

    return Model(loss, params, table="embed/weight")


def filtered():
    """Only some arrays are trained, by a filter of `eqx.partition`; functions as fields."""
    net = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth=2, key=jax.random.key(0))
    nothing = jax.tree.map(lambda _: False, net)
    last = eqx.tree_at(lambda m: (m.layers[1].weight, m.layers[2].bias), nothing, (True, True))
    params, static = eqx.partition(net, last)

    def loss(params, batch):
        return mean_square(jax.vmap(eqx.combine(params, static))(batch["x"]), batch)

    return Model(loss, params)


def stateful():
    """`eqx.nn.BatchNorm` with `mode="batch"` under `vmap`: `eqx.nn.State` is model state."""

    class Net(eqx.Module):
        hidden: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.hidden = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
            self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch", momentum=0.9)
            self.head = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])

        def __call__(self, x, state):
            x, state = self.norm(self.hidden(x), state)
            return self.head(jnp.tanh(x)), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params, state, batch):
        net = eqx.combine(params, static)
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        y, state = jax.vmap(net, **axes)(batch["x"], state)
        return mean_square(y, batch), state

    return Model(loss, params, state)
