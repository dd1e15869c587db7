"""Meshes of two levels: params divided inside a group of devices, which is one worker of several.

The reference is the run of as many workers as there are groups, each of one device.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from arrays import weights
from compilations import compilations
from grids import suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import wire
from optfn.distributed import exchange, power_sgd, quantize, scan_layers, sharded, top_k

SLOW, FAST, WIDTH, LAYERS, ROWS, EXAMPLES = 2, 4, 32, 3, 64, 48
AXES = ("slow", "fast")
CLIP = optfn.clip_by_global_norm(1.0)


def meshes():
    devices = np.array(jax.devices()[: SLOW * FAST])
    return Mesh(devices.reshape(SLOW, FAST), AXES), Mesh(devices[:SLOW], ("slow",))


PARAMS = {
    "embedding": weights(0, ROWS, WIDTH),
    "layers": optfn.Stacked(
        {"in": weights(1, LAYERS, WIDTH, 2 * WIDTH), "out": weights(2, LAYERS, 2 * WIDTH, WIDTH)}
    ),
    "scale": np.ones(5, np.float32),  # no dimension is divisible by four
}


def loss_fn(params, batch):
    ids, target = batch
    x = params["embedding"][ids]
    x = scan_layers(lambda w, x: x + jnp.tanh(x @ w["in"]) @ w["out"], params["layers"], x)
    return jnp.mean((jnp.mean(x, -1) * jnp.sum(params["scale"]) - target) ** 2)


def batches(count):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, ROWS, (count, EXAMPLES))
    return list(zip(ids, rng.normal(size=(count, EXAMPLES)).astype(np.float32), strict=True))


def made(tx, mesh, **options):
    return optfn.make_train_step(loss_fn, tx, mesh=mesh, data_axis=mesh.axis_names, **options)


def trained(tx, mesh, calls=6, **options):
    step = made(tx, mesh, **options)
    state, losses = problems.trained(step, step.init(PARAMS), batches(calls))
    return state, losses[-1], step


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)


DENSE = {
    "lamb": lambda: optfn.lamb(1e-3, grad_clip=CLIP),
    "int8": lambda: optfn.adamw(1e-3, moment_dtype="int8"),
    "guard": lambda: optfn.skip_nonfinite(optfn.adam(1e-3)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "kind"), [*itertools.product(DENSE, ["params", "state"])])
def test_local_steps_are_those_of_undivided_workers(name, kind):
    """tests/reference_run draws steps that are no rounds."""
    two, one = meshes()
    expected, loss, _ = trained(DENSE[name](), one, local_steps=3)
    options = {"shard": sharded(kind, axis="fast"), "local_steps": 3}
    state, found, step = trained(DENSE[name](), two, **options)
    # Codes of eight bits round a difference of one part in 10⁷ the other way now and then.
    of_loss, of_params = (1e-3, 1e-3) if name == "int8" else (1e-5, 2e-6)
    assert found == pytest.approx(loss, rel=of_loss)
    assert largest_difference(state.params, expected.params) < of_params
    assert compilations(step) == 1


def test_the_devices_of_a_worker_divide_its_own_state():
    options = {"shard": sharded("params", axis="fast"), "local_steps": 3}
    state = made(optfn.adam(1e-3), meshes()[0], **options).init(PARAMS)
    inner = state.opt_state.inner.inner_state[0].mu["layers"].layers["in"].value
    assert inner.shape == (SLOW * LAYERS, WIDTH, 2 * WIDTH)
    assert inner.sharding.spec == P("slow", "fast")
    assert inner.addressable_data(0).size == inner.size // 8
    assert state.params["embedding"].sharding.spec == P("fast")


EXCHANGES = {
    "mean": lambda: optfn.chain(exchange(axis_name="slow"), optfn.adam(1e-3)),
    "quantize": lambda: optfn.chain(
        exchange(quantize(8, chunk=32), axis_name="slow", min_size=64), optfn.sgd(0.1)
    ),
    "top_k": lambda: optfn.chain(
        exchange(top_k(0.25, chunk=32), axis_name="slow", min_size=64), optfn.sgd(0.1)
    ),
    "dgc": lambda: optfn.dgc_momentum(
        0.1, 0.5, rampup_begin_step=2, sparsity=(0.0,), local_grad_clip_norm=0.1,
        axis_name="slow", min_size=64, momentum_masking=False,
    ),
    "accumulate": lambda: optfn.accumulate(
        optfn.chain(exchange(top_k(0.25, chunk=32), axis_name="slow", min_size=64), optfn.sgd(0.1)),
        2,
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "kind"), [*itertools.product(EXCHANGES, ["params", "state"])])
def test_an_exchange_between_divided_workers_is_that_of_undivided_ones(name, kind):
    """Chunks divide the parts, so that they are those of whole leaves, and so are the residuals."""
    two, one = meshes()
    expected, loss, _ = trained(EXCHANGES[name](), one)
    state, found, step = trained(EXCHANGES[name](), two, shard=sharded(kind, axis="fast"))
    assert found == pytest.approx(loss, rel=1e-4)
    assert largest_difference(state.params, expected.params) < (
        1e-3 if name == "quantize" else 2e-6
    )
    assert compilations(step) == 1
    want, got = optfn.state_dict(expected.opt_state), optfn.state_dict(state.opt_state)
    assert want.keys() == got.keys()
    for key in (k for k in want if "residual" in k):
        assert got[key].size == want[key].size
        if name in ("top_k", "dgc"):
            np.testing.assert_allclose(np.ravel(got[key]), np.ravel(want[key]), atol=1e-5)


def test_each_part_is_rounded_at_random_as_a_leaf_of_its_own():
    """Between workers each part is exchanged alone; gradients are integers, so that bits agree."""
    two, _ = meshes()
    packets = quantize(4, chunk=32, stochastic=True)
    tx = optfn.chain(
        exchange(packets, axis_name="slow", error_feedback=0.0, min_size=64), optfn.sgd(1.0)
    )
    step = optfn.make_train_step(
        lambda p, x: jnp.mean(jnp.sum(p["w"] * x, (1, 2))),
        tx, mesh=two, data_axis=AXES, shard=sharded("params", axis="fast"),
    )  # fmt: skip
    state = step.init({"w": np.zeros((32, 64), np.float32)})
    update = jax.jit(jax.vmap(tx.update, axis_name="slow"))
    part = jnp.zeros((32 // FAST, 64))
    own = [jax.tree.map(lambda x: jnp.stack([x] * SLOW), tx.init(part))] * FAST
    expected = np.zeros((32, 64), np.float32)
    for seed in range(3):
        batch = 4.0 * np.random.default_rng(seed).integers(-50, 50, (SLOW * FAST, 32, 64))
        state, _ = step(state, batch.astype(np.float32))
        of_workers = batch.astype(np.float32).reshape(SLOW, FAST, 32, 64).mean(axis=1)
        moves = []
        for i, g in enumerate(np.split(of_workers, FAST, axis=1)):
            move, own[i] = update(jnp.asarray(g), own[i])
            moves.append(np.asarray(move[0]))
        expected += np.concatenate(moves)
        np.testing.assert_array_equal(state.params["w"], expected)
    assert (np.concatenate(moves) != -of_workers.mean(axis=0)).any()


def test_the_residual_of_a_divided_leaf_lies_on_its_devices():
    two, _ = meshes()
    state, _, _ = trained(EXCHANGES["top_k"](), two, calls=1, shard=sharded("params", axis="fast"))
    residual = state.opt_state[0].residual["layers"].layers["out"]
    assert residual.size == SLOW * LAYERS * 2 * WIDTH * WIDTH
    assert residual.addressable_data(0).size == residual.size // 8


LAZY = {
    "adam": lambda: optfn.adam(1e-3, lazy=True),
    "clip": lambda: optfn.momentum(0.1, 0.9, grad_clip=CLIP),
    "ftrl": lambda: optfn.ftrl(lambda step: 0.1 / (1 + step)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "kind"), [*itertools.product(LAZY, ["params", "state"])])
def test_the_devices_of_a_worker_divide_the_rows_of_a_table(name, kind):
    """The rate and the factor of a clip, computed for all rows, reach the owners of rows."""
    two, one = meshes()
    expected, loss, _ = trained(LAZY[name](), one, calls=3, tables="embedding")
    options = {"tables": "embedding", "shard_tables": True, "shard": sharded(kind, axis="fast")}
    state, found, _ = trained(LAZY[name](), two, calls=3, **options)
    assert found == pytest.approx(loss, rel=1e-4)
    assert largest_difference(state.params["layers"], expected.params["layers"]) < 2e-4
    table = np.asarray(state.params["embedding"])
    np.testing.assert_allclose(table, expected.params["embedding"], atol=2e-4)
    assert not np.array_equal(table, PARAMS["embedding"])


def sent(tx, mesh, **options):
    program = made(tx, mesh, **options).lower(PARAMS, batches(1)[0]).compile()
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    return {axes: n / size for axes, n in wire.bytes_by_axes(program, mesh).items()}


@pytest.mark.optimized
def test_an_exchange_and_divided_params_send_what_each_would_alone():
    two, _ = meshes()
    way = sharded("params", axis="fast")
    fsdp_mesh = Mesh(np.array(jax.devices()[:FAST]), ("fast",))
    alone = sent(optfn.adam(1e-3), fsdp_mesh, shard="params")["fast",]
    exchanged = sent(
        optfn.chain(exchange(quantize(4, chunk=256), axis_name="slow"), optfn.adam(1e-3)),
        two, shard=way,
    )  # fmt: skip
    assert exchanged["slow",] <= 0.135
    assert exchanged["fast",] <= 1.01 * alone


@pytest.mark.parametrize("name", ["top_k", "guard"])
def test_a_nan_in_one_part_of_one_worker_stops_all_parts(name):
    two, _ = meshes()

    def loss_with_nan(params, batch):
        loss = loss_fn(params, batch)
        # The gradient of one entry of one layer is NaN, on one of the eight devices.
        bad = jnp.any(batch[1] > 100.0)
        return loss + jnp.where(bad, jnp.nan, 0.0) * params["layers"].layers["in"][0, 5, 7]

    tx = (DENSE | EXCHANGES)[name]()
    step = optfn.make_train_step(
        loss_with_nan, tx, mesh=two, data_axis=AXES, shard=sharded("state", axis="fast")
    )
    state = step.init(PARAMS)
    ids, target = batches(1)[0]
    target[-1] = 1000.0
    before = jax.device_get(state.params)
    state, _ = step(state, (ids, target))
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), y[shard.index])


PARAMS_OF_WORKERS = {"shard": sharded("params", axis="fast")}


@pytest.mark.parametrize(
    ("tx", "options", "words"),
    [
        (lambda: optfn.chain(exchange(power_sgd(2), axis_name="slow"), optfn.sgd(0.1)),
         PARAMS_OF_WORKERS, "compressor of leaf 'embedding' keeps arrays for the whole leaf"),
        (lambda: optfn.chain(exchange(top_k(0.1), axis_name="fast"), optfn.sgd(0.1)),
         PARAMS_OF_WORKERS,
         "exchanges gradients over axis 'fast', over which params or state are divided"),
        (lambda: optfn.sgd(0.1), {"shard": "params", "local_steps": 2},
         "local_steps=2 cannot be combined with params or state divided over all of data_axis"),
        (lambda: optfn.sgd(0.1), {"shard": sharded("params", axis="other")},
         "axis 'other' must be one of data_axis"),
        (lambda: optfn.sgd(0.1), {"shard": sharded({"embedding": P("slow")}, axis="fast")},
         "for 'embedding' divides over 'slow', but along that axis devices are workers"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_said(tx, options, words):
    two, _ = meshes()
    with pytest.raises(ValueError, match=words):
        trained(tx(), two, calls=1, **options)


WAYS = {
    "workers": (None, {}),
    "state": ("state", {}),
    "params": ("params", {}),
    "specs": ({"w.*": P(None, "fast")}, {}),
    "packed state": ("state", {"packed": True}),
    "packed params": ("params", {"packed": True}),
}


@pytest.mark.parametrize(
    ("way", "steps"), suite(itertools.product(WAYS, [1, 3]), ("state", 3), ("packed params", 3))
)
def test_local_steps_send_what_as_many_steps_send(way, steps):
    """Along "fast" each step reduces gradients and gathers params; "slow" has one mean a round.

    If only the state is divided, the params of a round are gathered once more.
    """
    kind, options = WAYS[way]
    shapes = {f"w{i}": (64, 2048) for i in range(3)} | {f"o{i}": (33, 35) for i in range(4)}
    params = {name: weights(0, *shape) for name, shape in shapes.items()}
    count = sum(x.size for x in params.values())
    mesh, _ = meshes()

    def loss(p, x):
        return jnp.mean(sum(jnp.sum(jnp.tanh(x[:, : len(w)] @ w), -1) for w in p.values()) ** 2)

    tx = optfn.adam(1e-3, grad_clip=CLIP)
    if kind is not None:
        options = options | {"shard": sharded(kind, axis="fast")}
    step = optfn.make_train_step(loss, tx, mesh=mesh, data_axis=AXES, local_steps=steps, **options)
    program = step.lower(params, np.zeros((8 * steps, 64), np.float32)).compile()
    found = {k: x / count for k, x in wire.bytes_by_axes(program, mesh).items()}

    def ring(devices, copies):  # of all params, 4 bytes each
        return copies * 4 * (devices - 1) / devices

    if kind is None:
        expected = {AXES: ring(SLOW * FAST, 2)}
    else:
        # No dimension of the small leaves is divisible by four, but a packed buffer is.
        whole = 0 if options.get("packed") else 4 * 33 * 35 / count
        last = (kind == "state" and steps > 1) * (1 - whole)
        slow = ring(SLOW, 2) * ((1 - whole) / FAST + whole)
        expected = {("fast",): ring(FAST, 2 * steps + last), ("slow",): slow}
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("codec", [top_k(0.1), power_sgd(2)])
def test_a_summary_counts_the_state_of_all_workers(codec):
    mesh, _ = meshes()
    tx = optfn.accumulate(optfn.chain(exchange(codec, axis_name="slow"), optfn.adam(0.1)), 2)
    options = {"shard": sharded("params", axis="fast")}
    state = made(tx, mesh, **options).init(PARAMS)
    held = jax.tree.leaves((state.params, state.opt_state))
    size = sum(x.addressable_shards[0].data.nbytes for x in held)
    table = optfn.summary(tx, PARAMS, mesh=mesh, data_axis=AXES, **options)
    assert table.splitlines()[-1].endswith(f" {size:,}")
