"""What tests of exchanged gradients share: compressors, gradients, a model and its training."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference_exchange as reference
from arrays import normal
from simulation import N, stacked

import optfn
from optfn.distributed import (
    exchange,
    power_sgd,
    quantize,
    top_k,
)

EPS = np.finfo(np.float32).eps
COMPRESSORS = {
    name: (getattr(optfn.distributed, send.func.__name__)(**send.keywords), send)
    for name, send in reference.CASES.items()
}


def first(tree, worker=0):
    return jax.tree.map(lambda x: np.asarray(x)[worker], tree)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Signs of what exceeds a multiple of the mean magnitude; counts its calls in its state."""

    multiple: float

    def init(self, shape):
        return {"calls": jnp.zeros((), jnp.int32)}

    def encode(self, x, state):
        size = jnp.mean(jnp.abs(x))
        code = jnp.where(jnp.abs(x) > self.multiple * size, jnp.sign(x), 0).astype(jnp.int8)
        return (code, 2 * size), {"calls": state["calls"] + 1}

    def decode(self, packet, shape):
        code, size = packet
        return (code * size).reshape(shape)

    def num_bytes(self, shape):
        return math.prod(shape) + 4


PARAMS = {"w": (50, 40), "v": (1500,), "b": (6,)}


def gradients(seed, params=PARAMS):
    return {k: normal(100 * seed + i, N, *shape) for i, (k, shape) in enumerate(params.items())}


def zeros(params=PARAMS):
    return {k: np.zeros(shape, np.float32) for k, shape in params.items()}


MODEL = {
    "w": normal(0, 48, 30, scale=0.1),
    "v": normal(1, 30, 40, scale=0.1),
    "b": np.zeros(40, np.float32),
    "n": np.arange(3),
}
MODEL_IS_FLOAT = {k: k != "n" for k in MODEL}
BATCH = normal(2, 16, 48), normal(3, 16, 40)
CHOICE = {"w": top_k(0.1, values="int2"), "v": power_sgd(2)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def one_step(tx, params, state, part):
    grads = jax.grad(loss_fn, allow_int=True)(params, part)
    grads = {k: None if k == "n" else g for k, g in grads.items()}
    updates, state = tx.update(grads, state, params)
    return optfn.apply_updates(params, updates), state


def parts(batch=BATCH):
    return jax.tree.map(lambda x: x.reshape(N, -1, x.shape[1]), batch)


@functools.cache
def simulated_run(tx, steps=4):
    """Return params of one worker and the states of all after so many steps under vmap."""
    step = jax.jit(jax.vmap(functools.partial(one_step, tx), axis_name="data"))
    p, s = stacked(MODEL), stacked(tx.init(MODEL))
    for _ in range(steps):
        p, s = step(p, s, parts())
    return first(p), jax.device_get(s)


OPTIMIZERS = {
    "adamw": optfn.chain(exchange(CHOICE, min_size=1200), optfn.adamw(0.01)),
    "momentum": optfn.chain(exchange(quantize(1), error_feedback=0.5), optfn.momentum(0.1, 0.9)),
    "lamb": optfn.chain(exchange(top_k(0.05), warmup_steps=2), optfn.lamb(0.01)),
    "optax": optfn.chain(exchange(quantize(8)), optax.masked(optax.adam(0.01), MODEL_IS_FLOAT)),
}


def lowered_collectives(text):
    """Return the bytes of the operands of each kind of collective in a lowered program."""
    size = {"f32": 4, "ui32": 4, "i32": 4, "i8": 1}
    found = {}
    pattern = r'"stablehlo\.(all_gather|all_reduce)".*?[>)] : \(tensor<([\dx]*?)x?([a-z]+\d+)>\)'
    for kind, shape, dtype in re.findall(pattern, text, re.DOTALL):
        entries = math.prod(int(n) for n in shape.split("x") if n)
        found.setdefault(kind, []).append(entries * size[dtype])
    return found
