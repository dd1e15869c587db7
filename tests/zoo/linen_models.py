"""Models of flax linen."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from sharded_models import linen_boxes, linen_logical

from zoo.model import BATCH, LAYERS, ROWS, WIDTH, Model, mean_square
from zoo.with_shardings import with_shardings

nn = pytest.importorskip("flax.linen")


def init(net, x):
    return jax.jit(net.init)(jax.random.key(0), x)


def scan():
    """Layers in `nn.scan` and `nn.remat`, an `nn.Embed`."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + jnp.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = nn.Embed(ROWS, WIDTH, name="embed")(ids)
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            return layers(name="layers")(x, None)[0]

    net = Net()

    def loss(params, batch):
        return mean_square(net.apply({"params": params}, batch["ids"]), batch)

    return Model(loss, init(net, BATCH["ids"])["params"], table="embed/embedding")


def tied():
    """An `nn.Embed` that is the output layer too, by `attend`."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(ROWS, WIDTH, name="embed")
            return embed.attend(jnp.tanh(nn.Dense(WIDTH)(embed(ids))))

    net = Net()

    def loss(params, batch):
        logits = checkpoint_name(net.apply({"params": params}, batch["ids"]), "outputs")
        labels = jax.nn.one_hot(batch["ids"], ROWS)
        return -jnp.mean(jnp.sum(labels * nn.log_softmax(logits), -1))

    return Model(loss, init(net, BATCH["ids"])["params"], table="embed/embedding")


def batch_norm():
    """`nn.BatchNorm`, whose statistics are model state."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(WIDTH)(x))
            return nn.Dense(WIDTH)(jnp.tanh(x))

    net = Net()
    variables = init(net, BATCH["x"])

    def loss(params, stats, batch):
        variables = {"params": params, "batch_stats": stats}
        y, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return mean_square(y, batch), new["batch_stats"]

    return Model(loss, variables["params"], variables["batch_stats"])


def dropout():
    """`nn.Dropout` with the key of `rng=True`."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids, train):
            x = nn.Embed(ROWS, WIDTH, name="embed")(ids)
            x = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(nn.Dense(WIDTH)(x)))
            return nn.Dense(WIDTH)(x)

    net = Net()
    params = net.init(jax.random.key(0), BATCH["ids"], False)["params"]

    def loss(params, batch, key):
        y = net.apply({"params": params}, batch["ids"], True, rngs={"dropout": key})
        return mean_square(y, batch)

    return Model(loss, params, rng=True, table="embed/embedding")


def boxes():
    """`nn.with_partitioning` in `nn.scan`, with `with_sharding_constraint`."""
    return with_shardings(linen_boxes)


def logical():
    """`nn.with_logical_partitioning` and `nn.with_logical_constraint`, with rules."""
    return with_shardings(linen_logical)
