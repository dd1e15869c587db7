"""Models of plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from arrays import weights
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_models import plain_scan

from zoo.model import LAYERS, ROWS, WIDTH, Model, mean_square
from zoo.with_shardings import with_shardings


class Layer(NamedTuple):
    up: jax.Array
    down: jax.Array
    scale: jax.Array


class Weights(NamedTuple):
    embedding: jax.Array
    layers: Layer
    head: jax.Array


def tree_of_specs():
    """NamedTuples with a tree of PartitionSpecs like them, a `lax.scan` of a checkpoint."""
    params = Weights(
        weights(0, ROWS, WIDTH),
        Layer(
            weights(1, LAYERS, WIDTH, 2 * WIDTH),
            weights(2, LAYERS, 2 * WIDTH, WIDTH),
            1 + 0 * weights(3, LAYERS, WIDTH),
        ),
        weights(4, WIDTH, WIDTH),
    )
    specs = Weights(
        P("model", "data"),
        Layer(P(None, "data", "model"), P(None, "model", "data"), P()),
        P("data", "model"),
    )

    @jax.checkpoint
    def body(x, layer):
        normed = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * layer.scale
        return x + jax.nn.silu(normed @ layer.up) @ layer.down, None

    def loss(params, batch):
        x, _ = lax.scan(body, params.embedding[batch["ids"]], params.layers)
        return mean_square(x @ params.head, batch)

    return Model(loss, params, table="embedding", specs=specs)


def constraints():
    """`with_sharding_constraint` in a `lax.scan` of a checkpoint."""
    return with_shardings(plain_scan)
