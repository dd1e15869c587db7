"""The ground state of a chain of spins by netket: complex and real parameters, in float64."""

import os

os.environ["NETKET_ENABLE_X64"] = "0"  # within this file's tests only
os.environ["NETKET_SHARDING"] = "0"  # or it sets a mesh for all programs of the process

import jax
import jax.numpy as jnp
import netket
import pytest
from clients import assert_same_run, with_rules


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@with_rules("momentum", "adam")
def test_a_ground_state(rule, dtype):
    def run(tx):
        space = netket.hilbert.Spin(0.5, 4)
        energy = netket.operator.Ising(space, graph=netket.graph.Chain(4), h=1.0)
        model = netket.models.RBM(alpha=1, param_dtype=jnp.dtype(dtype))
        state = netket.vqs.FullSumState(space, model, seed=0)
        driver = netket.driver.VMC(energy, tx, variational_state=state)
        driver.run(10, out=(), show_progress=False)
        assert all(x.dtype == dtype for x in jax.tree.leaves(state.parameters))
        return state.parameters

    with jax.enable_x64(True):
        assert_same_run(run, rule, 0.01, tolerance=1e-8)
