"""What a training step can do, each a function that trains a model and compares the run by hand."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import optfn
from optfn.distributed import data_mesh
from optfn.leaves.nodes import is_packed
from optfn.sparse import ShardedTable
from zoo.by_hand import EPS, RATE, STEPS, by_hand, narrow
from zoo.model import BATCH, Model

ABILITIES = {}


class NotApplicable(Exception):
    """The model lacks what the ability is about."""


def ability(asked):
    """Register an ability under what a user writes for it, in Markdown."""

    def register(fn):
        ABILITIES[fn.__name__] = fn
        fn.asked = asked
        return fn

    return register


def adam(**options):
    return optfn.adam(RATE, eps=EPS, eps_hat=False, **options)


def mesh_for(model):
    """Return a mesh with the axes that a model names, and its number of workers."""
    if model.specs is None:
        return data_mesh(8), 8
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), 4


def train(model: Model, tx=None, params=None, **options):
    """Return losses, params and the model state as `by_hand` does."""
    step = optfn.make_train_step(
        model.loss,
        tx or adam(),
        model_state=model.model_state is not None,
        rng=model.rng,
        **options,
    )
    state, losses = step.init(model.params if params is None else params, model.model_state), []
    for _ in range(STEPS):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    if "shard" in options:
        arrays = jax.tree.leaves((state.params, state.opt_state))
        assert not all(x.sharding.is_fully_replicated for x in arrays)
    return results(losses, state)


def on_workers(model, tx=None, **options):
    """Return the results of a mesh of workers, and those by hand."""
    mesh, workers = mesh_for(model)
    return train(model, tx, mesh=mesh, **options), by_hand(model, (workers,) * STEPS)


def results(losses, state):
    params = optfn.unpack(state.params) if is_packed(state.params) else state.params
    # The table of several devices is one array in its natural order.
    params = jax.tree.map(np.asarray, params, is_leaf=lambda x: isinstance(x, ShardedTable))
    return list(losses), params, state.model_state


def list_numbers(tree):
    """Return each leaf in float64; of keys, their data."""
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    is_key = jax.dtypes.prng_key
    arrays = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, is_key) else x for x in leaves)
    return [np.asarray(x).astype(np.float64) for x in arrays]


def assert_agree(found, want, tolerance=2e-5):
    """Compare losses, params and model states, leaf by leaf."""
    for a, b in zip(list_numbers(found), list_numbers(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def need(given, lack):
    if given is None:
        raise NotApplicable(lack)
    return given


@ability("one device")
def one_device(model):
    assert_agree(train(model), by_hand(model))


@ability("`mesh=`")
def mesh(model):
    assert_agree(*on_workers(model))


@ability('`shard="state"`')
def state(model):
    assert_agree(*on_workers(model, shard="state"))


@ability('`shard="params"`')
def params(model):
    assert_agree(*on_workers(model, shard="params"))


@ability("`shard=` its own specs")
def specs(model):
    shard = need(model.specs, "it has no PartitionSpecs")
    assert_agree(*on_workers(model, shard=shard))


@ability('`partitioner="compiler"`')
def compiler(model):
    """With its own specs; a model without specs is divided as by "params"."""
    mesh, _ = mesh_for(model)
    shard = "params" if model.specs is None else model.specs
    found = train(model, mesh=mesh, shard=shard, partitioner="compiler")
    assert_agree(found, by_hand(model))


@ability("`microbatches=2`")
def microbatches(model):
    assert_agree(train(model, microbatches=2), by_hand(model, microbatches=2))


@ability("`packed=True`")
def packed(model):
    assert_agree(train(model, packed=True), by_hand(model))


@ability("bfloat16, `multi_precision`")
def masters(model):
    found = train(model, adam(multi_precision=True), narrow(model.params))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found[1]))
    assert_agree(found, by_hand(model, masters=True), 1e-2)


@ability('`moment_dtype="int8"`')
def int8(model):
    """With divided params; moments of 8 bits lead some percent away from the params by hand."""
    found, want = on_workers(model, adam(moment_dtype="int8"), shard="params")
    assert_agree(found[0], want[0], 2e-2)
    start, here, there = (
        np.concatenate([x.ravel() for x in list_numbers(params)])
        for params in (model.params, found[1], want[1])
    )
    assert np.linalg.norm(here - there) < 0.05 * np.linalg.norm(there - start)


@ability("`tables=`")
def tables(model):
    assert_agree(train(model, tables=need(model.table, "it has no embedding")), by_hand(model))


@ability('`tables=`, `shard="params"`')
def divided_tables(model):
    table = need(model.table, "it has no embedding")
    found, want = on_workers(model, shard="params", tables=table)
    assert_agree(found, want)


@ability("`recompute=`")
def recompute(model):
    assert_agree(train(model, recompute=("outputs",)), by_hand(model))


def fit(model, steps, **options):
    state, history = optfn.minimize(
        model.loss, adam(), model.params, [BATCH] * steps,
        model_state=model.model_state, rng=model.rng, progress=False, **options,
    )  # fmt: skip
    return results(history["loss"], state), history


@ability("resume in another layout")
def resume(model):
    """A step on a mesh with divided params, a checkpoint, two steps on one device."""
    mesh, workers = mesh_for(model)
    with tempfile.TemporaryDirectory() as folder:
        fit(model, 1, mesh=mesh, shard="params", checkpoint=folder)
        found, history = fit(model, STEPS, checkpoint=folder)
    assert len(history["loss"]) == STEPS
    assert_agree(found, by_hand(model, (workers, 1, 1)))


@ability("`evaluate=` on a mesh")
def evaluate(model):
    mesh, workers = mesh_for(model)
    key = [jax.random.key(5)] if model.rng else []

    def value(params, *state):
        loss = model.loss(params, *state, BATCH, *key)
        return loss[0] if state else loss

    _, history = fit(model, STEPS, mesh=mesh, shard="params", evaluate=value)
    _, params, state = by_hand(model, (workers,) * STEPS)
    want = value(params) if state is None else value(params, state)
    np.testing.assert_allclose(history["evaluation"][-1], want, rtol=1e-4)
