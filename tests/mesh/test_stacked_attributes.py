"""`ParamAttr(stacked=n)` says to norms and to `shard=` what a `Stacked` in the tree says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from grids import nightly, suite
from jax.sharding import PartitionSpec as P
from problems import stacked_layers, trained

import optfn
from optfn.distributed import data_mesh, plan_memory, scan_layers, sharded
from optfn.mesh.layout.sharding import layout_of

N, LAYERS, WIDTH = 4, 8, 32
X = np.random.default_rng(0).normal(size=(3, 16, WIDTH)).astype(np.float32)
STACKED = {"layers/.*": optfn.ParamAttr(stacked=1)}


def params(mark=lambda x: x):
    return stacked_layers(LAYERS, WIDTH, mark)


def loss_fn(p, x):
    x = scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"] + w["b"]), p["layers"], x)
    return jnp.mean((x @ p["head"] - 1.0) ** 2)


def both(make):
    """Return (optimizer, params): with attributes, and with a mark in the tree."""
    return (make(param_attrs=STACKED), params()), (make(), params(optfn.Stacked))


WAYS = {
    "state": "state",
    "params": "params",
    "whole": sharded("state", whole="layers/w"),
    "whole params": sharded("params", whole="layers/w"),
}
MAKERS = {
    "lamb": functools.partial(optfn.lamb, 1e-2),
    "in wrappers": lambda **more: optfn.skip_nonfinite(
        optfn.chain(optfn.lamb(1e-2, **more), optfn.exponential_moving_average(0.9))
    ),
}


def list_specs(tx, params, shard):
    layout = layout_of(shard, data_mesh(N), "data", tx=tx)
    return [
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        for specs in (layout.param_specs(params), layout.gradient_specs(params))
    ]


@pytest.mark.parametrize(
    "name, way",
    suite(
        itertools.product(MAKERS, WAYS),
        *(("lamb", "params"), ("lamb", "whole"), ("in wrappers", "state")),
    ),
)
def test_attributes_divide_as_a_mark_in_the_tree_does(name, way):
    pairs = both(MAKERS[name])
    expected = list_specs(*pairs[1], WAYS[way])
    assert list_specs(*pairs[0], WAYS[way]) == expected
    plans = [plan_memory(*pair, data_mesh(N), shard=WAYS[way]) for pair in pairs]
    assert plans[0] == plans[1]
    tables = [optfn.summary(*pair, mesh=data_mesh(N), shard=WAYS[way]) for pair in pairs]
    kept = [[line.split()[-1] for line in table.splitlines()] for table in tables]
    assert kept[0] == kept[1]  # bytes on a device
    if way in ("state", "params"):
        # Without either, the first axis is divided, and each device has whole layers.
        unmarked = list_specs(MAKERS[name](), params(), WAYS[way])
        assert unmarked != expected


def test_layers_of_equinox_which_takes_no_mark_in_the_tree():
    eqx = pytest.importorskip("equinox")

    def make(key):
        return eqx.nn.Linear(WIDTH, WIDTH, key=key)

    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), LAYERS))
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)

    def loss_fn(arrays, x):
        def body(x, layer):
            return x + jnp.tanh(jax.vmap(eqx.combine(layer, static))(x)), None

        return jnp.mean((jax.lax.scan(body, x, arrays)[0] - 1.0) ** 2)

    tx = optfn.lamb(1e-2, param_attrs={".*": optfn.ParamAttr(stacked=1)})
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(N), shard="params")
    state, losses = trained(step, step.init(arrays), X)
    assert state.params.weight.addressable_shards[0].data.shape == (LAYERS, WIDTH // N, WIDTH)
    alone = optfn.make_train_step(loss_fn, tx)
    _, expected = trained(alone, alone.init(arrays), X)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("shard", [nightly("state"), "params"])
def test_moments_of_8_bits_compile_a_step_once(shard):
    """The scales of a leaf that no device divides come back as they went in."""

    def loss(params, x):
        return jnp.mean(scan_layers(lambda p, h: jnp.tanh(h @ p["w"] + p["b"]), params, x) ** 2)

    step = optfn.make_train_step(
        loss, optfn.adam(1e-3, moment_dtype="int8"), mesh=data_mesh(), shard=shard
    )
    layers = {"w": np.ones((4, 512, 512), np.float32), "b": np.zeros((4, 512), np.float32)}
    state, x = step.init(optfn.Stacked(layers)), np.ones((16, 512), np.float32)
    before = [x.sharding for x in jax.tree.leaves(state)]
    state, _ = step(state, x)
    assert [x.sharding for x in jax.tree.leaves(state)] == before
    with count_compilations() as count:
        step(state, x)
    assert count.value == 0


def test_more_stacked_axes_than_a_leaf_has_are_said():
    tx = optfn.lamb(1e-2, param_attrs={"head": optfn.ParamAttr(stacked=3)})
    with pytest.raises(ValueError, match="stacked=3 for leaf 'head' must be at most 2"):
        plan_memory(tx, params(), data_mesh(N), shard="state")
