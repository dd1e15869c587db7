"""Optimizer state in the memory of the host: the values, the place, checkpoints, and plans."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from grids import by_name, nightly
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from problems import state_after

import optfn
from optfn.distributed import (
    compare_replicas,
    data_mesh,
    exchange,
    plan_memory,
    quantize,
    scan_layers,
    sharded,
)
from optfn.loss.jaxprs import primitives, row_loops
from optfn.mesh.compilers import memories
from optfn.mesh.layout.fingerprint import begin_finite_check, fingerprints

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(16, 16)).astype(np.float32) for _ in range(3)]
ON_HOST = {"state_memory": "pinned_host"}
CLIP = optfn.clip_by_global_norm(0.5)


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    """Send arrays of half a kilobyte, in several chunks."""
    monkeypatch.setattr(memories, "LARGE", 512)
    monkeypatch.setattr(row_loops, "CHUNK", 1024)


def params(dtype=jnp.float32):
    shapes = {"in": (16, 32), "out": (32, 24), "odd": (37, 5)}
    found = {k: RNG.normal(size=s) / 4 for k, s in shapes.items()}
    found["layers"] = optfn.Stacked({"w": RNG.normal(size=(8, 32, 32)) / 8, "b": np.zeros((8, 32))})
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), found)


PARAMS = params()
NARROW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)


def loss_fn(p, x):
    h = scan_layers(lambda q, h: h + jnp.tanh(h @ q["w"] + q["b"]), p["layers"], x @ p["in"])
    return jnp.mean((h @ p["out"]) ** 2) + jnp.sum(p["odd"] ** 2)


def large(state):
    return [x for x in jax.tree.leaves(state.opt_state) if memories.is_large(x)]


def kinds(state):
    return {x.sharding.memory_kind for x in large(state)}


def train(tx, start=PARAMS, batches=BATCHES, **options):
    """Return the step and the last state."""
    step = optfn.make_train_step(loss_fn, tx, **options)
    return step, state_after(step, step.init(start), batches)


def assert_near(found, want, tolerance=2e-6):
    def near(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    jax.tree.map(near, found, want)


MASTERS = optfn.adamw(1e-2, multi_precision=True, grad_clip=CLIP)


def grid(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("slow", "fast"), axis_types=(kind,) * 2)


# tests/reference_run draws the others, without masters.
LAYOUTS = {
    "params, packed": lambda: {"mesh": data_mesh(), "shard": "params", "packed": True},
    "two levels": lambda: {
        "mesh": grid(), "data_axis": ("slow", "fast"), "shard": sharded("params", axis="fast"),
    },
    "specs": lambda: {
        "mesh": grid(), "data_axis": "slow",
        "shard": {"in|out": P(None, "fast"), "layers/w": P("slow", None, "fast")},
    },
    "compiler": lambda: {"mesh": data_mesh(), "shard": "params", "partitioner": "compiler"},
    "as placed": lambda: {"mesh": data_mesh(), "partitioner": "compiler"},
    "explicit, params": lambda: {
        "mesh": grid(AxisType.Explicit), "data_axis": "slow", "shard": "params",
    },
    "explicit, compiler": lambda: {
        "mesh": grid(AxisType.Explicit), "data_axis": "slow", "partitioner": "compiler",
        "shard": {"in|out": P(None, "fast"), "layers/w": P(None, None, "fast")},
    },
}  # fmt: skip


@pytest.mark.parametrize("options", by_name(LAYOUTS, "explicit, params", "explicit, compiler"))
def test_each_layout_has_the_values_of_a_state_on_the_device(options):
    _, want = train(MASTERS, NARROW, **options())
    step, found = train(MASTERS, NARROW, **options(), **ON_HOST)
    assert kinds(found) == {"pinned_host"} and compilations(step) == 1
    assert jax.tree.structure(found) == jax.tree.structure(want)
    assert_near(found, want, 1e-5)


OPTIMIZERS = {
    "optax.adafactor": optax.adafactor(1e-2),
    "optax.lamb": optax.lamb(1e-2),
    "optax.prodigy": optax.contrib.prodigy(1.0),
    "optax.schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "optax.muon": optax.contrib.muon(1e-2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_each_optimizer_of_optax_has_the_values_of_a_state_on_the_device(name):
    options = {"mesh": data_mesh(), "shard": "params"}
    _, want = train(OPTIMIZERS[name], **options)
    step, found = train(OPTIMIZERS[name], **options, **ON_HOST)
    assert kinds(found) <= {"pinned_host"} and compilations(step) == 1
    assert_near(found.params, want.params, 1e-5)


def test_residuals_lie_on_the_host_too():
    tx = optfn.chain(exchange(quantize(4)), optfn.adam(1e-2))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(), **ON_HOST)
    assert kinds(step.init(PARAMS)) == {"pinned_host"}


def test_padded_arrays_stay_on_the_device():
    layers = optfn.Stacked({"w": RNG.normal(size=(6, 32, 32)).astype(np.float32) / 8})
    start = {"in": PARAMS["in"], "layers": layers}

    def loss(p, x):
        h = scan_layers(lambda q, h: h + jnp.tanh(h @ q["w"]), p["layers"], x @ p["in"])
        return jnp.mean(h**2)

    options = {"mesh": data_mesh(), "shard": sharded("state", whole="layers/w")}
    found = []
    for more in ({}, ON_HOST):
        step = optfn.make_train_step(loss, optfn.muon(1e-2), **options, **more)
        found.append(step(step.init(start), BATCHES[0])[0])
    assert_near(found[1].params, found[0].params, 1e-5)


def test_without_the_option_nothing_is_imported(monkeypatch):
    modules = {"optfn.train.host_state", "optfn.loss.jaxprs.row_loops"}
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    step = optfn.make_train_step(lambda p, x: jnp.sum(p * x), optfn.adam(1e-2))
    step(step.init(np.ones(3, np.float32)), np.ones(3, np.float32))
    assert not modules & {*sys.modules}


def test_what_reads_a_state_fetches_it():
    tx = optfn.chain(optfn.adam(1e-2), optfn.exponential_moving_average(0.9))
    _, state = train(tx, mesh=data_mesh(), **ON_HOST)
    on_device = jax.tree.map(memories.to_device, state)
    leaves = jax.tree.leaves(state)
    np.testing.assert_array_equal(fingerprints(leaves), fingerprints(jax.tree.leaves(on_device)))
    assert begin_finite_check(leaves)()
    compare_replicas(state, data_mesh())
    average = optfn.averaged_params(state.opt_state, state.params)
    assert not any(map(memories.is_on_host, jax.tree.leaves(average)))
    want = optfn.averaged_params(on_device.opt_state, state.params)
    jax.tree.map(np.testing.assert_array_equal, average, want)
    assert optfn.state_dict(state)["train/step"] == 3


def test_one_function_makes_arrays_by_their_shards():
    """JAX's own forgets the memory of an array on one device, and the next step ends the
    process."""
    root = Path(optfn.__file__).parent
    callers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"\bmake_array_from_callback\(", path.read_text())
    }
    # The second one takes a NamedSharding.
    assert callers == {"mesh/compilers/memories.py", "mesh/layout/data_parallel.py"}


def test_the_plan_counts_the_host():
    mesh, tx = AbstractMesh((8,), ("data",)), optfn.adamw(1e-2, multi_precision=True)
    options = {"shard": "params"}
    on_device = plan_memory(tx, NARROW, mesh, **options)
    plan = plan_memory(tx, NARROW, mesh, **options, **ON_HOST, host_link=1e9)
    assert plan.host + plan.state == on_device.state and plan.params == on_device.params
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(), **options, **ON_HOST)
    assert plan.host == sum(x.addressable_shards[0].data.nbytes for x in large(step.init(NARROW)))
    # Masters and two moments are read once and written once, and samples of the masters once more.
    assert plan.host_link_bytes == pytest.approx(2 * plan.host, rel=0.01)
    assert plan.host_seconds == plan.host_link_bytes / 1e9
    assert "host=" in repr(plan) and "host" not in repr(on_device)


def test_norms_of_layers_read_nothing_twice():
    """A norm of each layer is a rule of rows, which are the layers."""
    layers, mesh = {"layers": NARROW["layers"]}, AbstractMesh((1,), ("data",))
    plan = plan_memory(optfn.lamb(1e-2, multi_precision=True), layers, mesh, **ON_HOST)
    assert plan.host_link_bytes == pytest.approx(2 * plan.host, rel=0.02)


def test_refused_options():
    with pytest.raises(ValueError, match="state_memory='pinned_host' cannot be combined with loc"):
        train(MASTERS, mesh=data_mesh(), local_steps=2, **ON_HOST)
    with pytest.raises(ValueError, match="cannot be combined with tables"):
        train(MASTERS, tables="in", **ON_HOST)
    with pytest.raises(ValueError, match="state_memory must be one of"):
        train(MASTERS, state_memory="disk")


def count_moved(jaxpr, in_steps=True, times=1):
    """Return the bytes that a program moves between the memories; a `while` has the steps of an
    accumulation, and chunks are in loops of a known length."""
    found = 0
    for equation in jaxpr.eqns:
        found += times * primitives.count_moved(equation)
        if in_steps or primitives.as_while(equation) is None:
            inner = primitives.find_inner_jaxprs(equation)
            runs = times * primitives.count_runs(equation)
            found += sum(count_moved(x, in_steps, runs) for x in inner)
    return found


@pytest.mark.parametrize("tx", [nightly(MASTERS), optfn.accumulate(optfn.lamb(1e-2), 2)])
def test_an_accumulation_moves_its_sums_alone_between_steps(tx):
    tx, options = optfn.accumulate(tx, 2), {"mesh": data_mesh(), "shard": "params"}
    step = optfn.make_train_step(loss_fn, tx, **options, **ON_HOST)
    state = step.init(NARROW)
    assert kinds(state) == {"pinned_host"}
    jaxpr = step.compiled.trace(*step.shapes(state, BATCHES[0])).jaxpr.jaxpr
    # A sum is read and written, and read again for the update, which is −0.0.
    total = jax.tree.leaves(state.opt_state.total)
    sums = 3 * sum(x.nbytes for x in total if memories.is_large(x))
    assert count_moved(jaxpr, in_steps=False) == sums
    assert count_moved(jaxpr) >= 3 * sums


def test_a_sum_of_several_gradients_by_optax_moves_the_state_in_every_call():
    tx = optax.MultiSteps(MASTERS, 2)
    with pytest.warns(UserWarning, match="Use optfn.accumulate, which moves the sums alone"):
        _, found = train(tx, **ON_HOST)
    _, want = train(tx)
    assert_near(found.params, want.params, 1e-5)


def by_rows(fn, *args, divide=lambda shape: (1, 1)):
    """Return fn(*args), whose first argument lies on the host."""

    def run(*args):
        return row_loops.run_by_rows(fn, args, divide, "cpu")

    return jax.jit(run)(jax.device_put(args[0], jax.memory.Space.Host), *args[1:])


@pytest.mark.parametrize("rows, devices", [(64, 2), (67, 4), (1, 4), (1000, 1)])
def test_chunks_of_any_number_of_rows(rows, devices):
    def fn(m, p):
        number = jax.lax.broadcasted_iota(jnp.float32, m.shape, 0)
        norm = jnp.sqrt(jnp.sum(m**2))
        m = 0.9 * m + jnp.sum(p, axis=1, keepdims=True) + number
        p = p - m.reshape(rows, 2, 4).reshape(rows, 8) / norm
        return m, jnp.where(jnp.sum(m) > 0, p, 0.0), norm

    m, p = (RNG.normal(size=(rows, 8)).astype(np.float32) for _ in range(2))
    found = by_rows(fn, m, p, divide=lambda shape: (devices, 1))
    assert memories.is_on_host(found[0]) and not memories.is_on_host(found[1])
    assert_near(found, jax.jit(fn)(m, p), 1e-5)


def test_a_norm_needs_no_array_as_a_whole():
    def fn(m):
        m = 0.9 * m
        largest = jnp.max(jnp.abs(m))
        return m / jnp.sqrt(jnp.sum(m**2) + largest), jnp.all(m < largest), jnp.any(m > 9)

    m = RNG.normal(size=(64, 8)).astype(np.float32)
    program = jax.make_jaxpr(lambda m: by_rows(fn, m))(m)
    made = [v.aval for e in primitives.walk(program.jaxpr) for v in e.outvars]
    whole = [x for x in made if x.size == m.size and x.memory_space == jax.memory.Space.Device]
    assert not whole
    found = by_rows(fn, m)
    assert memories.is_on_host(found[0])
    assert_near(found, fn(m), 1e-5)


def named_layer(q, h):
    h = checkpoint_name(h, "h")
    return h + jnp.tanh(h @ q["w"] + q["b"])


def test_saved_activations_wait_on_the_host():
    def loss(layer):
        return lambda p, x: jnp.mean(scan_layers(layer, p["layers"], x @ p["in"]) ** 2)

    found, params = [], {k: PARAMS[k] for k in ("in", "layers")}
    for layer in (
        named_layer, optfn.recompute(named_layer, checkpoints=["h"], offload=True),
    ):  # fmt: skip
        options = {"mesh": data_mesh(), "shard": "params"}
        step = optfn.make_train_step(loss(layer), optfn.sgd(0.1), **options)
        state, _ = step(step.init(params), BATCHES[0])
        program = str(step.compiled.trace(state, BATCHES[0]).jaxpr)
        found.append((state.params, program.count("<host>")))
    assert_near(found[1][0], found[0][0])
    assert not found[0][1] and found[1][1]
    with pytest.raises(ValueError, match="offload=True needs checkpoints"):
        optfn.recompute([named_layer], segments="each", offload=True)
