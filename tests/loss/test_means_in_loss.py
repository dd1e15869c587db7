"""Two levels: the backward pass of a gather averages the gradient between groups too.

The reference is the same step with the mean after the loss, as it is with microbatches.
"""

import contextlib
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import suite
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import exchange, quantize, scan_layers, sharded, top_k
from optfn.mesh.layout import mesh_layout
from optfn.train import composition

WIDTH, LAYERS, ROWS, EXAMPLES = 32, 3, 64, 32
AXES = ("slow", "fast")
SMALL = 256  # bytes; gradients of more are averaged in the loss

SIZES = {"2 of 4": (2, 4), "4 of 2": (4, 2)}
KINDS = {
    "params": "params",
    "state": "state",
    "specs": {"layers/.*": P(None, None, "fast"), "embedding": P("fast")},
}
CODECS = {
    "as they are": {},
    "packets": {"gather": quantize(8), "reduce": quantize(8)},
    "float32 inside": {"reduce_dtype": "float32"},
    "once": {"gather_once": True},
}
OPTIONS = {
    "nothing": {},
    "float32": {"reduce_dtype": "float32"},
    "microbatches": {"microbatches": 2},
    "packed": {"packed": True},
    "local steps": {"local_steps": 2},
}
OPTIMIZERS = {
    "adam": lambda: optfn.adam(1e-2, grad_clip=optfn.clip_by_global_norm(0.1)),
    "guard": lambda: optfn.skip_nonfinite(optfn.momentum(0.1, 0.9)),
    "loss scale": lambda: optfn.dynamic_loss_scale(optfn.sgd(0.1)),
    "frozen": lambda: optfn.sgd(0.1, param_attrs={"layers/in": optfn.ParamAttr(trainable=False)}),
    "exchange": lambda: optfn.chain(exchange(axis_name="slow"), optfn.sgd(0.1)),
    "top_k": lambda: optfn.chain(
        exchange(top_k(0.25, chunk=32), axis_name="slow", min_size=64), optfn.sgd(0.1)
    ),
}


def layer(w, x):
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def scan_of_jax(layers, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, layers)[0]


def scan_of_checkpoints(layers, x):
    body = jax.checkpoint(lambda x, w: (layer(w, x), None))
    return lax.scan(body, x, layers, reverse=True)[0]


def no_scan(layers, x):
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda w, i=i: w[i], layers), x)
    return x


LOSSES = {
    "scan_layers": lambda layers, x: scan_layers(layer, layers, x),
    "scan": scan_of_jax,
    "scan of checkpoints": scan_of_checkpoints,
    "no scan": no_scan,
}


def make_params(dtype):
    def leaf(seed, *shape):
        return jnp.asarray(normal(seed, *shape, scale=0.2), dtype)

    layers = {"in": leaf(1, LAYERS, WIDTH, 2 * WIDTH), "out": leaf(2, LAYERS, 2 * WIDTH, WIDTH)}
    return {
        "embedding": leaf(0, ROWS, WIDTH),
        "layers": optfn.Stacked(layers),
        "scale": leaf(3, 5),  # whole on each device
    }


def make_loss(apply):
    def loss(params, batch):
        ids, target = batch
        x = apply(params["layers"].layers, params["embedding"][ids])
        error = jnp.mean(x, -1) * jnp.sum(params["scale"]) - target
        return jnp.mean(error.astype(jnp.float32) ** 2)

    return loss


def make_batch(seed):
    ids = np.random.default_rng(seed).integers(0, ROWS, EXAMPLES)
    return ids, np.asarray(normal([seed, 1], EXAMPLES))


def make_step(case):
    sizes, kinds = SIZES[case["sizes"]], AxisType.Explicit if case["explicit"] else AxisType.Auto
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), AXES, axis_types=(kinds,) * 2)
    way = sharded(KINDS[case["kind"]], axis="fast", **CODECS[case["codecs"]])
    tx = OPTIMIZERS[case["optimizer"]]()
    loss = make_loss(LOSSES[case["loss"]])
    options = OPTIONS[case["option"]]
    return optfn.make_train_step(loss, tx, mesh=mesh, data_axis=AXES, shard=way, **options)


def train(case):
    step = make_step(case)
    state = step.init(make_params(case["dtype"]))
    for seed in range(2):
        state, metrics = step(state, make_batch(seed))
    return jax.tree.map(np.asarray, (state.params, state.opt_state, metrics))


