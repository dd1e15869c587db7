"""What tests of exchanged gradients share: compressors, gradients, a model and its training."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import reference_exchange as reference
from arrays import normal
from simulation import N

import optfn

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
BATCH = normal(2, 16, 48), normal(3, 16, 40)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def lowered_collectives(text):
    """Return the bytes of the operands of each kind of collective in a lowered program."""
    size = {"f32": 4, "ui32": 4, "i32": 4, "i8": 1}
    found = {}
    pattern = r'"stablehlo\.(all_gather|all_reduce)".*?[>)] : \(tensor<([\dx]*?)x?([a-z]+\d+)>\)'
    for kind, shape, dtype in re.findall(pattern, text, re.DOTALL):
        entries = math.prod(int(n) for n in shape.split("x") if n)
        found.setdefault(kind, []).append(entries * size[dtype])
    return found
