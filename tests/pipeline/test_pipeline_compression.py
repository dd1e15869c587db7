"""Deep Gradient Compression between the data workers of a pipeline, 4 stages × 2 workers.

The reference is the unpipelined model on two workers simulated by vmap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from grids import nightly
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    STAGES,
    WIDTH,
    batch,
    block,
    blocks,
    mean_square,
    mesh_of,
)
from simulation import pipelined, unpipelined

import optfn
from optfn.distributed import PipelineParams, stack_stages, unstack_stages

STEPS = 6


def compressing(nesterov=False, sparsity=(0.5, 0.9)):
    """Dense, then a ramp of two steps; matrices are compressed, the 36 biases are not."""
    with pytest.warns(UserWarning, match="little momentum remains"):
        return optfn.dgc_momentum(
            0.05,
            0.9,
            rampup_begin_step=2,
            rampup_step=2,
            sparsity=sparsity,
            min_size=40,
            nesterov=nesterov,
        )


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("explicit", "nesterov"), [(False, True), nightly(True, False)])
def test_stacked_stages_train_as_two_simulated_workers(explicit, nesterov):
    """Losses, params and the residuals of each worker's stages, through the full ramp."""
    tx, mesh = compressing(nesterov), mesh_of(explicit)
    batches = [batch(k) for k in range(STEPS)]
    params = stack_stages(blocks(), mesh=mesh)
    losses, state = pipelined(tx, block, params, batches, mesh, P("stage"))
    want, want_params, want_state = unpipelined(tx, blocks(), batches)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    assert_close(unstack_stages(state.params), want_params)

    got, expected = state.opt_state[0], want_state[0]
    assert int(got.num_workers) == 2 and int(got.step) == STEPS
    for name in ("in", "out"):  # flat, worker by worker, in it stage by stage
        kept = got.residual.value[name].reshape(2, STAGES, -1)
        assert_close(kept, jnp.stack([v[name] for v in expected.residual.value], axis=1))
        assert got.residual.value[name].sharding.spec == P(("data", "stage"))
    assert float(jnp.abs(got.residual.value["in"]).max()) > 1e-3  # something was not sent


@pytest.mark.nightly  # stacked stages with shared weights are below
def test_heterogeneous_stages_that_share_weights_train_as_two_simulated_workers():
    """Weights that the first and last stage share are replicated, as is their state."""

    def first(w, x, shared):
        return block(w, x @ shared)

    def last(w, x, shared):
        return block(w, x) @ shared.T

    def loss_fn(params, batch):
        x, target = batch
        for stage, w in zip((first, block, block, last), params.stages, strict=True):
            x = block(w, x) if stage is block else stage(w, x, params.shared)
        return mean_square(x, target)

    tx, mesh = compressing(sparsity=(0.9,)), mesh_of(False)
    batches = [batch(k) for k in range(STEPS)]
    params = PipelineParams(blocks(), normal(7, WIDTH, WIDTH, scale=0.5))
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    losses, state = pipelined(tx, [first, block, block, last], placed, batches, mesh, P(), "zb")
    want, want_params, _ = unpipelined(tx, params, batches, loss_fn)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    assert_close(state.params, want_params)


@pytest.mark.nightly
@pytest.mark.optimized
def test_shared_weights_and_integers_beside_stacked_stages():
    """`spec` is for the stages; shared weights are replicated; integers have no update or state."""

    def stage(w, x, shared):
        return block(w, x @ shared["mix"] @ shared["mix"].T)

    def loss_fn(params, batch):
        x, target = batch
        for w in params.stages:
            x = stage(w, x, params.shared)
        return mean_square(x, target)

    with pytest.warns(UserWarning, match="little momentum remains"):
        tx = optfn.dgc_momentum(0.05, 0.9, rampup_begin_step=0, sparsity=(0.8,), min_size=40)
    mesh, batches = mesh_of(False), [batch(k) for k in range(STEPS)]
    stages = [w | {"id": np.arange(30, dtype=np.int32) + i} for i, w in enumerate(blocks())]
    shared = {"mix": normal(7, WIDTH, 8, scale=0.2), "ids": np.arange(24)}
    params = PipelineParams(stages, shared)
    replicated = jax.device_put(shared, NamedSharding(mesh, P()))
    placed = PipelineParams(stack_stages(stages, mesh=mesh), replicated)
    losses, state = pipelined(tx, stage, placed, batches, mesh, P("stage"), pattern="stages/.*")
    want, want_params, want_state = unpipelined(tx, params, batches, loss_fn)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    got = state.params._replace(stages=unstack_stages(state.params.stages))
    assert_close(got, want_params)

    kept, expected = state.opt_state[0].residual.value, want_state[0].residual.value
    assert kept.shared["mix"].sharding.spec == P(("data",))
    assert kept.stages["in"].sharding.spec == P(("data", "stage"))
    assert_close(kept.shared["mix"].reshape(2, -1), expected.shared["mix"])
    assert kept.stages["id"] == kept.shared["ids"] == optax.MaskedNode()
    assert float(jnp.abs(kept.shared["mix"]).max()) > 1e-3
