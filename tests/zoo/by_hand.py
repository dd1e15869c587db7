"""The loop that a user writes with optax, on one device: what every ability is compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zoo.model import BATCH, EXAMPLES, Model

# Without eps the directions of gradients that are zero but for roundings, as those of a bias before
# a BatchNorm, would be noise.
RATE, EPS, STEPS = 0.05, 1e-3, 3


def fold_keys(state, worker):
    """Fold the number of a worker into the typed keys of a model state."""

    def fold(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(x, worker) if is_key else x

    return jax.tree.map(fold, state)


def join_states(before, own, after):
    """Join the model states of workers: means of floats, else worker 0's; unchanged keys stay."""

    def join(old, seen, *new):
        if jnp.issubdtype(old.dtype, jnp.floating):
            return sum(new) / len(new)
        is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
        return old if is_key and jnp.all(new[0] == seen) else new[0]

    return jax.tree.map(join, before, own, *after)


@functools.cache
def loss_and_gradients(model: Model):
    def loss(params, *arguments):
        # flax lets a model change only Variables of this trace, so their trees are made anew.
        return model.loss(params, *jax.tree.map(lambda x: x, arguments))

    return jax.jit(jax.value_and_grad(loss, has_aux=model.model_state is not None))


@functools.cache
def by_hand(model: Model, workers=(1,) * STEPS, microbatches=1, masters=False):
    """Train a model with optax, and return losses, params and the model state.

    Where it matters to the model, each of the workers has its examples, its key and its statistics,
    one after another; and microbatches pass the statistics on.

    Args:
      model: the model.
      workers: their number in each step.
      microbatches: the number of slices of a worker's examples.
      masters: whether params are bfloat16, and the optimizer has float32 ones.
    """
    if not model.differs_by_worker:
        workers, microbatches = (1,) * STEPS, 1
    tx = optax.adam(RATE, eps=EPS)
    params, state, losses = model.params, model.model_state, []
    if masters:
        params = narrow(params)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    opt_state, update = tx.init(wide), jax.jit(tx.update)
    for step, count in enumerate(workers):
        found = [
            of_worker(model, params, state, step, worker, count, microbatches)
            for worker in range(count)
        ]
        values, grads, own, after = zip(*found, strict=True)
        losses.append(np.mean(values))
        state = None if state is None else join_states(state, own[0], after)
        updates, opt_state = update(mean_of(grads), opt_state, wide)
        wide = optax.apply_updates(wide, updates)
        params = narrow(wide) if masters else wide
    return losses, params, state


def of_worker(model, params, state, step, worker, workers, microbatches):
    """Return the loss and gradients of a worker, and its model state before and after."""
    own = fold_keys(state, worker) if workers > 1 else state
    now, found = own, []
    for k in range(microbatches):
        arguments = [] if state is None else [now]
        arguments.append(slice_batch(worker * microbatches + k, workers * microbatches))
        if model.rng:
            key = jax.random.fold_in(jax.random.key(0), step)
            key = jax.random.fold_in(key, worker) if workers > 1 else key
            arguments.append(jax.random.fold_in(key, k) if microbatches > 1 else key)
        value, grads = loss_and_gradients(model)(params, *arguments)
        if state is not None:
            value, now = value
        found.append((value, jax.tree.map(lambda g: np.asarray(g, np.float32), grads)))
    values, grads = zip(*found, strict=True)
    return np.mean(values), mean_of(grads), own, now


def narrow(params):
    return jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)


def mean_of(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def slice_batch(number, count):
    size = EXAMPLES // count
    return {name: x[number * size : (number + 1) * size] for name, x in BATCH.items()}
