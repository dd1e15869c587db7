"""Deep Gradient Compression between the data workers of a pipeline, 4 stages × 2 workers.

The reference is the unpipelined model on two workers simulated by vmap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_pipeline_step import STAGES, batch, block, blocks, mean_square, mesh_of, whole

import optfn
from optfn.distributed import (
    on_each_device,
    pipeline_value_and_grad,
    stack_stages,
    unstack_stages,
)

STEPS = 6


def compressing(nesterov=False):
    """Dense, then two stages of a ramp; the matrices are compressed, the biases are not."""
    return optfn.dgc_momentum(
        0.05,
        0.9,
        rampup_begin_step=2,
        rampup_step=2,
        sparsity=(0.5, 0.9),
        min_size=20,
        nesterov=nesterov,
        local_grad_clip_norm=0.5,
    )


def simulated(tx, params, batches):
    """Return losses, params and state of two workers side by side on one device."""

    def worker(params, state, part):
        loss, grads = jax.value_and_grad(whole)(params, part)
        updates, state = tx.update(grads, state, params)
        return jax.lax.pmean(loss, "data"), optfn.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(worker, axis_name="data"))
    params, state = jax.tree.map(lambda x: jnp.stack([x, x]), (params, tx.init(params)))
    losses = []
    for each in batches:
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), each)
        loss, params, state = step(params, state, parts)
        losses.append(float(loss[0]))
    return losses, jax.tree.map(lambda x: x[0], params), state


def pipelined(tx, stage_fn, params, batches, mesh, spec, schedule="1f1b"):
    f = pipeline_value_and_grad(
        stage_fn,
        mean_square,
        mesh=mesh,
        num_microbatches=3,
        schedule=schedule,
        data_axis="data",
        grad_reduce=None,
    )
    step = optfn.make_train_step(mean_square, on_each_device(tx, mesh, spec=spec), value_and_grad=f)
    state, losses = step.init(params), []
    placed = jax.tree.map(lambda x: x.sharding, state)
    for each in batches:
        state, metrics = step(state, each)
        losses.append(float(metrics["loss"]))
    for x, before in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(before, x.ndim)
    assert step.compiled._cache_size() == 1
    return losses, state


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_stacked_stages_train_as_two_simulated_workers(explicit, nesterov):
    """Losses, params and what each worker keeps of each stage, through the whole ramp."""
    tx, mesh = compressing(nesterov), mesh_of(explicit)
    batches = [batch(k) for k in range(STEPS)]
    params = stack_stages(blocks(), mesh=mesh)
    losses, state = pipelined(tx, block, params, batches, mesh, P("stage"))
    want, want_params, want_state = simulated(tx, blocks(), batches)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    assert_close(unstack_stages(state.params), want_params)

    got, expected = state.opt_state[0], want_state[0]
    assert int(got.num_workers) == 2 and int(got.step) == STEPS
    for name in ("in", "out"):  # flat, worker by worker, in it stage by stage
        kept = got.residual[name].reshape(2, STAGES, -1)
        assert_close(kept, jnp.stack([v[name] for v in expected.residual], axis=1))
        assert got.residual[name].sharding.spec == P(("data", "stage"))
    assert float(jnp.abs(got.residual["in"]).max()) > 1e-3  # something was not sent


def test_unlike_stages_train_as_two_simulated_workers():
    tx, mesh = compressing(), mesh_of(False)
    batches = [batch(k) for k in range(STEPS)]
    params = jax.device_put(blocks(), NamedSharding(mesh, P()))
    losses, state = pipelined(tx, [block] * STAGES, params, batches, mesh, P(), "zb")
    want, want_params, _ = simulated(tx, blocks(), batches)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    assert_close(state.params, want_params)


def test_all_stages_skip_what_is_not_finite_in_one():
    mesh = mesh_of(False)
    tx = on_each_device(compressing(), mesh, spec=P("stage"))
    params = stack_stages(blocks(), mesh=mesh)
    grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape), x.dtype), params)
    grads["in"] = grads["in"].at[1, 2, 0, 0].set(jnp.nan)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for u in jax.tree.leaves(updates):
        np.testing.assert_array_equal(u, 0)
    assert [int(x.data) for x in state[0].skipped.addressable_shards] == [1] * 8
    assert [int(x.data) for x in state[0].step.addressable_shards] == [0] * 8


def test_bad_input():
    mesh = mesh_of(False)
    tx = on_each_device(compressing(), mesh, spec=P("stage"))
    params = stack_stages(blocks(), mesh=mesh)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"'bias' of shape \(4, 9\).*2 workers.*grad_reduce=None"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="no axis 'stages'"):
        on_each_device(compressing(), mesh, spec=P("stages"))
    with pytest.raises(ValueError, match="no axis 'data'"):
        alone = Mesh(np.array(jax.devices()[:2]), ("stage",))
        on_each_device(compressing(), alone, spec=P("stage"))
