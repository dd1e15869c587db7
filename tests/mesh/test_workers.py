"""Workers hold the same params whatever stands around or beside a transform that communicates."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from jax.sharding import PartitionSpec as P
from problems import batch, block, blocks, mean_square, mesh_of, state_after
from simulation import stacked

import optfn
from optfn.distributed import (
    compare_replicas,
    data_mesh,
    pipeline_value_and_grad,
    rescale_residuals,
    stack_stages,
)

N = 4


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def start():
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 8), "v": (8, 2), "b": (2,)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def data(k, size=16):
    rng = np.random.default_rng(k)
    return rng.standard_normal((size, 6), np.float32), rng.standard_normal((size, 2), np.float32)


def dgc(**options):
    options = {"rampup_begin_step": 0, "sparsity": (0.98,), "min_size": 16} | options
    return optfn.dgc_momentum(0.1, 0.9, **options)


def simulated(tx, batches):
    """Return the params of N workers side by side on one device, and their state."""

    def worker(params, state, part):
        grads = jax.grad(loss_fn)(params, part)
        grads = {k: g if k in ("w", "v") else jax.lax.pmean(g, "data") for k, g in grads.items()}
        updates, state = tx.update(grads, state, params, axis_name="data")
        return optfn.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(worker, axis_name="data"))
    params, state = stacked((start(), tx.init(start())), N)
    for whole in batches:
        parts = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), whole)
        params, state = step(params, state, parts)
    return params, state


def on_mesh(tx, batches):
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    return step, state_after(step, step.init(start()), batches)


def labels(params):
    return {k: "slow" if k == "b" else "fast" for k in params}


BESIDE_OTHERS = {
    "partition": lambda: optax.partition({"fast": dgc(), "slow": optfn.adam(0.1)}, labels),
    "masked": lambda: optfn.chain(
        optax.masked(dgc(), {"w": True, "v": True, "b": False}),
        optax.masked(optfn.adam(0.1), {"w": False, "v": False, "b": True}),
    ),
    "accumulated partition": lambda: optfn.accumulate(
        optax.partition({"fast": dgc(), "slow": optfn.adam(0.1)}, labels), 2
    ),
    "guarded": lambda: optfn.record_metrics(
        optfn.skip_nonfinite(optax.partition({"fast": dgc(), "slow": optfn.adam(0.1)}, labels))
    ),
    "attributes": lambda: dgc(param_attrs={"b": optfn.ParamAttr(trainable=False)}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*BESIDE_OTHERS])
def test_params_stay_the_same_on_all_workers(name):
    """The mesh gives what simulated workers give, whose other leaves have the mean gradient."""
    batches = [data(k) for k in range(4)]
    want, _ = simulated(BESIDE_OTHERS[name](), batches)
    _, state = on_mesh(BESIDE_OTHERS[name](), batches)
    compare_replicas(state.params, data_mesh(N))
    for k, x in state.params.items():
        np.testing.assert_allclose(x, want[k][0], rtol=1e-5, atol=1e-6, err_msg=k)
        np.testing.assert_allclose(want[k], np.broadcast_to(want[k][0], want[k].shape), atol=1e-6)


@pytest.mark.nightly
def test_accumulate_keeps_each_workers_own_sum():
    """Halfway it is carried over to other workers as the mean."""
    _, state = on_mesh(optfn.accumulate(dgc(), 2), [data(k) for k in range(3)])
    accumulated = state.opt_state.own_total["w"]
    assert accumulated.shape == (N * 6, 8) and accumulated.sharding.spec == P("data")
    mapping = optfn.state_dict(state.opt_state)
    assert "accumulate/own_total/w" in mapping["per_worker"]
    rescaled = rescale_residuals(mapping, 2)
    mean = np.asarray(accumulated).reshape(N, 48).mean(0)
    total = rescaled["accumulate/own_total/w"].reshape(2, 48)
    np.testing.assert_allclose(total, [mean, mean], rtol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    ],
)
def test_wrappers_that_are_not_known_are_refused_by_name(wrap):
    with pytest.raises(ValueError, match=r"(ApplyIfFinite|MultiSteps)State encloses a"):
        optfn.make_train_step(loss_fn, wrap(dgc()), mesh=data_mesh(N)).init(start())


def test_a_wrapper_whose_state_is_a_class_is_refused_too():
    @partial(jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=[])
    @dataclasses.dataclass
    class Wrapped:
        inner: Any

    def wrap(tx):
        return optax.GradientTransformationExtraArgs(lambda p: Wrapped(tx.init(p)), tx.update)

    step = optfn.make_train_step(loss_fn, wrap(dgc()), mesh=data_mesh(N))
    with pytest.raises(ValueError, match="Wrapped encloses a"):
        step.init(start())
    optfn.make_train_step(loss_fn, wrap(optfn.adam(0.1)), mesh=data_mesh(N)).init(start())


def test_a_wrapper_that_renames_leaves_is_refused():
    """By their names the step knows which gradients are a worker's own."""
    step = optfn.make_train_step(loss_fn, optax.flatten(dgc()), mesh=data_mesh(N))
    with pytest.raises(ValueError, match=r"has leaves that params do not have, ''.*optax.flatten"):
        step(step.init(start()), data(0))


def test_partitions_and_sums_beside_a_pipeline():
    """Leaves that nothing exchanges are averaged; accumulate keeps the sums of each worker."""

    def by_path(params):
        return jax.tree.map(lambda x: "fast" if x.ndim > 2 else "slow", params)

    mesh = mesh_of(False)
    tx = optax.partition({"fast": dgc(), "slow": optfn.adam(0.1)}, by_path)
    f = pipeline_value_and_grad(block, mean_square, mesh=mesh, num_microbatches=3)
    step = optfn.make_train_step(
        None, optfn.accumulate(tx, 2), value_and_grad=f, mesh=mesh, shard={".*": P("stage")}
    )
    first = step.init(stack_stages(blocks(), mesh=mesh))
    compare_replicas(state_after(step, first, map(batch, range(4))).params, mesh)


@pytest.mark.parametrize("virtual_stages", [nightly(1), 2])
def test_labels_of_stacked_stages_are_stacked_or_a_function(virtual_stages):
    params = stack_stages(blocks(), virtual_stages=virtual_stages)
    labels = dict.fromkeys(blocks()[0], "fast")
    mask = dict.fromkeys(labels, True)

    def by_labels(labels):
        return optax.partition({"fast": optfn.adam(0.1)}, labels)

    for tx in (by_labels(labels), optax.masked(optfn.adam(0.1), mask)):
        words = r"chain: part 1: a tree.*Put it into an optfn\.Stacked.*or pass a function"
        with pytest.raises(ValueError, match=words):
            optfn.chain(optfn.clip_by_norm(1.0), tx).init(params)
    stacked = optfn.Stacked(labels)
    stacked = optfn.Stacked(stacked) if virtual_stages > 1 else stacked
    whole = jax.tree.leaves(optfn.adam(0.1).init(params))
    for good in (stacked, lambda params: jax.tree.map(lambda _: "fast", params)):
        state = by_labels(good).init(params)
        for x, y in zip(jax.tree.leaves(state), whole, strict=True):
            np.testing.assert_array_equal(x, y)
