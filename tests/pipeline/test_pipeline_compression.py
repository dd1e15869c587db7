"""Deep Gradient Compression between the data workers of a pipeline, 4 stages × 2 workers.

The reference is the unpipelined model on two workers simulated by vmap.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import STAGES, batch, block, blocks, mesh_of
from simulation import pipelined, unpipelined

import optfn
from optfn.distributed import stack_stages, unstack_stages

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


@pytest.mark.nightly
@pytest.mark.parametrize(("explicit", "nesterov"), [(False, True), (True, False)])
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
        assert_close(kept, np.stack([v[name] for v in expected.residual.value], axis=1))
        assert got.residual.value[name].sharding.spec == P(("data", "stage"))
    assert np.abs(got.residual.value["in"]).max() > 1e-3  # something was not sent
