"""Scans over params under `shard="params"`, whoever wrote them: values and temporaries."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import suite
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from problems import trained as trained_on

import optfn
from optfn.distributed import data_mesh, quantize, scan_layers, sharded
from optfn.loss.jaxprs import sharded as sharded_programs
from optfn.loss.jaxprs.sharded_param import ShardedParam

N, LAYERS, WIDTH, BATCH = 8, 16, 64, 16
TARGET = normal(5, BATCH, WIDTH)


def layer(w, x):
    return jnp.tanh(x @ w)


def body(x, w):
    return layer(w, x), None


def mean_square(x, target):
    return jnp.mean((x - target).astype(jnp.float32) ** 2)


def plain(apply):
    """Return params and the loss of a function (stacked weights, x) -> x."""
    params = {"w": normal(0, LAYERS, WIDTH, WIDTH, scale=0.1)}
    return params, lambda params, batch: mean_square(apply(params["w"], batch[0]), batch[1])


def scan(w, x):
    return lax.scan(body, x, w)[0]


def scan_of_groups(w, x):
    groups = (0.5 * w).reshape(4, 4, WIDTH, WIDTH)
    return lax.scan(lambda x, group: (scan(group, x), None), x, groups)[0]


def scan_of_cast(w, x):
    half = jnp.bfloat16
    return lax.scan(body, x.astype(half), w.astype(half))[0]


def scan_with_results(w, x):
    def body(carry, w):
        number, x = carry
        x = layer(w, x)
        return (number + 1, x), jnp.mean(x)

    (number, x), means = lax.scan(body, (0, x), w)
    return x * (1 + 1e-3 * jnp.sum(means) + 0 * number)


def scan_of_tied(w, x):
    return scan(w, scan(w, x)) + 1e-3 * jnp.sum(w[0] * w[-1])


def layers_of_tied(w, x):
    """The layers count in an integer, and each reads the last layer too."""

    def fn(layer_w, carry):
        number, x = carry
        return number + 1, layer(layer_w, x) + 1e-2 * number * jnp.tanh(x @ w[-1])

    return scan_layers(fn, w, (0, x))[1]


def layers_with_policy(w, x):
    fn = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    return scan_layers(lambda w, x: x + fn(w, x), w, x)


def checkpoint_in_reverse(w, x):
    def body(x, element):
        w, scale = element
        x = layer(scale * w, x)
        return x, jnp.mean(x)

    scales = jnp.linspace(0.5, 1, LAYERS)
    x, means = lax.scan(jax.checkpoint(body), x, (w, scales), reverse=True, unroll=2)
    return x * (1 + 1e-3 * means[0])


def checkpoint_of_named(w, x):
    def named(x, w):
        return jax.checkpoint(body)(checkpoint_name(x, "x"), checkpoint_name(w, "w"))

    return lax.scan(named, x, w)[0]


def gradient_in_loss(w, x):
    return x + jax.grad(lambda x: jnp.sum(scan_layers(layer, w, x) ** 2))(x)


PLAIN = {
    "scan_layers": lambda w, x: scan_layers(layer, w, x),
    "scan_layers of tied": layers_of_tied,
    "scan_layers, policy": layers_with_policy,
    "scan_layers of groups": lambda w, x: scan_layers(
        lambda group, x: scan_layers(layer, group, x), w.reshape(4, 4, WIDTH, WIDTH), x
    ),
    "scan_layers of a cast": lambda w, x: scan_layers(
        layer, w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    ),
    "gradient of scan_layers": gradient_in_loss,
    "scan": scan,
    "scan of checkpoint": lambda w, x: lax.scan(jax.checkpoint(body), x, w)[0],
    "scan of checkpoint in reverse": checkpoint_in_reverse,
    "scan of checkpoint of named": checkpoint_of_named,
    "checkpoint of scan": jax.checkpoint(scan),
    "jit of scan": jax.jit(scan),
    "scan in reverse": lambda w, x: lax.scan(body, x, w, reverse=True)[0],
    "scan, unrolled": lambda w, x: lax.scan(body, x, w, unroll=4)[0],
    "scan with results": scan_with_results,
    "scan of a cast": scan_of_cast,
    "scan of groups": scan_of_groups,
    "scan of transposed": lambda w, x: lax.scan(body, x, jnp.swapaxes(w, 1, 2))[0],
    "scan of scaled": lambda w, x: lax.scan(body, x, 0.5 * w)[0],
    "tied": scan_of_tied,
    "loop": lambda w, x: lax.fori_loop(0, LAYERS, lambda i, x: layer(w[i], x), x),
    "unrolled": lambda w, x: layer(w[1], layer(w[0], x)),
    "cond": lambda w, x: lax.cond(jnp.sum(x) > 0, scan, scan, w, x),
}


def linen(remat):
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None

    block = nn.remat(Layer, prevent_cse=False) if remat else Layer
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    model = nn.scan(block, **options, length=LAYERS)()
    params = model.init(jax.random.key(0), TARGET[:1], None)["params"]

    def loss(params, batch):
        return mean_square(model.apply({"params": params}, batch[0], None)[0], batch[1])

    return params, loss


def nnx_scan(remat):
    nnx = pytest.importorskip("flax.nnx")

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(axis_size=LAYERS)
    def stack(rngs):
        return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def apply(x, linear):
        return jnp.tanh(linear(x))

    apply = nnx.remat(apply) if remat else apply
    apply = nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    graph, params = nnx.split(stack(nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        return mean_square(apply(batch[0], nnx.merge(graph, params)), batch[1])

    return params, loss


def haiku():
    hk = pytest.importorskip("haiku")

    def forward(x):
        stack = hk.experimental.layer_stack(LAYERS)
        return stack(lambda x: jnp.tanh(hk.Linear(WIDTH, with_bias=False)(x)))(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), TARGET[:1])
    return params, lambda params, batch: mean_square(model.apply(params, batch[0]), batch[1])


def equinox(remat):
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), LAYERS)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key))(keys)
    params, static = eqx.partition(stack, eqx.is_inexact_array)
    checkpoint = eqx.filter_checkpoint if remat else lambda f: f

    def loss(params, batch):
        def body(x, params):
            layer = eqx.combine(params, static)
            return checkpoint(lambda x: jnp.tanh(jax.vmap(layer)(x)))(x), None

        return mean_square(lax.scan(body, batch[0], params)[0], batch[1])

    return params, loss


MODELS = {name: lambda apply=apply: plain(apply) for name, apply in PLAIN.items()} | {
    "linen": lambda: linen(False),
    "linen, remat": lambda: linen(True),
    "nnx": lambda: nnx_scan(False),
    "nnx, remat": lambda: nnx_scan(True),
    "haiku": haiku,
    "equinox": lambda: equinox(False),
    "equinox, checkpoint": lambda: equinox(True),
}
# Scans that a device reads layer by layer.
WHOLE = ("tied", "scan_layers of tied", "loop", "unrolled", "cond")
FOUND = [name for name in MODELS if name not in WHOLE]
# Scans whose layers the backward pass recomputes from their inputs.
RECOMPUTED = [
    *(name for name in MODELS if "scan_layers" in name or "of checkpoint" in name),
    *("linen, remat", "nnx, remat", "equinox, checkpoint"),
]
# One of each library, and the scans whose programs differ most.
COMPILED = (
    "scan_layers", "scan", "scan, unrolled", "scan of groups", "linen, remat", "nnx", "haiku",
    "equinox, checkpoint",
)  # fmt: skip


def batches():
    return [(normal([1, i], BATCH, WIDTH), TARGET) for i in range(3)]


def trained(loss, params, **options):
    step = optfn.make_train_step(loss, optfn.momentum(0.1, 0.9), **options)
    state, losses = trained_on(step, step.init(params), batches())
    return losses, jax.tree.map(np.asarray, state.params)


# The zoo trains a model of each library with divided params.
@pytest.mark.parametrize("name", suite(MODELS, "scan of groups", "nnx", "equinox, checkpoint"))
def test_params_are_those_of_one_device(name):
    params, loss = MODELS[name]()
    want, got = trained(loss, params), trained(loss, params, mesh=data_mesh(N), shard="params")
    rtol = 2e-2 if "cast" in name else 1e-5
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=rtol / 10)


OPTIONS = {
    "microbatches": {"shard": "params", "microbatches": 2},
    "packets": {"shard": sharded("params", gather=quantize(8))},
    "two levels": {"shard": sharded("params", axis="fast"), "data_axis": ("slow", "fast")},
    "specs": {"shard": {".*": P(None, None, "data")}},
    "layers divided": {"shard": {".*": P("data")}},
    "recompute": {"shard": "params", "recompute": ("x",)},
}


@pytest.mark.parametrize("option", ["packets", "layers divided"])
def test_a_scan_trains_like_scan_layers(option):
    """The two differ in what they recompute, so only in roundings; tests/reference_run draws the
    other options."""

    def train(apply):
        params, loss = plain(apply)
        return trained(loss, params, mesh=data_mesh(N), **OPTIONS[option])

    chex.assert_trees_all_close(train(PLAIN["scan_layers"]), train(scan), rtol=1e-5, atol=1e-5)


def scan_checkpoints(run, constants, init, stacks, order):
    """Return the results of `scan_recomputed` with the derivative that JAX makes of them."""

    def body(carry, arrays):
        pairs = zip(stacks, arrays, strict=True)
        layers = [x.layer(array) if isinstance(x, ShardedParam) else array for x, array in pairs]
        results = jax.checkpoint(run, prevent_cse=False)([*constants, *carry, *layers])
        return results[: len(carry)], results[len(carry) :]

    arrays = [x.shard.array if isinstance(x, ShardedParam) else x for x in stacks]
    carry, results = lax.scan(
        body, list(init), arrays, order.length, order.reverse, unroll=order.unroll
    )
    return [*carry, *results]


def use_scans_of_jax(monkeypatch):
    """Replace `scan_recomputed`; return a list of the calls of its replacement."""
    calls = []

    def scan(*arguments):
        calls.append(arguments)
        return scan_checkpoints(*arguments)

    monkeypatch.setattr(sharded_programs, "scan_recomputed", scan)
    return calls


@pytest.mark.parametrize("name", suite(RECOMPUTED, "scan of checkpoint in reverse", "nnx, remat"))
def test_a_recomputed_scan_has_the_bits_of_the_scan_of_jax(name, monkeypatch):
    params, loss = MODELS[name]()
    got = trained(loss, params, mesh=data_mesh(N), shard="params")
    calls = use_scans_of_jax(monkeypatch)
    chex.assert_trees_all_equal(got, trained(loss, params, mesh=data_mesh(N), shard="params"))
    assert calls


@pytest.mark.parametrize("option", suite(OPTIONS, "two levels"))
def test_a_recomputed_scan_has_these_bits_with_each_option(option, monkeypatch):
    mesh = data_mesh(N) if option != "two levels" else jax.make_mesh((2, 4), ("slow", "fast"))

    def train():
        params, loss = plain(lambda w, x: checkpoint_name(layers_of_tied(w, x), "x"))
        return trained(loss, params, mesh=mesh, **OPTIONS[option])

    got = train()
    calls = use_scans_of_jax(monkeypatch)
    chex.assert_trees_all_equal(got, train())
    assert calls


def compiled(name):
    params, loss = MODELS[name]()
    step = optfn.make_train_step(loss, optfn.sgd(1e-2), mesh=data_mesh(N), shard="params")
    return step.lower(params, batches()[0]).compile()


@pytest.mark.parametrize("name", suite(FOUND, *COMPILED, "scan with results", "scan of checkpoint"))
def test_a_plan_gathers_no_layers_whole(name):
    """For each model by its equations, which takes a tenth of the time of a compilation."""
    params, loss = MODELS[name]()
    arguments = {"shard": "params", "loss_fn": loss, "batch": batches()[0]}
    plan = optfn.distributed.plan_memory(optfn.sgd(0.1), params, data_mesh(N), **arguments)
    assert not plan.gathered_whole


@pytest.mark.optimized
@pytest.mark.parametrize("name", suite(FOUND, "scan of groups"))
def test_no_device_holds_all_layers(name):
    """Temporaries: some layers, shards, activations; with all layers gathered they are 2.5 P."""
    whole = 4 * LAYERS * WIDTH * WIDTH
    program = compiled(name)
    activations = 4 * LAYERS * BATCH // N * WIDTH * 8
    assert program.memory_analysis().temp_size_in_bytes < 0.55 * whole + activations


def loss_of_three(params, batch):
    x = lax.scan(body, batch, params["scanned"].astype(jnp.bfloat16))[0]
    x = lax.scan(body, x, params["tied"])[0]
    return jnp.mean((x @ params["head"]) ** 2) + jnp.sum(params["tied"] ** 2)


def test_a_plan_has_the_line_of_the_loss_around_a_jitted_function():
    """Inside jnp.take no equation has a line of the loss; "table" is read there alone."""
    params = {"table": normal(0, 1024, WIDTH), "w": normal(1, LAYERS, WIDTH, WIDTH)}
    options = {"tx": optfn.sgd(0.1), "params": params, "mesh": data_mesh(N), "shard": "params"}

    def loss(p, ids):
        return jnp.mean(scan(p["w"], jnp.take(p["table"], ids, axis=0)))

    plan = optfn.distributed.plan_memory(**options, loss_fn=loss, batch=jnp.arange(4))
    assert plan.gathered_whole.keys() == {"table"}
    assert re.search(r"test_scans\.py:\d+.*loss", plan.gathered_whole["table"])


def test_a_plan_of_a_loss_needs_a_batch():
    params = {"w": normal(0, WIDTH, WIDTH)}
    options = {"tx": optfn.sgd(0.1), "params": params, "mesh": data_mesh(N), "shard": "params"}
    plan_memory = optfn.distributed.plan_memory
    with pytest.raises(ValueError, match=r"plan_memory: loss_fn needs batch.*TypeError: 'NoneTy"):
        plan_memory(**options, loss_fn=lambda p, batch: jnp.sum(batch[0] @ p["w"]))
    without = plan_memory(**options, loss_fn=lambda p, batch: jnp.sum(p["w"]))
    assert without.gathered_whole.keys() == {"w"}
    assert "test_scans.py" in without.gathered_whole["w"]
    with pytest.raises(TypeError, match="unsupported operand"):
        plan_memory(**options, loss_fn=lambda p, batch: p["w"] + "", batch=TARGET)


def test_a_plan_of_the_loss_says_what_is_gathered_whole():
    """Each leaf has P bytes; a scan sends them twice, and a line that needs all of them once."""
    params = {k: normal(0, LAYERS, WIDTH, WIDTH) for k in ("scanned", "tied")}
    params["head"] = normal(0, WIDTH, LAYERS * WIDTH)
    arguments = {"shard": "params", "loss_fn": loss_of_three, "batch": TARGET}
    plan = optfn.distributed.plan_memory(optfn.sgd(0.1), params, data_mesh(N), **arguments)
    whole = 4 * LAYERS * WIDTH * WIDTH
    # Of the scanned leaf one layer and the shard of all; the others are reduced as a whole.
    assert plan.gradients == whole // LAYERS + whole // N + 2 * whole
    assert plan.gathered_whole.keys() == {"tied", "head"}
    assert all("test_scans.py" in line for line in plan.gathered_whole.values())
    # Leaves of LAYERS layers are divided by layers: each layer is divided first, by an all-to-all.
    per_layers = 2 + 2 / N
    gathers = per_layers + (per_layers + 1) + 1
    assert plan.sent == pytest.approx((N - 1) / N * whole * (gathers + 3), rel=1e-3)
