"""The loss of a program over one big batch, and its gradients, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from reference_run.program import STACKED, make_batch


def hidden(params, x):
    """Return the values of a layer, or of the last of stacked layers."""
    for w, b in zip(params["w"], params["b"], strict=True) if params["w"].ndim == 3 else ():
        x = jnp.tanh(x @ w + b)
    return x if params["w"].ndim == 3 else jnp.tanh(x @ params["w"] + params["b"])


def outputs(params, x, ids=None):
    """Return the model's number for each example."""
    if "t" in params:
        x = x + jnp.mean(params["t"][ids[:, :2]], 1)
    if "u" in params:
        x = x + jnp.mean(params["u"][ids[:, 2:]], 1)
    h = checkpoint_name(hidden(params, x), "hidden")  # what a way with `recompute=` keeps
    h = h * params["z"] if "z" in params else h
    out = params["s"] * jnp.sum(h, -1)
    if "empty" in params:
        out = out + jnp.sum(params["empty"])
    if "large" in params:
        columns = jnp.arange(1, 513, dtype=x.dtype)  # no two have gradients of one size
        out = out + 0.3 * jnp.sum(jnp.tanh(x @ params["large"]) / columns, -1)
    return out * params["count"] if "count" in params else out


def errors(out, y):
    """Return the loss of each example: a square, and a product where that would be infinite."""
    return jnp.where(jnp.abs(y) > 1e9, out * y, (out - y) ** 2)


def first_model_state(p):
    """Return the model state that a program begins with: a running mean, a counter, and perhaps
    a key."""
    state = {"mean": np.zeros(4, p.dtype), "seen": np.int32(0)} if p.model_state else None
    return state | {"key": np.array(KEY)} if p.model_state == "key" else state


KEY = 0, 3  # the data of jax.random.key(3)


def pass_on(p, model_state, batch, way, worker=None):
    """Return what the model state adds to the output of each example, and the next model state;
    `worker` is the number of one that takes the step alone.

    The microbatches of a worker pass it on. The next one is the mean of the workers', with the
    counter and the key of the first.
    """
    if model_state is None:
        return np.zeros(len(batch[2])), None
    seen, ends = [], []
    many = 1 if worker is not None else way.workers or 1
    split = functools.partial(np.split, indices_or_sections=many * way.microbatches)
    pieces = iter(zip(split(batch[0]), split(batch[2]), strict=True))
    for number in range(many):
        number = worker if worker is not None else number if way.workers else None
        state = model_state
        for _ in range(way.microbatches):
            x, w = next(pieces)
            seen.append(np.full(len(w), 0.1 * state["mean"][0]))
            state = next_model_state(p, state, x, w, number)
        ends.append(state)
    return np.concatenate(seen), ends[0] | {"mean": np.mean([x["mean"] for x in ends], 0)}


def next_model_state(p, model_state, x, w, worker):
    """Return the model state after a batch or microbatch; the number of a worker, if there are
    several, is folded into its key. A number that is not finite stays, if no example has weight."""
    weights = w if p.model_state == "weights" else np.ones(len(x))
    before, mean = model_state["mean"], np.nan
    if np.sum(weights):
        mean = np.average(x.astype(np.float64), 0, weights)
    mean = 0.9 * before + 0.1 * mean
    if p.is_weighted and not np.sum(w):
        mean = np.where(np.isfinite(mean), mean, before)
    after = {"mean": mean, "seen": model_state["seen"] + 1}
    if "key" in model_state:
        key = jax.random.wrap_key_data(model_state["key"].astype(np.uint32))
        key = key if worker is None else jax.random.fold_in(key, worker)
        after["key"] = np.asarray(jax.random.key_data(jax.random.split(key)[0]))
    return after


def noise(step, num_workers, num_microbatches, count, one=None):
    """Return the factors of dropout in a step: of each worker's microbatches, in their order, or of
    one worker alone."""
    key, factors = jax.random.fold_in(jax.random.key(7), step), []
    for worker in range(num_workers or 1):
        own = jax.random.fold_in(key, worker) if num_workers else key
        own = own if one is None else jax.random.fold_in(key, one)
        for part in range(num_microbatches):
            last = jax.random.fold_in(own, part) if num_microbatches > 1 else own
            size = count // (num_workers or 1) // num_microbatches
            factors.append(np.asarray(jax.random.uniform(last, (size,), "float32", minval=0.5)))
    return np.concatenate(factors).astype(np.float64)


