"""Params and state spread over a mesh: the trajectory of one device, 1/N of the bytes, the wire."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from grids import suite
from hlo import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import stacked_layers, trained

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh, plan_memory, scan_layers
from optfn.mesh.layout.sharding import layout_of

N = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 16, 32)).astype(np.float32)
PARAMS = {
    "w": 0.1 * RNG.normal(size=(32, 24)).astype(np.float32),
    "v": 0.1 * RNG.normal(size=(24, 16)).astype(np.float32),
    "b": np.zeros(16, np.float32),
    "odd": np.ones(3, np.float32),  # 8 divides none of its dimensions
}
SHARDS = {"state": "state", "params": "params", "specs": {"w": P(None, "data"), "v|b": P("data")}}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] + params["b"] - params["odd"].sum()) ** 2)


def run(step, batches=X, params=PARAMS):
    return trained(step, step.init(params), batches)


def bytes_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("shard", suite(SHARDS, "params"))
def test_the_trajectory_is_that_of_one_device(shard):
    """Of factors of other shapes than their leaf; tests/reference_run draws other optimizers."""
    tx = optax.adafactor(0.01, min_dim_size_to_factor=8)
    alone, losses = run(optfn.make_train_step(loss_fn, tx))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), shard=SHARDS[shard])
    state, found = run(step)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for path, start in PARAMS.items():
        moved = np.abs(np.asarray(alone.params[path]) - start).max()
        error = np.abs(np.asarray(state.params[path]) - np.asarray(alone.params[path])).max()
        assert error <= 1e-4 * max(moved, 1e-3)
    assert compilations(step) == 1


# The shape of a leaf, the axis that is divided, and the collectives of the update.
DIVIDED = [
    ((64, 512), 0, set()),
    ((3, 16, 512), 1, set()),
    ((8, 3, 512), 0, set()),
    ((64, 512), 1, {"all-reduce"}),
    ((3, 3, 16, 64), 2, {"all-reduce"}),
    ((96,), 0, {"all-reduce"}),
]


@pytest.mark.parametrize(("shape", "axis", "expected"), suite(DIVIDED, DIVIDED[1]))
def test_codes_and_scales_stay_where_they_are(shape, axis, expected):
    """Where a row is divided, the devices agree on its maximum, a number a row."""
    tx, mesh = optfn.adam(0.01, moment_dtype="int8"), data_mesh(N)
    spec = P(*[None] * axis, "data")
    params = {"w": RNG.normal(size=shape).astype(np.float32)}
    grads = {"w": RNG.normal(size=shape).astype(np.float32)}
    layout = layout_of({"w": spec}, mesh, "data")
    specs = layout.state_specs(jax.eval_shape(tx.init, params), params)
    state = jax.device_put(tx.init(params), layout.make_shardings(specs))
    placed = jax.device_put(grads, NamedSharding(mesh, spec))
    update = jax.jit(tx.update, out_shardings=(placed["w"].sharding, layout.make_shardings(specs)))
    text = update.lower(placed, state).compile().as_text()
    found = re.findall(r"= f32\[([\d,]*)\]\S* (all-\w+|collective-\w+|reduce-scatter)", text)
    assert {kind for _, kind in found} == expected
    rows = tx.init(params)[0].mu_scale["w"].size
    assert all(np.prod([int(n) for n in x.split(",") if n]) <= rows for x, _ in found)
    assert not re.findall(r"= \(?[su]8\S* (?:all-|collective-)", text)
    chex.assert_trees_all_equal(
        jax.device_get(update(placed, state)[1]),
        jax.device_get(jax.jit(tx.update)(grads, tx.init(params))[1]),
    )


@pytest.mark.parametrize("shard", ["state", "params"])
def test_each_device_keeps_an_eighth(shard):
    tx = optfn.adamw(0.01, moment_dtype="int8", multi_precision=True)
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["embed"]), tx, mesh=data_mesh(N), shard=shard
    )
    layer = {"w": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32)}
    state = step.init({"embed": np.ones((256, 64), np.float32), "layers": [layer] * 2})
    total = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    assert bytes_a_device(state.opt_state) <= 1.01 * total / N
    whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
    part = bytes_a_device(state.params)
    assert part <= 1.01 * whole / N if shard == "params" else part == whole


def compile_step(step, params, x):
    return step.compiled.lower(step.init(params), x).compile()


@pytest.mark.optimized
def test_spread_state_costs_the_wire_of_an_all_reduce():
    def loss(params, x):
        return jnp.mean((x @ params["w"] @ params["v"]) ** 2)

    params = {"w": np.ones((32, 64), np.float32), "v": np.ones((64, 128), np.float32)}
    tx = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
    sent = []
    for shard in (None, "state"):
        step = optfn.make_train_step(loss, tx, mesh=data_mesh(N), shard=shard)
        program = compile_step(step, params, X[0])
        reduced = collectives(program.as_text())["all-reduce"]
        sent.append((wire.bytes_sent(program, N), 2 * (N - 1) / N * sum(reduced)))
    assert sent[0][0] == sent[0][1]
    assert sent[1][0] == pytest.approx(sent[0][0], rel=0.01)
    assert sent[1][1] < 100  # the loss and the norm


def test_updates_are_in_place():
    params = {"w": np.ones((64, 128), np.float32)}
    step = optfn.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"][:32]) ** 2),
        optfn.adam(0.01),
        mesh=data_mesh(N),
        shard="params",
    )
    optfn.assert_in_place(step, step.init(params), X[0], min_size=512)


LAYERS, WIDTH = 8, 128  # 8 workers divide the layers as well


def layer(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def stacked_params(mark=lambda x: x):
    return stacked_layers(LAYERS, WIDTH, mark)


def stacked_loss(params, x):
    return jnp.mean((scan_layers(layer, params["layers"], x) @ params["head"]) ** 2)


STACKED_X = RNG.normal(size=(3, 16, WIDTH)).astype(np.float32)


@pytest.mark.optimized
def test_layers_are_gathered_one_at_a_time():
    """Temporaries hold a few layers, not all; and no whole stack is gathered."""
    step = optfn.make_train_step(stacked_loss, optfn.adam(0.01), mesh=data_mesh(N), shard="params")
    compiled = compile_step(step, stacked_params(), STACKED_X[0])
    one = 4 * WIDTH * WIDTH
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * one < LAYERS * one
    gathers = re.findall(r"= (\S+) all-gather(?:-start)?\(", compiled.as_text())
    assert gathers and not any(f"[{LAYERS},{WIDTH},{WIDTH}]" in g for g in gathers)


def program_of_layers(fn):
    """Return the text of a step whose layers are `fn`."""

    def loss(params, x):
        return jnp.mean((scan_layers(fn, params["layers"], x) @ params["head"]) ** 2)

    step = optfn.make_train_step(loss, optfn.adam(0.01), mesh=data_mesh(N), shard="params")
    return step.lower(stacked_params(), STACKED_X[0]).as_text()


@pytest.mark.parametrize("wrapped", [jax.checkpoint, lambda fn: jax.jit(jax.checkpoint(fn))])
def test_a_checkpoint_around_a_layer_changes_nothing(wrapped):
    """Its barrier would hold products back until all of the layer is gathered."""
    assert program_of_layers(wrapped(layer)) == program_of_layers(layer)


def test_a_checkpoint_around_a_part_of_a_layer_stays():
    def layer_of_parts(params, x):
        return 2 * jax.checkpoint(layer)(params, x)

    barriers = [program_of_layers(fn).count("_barrier") for fn in (layer, layer_of_parts)]
    assert barriers == [1, 2]


def test_a_value_and_grad_of_ones_own_sees_whole_params():
    def own(params, x):
        assert params["w"].shape == (32, 24)
        return jax.value_and_grad(loss_fn)(params, x)

    tx = optfn.lamb(0.01)
    alone, _ = run(optfn.make_train_step(loss_fn, tx))
    step = optfn.make_train_step(None, tx, value_and_grad=own, mesh=data_mesh(N), shard="params")
    state, _ = run(step)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(alone.params), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shard": "state", "mesh": None}, ValueError, "shard='state' needs mesh"),
        ({"shard": "all"}, TypeError, 'must be "state", "params", a mapping.*got \'all\''),
        ({"shard": {"w": "data"}}, TypeError,
         "must be .* a mapping from patterns of paths to PartitionSpecs, .*got 'data'.* at 'w'"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), **{"mesh": data_mesh(N)} | options)


@pytest.mark.parametrize(
    ("tx", "shard", "words"),
    [
        (lambda: optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0), "state",
         "shard: tx exchanges gradients"),
        (lambda: optfn.sgd(0.1), {"nothing": P("data")}, "'nothing' matches no leaf"),
        (lambda: optfn.sgd(0.1), {"odd": P("data")},
         r"dimension 0 of leaf 'odd', which has shape \(3,\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_at_init(tx, shard, words):
    with pytest.raises(ValueError, match=words):
        optfn.make_train_step(loss_fn, tx(), mesh=data_mesh(N), shard=shard).init(PARAMS)


@pytest.mark.optimized
def test_the_plan_is_what_the_compiled_step_takes_and_sends():
    """tests/plan/test_plans.py has pairs of features."""
    params, x = stacked_params(optfn.Stacked), STACKED_X[0]
    tx, mesh = optfn.adam(0.01), data_mesh(N)
    step = optfn.make_train_step(stacked_loss, tx, mesh=mesh, shard="params")
    state = step.init(params)
    plan = plan_memory(tx, params, mesh, shard="params")
    compiled = step.compiled.lower(state, x).compile()
    arguments = compiled.memory_analysis().argument_size_in_bytes - x.nbytes / N
    assert plan.params + plan.state == pytest.approx(arguments, rel=0.05)
    assert plan.params == bytes_a_device(state.params)
    assert plan.state == bytes_a_device(state.opt_state)
    assert plan.gradients == sum(p.nbytes for p in jax.tree.leaves(params))
    assert plan.sent == pytest.approx(wire.bytes_sent(compiled, N), rel=0.05)


def test_a_plan_counts_what_an_exchange_sends():
    params = {"w": jnp.ones((8, 4)), "v": jnp.ones(16), "masked": None}
    mesh, labels = data_mesh(N), {"w": "dgc", "v": "adam", "masked": None}
    dgc = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=8)  # one entry, 8 bytes
    some = optax.partition({"dgc": dgc, "adam": optfn.adam(1e-3)}, labels)
    every = optfn.chain(optfn.distributed.exchange(None), optfn.adam(1e-3))
    loss, agreed = 2 * 7 / 8 * 4, 2 * 7 / 8 * 2 * 4  # the largest of two numbers of all workers
    assert [plan_memory(tx, params, mesh).sent for tx in (optfn.adam(1e-3), some, every)] == [
        2 * 7 / 8 * 4 * 48 + loss,
        2 * 7 / 8 * 4 * 16 + 7 * 8 + loss + agreed,
        2 * 7 / 8 * 4 * 48 + loss,
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=n, rampup_step=4 * n or 1),
        lambda n: optfn.distributed.exchange(optfn.distributed.top_k(0.01), warmup_steps=n),
        lambda n: optfn.distributed.exchange(
            optfn.distributed.quantize(4), route="parts", warmup_steps=n
        ),
    ],
    ids=["dgc", "top_k", "parts"],
)
def test_a_plan_counts_the_last_phase_of_an_exchange(make):
    params = {"w": jnp.ones((256, 256))}
    mesh = data_mesh(N)
    whole, *sent = (plan_memory(tx, params, mesh).sent for tx in (optfn.sgd(1), make(0), make(3)))
    assert sent[0] == sent[1] < whole / 3


def test_a_plan_needs_no_devices():
    mesh = jax.sharding.AbstractMesh((512, 8), ("data", "model"))
    params = {"w": jax.ShapeDtypeStruct((1 << 16, 1 << 14), jnp.bfloat16)}
    plan = plan_memory(optfn.adam(1e-3), params, mesh, shard={"w": P("data", "model")})
    assert plan.params == 2 * 2**30 // 4096 and plan.gradients == 2 * 2**30 // 8
    assert plan.state == pytest.approx(4 * plan.params, rel=1e-3)
