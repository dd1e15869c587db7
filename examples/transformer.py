"""A small byte-level causal transformer in plain JAX: params are a dict, functions are pure.

embed → blocks → head, each a function of its own params, so that the same model can be trained
whole, cut into pipeline stages or recomputed block by block. Run by `python -m examples.demo`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256


class Config(NamedTuple):
    """The size of the model."""

    width: int = 128
    heads: int = 2
    blocks: int = 2
    hidden: int = 512
    length: int = 128  # of the context, in bytes
    recent: int = 6  # bytes whose embeddings are summed at each position


def init(key: jax.Array, config: Config) -> dict[str, Any]:
    """Return the parameters: {"embed", "blocks": [...], "head"}, float32."""
    d, f = config.width, config.hidden
    keys = iter(jax.random.split(key, 1 + 4 * config.blocks))

    def normal(shape: tuple[int, ...], scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    shrink = (2 * config.blocks) ** -0.5  # residual branches start small
    embed = {"table": normal((config.recent, VOCABULARY, d), 0.1)}
    blocks = [
        {
            "norm_1": jnp.ones(d),
            "qkv": normal((d, 3 * d), d**-0.5),
            "out": normal((d, d), shrink * d**-0.5),
            "norm_2": jnp.ones(d),
            "up": normal((d, f), d**-0.5),
            "down": normal((f, d), shrink * f**-0.5),
        }
        for _ in range(config.blocks)
    ]
    head = {
        "norm": jnp.ones(d),
        "kernel": jnp.zeros((d, VOCABULARY)),
        "bias": jnp.zeros(VOCABULARY),
    }
    return {"embed": embed, "blocks": blocks, "head": head}


def embed(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Sum the embeddings of the byte and of those just before: (batch, time) -> (…, width).

    A table for each distance gives the first block the n-grams it would have to learn to gather.
    """
    table = params["table"]
    x = table[0][tokens]
    for distance in range(1, len(table)):
        before = jnp.pad(tokens, ((0, 0), (distance, 0)))[:, : tokens.shape[1]]
        x = x + table[distance][before]
    # Small tables times ten: the steps of an adaptive rule then move embeddings faster.
    return 10.0 * x


def block(params: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """Apply attention and a feed-forward layer, each added to its input."""
    batch, time, d = x.shape
    q, k, v = jnp.split(rms_norm(x, params["norm_1"]) @ params["qkv"], 3, axis=-1)
    q, k, v = (z.reshape(batch, time, heads, d // heads) for z in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) * (d // heads) ** -0.5
    past = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9).astype(jnp.float32)).astype(x.dtype)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, time, d)
    x = x + attended @ params["out"]
    hidden = jnp.square(jax.nn.relu(rms_norm(x, params["norm_2"]) @ params["up"]))
    return x + hidden @ params["down"]


def head(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the logits of the next byte, float32."""
    x = rms_norm(x, params["norm"]) @ params["kernel"] + params["bias"]
    return x.astype(jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs of features by angles that grow with the position (RoPE)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None, None] * 10000.0 ** (-np.arange(half) / half)
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
    """Return the nats of each next byte of windows (batch, time + 1)."""
    logits = apply(params, windows[:, :-1], config)
    chosen = jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def loss_fn(params: dict[str, Any], windows: jax.Array, config: Config) -> jax.Array:
    """Return the mean cross-entropy in nats."""
    return losses(params, windows, config).mean()
