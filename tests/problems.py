"""Steps and models that tests share; so do they the programs of a model of one shape, by stages."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from arrays import normal
from jax.sharding import Mesh

import optfn

WIDTH, BATCH, STAGES = 6, 24, 4


def blocks():
    return [
        {
            "in": normal([i, 0], WIDTH, 9, scale=0.4),
            "bias": normal([i, 1], 9, scale=0.1),
            "out": normal([i, 2], 9, WIDTH, scale=0.4),
        }
        for i in range(STAGES)
    ]


def block(w, x):
    return x + jnp.tanh(x @ w["in"] + w["bias"]) @ w["out"]


def mean_square(y, target):
    return jnp.mean((y - target) ** 2)


def stacked_layers(num_layers, width, mark=lambda x: x):
    """Params of residual layers in one tree, which `mark` may wrap, and of a head."""
    rng = np.random.default_rng(1)
    return {
        "layers": mark(
            {
                "w": 0.1 * rng.normal(size=(num_layers, width, width)).astype(np.float32),
                "b": np.zeros((num_layers, width), np.float32),
            }
        ),
        "head": rng.normal(size=(width, 8)).astype(np.float32),
    }


def square_error(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


def whole(stages, batch):
    y, target = batch
    for w in stages:
        y = block(w, y)
    return mean_square(y, target)


def batch(k):
    return normal([9, k, 0], BATCH, WIDTH), normal([9, k, 1], BATCH, WIDTH)


def mesh_of(explicit):
    devices = jax.devices()[: 2 * STAGES]
    if explicit:
        return jax.make_mesh((2, STAGES), ("data", "stage"), devices=devices)
    return Mesh(np.array(devices).reshape(2, STAGES), ("data", "stage"))


class Step(NamedTuple):
    """What an update gives, and the params after it."""

    updates: Any
    params: Any
    state: Any


@functools.lru_cache(maxsize=8)
def compiled(tx, **extra):
    return jax.jit(functools.partial(tx.update, **extra))


def steps(tx, params, gradients, state=None, apply=optfn.apply_updates, **extra):
    """Return the Step of each of the gradients, by one compiled program."""
    state, found = tx.init(params) if state is None else state, []
    for grads in gradients:
        updates, state = compiled(tx, **extra)(grads, state, params)
        params = apply(params, updates)
        found.append(Step(updates, params, state))
    return found


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = {"a": {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}, "c": rng.normal(size=5)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), draw)


def run(tx, params, gradients, apply=optfn.apply_updates):
    """Return params and state after each of the gradients."""
    found = steps(tx, params, gradients, apply=apply)
    return [step.params for step in found], found[-1].state


def trained(step, state, batches):
    """Return the state of a training step after the batches, and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def state_after(step, state, batches):
    return trained(step, state, batches)[0]


def equal(a, b):
    chex.assert_trees_all_equal(jax.device_get(a), jax.device_get(b))


def spec(tree):
    """Return the structure of a tree; shape, dtype and weak type of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]


def scripted(values):
    """Return an evaluation that gives these numbers one after the other."""
    remaining = iter(values)
    return lambda w: next(remaining)
