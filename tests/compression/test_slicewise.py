"""The exchange by parts: packets of slices to their owners, and the means of them back."""

import functools
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from compilations import compilations
from grids import nightly
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import trained
from reference_exchange import quantize as quantized

import optfn
from benchmarks import wire
from optfn.distributed import (
    data_mesh,
    exchange,
    init_state,
    quantize,
    rescale_residuals,
    sharded,
    state_specs,
    top_k,
)
from optfn.mesh.layout import data_parallel

N = 8
# 8 slices of 768 entries; slices of 188, of which the last is padded; a leaf that goes dense.
SHAPES = {"w": (64, 96), "v": (1500,), "b": (7,)}
BY_PARTS = functools.partial(exchange, route="parts")


def zeros():
    return {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}


def gradients(seed, workers=N):
    return {
        k: normal(10 * seed + i, workers, *shape) for i, (k, shape) in enumerate(SHAPES.items())
    }


def on_a_mesh(tx, mesh, params):
    """Return the update of all workers, (gradients, state) -> (directions, state)."""
    specs = state_specs(tx, params)
    return jax.jit(
        jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh,
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
            check_vma=False,
        )
    )


def in_slices(x, workers=N):
    x = x.reshape(-1)
    return np.pad(x, (0, -x.size % workers)).reshape(workers, -1)


