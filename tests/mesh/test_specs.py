"""`shard=` takes the shardings that models have: trees of the params' structure, or prefixes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from grids import nightly
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import trained

import optfn
from optfn.distributed import plan_memory, sharded
from optfn.mesh.layout.sharding import layout_of

X = np.random.default_rng(0).normal(size=(3, 16, 8)).astype(np.float32)
ROWS, COLUMNS = P("data", None), P(None, "data")


def mesh_of(sizes=(4, 2), names=("data", "model")):
    return Mesh(np.array(jax.devices()).reshape(sizes), names)


def specs_of(shard, params, mesh=None):
    """Return the PartitionSpec of each leaf, without the axes that specs leave out at the end."""
    mesh = mesh_of() if mesh is None else mesh
    specs = layout_of(shard, mesh, "data").param_specs(params)
    return jax.tree.map(trimmed, specs, is_leaf=lambda x: isinstance(x, P))


def trimmed(spec):
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


class Layer(NamedTuple):
    up: Any
    down: Any


class Weights(NamedTuple):
    """The weights of a model as Llama's programs have them."""

    embedding: Any
    layers: list
    norm: Any


WEIGHTS = Weights(
    weights(0, 16, 8),
    [Layer(weights(i, 8, 16), weights(9 + i, 16, 8)) for i in range(2)],
    weights(7, 8),
)


def broadcast(prefix, params):
    """Return the specs by JAX's own reading of a prefix."""
    whole = jax.tree.map(
        lambda x: P() if x is None else x.spec if isinstance(x, NamedSharding) else x,
        prefix,
        is_leaf=lambda x: x is None or isinstance(x, P),
    )
    specs = jax.tree.broadcast(whole, params, is_leaf=lambda x: isinstance(x, P))
    return jax.tree.map(trimmed, specs, is_leaf=lambda x: isinstance(x, P))


FULL = Weights(P("model", "data"), [Layer(COLUMNS, ROWS), Layer(P(), P("model"))], P("data"))
TREES = {
    "whole structure": FULL,
    "NamedShardings": jax.tree.map(
        lambda spec: NamedSharding(mesh_of(), spec), FULL, is_leaf=lambda x: isinstance(x, P)
    ),
    "a prefix": Weights(P("model"), P("data"), None),
    "prefixes in a list": Weights(None, [Layer(COLUMNS, None), P("data")], P("data")),
    "one spec": P("data"),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("way", ["alone", "in sharded"])
def test_a_tree_is_read_as_jax_reads_a_prefix(name, way):
    shard = TREES[name] if way == "alone" else sharded(TREES[name], axis="data")
    assert specs_of(shard, WEIGHTS) == broadcast(TREES[name], WEIGHTS)


def test_none_in_a_prefix_stands_for_modules_without_params_too():
    params = {"dense": {"w": np.ones((8, 4))}, "dropout": {}, "bias": None}
    expected = {"dense": {"w": P("data")}, "dropout": {}, "bias": None}
    for shard in ({"dense": {"w": ROWS}, "dropout": None}, {"dense": ROWS, "dropout": None}):
        assert specs_of(shard, params) == expected


# A flat mapping from text to specs could be a tree or patterns.


TWO = {"w": (8, 4), "b": (4,)}
FLAT = {
    "both": ({"w": ROWS, "b": None}, TWO, {"w": P("data"), "b": P()}),
    "patterns": ({"w": ROWS}, TWO, {"w": P("data"), "b": P()}),
    "or": ({"w|b": P("data")}, TWO, {"w": P("data"), "b": P("data")}),
    "a prefix, of which no key is a pattern": (
        {"net": ROWS, "b": P()},
        {"net": {"w": (8, 4), "v": (4, 4)}, "b": (4,)},
        {"net": {"w": P("data"), "v": P("data")}, "b": P()},
    ),
    "the longest path": (
        {"net/~/linear": ROWS, "net": P(None, "data"), "net/~/linear/b": P()},
        {"net/~/linear": TWO, "net": {"w": (8, 4)}},
        {"net/~/linear": {"w": P("data"), "b": P()}, "net": {"w": P(None, "data")}},
    ),
    "names, though the first is a pattern of the last as well": (
        {"w.0": ROWS, "w.00": P(None, "data"), "w_0": P()},
        {"w.0": (8, 4), "w.00": (4, 4), "w_0": (4, 4)},
        {"w.0": P("data"), "w.00": P(None, "data"), "w_0": P()},
    ),
    "patterns of some names": (
        {"w.*": ROWS, "b": P("data")},
        {"w.0": (8, 4), "w.1": (8, 4), "b": (4,)},
        {"w.0": P("data"), "w.1": P("data"), "b": P("data")},
    ),
}


@pytest.mark.parametrize(("shard", "params", "expected"), FLAT.values(), ids=FLAT)
def test_a_flat_mapping_is_names_where_it_names_all_leaves_and_else_patterns(
    shard, params, expected
):
    arrays = jax.tree.map(np.ones, params, is_leaf=lambda x: isinstance(x, tuple))
    assert specs_of(shard, arrays) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_both_readings_agree_on_trees_that_are_named_by_words(depth):
    rng = np.random.default_rng(depth)
    leaf = {"kernel": np.ones((8, 8)), "bias": np.ones(8)}
    params = {f"block{i}": leaf for i in range(3)} if depth == 2 else leaf
    names = optfn.core.tree.paths(params)
    for _ in range(20):
        chosen = dict.fromkeys(names, P())
        chosen |= {name: P("data") for name in names if rng.integers(2)}
        tree = jax.tree.unflatten(jax.tree.structure(params), chosen.values())
        # A last pattern that matches all, and nothing that is left, lets only patterns be read.
        assert (
            specs_of(tree, params)
            == specs_of(chosen, params)
            == specs_of(chosen | {".*": P("model")}, params)
        )


@pytest.mark.parametrize(
    ("shard", "error", "words"),
    [
        (FULL._replace(norm=P("stage")), ValueError, "no axis 'stage' for 'norm'.*P.*'stage'.*are"),
        (P("data", "data"), ValueError, "P.*for '' must not name a mesh axis twice"),
        (Weights(3, None, None), TypeError,
         "a tree of PartitionSpecs.*got 3 of type int at 'embed"),
        (Weights(None, [Layer(None, "data")], None), TypeError, "got 'data'.* at 'layers/0/down'"),
    ],
)  # fmt: skip
def test_what_is_no_spec_of_the_mesh_is_said_where_the_step_is_made(shard, error, words):
    with pytest.raises(error, match=words):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), mesh=mesh_of(), shard=shard)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (FULL._replace(layers=[Layer(P(("data", "model"), "data"), P())]),
         "must not name a mesh axis twice"),
        ({"embedding": P(), "layer": P("data"), "norm": [P()]},
         r"structure of params.*missing 'layers/0/up', 'layers/0/down', .*not expected 'layer'"),
        (FULL._replace(layers=FULL.layers[:1]), "missing 'layers/1/up', 'layers/1/down'"),
        (FULL._replace(layers=[*FULL.layers, P("data")]), "not expected 'layers/2'"),
        (FULL._replace(norm=Layer(P("data"), P())), "missing 'norm'.*not expected 'norm/up'"),
        (FULL._replace(norm=P(("data", "model"), None)),
         r"'model'.*more entries than leaf 'norm'"),
    ],
)  # fmt: skip
def test_a_tree_that_does_not_fit_names_the_paths(shard, words):
    with pytest.raises(ValueError, match=words):
        specs_of(shard, WEIGHTS)


