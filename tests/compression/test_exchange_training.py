"""Training with exchanged gradients: on a mesh, beside other wrappers, and from a checkpoint."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from exchanges import (
    BATCH,
    MODEL,
    loss_fn,
)
from simulation import N, stacked
from simulation import simulated_update as simulated

import optfn
from optfn.distributed import (
    data_mesh,
    exchange,
    quantize,
    top_k,
)
from optfn.sparse import Rows


def test_the_plain_mean_is_the_step_of_today():
    """Bit for bit, in the dtype of the gradient, without any state."""
    model = jax.tree.map(jnp.asarray, MODEL | {"h": np.zeros(8, jnp.bfloat16)})

    def loss(params, batch):
        return loss_fn(params, batch) + jnp.sum(params["h"] * batch[0][:, :8].mean(0))

    results = []
    for tx in (optfn.chain(exchange(None), optfn.adamw(0.01)), optfn.chain(optfn.adamw(0.01))):
        step = optfn.make_train_step(loss, tx, mesh=data_mesh(N))
        state = step.init(model)
        for _ in range(3):
            state, _ = step(state, BATCH)
        results.append(jax.device_get(state.params))
    chex.assert_trees_all_equal(*results)
    tx = exchange()
    assert not jax.tree.leaves(tx.init(model))
    g = jax.tree.map(lambda p: jnp.ones((N, *p.shape), p.dtype), model)
    text = str(jax.make_jaxpr(jax.vmap(tx.update, axis_name="data"))(g, tx.init(model)))
    # Nothing but the conditions of branches, behind which small leaves are taken apart again.
    assert set(re.findall(r"convert_element_type\[new_dtype=(\w+)", text)) <= {"int32"}
    direction, _ = simulated(tx)(g, tx.init(model))
    assert direction["h"].dtype == jnp.bfloat16


@pytest.mark.nightly
def test_row_updates_are_those_of_arrays_bit_for_bit():
    """Entries that several workers send are added in the order of the workers; few are sent."""
    params = {"w": normal(0, 64, 128), "v": normal(1, 1100), "b": normal(2, 5)}
    tx = optfn.chain(exchange({"w": top_k(0.001), ".*": quantize(8)}), optfn.sgd(0.1))
    series = [{k: normal(10 + t, N, *x.shape) for k, x in params.items()} for t in range(4)]
    for g in series:
        g["w"][:, 3, 5:8] += 20  # all workers send it
    series[2]["v"][1, 0] = np.nan
    found, kinds = {}, set()
    for row_updates in (False, True):

        def update(g, state, p, row_updates=row_updates):
            updates, state = tx.update(g, state, p, row_updates=row_updates)
            kinds.add((row_updates, type(updates["w"]), type(updates["v"])))
            return optfn.apply_updates(p, updates), state

        run = jax.jit(jax.vmap(update, axis_name="data"))
        p, state = stacked(params), stacked(tx.init(params))
        for g in series:
            p, state = run(g, state, p)
        found[row_updates] = jax.device_get((p, state))
    assert {kind[1] for kind in kinds if kind[0]} == {Rows}
    assert all(kind[2] is not Rows and (kind[0] or kind[1] is not Rows) for kind in kinds)
    chex.assert_trees_all_equal(found[True], found[False])
    moved = np.flatnonzero(found[True][0]["w"][0] != params["w"])
    assert 3 <= moved.size <= 3 * N * 8 and int(found[True][1][0].step[0]) == 3
