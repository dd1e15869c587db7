"""A small byte-level causal transformer in plain JAX: params are a nested dict, functions are pure.

    embed -> block -> … -> block -> head

Each is a function of its own params, and all blocks have the same shapes, so the model can be
trained as one function, cut into pipeline stages, or recomputed block by block. Params may be
float32 or bfloat16; norms, softmax and loss are float32. `python -m examples.demo` trains it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BYTES = 256  # the vocabulary
GAIN = 10.0  # of the embedding


class Config(NamedTuple):
    """The size of the model."""

    width: int = 96
    heads: int = 2
    hidden: int = 384
    blocks: int = 2
    length: int = 128  # of the context, in bytes
    recent: int = 6  # bytes whose embeddings are summed at each position


def init(key: jax.Array, config: Config) -> dict[str, Any]:
    """Return the parameters, float32: {"embed": {…}, "blocks": [{…}, …], "head": {…}}."""
    d, f = config.width, config.hidden
    keys = iter(jax.random.split(key, 1 + 4 * config.blocks))

    def normal(*shape: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    residual = (2 * config.blocks) ** -0.5  # two branches per block add to the residual stream
    return {
        "embed": {"table": normal(config.recent, BYTES, d, scale=1 / GAIN)},
        "blocks": [
            {
                "norm_1": jnp.ones(d),
                "qkv": normal(d, 3 * d, scale=d**-0.5),
                "out": normal(d, d, scale=residual * d**-0.5),
                "norm_2": jnp.ones(d),
                "up": normal(d, f, scale=d**-0.5),
                "down": normal(f, d, scale=residual * f**-0.5),
            }
            for _ in range(config.blocks)
        ],
        # With a kernel of zeros, the untrained model needs 8 bits for every byte.
        "head": {"norm": jnp.ones(d), "kernel": jnp.zeros((d, BYTES)), "bias": jnp.zeros(BYTES)},
    }


def embed(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Sum the embeddings of the byte and of those just before: (batch, time) -> (…, width).

    A table for each distance gives the first block the n-grams that attention would otherwise have
    to learn to collect.
    """
    x = jnp.zeros((), params["table"].dtype)
    for distance, table in enumerate(params["table"]):
        x = x + table[jnp.pad(tokens, ((0, 0), (distance, 0)))[:, : tokens.shape[1]]]
    # Small tables times a gain: a step of an adaptive rule moves the embedding GAIN times as far.
    return GAIN * x


def block(params: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """Add attention and then a feed-forward layer to x, (batch, time, width)."""
    x = x + attention(params, rms_norm(x, params["norm_1"]), heads)
    return x + feed_forward(params, rms_norm(x, params["norm_2"]))


def attention(params: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """Mix each position with those before it, by softmax over rotated queries and keys."""
    batch, time, width = x.shape
    size = width // heads

    def by_head(z: jax.Array) -> jax.Array:
        z = z.reshape(batch, time, heads, size)
        return z.transpose(0, 2, 1, 3).reshape(batch * heads, time, size)

    # Products with weights are of matrices, not stacks of them: XLA on a CPU is faster at those.
    q, k, v = map(by_head, jnp.split(x.reshape(-1, width) @ params["qkv"], 3, axis=-1))
    scores = jnp.einsum("nqd,nkd->nqk", rotate(q) * size**-0.5, rotate(k))
    scores = jnp.where(np.tri(time, dtype=bool), scores.astype(jnp.float32), -1e9)
    mixed = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores).astype(x.dtype), v)
    mixed = mixed.reshape(batch, heads, time, size).transpose(0, 2, 1, 3).reshape(-1, width)
    return (mixed @ params["out"]).reshape(x.shape)


def feed_forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Apply two matrices with a squared ReLU between them."""
    hidden = jnp.square(jax.nn.relu(x.reshape(-1, x.shape[-1]) @ params["up"]))
    return (hidden @ params["down"]).reshape(x.shape)


def head(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the logits of the next byte, float32."""
    logits = rms_norm(x, params["norm"]) @ params["kernel"] + params["bias"]
    return logits.astype(jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs of features by angles that grow with the position (RoPE): (…, time, size)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def apply(params: dict[str, Any], tokens: jax.Array, config: Config) -> jax.Array:
    """Return the logits of each next byte: (batch, time) -> (batch, time, 256)."""
    x = embed(params["embed"], tokens)
    for each in params["blocks"]:
        x = block(each, x, config.heads)
    return head(params["head"], x)


def losses(params: dict[str, Any], windows: jax.Array, config: Config) -> jax.Array:
    """Return the nats of each next byte: windows (batch, time + 1) -> (batch, time)."""
    logits = apply(params, windows[:, :-1], config)
    right = jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - right


def loss_fn(params: dict[str, Any], windows: jax.Array, config: Config) -> jax.Array:
    """Return the mean cross-entropy in nats."""
    return losses(params, windows, config).mean()
