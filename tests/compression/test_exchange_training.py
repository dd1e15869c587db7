"""Training with exchanged gradients: on a mesh, beside other wrappers, and from a checkpoint."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from arrays import normal
from exchanges import (
    BATCH,
    MODEL,
    OPTIMIZERS,
    first,
    loss_fn,
    lowered_collectives,
    one_step,
    parts,
    simulated_run,
)
from grids import nightly
from jax.sharding import PartitionSpec as P
from simulation import N, pipelined, stacked, unpipelined
from simulation import simulated_update as simulated

import optfn
from optfn.distributed import (
    data_mesh,
    exchange,
    init_state,
    quantize,
    rescale_residuals,
    stack_stages,
    state_specs,
    top_k,
    unstack_stages,
)
from optfn.sparse import Rows


def test_frozen_leaves_in_a_training_step():
    """No collective has their size, although the step averages what no transform exchanges."""
    attrs = {"w": optfn.ParamAttr(trainable=False)}
    tx = optfn.chain(exchange(quantize(1), param_attrs=attrs), optfn.adam(0.1, param_attrs=attrs))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), donate=False)
    state = step.init(MODEL)
    found = lowered_collectives(step.compiled.lower(state, BATCH).as_text())
    assert max(x for sizes in found.values() for x in sizes) < MODEL["w"].nbytes
    after, _ = step(state, BATCH)
    np.testing.assert_array_equal(after.params["w"], MODEL["w"])


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
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_a_mesh(name):
    """make_train_step follows the simulation; all devices have the same bits; the loss falls."""
    tx = OPTIMIZERS[name]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state, losses = step.init(MODEL), []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    want, simulated_state = simulated_run(tx)
    chex.assert_trees_all_close(jax.device_get(state.params), want, rtol=1e-4, atol=1e-5)
    got = {
        k: np.asarray(x).reshape(N, *MODEL[k].shape)
        for k, x in state.opt_state[0].residual.value.items()
        if hasattr(x, "shape")
    }
    # A masked leaf has no residual.
    expected = {k: x for k, x in simulated_state[0].residual.value.items() if hasattr(x, "shape")}
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)
    assert all(x.any() for x in jax.tree.leaves(got))
    for x in jax.tree.leaves(state.params):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x))


@pytest.mark.nightly
def test_all_ways_to_run_agree():
    """pmap, shard_map with and without check_vma."""
    tx = OPTIMIZERS["adamw"]
    want, _ = simulated_run(tx)
    p, s = stacked(MODEL), stacked(tx.init(MODEL))
    step = jax.pmap(functools.partial(one_step, tx), axis_name="data")
    for _ in range(4):
        p, s = step(p, s, parts())
    for worker in range(N):
        chex.assert_trees_all_equal(first(p, worker), first(p))
    chex.assert_trees_all_close(first(p), want, rtol=1e-4, atol=1e-5)
    mesh, specs = data_mesh(N), state_specs(tx, MODEL)
    for check_vma in (True, False):

        def body(params, state, part, check_vma=check_vma):
            own = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            grads = jax.grad(loss_fn, allow_int=True)(own if check_vma else params, part)
            grads = {k: None if k == "n" else g for k, g in grads.items()}
            updates, state = tx.update(grads, state, params)
            return optfn.apply_updates(params, updates), state

        run = jax.jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )
        params, state = MODEL, init_state(tx, MODEL, mesh)
        for _ in range(4):
            params, state = run(params, state, BATCH)
        chex.assert_trees_all_close(jax.device_get(params), want, rtol=1e-4, atol=1e-5)


def test_packed_params():
    """The same updates and the same keys as without packing: chunks are those of the leaves."""
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), packed=True)
    state = step.init(MODEL)
    for _ in range(4):
        state, _ = step(state, BATCH)
    want, _ = simulated_run(tx)
    chex.assert_trees_all_close(
        jax.device_get(optfn.unpack(state.params)), want, rtol=1e-4, atol=1e-5
    )
    plain = init_state(tx, MODEL, data_mesh(N))
    assert set(optfn.state_dict(state.opt_state)) == set(optfn.state_dict(plain))


@pytest.mark.nightly
def test_accumulate_keeps_each_workers_own_sum():
    """Two half batches are one step of the whole one, and the residuals are the same."""
    tx = optfn.chain(exchange(top_k(0.1)), optfn.sgd(0.1))
    halves = [
        jax.tree.map(lambda x, i=i: np.concatenate([part[i::2] for part in x]), parts())
        for i in (0, 1)
    ]
    step = optfn.make_train_step(loss_fn, optfn.accumulate(tx, 2), mesh=data_mesh(N))
    state = step.init(MODEL)
    for half in halves:
        state, _ = step(state, half)
    once = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    want, _ = once(once.init(MODEL), BATCH)
    chex.assert_trees_all_close(state.params, want.params, atol=1e-6)
    inner = state.opt_state.inner_state
    chex.assert_trees_all_close(inner[0].residual, want.opt_state[0].residual, atol=1e-6)


def test_skip_nonfinite_stops_what_follows_too():
    tx = optfn.skip_nonfinite(optfn.record_metrics(OPTIMIZERS["adamw"]))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), donate=False)
    state, _ = step(step.init(MODEL), BATCH)
    spoiled = BATCH[0].copy(), BATCH[1]
    spoiled[0][-1, 0] = np.nan
    after, _ = step(state, spoiled)
    assert int(after.opt_state.skipped) == 1
    chex.assert_trees_all_equal(after.opt_state.inner_state, state.opt_state.inner_state)
    chex.assert_trees_all_equal(after.params, state.params)


@pytest.mark.nightly  # test_pipeline_compression.py has DGC there
@pytest.mark.parametrize("route", ["gather", "parts"])
def test_beside_a_pipeline(route):
    """Each stage exchanges with the same stage of the other workers."""
    choice = {".*in": top_k(0.2), ".*out": quantize(1)}
    tx = optfn.chain(exchange(choice, min_size=20, route=route), optfn.momentum(0.05, 0.9))
    mesh, batches = problems.mesh_of(False), [problems.batch(k) for k in range(3)]
    params = stack_stages(problems.blocks(), mesh=mesh)
    losses, state = pipelined(tx, problems.block, params, batches, mesh, P("stage"))
    want, want_params, want_state = unpipelined(tx, problems.blocks(), batches)
    np.testing.assert_allclose(losses, want, atol=1e-5)
    chex.assert_trees_all_close(unstack_stages(state.params), want_params, atol=1e-5)
    got, expected = state.opt_state[0].residual.value, want_state[0].residual.value
    for k in ("in", "out"):
        stages = np.stack([x[k] for x in expected], axis=1)
        np.testing.assert_allclose(got[k].reshape(stages.shape), stages, atol=1e-5)
        assert np.abs(stages).max() > 1e-3


@pytest.mark.parametrize("as_mapping", [nightly(False), True])
def test_another_number_of_workers(as_mapping):
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state, _ = step(step.init(MODEL), BATCH)
    before = jax.device_get(state.opt_state[0])
    scaled = rescale_residuals(optfn.state_dict(state) if as_mapping else state, 2)
    fewer = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(2))
    mapping = scaled if as_mapping else optfn.state_dict(scaled)
    resumed = optfn.load_state_dict(fewer.init(MODEL), mapping)
    part = resumed.opt_state[0]
    assert int(part.num_workers) == 2
    for k in ("w", "v"):
        each = before.residual.value[k].reshape(N, *MODEL[k].shape)
        want = np.tile(each.mean(axis=0, dtype=np.float64).astype(np.float32), (2, 1))
        np.testing.assert_array_equal(part.residual.value[k], want)
    np.testing.assert_array_equal(part.compressor["v"], before.compressor["v"])
    fewer(resumed, BATCH)


def test_names_in_a_checkpoint_that_goes_on_bit_for_bit(tmp_path):
    """The keys do not depend on what stands before or around the exchange."""
    tx = OPTIMIZERS["adamw"]
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N))
    state = step.init(MODEL)
    for _ in range(2):
        state, _ = step(state, BATCH)
    optfn.save_checkpoint(tmp_path, state)
    mapping = optfn.state_dict(state.opt_state)
    assert mapping["per_worker"].tolist() == ["exchange/residual/v", "exchange/residual/w"]
    assert mapping["exchange/residual/w"].shape == (N * 48, 30)
    assert mapping["exchange/residual/w"].dtype == np.float32
    assert int(mapping["exchange/num_workers"]) == N
    around = optfn.skip_nonfinite(optfn.chain(optfn.clip_by_global_norm(1.0), tx))
    assert set(mapping) <= set(optfn.state_dict(init_state(around, MODEL, data_mesh(N))))
    whole, _ = step(state, BATCH)
    restored, _ = optfn.restore_checkpoint(tmp_path, step.init(MODEL))
    resumed, _ = step(restored, BATCH)
    chex.assert_trees_all_equal(jax.device_get(whole), jax.device_get(resumed))


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
