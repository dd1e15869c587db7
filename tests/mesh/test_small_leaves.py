"""Leaves too small to divide stay whole on each device, and a step has no collective for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from jax.sharding import PartitionSpec as P
from problems import state_after

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh, plan_memory, scan_layers
from optfn.mesh.layout import sharding

LAYERS, WIDTH, DEVICES = 4, 512, 2


def model(vectors):
    """Return params with so many vectors in each layer, and so many beside them."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (0.05 * rng.normal(size=shape)).astype(np.float32)

    layers = {f"v{i}": normal(LAYERS, WIDTH) for i in range(vectors)}
    layers["w"] = normal(LAYERS, WIDTH, WIDTH)
    return {"layers": optfn.Stacked(layers)} | {f"b{i}": normal(WIDTH) for i in range(vectors)}


def loss(params, x):
    def layer(w, x):
        vectors = [w[k] for k in w if k != "w"]
        return x + jnp.tanh(x @ w["w"] + sum(vectors))

    x = scan_layers(layer, params["layers"], x)
    return jnp.mean((x + sum(params[k] for k in params if k != "layers")) ** 2)


def stepped(shard, vectors=1):
    mesh = data_mesh(DEVICES)
    return optfn.make_train_step(loss, optfn.adam(1e-2), mesh=mesh, shard=shard), model(vectors)


X = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
SHARDS = ("state", "params")


@pytest.mark.parametrize("shard", SHARDS)
def test_vectors_stay_whole_and_matrices_are_divided(shard):
    step, params = stepped(shard)
    state = step.init(params)
    specs = step.layout.gradient_specs(params)
    assert specs["b0"] == specs["layers"]["v0"] == P()
    assert any(specs["layers"]["w"])
    kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert kept <= 1.01 * 2 * 4 * sum(x.size for x in jax.tree.leaves(params)) / DEVICES + 64


@pytest.mark.optimized
@pytest.mark.parametrize("shard", suite(SHARDS, "params"))
def test_more_vectors_add_no_collective(shard):
    found = []
    for vectors in (1, 2):
        step, params = stepped(shard, vectors)
        program = step.lower(params, X).compile()
        found.append(sum(x.times for x in wire.collectives(program)))
        sent = sum(wire.bytes_by_axes(program, step.mesh).values())
        plan = plan_memory(step.tx, params, step.mesh, shard=shard)
        assert sent == pytest.approx(plan.sent, rel=0.02)
    assert found[0] == found[1]


@pytest.mark.nightly
@pytest.mark.parametrize("shard", [*SHARDS])
def test_a_state_whose_vectors_were_divided_goes_on(shard, tmp_path, monkeypatch):
    """Files of both forms load into steps of both forms, and train alike."""
    pytest.importorskip("orbax.checkpoint")

    def trained(saved=None, load=None):
        step, params = stepped(shard)
        state = step.init(params)
        if load is not None:
            state = optfn.restore_checkpoint(load, state)[0]
        state = state_after(step, state, [X, X])
        if saved is not None:
            optfn.save_checkpoint(saved, state, sharded=True)
        return jax.tree.map(np.asarray, state)

    monkeypatch.setattr(sharding, "find_small_leaves", lambda params, count: set())
    trained(saved=tmp_path / "divided")
    expected = trained(load=tmp_path / "divided")
    monkeypatch.undo()
    found = trained(load=tmp_path / "divided")
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "stacked", "count", "expected"),
    [
        ([(16384,), (4096, 4096)], False, 8, {0}),  # 64 KB of 64 MB
        ([(16385,), (4096, 4096)], False, 8, set()),
        ([(16384,), (4096, 4096)], False, 16, set()),  # a shard has 4 MB
        ([(2048,), (1024,), (512, 512)], False, 1, {1}),  # the smaller one alone
        ([(32, 4096), (32, 4096, 4096)], True, 8, {0}),  # 16 KB a layer
        ([(8, 4096), (8, 16384, 16384)], True, 100, {0}),  # 128 KB of 8 GB
        ([(8, 4096), (8, 16384, 16384)], True, 512, {0}),
        ([(8, 128, 129), (8, 4096, 4096)], True, 4, set()),  # 66 KB a layer
    ],
)
def test_how_small_is_small(shapes, stacked, count, expected):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params = optfn.Stacked(params) if stacked else params
    assert sharding.find_small_leaves(params, count) == expected
