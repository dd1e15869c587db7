"""Models of flax nnx."""

import jax
import jax.numpy as jnp
import pytest
from sharded_models import nnx_metadata

import optfn
from optfn.distributed import scan_layers
from zoo.model import LAYERS, ROWS, WIDTH, Model, mean_square
from zoo.with_shardings import with_shardings

nnx = pytest.importorskip("flax.nnx")


def scan():
    """Layers made by `nnx.vmap` and run by `nnx.scan` and `nnx.remat`, an `nnx.Embed`."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.dense(self.norm(x)))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(axis_size=LAYERS)
    def stack(rngs):
        return Layer(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, layer):
        return layer(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
            self.layers = stack(rngs)

        def __call__(self, ids):
            return run(self.embed(ids), self.layers)

    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        return mean_square(nnx.merge(graphdef, params)(batch["ids"]), batch)

    return Model(loss, params, table="embed/embedding")


def stacked():
    """Modules stacked by hand, and merged for each layer inside `scan_layers`."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.dense(x))

    layers = [nnx.split(Layer(nnx.Rngs(seed)), nnx.Param) for seed in range(LAYERS)]
    graphdef = layers[0][0]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in layers))

    def loss(params, batch):
        def layer(params, x):
            return nnx.merge(graphdef, params)(x)

        return mean_square(scan_layers(layer, params["layers"], batch["x"]), batch)

    return Model(loss, {"layers": optfn.Stacked(stack)})


def lora():
    """`nnx.LoRA` beside frozen weights, split by `nnx.LoRAParam`."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.first_lora = nnx.LoRA(WIDTH, 4, WIDTH, rngs=rngs)
            self.last = nnx.LoRA(
                WIDTH, 4, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
            )

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x) + self.first_lora(x)))

    graphdef, params, frozen = nnx.split(Net(nnx.Rngs(0)), nnx.LoRAParam, ...)

    def loss(params, batch):
        return mean_square(nnx.merge(graphdef, params, frozen)(batch["x"]), batch)

    return Model(loss, params)


def random_state():
    """`nnx.Dropout` and `nnx.BatchNorm`: `nnx.Rngs` and statistics are model state."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.head(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, batch):
        model = nnx.merge(graphdef, params, rest)
        model.train()
        value = mean_square(model(batch["x"]), batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    return Model(loss, params, rest)


def metadata():
    """`nnx.with_partitioning`, with `with_sharding_constraint`."""
    return with_shardings(nnx_metadata)