@pytest.mark.nightly
def test_slices_with_padding_follow_the_equations():
    """Both residuals and the direction of each step, from those of the step before."""
    beta = 0.5
    tx = BY_PARTS(quantize(2, chunk=64), error_feedback=beta)
    send = functools.partial(quantized, bits=2, chunk=64)
    mesh = data_mesh(N)
    state, update = init_state(tx, zeros(), mesh), on_a_mesh(tx, mesh, zeros())
    for t in range(4):
        g, before = gradients(t), jax.device_get(state)
        direction, state = jax.device_get(update(g, state))
        for k in ("w", "v"):
            n = g[k][0].size
            total = beta * before.residual[k].reshape(N, n) + g[k].reshape(N, n)
            sent = np.stack([[send(x) for x in in_slices(worker)] for worker in total])
            close = functools.partial(
                np.testing.assert_allclose, rtol=0, atol=2e-6 * np.abs(total).max()
            )
            close(state.residual[k].reshape(N, n), total - sent.reshape(N, -1)[:, :n])
            owned = beta * in_slices(before.published[k]) + sent.mean(axis=0, dtype=np.float64)
            published = np.stack([send(x.astype(np.float32)) for x in owned])
            close(direction[k].reshape(-1), published.reshape(-1)[:n])
            close(state.published[k][:n], (owned - published).reshape(-1)[:n])
            assert state.published[k].shape == (-(-n // N) * N,)
            assert not state.published[k][n:].any()
            assert state.published[k].any()
        np.testing.assert_allclose(direction["b"], g["b"].mean(0), atol=1e-6)
    assert isinstance(state.published["b"], type(state.residual["b"]))  # both are masked


def test_a_nan_gives_zeros_and_changes_nothing():
    tx, mesh = BY_PARTS(quantize(4)), data_mesh(N)
    state, update = init_state(tx, zeros(), mesh), on_a_mesh(tx, mesh, zeros())
    _, state = update(gradients(0), state)
    spoiled = gradients(1)
    spoiled["v"][3, 7] = np.nan
    direction, after = update(spoiled, state)
    assert not any(x.any() for x in jax.tree.leaves(direction))
    chex.assert_trees_all_equal(state, after)


def of_a_large_leaf(route, size, workers=N):
    """Return the bytes that a worker sends for each entry of a leaf, in a compiled update."""
    tx, mesh = exchange(quantize(4), route=route), data_mesh(workers)
    params = {"w": jnp.zeros(size)}
    g = {"w": jnp.zeros((workers, size))}
    run = on_a_mesh(tx, mesh, params)
    compiled = run.lower(g, init_state(tx, params, mesh)).compile()
    return wire.bytes_by_axes(compiled, mesh)["data",] / size


def test_bytes_in_the_compiled_program():
    """2(N − 1)/N·(4/8 + 4/4096) beside 7 times as many of packets to all, and flags."""
    size = N * 4096
    flags = 2 * (N - 1) / N * 8 / size
    by_parts = 2 * (N - 1) / N * (4 / 8 + 4 / 4096)
    found = of_a_large_leaf("parts", size)
    assert found == pytest.approx(by_parts + flags, rel=1e-6)
    assert found <= 1.0
    to_all = (N - 1) * (4 / 8 + 4 / 4096)
    assert of_a_large_leaf("gather", size) == pytest.approx(to_all + flags, rel=1e-6)


def traffic(route, size, compressor):
    tx = exchange(compressor, route=route)
    return tx.init({"w": jnp.zeros(size)}).exchanged.traffic


def test_bytes_by_formula():
    """For any number of workers those of two packets of the leaf, and fewer than 1.0 an entry."""
    size = 1024 * 4096
    for workers in (2, 8, 64, 1024):
        found = float(traffic("parts", size, quantize(4)).bytes_sent(jnp.int32(0), workers)) / size
        assert found == pytest.approx(2 * (workers - 1) / workers * (4 / 8 + 4 / 4096))
        assert found <= 1.01 and (workers > 64 or found <= 1.0)
    # Whole words and scales are those of slices: 1,500 entries in slices of 188, 94 bytes each.
    found = float(traffic("parts", 1500, quantize(4)).bytes_sent(jnp.int32(0), 8))
    assert found == 2 * 7 * (4 * 24 + 4)


def rows_of_links():
    page = (Path(__file__).parents[2] / "docs" / "links.md").read_text()
    section = page.partition("\n### To all workers, or by parts?\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [\d,]+ \|.*$", section, re.M)
    return [[float(x.replace(",", "")) for x in row.strip("| ").split("|")] for row in rows]


@pytest.mark.parametrize("row", rows_of_links(), ids=lambda row: int(row[0]))
def test_the_table_of_links(row):
    """Bytes a parameter: dense, then to all and by parts for 8, 4 and 1 bits."""
    workers, dense, *found = int(row[0]), *row[1:]
    size = 1024 * 4096
    assert dense == pytest.approx(2 * (workers - 1) / workers * 4, rel=0.005)
    expected = [
        float(traffic(route, size, quantize(bits)).bytes_sent(jnp.int32(0), workers)) / size
        for bits in (8, 4, 1)
        for route in ("gather", "parts")
    ]
    assert found == pytest.approx(expected, rel=0.005)
    for to_all, by_parts in zip(found[::2], found[1::2], strict=True):
        assert by_parts < to_all if workers > 2 else by_parts == to_all
    passes = [to_all > dense for to_all in found[::2]]
    assert passes == [workers >= least for least in (8, 16, 64)]


def loss_fn(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["in"])
    return jnp.mean((h @ params["out"] + params["b"] - y) ** 2)


MODEL = {"in": 0.3 * normal(0, 24, 64), "out": 0.3 * normal(1, 64, 20), "b": np.zeros(20, "f")}


def batches(count, rows=32):
    return [(normal(50 + t, rows, 24), normal(90 + t, rows, 20)) for t in range(count)]


@pytest.mark.nightly
def test_the_outer_exchange_of_local_steps():
    outer = optfn.chain(BY_PARTS(quantize(4, chunk=32)), optfn.sgd(1.0))
    runs = {}
    for name, tx in (("parts", outer), ("dense", None)):
        step = optfn.make_train_step(
            loss_fn, optfn.adam(1e-2), mesh=data_mesh(4), local_steps=2, outer=tx
        )
        runs[name] = trained(step, step.init(MODEL), batches(6))
    state, losses = runs["parts"]
    assert losses == pytest.approx(runs["dense"][1], rel=0.05)
    keys = optfn.state_dict(state.opt_state)
    assert keys["outer/exchange/published/in"].shape == (MODEL["in"].size,)
    published = state.opt_state.outer[0].published["in"]
    assert published.addressable_data(0).size == MODEL["in"].size // 4


@pytest.mark.parametrize("kind", ["params", nightly("state")])
def test_two_levels(kind):
    """Each device exchanges slices of its part; residuals are those of packets to all."""
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh, axes = Mesh(devices, ("slow", "fast")), ("slow", "fast")
    found = {}
    for route in ("parts", "gather"):
        tx = optfn.chain(
            exchange(quantize(4, chunk=16), axis_name="slow", route=route, min_size=100),
            optfn.sgd(0.1),
        )
        step = optfn.make_train_step(
            loss_fn, tx, mesh=mesh, data_axis=axes, shard=sharded(kind, axis="fast")
        )
        state = step.init(MODEL)
        found[route], _ = step(state, batches(1)[0])
        assert compilations(step) == 1
    ours, theirs = (optfn.state_dict(found[route].opt_state) for route in ("parts", "gather"))
    for key in theirs:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    assert sorted(set(ours) - set(theirs)) == [f"exchange/published/{k}" for k in ("in", "out")]
    published = found["parts"].opt_state[0].published["in"]
    assert published.shape == (4, MODEL["in"].size // 4)  # each device has rows of the leaf
    assert published.addressable_data(0).size == MODEL["in"].size // 8
    # What owners keep is the difference of the directions.
    moved = [np.asarray(found[route].params["in"]) for route in ("parts", "gather")]
    kept = 0.1 * np.asarray(published).reshape(MODEL["in"].shape)
    np.testing.assert_allclose(moved[0] - moved[1], kept, atol=1e-6)
    assert np.abs(kept).max() > 1e-4


def test_bytes_of_two_levels():
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh, axes = Mesh(devices, ("slow", "fast")), ("slow", "fast")
    params = {"in": np.zeros((256, 256), np.float32)}
    tx = optfn.chain(BY_PARTS(quantize(4, chunk=256), axis_name="slow"), optfn.sgd(0.1))
    step = optfn.make_train_step(
        lambda p, x: jnp.mean((x @ p["in"]) ** 2), tx,
        mesh=mesh, data_axis=axes, shard=sharded("params", axis="fast"),
    )  # fmt: skip
    state = step.init(params)
    batch = data_parallel.split_batch(np.ones((8, 256), np.float32), mesh, step.layout.data_axes)
    found = wire.bytes_by_axes(step.compiled.lower(state, batch).compile(), mesh)
    # A device sends packets of its half of the leaf.
    expected = 2 * 3 / 4 * (4 / 8 + 4 / 256) * 256**2 / 2
    assert found["slow",] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("as_mapping", "workers"), [(True, 5), nightly(False, 2)])
def test_another_number_of_workers(as_mapping, workers):
    """Published parts stay one whole leaf, whose slices have other owners; residuals are meaned."""
    params = {"w": np.zeros((37, 41), np.float32)}
    tx = BY_PARTS(quantize(4, chunk=32))
    mesh = data_mesh(N)
    _, state = on_a_mesh(tx, mesh, params)(
        {"w": normal(0, N, 37, 41)}, init_state(tx, params, mesh)
    )
    before = jax.device_get(state)
    assert before.published["w"].shape == (1520,)  # 1,517 and 3 of padding
    fewer = data_mesh(workers)
    scaled = rescale_residuals(optfn.state_dict(state) if as_mapping else state, workers)
    mapping = scaled if as_mapping else optfn.state_dict(scaled)
    resumed = optfn.load_state_dict(init_state(tx, params, fewer), mapping)
    whole = np.asarray(resumed.published["w"])
    assert whole.size == {2: 1518, 5: 1520}[workers]
    np.testing.assert_array_equal(whole[:1517], before.published["w"][:1517])
    assert not whole[1517:].any()
    mean = before.residual["w"].reshape(N, -1).mean(axis=0, dtype=np.float64).astype(np.float32)
    np.testing.assert_array_equal(resumed.residual["w"].reshape(-1), np.tile(mean, workers))
    direction, after = on_a_mesh(tx, fewer, params)(
        {"w": np.zeros((workers, 37, 41), np.float32)}, resumed
    )
    # Nothing of what workers and owners had kept is lost.
    left = np.asarray(after.residual["w"]).reshape(workers, -1).mean(axis=0, dtype=np.float64)
    left += np.asarray(after.published["w"])[:1517]
    total = np.asarray(direction["w"]).reshape(-1) + left
    np.testing.assert_allclose(total, mean + before.published["w"][:1517], atol=1e-6)


def test_the_published_part_of_other_workers_is_refused():
    tx = BY_PARTS(top_k(0.1))
    state = init_state(tx, zeros(), data_mesh(4))
    with pytest.raises(ValueError, match=r"exchange: .*'v' must have shape"):
        on_a_mesh(tx, data_mesh(2), zeros())(gradients(0, 2), state)