@contextlib.contextmanager
def mean_after_the_loss(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(composition, "average_in_loss", lambda layout, workers, options: layout)
        yield


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def count_averaged(jaxpr, axis, times=1, in_scan=False):
    """Return the number of elements that a jaxpr adds over an axis: inside scans, and outside."""
    inside = outside = 0
    for equation in jaxpr.eqns:
        names = equation.params.get("axes", ())
        if equation.primitive.name in ("psum", "psum_invariant") and axis in names:
            size = times * sum(math.prod(v.aval.shape) for v in equation.invars)
            inside, outside = inside + size * in_scan, outside + size * (not in_scan)
        is_scan = equation.primitive.name == "scan"
        repeated = times * equation.params["length"] if is_scan else times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                inner = getattr(inner, "jaxpr", inner)
                found = count_averaged(inner, axis, repeated, in_scan or is_scan)
                inside, outside = inside + found[0], outside + found[1]
    return inside, outside


def count(case):
    step = make_step(case)
    arguments = step.shapes(make_params(case["dtype"]), make_batch(0))
    jaxpr = jax.make_jaxpr(step.compiled)(*arguments).jaxpr
    # Without what no result needs and no compiler computes, the mean of a frozen leaf's gradient.
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return count_averaged(needed, "slow")


PLAIN = {
    "loss": "scan_layers", "kind": "params", "codecs": "as they are", "option": "nothing",
    "optimizer": "adam", "sizes": "2 of 4", "dtype": "float32", "explicit": False,
}  # fmt: skip


INSIDE = [
    *({"loss": name} for name in ("scan", "scan of checkpoints")),
    {"optimizer": "loss scale"},
    {"codecs": "packets"},
    {"kind": "specs"},
]
OUTSIDE = [
    {"kind": "state"},
    {"codecs": "once"},
    *({"option": name} for name in ("microbatches", "packed", "local steps")),
    {"optimizer": "top_k"},
]


@pytest.mark.parametrize("change", INSIDE + OUTSIDE, ids=str)
def test_layers_are_averaged_inside_of_the_loop_or_after_the_loss(change, monkeypatch):
    monkeypatch.setattr(mesh_layout, "SMALL_BYTES", SMALL)
    inside, outside = count(PLAIN | change)
    assert inside == (
        LAYERS * 4 * WIDTH**2 / 4 if change in INSIDE else 0
    )  # a quarter of a group's
    assert change in OUTSIDE or outside <= ROWS * WIDTH / 4 + 16


# tests/reference_run draws two levels with more optimizers.
CASES = [
    {"loss": "scan of checkpoints", "sizes": "4 of 2"},
    {"loss": "scan", "kind": "specs", "explicit": True},
    {"loss": "no scan", "optimizer": "exchange"},
    {"codecs": "packets", "optimizer": "loss scale", "dtype": "bfloat16"},
    {"codecs": "float32 inside", "optimizer": "guard", "sizes": "4 of 2"},
    {"option": "float32", "optimizer": "frozen", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("change", suite(CASES, CASES[0]), ids=str)
def test_the_place_of_the_mean_changes_no_bit_and_sends_no_more(change, monkeypatch):
    monkeypatch.setattr(mesh_layout, "SMALL_BYTES", SMALL)
    case = PLAIN | change
    got, sent = train(case), count(case)
    with mean_after_the_loss(monkeypatch):
        chex.assert_trees_all_equal(got, train(case))
        assert sum(count(case)) == sum(sent)


def scan_twice(layers, x):
    return scan_of_jax(layers, scan_of_jax(layers, x))


def test_a_stack_that_two_scans_read_is_averaged_in_each(monkeypatch):
    monkeypatch.setitem(LOSSES, "scan twice", scan_twice)
    monkeypatch.setattr(mesh_layout, "SMALL_BYTES", SMALL)
    case = PLAIN | {"loss": "scan twice"}
    assert count(case)[0] == 2 * LAYERS * 4 * WIDTH**2 / 4
    got = train(case)[0]
    with mean_after_the_loss(monkeypatch):
        chex.assert_trees_all_close(got, train(case)[0], rtol=1e-5, atol=1e-6)


def test_small_shards_share_an_all_reduce():
    inside, _ = count(PLAIN)
    assert inside == 0