@functools.partial(jax.jit, static_argnums=(4, 8))
def _differentiate(
    params, fixed, batch, added, is_weighted, factor, by_example, owners, is_reversed
):
    x, y, weights, *ids = batch
    used = weights if is_weighted else jnp.ones_like(weights)
    x = jnp.where((used != 0)[:, None], x, 0)  # what has no weight makes no NaN
    weight = jnp.sum(used)

    def loss(params, own):  # of the examples of one worker; the mean over workers is the loss
        layers = {k: params[k][::-1] for k in STACKED} if is_reversed else {}
        out = outputs({**params, **layers, **fixed}, x, *ids) + added
        each = jnp.where(used != 0, errors(out * by_example, y) * factor, 0)
        value = jnp.sum(jnp.where(own, used * each, 0)) / jnp.where(weight == 0, 1, weight)
        return len(owners) * value, (each, out)

    (values, rest), grads = jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0))(
        params, owners
    )
    return jnp.mean(values), grads, jax.tree.map(lambda a: a[0], rest), weight


def differentiate(p, params, batch, model_state, step, way, worker=None):
    """Return the loss of a call, each worker's own gradients, the weight, and aux; `worker` is the
    number of one that takes the step alone.

    A gradient has the worker as its leading axis, and the mean over it is that of the whole batch.
    A mean of nothing is NaN, with weight 0. Each call of a plain loss counts alike.
    """
    floats = {k: x for k, x in params.items() if k != "count"}
    fixed = {k: x for k, x in params.items() if k == "count"}
    x, y, w = (np.asarray(a, np.float64) for a in batch[:3])
    x = np.mean(np.reshape(x, (len(y), -1, 4)), 1)  # an example may have several rows
    factor = 1 + 0.1 * step if p.pass_step else 1.0
    parts = way.workers, way.microbatches, len(x)
    each = noise(step, *parts, worker) if p.key else np.ones(len(x))
    owners = np.arange(len(x)) * way.exchanging // len(x) == np.arange(way.exchanging)[:, None]
    added, _ = pass_on(p, model_state, batch, way, worker)
    data = (x, y, w, *batch[3:]), added, p.is_weighted, factor, each, owners
    value, grads, (losses, out), weight = jax.device_get(
        _differentiate(floats, fixed, *data, "reversed" in p.spelling)
    )
    weights = w if p.is_weighted else np.ones_like(w)
    aux = {
        "abs": np.mean(np.abs(out)),
        "big": np.sum(losses > 1),
        "mean": np.sum(weights * out) / np.sum(weights) if np.sum(weights) else np.nan,
    }
    grads = {k: np.asarray(g) for k, g in grads.items()}
    value = float(value) if weight else np.nan
    return value, grads, float(weight) if p.is_weighted else 1.0, aux


def join_aux(parts):
    """Return the aux of equal parts of a batch together, from pairs of a weight and an aux."""
    weights = [weight for weight, _ in parts]
    means = [aux["mean"] if weight else 0.0 for weight, aux in parts]
    return {
        "abs": np.mean([aux["abs"] for _, aux in parts]),
        "big": np.sum([aux["big"] for _, aux in parts]),
        "mean": np.average(means, weights=weights) if any(weights) else np.nan,
    }


HELD = [{"seed": 101, "weights": [1.0, 0.0, 2.0, 1.0, 0.5, 1.0, 0.0, 1.0]}]
HELD += [{"seed": 102, "weights": [0.0] * 4}, {"seed": 103, "weights": [1.0, 0.0, 3.0, 1.0]}]


def held_batches(p):
    """Return the batches that are held back."""
    more = None, p.batch_dtype, 1, p.has_tables
    return [make_batch(b["seed"], b["weights"], *more) for b in HELD]


def loss_of_held(p, params, model_state, way):
    """Return the loss of the batches that are held back, in a step 0 of a way, which has one
    device."""
    total, count = 0.0, 0.0
    for batch in held_batches(p):
        value, _, weight, _ = differentiate(p, params, batch, model_state, 0, way)
        weight = weight if p.is_weighted else len(batch[1])
        total, count = total + (weight * value if weight else 0.0), count + weight
    return total / count


def statistics_of_held(p):
    """Return the mean of the running mean's inputs over the batches that are held back."""
    return np.mean(np.concatenate([batch[0] for batch in held_batches(p)]), 0, dtype=np.float64)
