"""Constraints of a model in the step of a worker: those along its own axes mean nothing there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import weights
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sharded_models import MODELS, WIDTH, constrain

import optfn
from optfn.distributed import data_mesh
from optfn.jaxprs import constraints

BATCH = weights(3, 16, WIDTH)


def two_axes():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


WAYS = {
    "two axes": lambda: {"mesh": two_axes()},
    "both split the batch": lambda: {"mesh": two_axes(), "data_axis": ("data", "model")},
    "params": lambda: {"mesh": two_axes(), "shard": "params"},
    "microbatches": lambda: {"mesh": two_axes(), "microbatches": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_constraints_trains_as_on_one_device(model, way):
    apply, params, _ = model()
    params = jax.device_get(params)

    def loss(params, x):
        return jnp.mean((apply(params, x) - 1.0) ** 2)

    tx = optax.sgd(0.1, momentum=0.9)
    expected, state = params, tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss)(expected, BATCH), state)
        expected = optax.apply_updates(expected, updates)
    step = optfn.make_train_step(loss, optfn.momentum(0.1, 0.9), **WAYS[way]())
    trained = step.init(params)
    for _ in range(3):
        trained, _ = step(trained, BATCH)
    assert jax.tree.structure(trained.params) == jax.tree.structure(params)
    leaves = zip(jax.tree.leaves(trained.params), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_constraints_along_other_axes_hold():
    def loss(params, x):
        return jnp.mean(constrain(x @ params, "data", "model") ** 2)

    step = optfn.make_train_step(loss, optfn.sgd(0.1), mesh=two_axes())
    text = step.lower(np.ones((WIDTH, WIDTH), np.float32), BATCH).as_text()
    kept = [x for x in text.splitlines() if "sharding_constraint" in x and "16xf32" in x]
    assert any("model" in x for x in kept) and not any("data" in x for x in kept)


def test_a_worker_still_names_its_axes():
    def loss(params, x):
        out = constrain(x @ params, "data", "model")
        return jax.lax.pmean(jnp.mean(out), "data") + 0 * jax.lax.axis_index("data")

    step = optfn.make_train_step(loss, optfn.sgd(0.1), mesh=two_axes())
    w = weights(1, WIDTH, WIDTH)
    _, metrics = step(step.init(w), BATCH)
    np.testing.assert_allclose(metrics["loss"], np.mean(BATCH @ w), rtol=1e-5)


def test_a_loss_without_such_constraints_is_traced_once(monkeypatch):
    monkeypatch.setattr(constraints, "_run_without", None)
    traces = []

    def loss(params, x):
        traces.append(len(traces))
        return jnp.mean(constrain(x @ params, None, "model"))

    step = optfn.make_train_step(loss, optfn.sgd(0.1), mesh=two_axes())
    step(step.init(np.ones((WIDTH, WIDTH), np.float32)), BATCH)
    assert len(traces) == 1


def test_other_errors_of_a_loss_pass():
    def loss(params, x):
        raise ValueError("Manual work")

    step = optfn.make_train_step(loss, optfn.sgd(0.1), mesh=data_mesh())
    with pytest.raises(ValueError, match="Manual work"):
        step(step.init(np.ones(3, np.float32)), BATCH)


def test_branches_of_a_condition():
    def loss(params, x):
        def branch(x):
            return constrain(x @ params, "data", None)

        return jnp.mean(jax.lax.cond(jnp.sum(params) > 0, branch, lambda x: x, x))

    spec = P("data")
    run = jax.shard_map(
        lambda w, x: jax.lax.pmean(constraints.drop_manual_constraints(loss)(w, x), "data"),
        mesh=data_mesh(4), in_specs=(P(), spec), out_specs=P(), check_vma=False,
    )  # fmt: skip
    w = np.abs(weights(1, WIDTH, WIDTH))
    np.testing.assert_allclose(run(w, BATCH), np.mean(BATCH @ w), rtol=1e-5)