def test_what_does_not_divide_names_leaf_spec_and_mesh():
    params = {"w": np.ones((6, 4))}
    words = r"leaf 'w', .*\(6, 4\).*4 devices along 'data'.*P.*'data'.*'data': 4, 'model': 2"
    with pytest.raises(ValueError, match=words):
        specs_of({"w": ROWS}, params)


def loss_fn(w, x):
    x = x @ w.embedding.T @ w.embedding
    for layer in w.layers:
        x = x + jnp.tanh(x @ layer.up) @ layer.down
    return jnp.mean((x * w.norm - 1.0) ** 2)


@pytest.mark.parametrize("name", [nightly("NamedShardings"), "a prefix"])
def test_params_lie_as_the_tree_says_and_the_plan_counts_their_bytes(name):
    """The product's test of the zoo trains such a model."""
    tx = optfn.adam(1e-2)
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh_of(), shard=TREES[name])
    state = step.init(WEIGHTS)
    assert jax.tree.map(lambda x: trimmed(x.sharding.spec), state.params) == broadcast(
        TREES[name], WEIGHTS
    )
    kept = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
            for tree in (state.params, state.opt_state)]  # fmt: skip
    for mesh in (mesh_of(), AbstractMesh((4, 2), ("data", "model"))):
        plan = plan_memory(tx, WEIGHTS, mesh, shard=TREES[name])
        assert [plan.params, plan.state] == kept
    table = optfn.summary(tx, WEIGHTS, mesh=mesh_of(), shard=TREES[name])
    assert "layers/1/down" in table


def test_packed_params_are_whole_buffers_with_a_tree_as_with_patterns():
    params = {"w": weights(1, 8, 8), "v": weights(2, 8, 8)}

    def loss_fn(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - 1.0) ** 2)

    alone = optfn.make_train_step(loss_fn, optfn.adam(1e-2))
    _, expected = trained(alone, alone.init(params), X)
    for shard in ({"w": P("data"), "v": P()}, {"w": P("data")}):
        step = optfn.make_train_step(
            loss_fn, optfn.adam(1e-2), shard=shard, mesh=mesh_of(), packed=True
        )
        _, losses = trained(step, step.init(params), X)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)


# The annotations of libraries; tests/loss/test_constraints.py trains such models.


def test_flax_boxes_stay_boxes_and_their_specs_are_taken_boxed_or_not():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def boxed(*names):
                return nn.with_partitioning(nn.initializers.lecun_normal(), names)

            x = nn.relu(nn.Dense(16, kernel_init=boxed(None, "model"))(x))
            return nn.Dense(8, use_bias=False, kernel_init=boxed("model", None))(x)

    boxed = Net().init(jax.random.key(0), X[0])["params"]
    expected = {"Dense_0": {"kernel": P(None, "model"), "bias": P()}}
    expected["Dense_1"] = {"kernel": P("model")}
    assert specs_of(nn.get_partition_spec(boxed), nn.unbox(boxed)) == expected
    shard = nn.get_sharding(boxed, mesh_of())
    step = optfn.make_train_step(loss_fn, optfn.adam(1e-2), mesh=mesh_of(), shard=shard)
    state = step.init(boxed)
    kernel = state.params["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.value.addressable_shards[0].data.shape == (8, 8)
    assert any(name.endswith("mu/Dense_0/kernel/value") for name in optfn.state_dict(state))


def test_trees_of_equinox_with_none_in_the_place_of_what_is_no_array():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, width_size=16, depth=1, use_bias=False, key=jax.random.key(0))
    params, _ = eqx.partition(model, eqx.is_inexact_array)
    prefix = eqx.tree_at(lambda p: p.layers, params, (P("model", "data"), None))
    found = specs_of(prefix, params)
    assert [layer.weight for layer in found.layers] == [P("model", "data"), P()]
