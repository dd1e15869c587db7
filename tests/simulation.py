"""Training on several workers, simulated by vmap on one device, and on the stages of a pipeline."""

import functools

import jax
import numpy as np
from compilations import compilations
from problems import mean_square, trained, whole

import optfn
from optfn.distributed import pipeline_value_and_grad

N = 4


def stacked(tree, workers=N):
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * workers), tree)


def one_step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optfn.apply_updates(params, updates), state


@functools.lru_cache(maxsize=1)
def simulated(tx):
    """Return the step of all workers, params and state and gradients stacked."""
    return jax.jit(jax.vmap(functools.partial(one_step, tx), axis_name="data"))


@functools.lru_cache(maxsize=4)
def simulated_update(tx):
    """Return the update of all workers, (gradients, state) -> (directions, state)."""
    return jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="data"))


def follow(tx, params, gradients, workers=N):
    """Return params and DGC state after each step, stacked over workers."""
    step, p, s = simulated(tx), stacked(params, workers), stacked(tx.init(params), workers)
    series = []
    for g in gradients:
        p, s = step(p, s, g)
        series.append((jax.device_get(p), jax.device_get(s)))
    return series


def unpipelined(tx, params, batches):
    """Return losses, params and state of two workers side by side on one device."""

    def worker(params, state, part):
        loss, grads = jax.value_and_grad(whole, allow_int=True)(params, part)
        grads = jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)
        updates, state = tx.update(grads, state, params)
        return jax.lax.pmean(loss, "data"), optfn.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(worker, axis_name="data"))
    params, state = stacked((params, tx.init(params)), 2)
    losses = []
    for single in batches:
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), single)
        loss, params, state = step(params, state, parts)
        losses.append(float(loss[0]))
    return losses, jax.tree.map(lambda x: x[0], params), state


def pipelined(tx, stage_fn, params, batches, mesh, spec):
    f = pipeline_value_and_grad(stage_fn, mean_square, mesh=mesh, num_microbatches=3)
    step = optfn.make_train_step(None, tx, value_and_grad=f, mesh=mesh, shard={".*": spec})
    state = step.init(params)
    placed = jax.tree.map(lambda x: x.sharding, state)
    state, losses = trained(step, state, batches)
    for x, before in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(before, x.ndim)
    assert compilations(step) == 1
    return losses, state
