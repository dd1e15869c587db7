"""Meshes of several axes: what is exchanged, averaged and divided over which of them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import trained

import optfn
from optfn.distributed import (
    data_mesh,
    exchange,
    plan_memory,
    rescale_residuals,
    scan_layers,
    top_k,
)

AXES = ("a", "b")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 16, 12)).astype(np.float32)
PARAMS = {"w": 0.1 * RNG.normal(size=(12, 8)).astype(np.float32), "b": np.zeros(8, np.float32)}


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), AXES)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 1.0) ** 2)


def run(tx, batches=X, params=PARAMS, loss=loss_fn, **options):
    step = optfn.make_train_step(loss, tx, **options)
    return trained(step, step.init(params), batches)


def assert_same_on_all_devices(tree):
    for x in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        assert all(np.array_equal(first, other, equal_nan=True) for other in others)


def on_four(tx, **options):
    """The run on four workers; two devices of each group of eight had the mean of its gradients."""
    return run(tx, mesh=data_mesh(4, axis_name="a"), data_axis="a", **options)


EXCHANGES = {
    "top_k": lambda: optfn.chain(exchange(top_k(0.2), axis_name="a", min_size=1), optfn.sgd(0.1)),
    "dgc": lambda: optfn.dgc_momentum(
        0.1,
        0.9,
        rampup_begin_step=1,
        sparsity=[0.8],
        min_size=1,
        axis_name="a",
        momentum_masking=False,
    ),
    "accumulate": lambda: optfn.accumulate(
        optfn.chain(exchange(top_k(0.2), axis_name="a", min_size=1), optfn.sgd(0.1)), 2
    ),
    "one leaf": lambda: optax.partition(
        {"w": EXCHANGES["top_k"](), "b": optfn.adam(0.01)}, {"w": "w", "b": "b"}
    ),
}


@pytest.mark.parametrize("name", suite(EXCHANGES, "accumulate"))
def test_an_exchange_over_some_axes_takes_the_mean_over_the_others(name):
    tx = EXCHANGES[name]
    state, losses = run(tx(), mesh=mesh(), data_axis=AXES)
    assert_same_on_all_devices(state.params)
    want, expected = on_four(tx())
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(want.params), rtol=1e-5, atol=1e-6
    )
    # Workers that differ are the four of its axis: so many residuals are kept, and counted.
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(want)]


@pytest.mark.nightly
def test_the_outer_exchange_of_local_steps_too():
    def options():
        link = exchange(top_k(0.2), axis_name="a", min_size=1)
        return {"local_steps": 2, "outer": optfn.chain(link, optfn.sgd(0.7))}

    state, _ = run(optfn.sgd(0.1), mesh=mesh(), data_axis=AXES, **options())
    assert_same_on_all_devices(state.params)
    # A drift is the mean over "b" before it is exchanged over "a": with sgd and equal examples on
    # the workers of a group, that of one worker of four.
    pairs = np.repeat(X.reshape(4, 4, 2, 2, 12)[:, :, :1], 2, axis=2).reshape(X.shape)
    state, _ = run(optfn.sgd(0.1), pairs, mesh=mesh(), data_axis=AXES, **options())
    alone = X.reshape(4, 4, 2, 2, 12)[:, :, 0].reshape(4, 8, 12)
    want, _ = on_four(optfn.sgd(0.1), batches=alone, **options())
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(want.params), rtol=1e-5, atol=1e-6
    )


def test_an_exchange_over_an_axis_that_splits_no_batch():
    """Devices along it have equal gradients: the run is that of the data axis alone."""
    tx = optfn.chain(exchange(top_k(0.2), axis_name="b", min_size=1), optfn.sgd(0.1))
    state, losses = run(tx, mesh=mesh(), data_axis="a")
    assert_same_on_all_devices(state.params)
    own = optfn.chain(exchange(top_k(0.2), axis_name="a", min_size=1), optfn.sgd(0.1))
    _, expected = run(own, mesh=data_mesh(1, axis_name="a"), data_axis="a")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_bytes_count_the_mean_and_the_packets_and_residuals_are_those_of_the_axis():
    link = exchange(top_k(0.25), axis_name="a", min_size=10)  # "b" goes dense
    tx = optfn.chain(link, optfn.sgd(0.1))
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh(), data_axis=AXES)
    state, metrics = step(step.init(PARAMS), X[0])
    mean_over_b = 2 * (2 - 1) / 2 * 4 * (96 + 8)
    packets = (4 - 1) * top_k(0.25).num_bytes((12, 8)) + 2 * (4 - 1) / 4 * 4 * 8
    assert float(metrics["bytes_sent"]) == mean_over_b + packets
    loss, agreed = 2 * 7 / 8 * 4, 2 * 3 / 4 * 2 * 4  # the largest of two numbers over axis a
    planned = plan_memory(tx, PARAMS, mesh(), data_axis=AXES).sent
    assert planned == mean_over_b + packets + loss + agreed
    # They move to another number of workers.
    before = np.asarray(state.opt_state[0].residual["w"]).reshape(4, -1)
    moved = rescale_residuals(state.opt_state, 2)[0].residual["w"]
    assert moved.shape == (2 * 12, 8)
    np.testing.assert_allclose(moved.reshape(2, -1), [before.mean(0)] * 2, rtol=1e-6)


@pytest.mark.parametrize("axis_name", [nightly("a"), "b", nightly(None), nightly(AXES)])
def test_a_guard_judges_for_all_workers_whatever_its_own_axes(axis_name):
    link = optfn.chain(exchange(axis_name=AXES), optfn.sgd(0.1))
    guard = optfn.skip_nonfinite(link, axis_name=axis_name)
    bad = X[:1].copy()
    bad[0, 3, 0] = np.nan
    state, _ = run(guard, bad, mesh=mesh(), data_axis=AXES)
    assert_same_on_all_devices((state.params, state.opt_state.skipped))
    chex.assert_trees_all_equal(jax.device_get(state.params), PARAMS)
    assert int(state.opt_state.skipped) == 1


TABLE = RNG.normal(size=(16, 8)).astype(np.float32)
LAYERS = 0.3 * RNG.normal(size=(8, 8, 8)).astype(np.float32)
IDS = RNG.integers(0, 16, (4, 16))


def lookup_loss(params, ids):
    x = params["t"][ids] * ids[:, None]
    x = scan_layers(lambda p, x: jnp.tanh(x @ p), params["w"], x)
    return jnp.mean(x**2) + jnp.mean(params["t"] ** 2)


def train_lookups(**options):
    return run(optfn.lamb(0.01), IDS, {"t": TABLE, "w": LAYERS}, lookup_loss, **options)


on_one_device = functools.cache(train_lookups)


@pytest.mark.parametrize(
    ("table", "layers", "parts"),
    [
        (P(("b", "a")), P(("b", "a")), (8, 8)),
        (P("b", "a"), P("b", None, "a"), (8, 8)),
        (P(None, "b"), P(None, "a"), (2, 4)),
    ],
    ids=["in any order", "each a dimension", "over one of them"],
)
def test_specs_over_any_of_the_data_axes(table, layers, parts):
    """The run of one device; layers are scanned."""
    shard = {"t": table, "w": layers}
    state, losses = train_lookups(mesh=mesh(), data_axis=AXES, shard=shard)
    want, expected = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, x in state.params.items():
        np.testing.assert_allclose(x, want.params[name], rtol=1e-4, atol=1e-6)
    found = [x.size // x.addressable_shards[0].data.size for x in state.params.values()]
    assert found == [*parts]


@pytest.mark.parametrize("shard", [nightly(None), nightly("state"), "params"])
def test_narrow_params_on_a_mesh_with_an_axis_for_the_compiler(shard):
    """XLA ends the process where bfloat16 is summed over some of the axes of a mesh on CPU."""
    dtype = jnp.bfloat16
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)

    def loss(params, model_state, x):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return loss_fn(wide, x), (x.mean().astype(dtype), x.mean().astype(dtype))

    def trained(**options):
        step = optfn.make_train_step(
            loss, optfn.adam(0.01), has_aux=True, model_state=True, **options
        )
        state, metrics = step(step.init(params, jnp.zeros((), dtype)), X[0])
        return jax.device_get((state.params, state.model_state, metrics["aux"]))

    got = trained(mesh=mesh(), data_axis="a", shard=shard)
    chex.assert_trees_all_close(got, trained(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [nightly({}), nightly({"shard": "state"}), {"shard": "params"}, {"shard": {"w": P("a")}}],
    ids=str,
)
@pytest.mark.parametrize("mask", [optax.MaskedNode, nightly(lambda: None)])
def test_masked_leaves_of_params_and_a_python_number(options, mask):
    """A partition of an equinox module has None in the place of what is no array."""
    params = {**PARAMS, "activation": mask(), "layers": [mask(), PARAMS["w"]], "scale": 2.0}

    def loss(params, x):
        return loss_fn(params, x) * params["scale"] + jnp.mean(params["layers"][1] ** 2)

    state, losses = run(optfn.adam(0.01), X, params, loss, mesh=mesh(), data_axis="a", **options)
    want, expected = run(optfn.adam(0.01), X, params, loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert jax.tree.structure(state.params) == jax.tree.structure(want.params)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(want.params), rtol=1e-4, atol=1e-6
    )


def test_a_history_of_gradients_lies_as_its_parameter_does():
    """asgd keeps batch_num gradients of each; along an axis for the compiler too."""
    step = optfn.make_train_step(
        loss_fn, optfn.asgd(0.1, batch_num=3), mesh=mesh(), data_axis="a",
        shard={"w": P(None, "b")},
    )  # fmt: skip
    state = step.init(PARAMS)
    parts = {x.shape: x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.opt_state)}
    assert {k: v for k, v in parts.items() if 12 in k} == {(3, 12, 8): (3, 12, 4)}


def test_small_integers_of_aux_are_summed_in_32_bits():
    def aux(x):
        return {
            "uint8": jnp.uint8(200),
            "int8": jnp.int8(-100),
            "bool": x.mean() > -10,
            "int32": jnp.int32(x.shape[0]),
        }

    for options in ({}, {"local_steps": 2}):
        calls = options.get("local_steps", 1) * 8
        step = optfn.make_train_step(
            lambda p, x: (loss_fn(p, x), aux(x)), optfn.sgd(0.1), has_aux=True, mesh=mesh(),
            data_axis=AXES, **options,
        )  # fmt: skip
        _, metrics = step(step.init(PARAMS), X[0])
        want = {"uint8": 200 * calls, "int8": -100 * calls, "bool": calls, "int32": 16}
        assert jax.tree.map(int, metrics["aux"]) == want


WAYS_OF_MEANS = {
    "workers": lambda: {"mesh": mesh(), "data_axis": AXES},
    "local steps": lambda: {"mesh": mesh(), "data_axis": AXES, "local_steps": 2},
    "params": lambda: {"mesh": mesh(), "data_axis": AXES, "shard": "params"},
    "microbatches": lambda: {"microbatches": 2},
    "own gradient": lambda: {"mesh": mesh(), "data_axis": AXES, "value_and_grad": True},
}


@pytest.mark.parametrize("way", suite(WAYS_OF_MEANS, "local steps", "microbatches", "own gradient"))
def test_aux_of_each_example_is_refused_and_arrays_of_other_axes_are_means(way):
    options = WAYS_OF_MEANS[way]()

    def made(aux):
        def loss(p, x):
            return loss_fn(p, x), {"found": aux(p, x)}

        own = jax.value_and_grad(loss, has_aux=True) if options.get("value_and_grad") else None
        return optfn.make_train_step(
            None if own else loss, optfn.sgd(0.1), has_aux=True, **options | {"value_and_grad": own}
        )

    step = made(lambda p, x: x.mean(0) + 0 * p["w"].sum())
    _, metrics = step(step.init(PARAMS), X[0])
    np.testing.assert_allclose(metrics["aux"]["found"], X[0].mean(0), rtol=1e-5, atol=1e-6)
    for of_examples in (lambda p, x: x.sum(-1), lambda p, x: x.sum(-1) > 0):
        with pytest.raises(ValueError, match=r"aux at 'found': an array of shape \(\d+,\) has"):
            step = made(of_examples)
            step(step.init(PARAMS), X[0])


def test_aux_of_each_example_stays_on_one_device():
    step = optfn.make_train_step(
        lambda p, x: (loss_fn(p, x), x.sum(-1)), optfn.sgd(0.1), has_aux=True
    )
    _, metrics = step(step.init(PARAMS), X[0])
    np.testing.assert_allclose(metrics["aux"], X[0].sum(-1), rtol=1e-5, atol=1e-6)


def test_a_key_in_aux_is_that_of_worker_0():
    step = optfn.make_train_step(
        lambda p, x, key: (loss_fn(p, x), key), optfn.sgd(0.1), has_aux=True, rng=3, mesh=mesh(),
        data_axis=AXES,
    )  # fmt: skip
    _, metrics = step(step.init(PARAMS), X[0])
    of_step = jax.random.fold_in(jax.random.key(3), 0)
    want = jax.random.key_data(jax.random.fold_in(of_step, 0))
    np.testing.assert_array_equal(jax.random.key_data(metrics["aux"]), want)


def with_aux(aux):
    return lambda **options: run(
        optfn.sgd(0.1), loss=lambda p, x: (loss_fn(p, x), aux), has_aux=True, **options
    )


def of_another_shape(params, x):
    return loss_fn(params, x), {"w": jnp.zeros(8), "b": jnp.zeros(8)}


def of_an_integer(params, x):
    return loss_fn(params, x), {"w": params["w"], "b": params["b"], "n": jnp.zeros(3)}


@pytest.mark.parametrize(
    "options",
    [{}, nightly({"mesh": mesh}), {"mesh": mesh, "shard": "params"}],
    ids=["one device", "mesh", "sharded"],
)
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (with_aux({"name": "text"}), TypeError,
         "aux must consist of arrays .*'text' of type str at 'name"),
        (lambda **k: run(optfn.sgd(0.1), [(X[0], "text")], **k), TypeError,
         "the batch must consist of arrays and numbers; leaf '1' is 'text' of type str"),
        (lambda **k: run(optfn.sgd(0.1), [{"x": np.array(["a", "b"])}], **k), TypeError,
         "the batch must consist of arrays and numbers; leaf 'x'"),
        (lambda **k: run(optfn.sgd(0.1), loss=None, value_and_grad=of_another_shape, **k),
         ValueError, r"the gradient of 'w' is an array of shape \(8,\) and dtype float32; the"),
        (lambda **k: run(optfn.sgd(0.1), params={**PARAMS, "n": np.arange(3)}, loss=None,
                         value_and_grad=of_an_integer, **k),
         TypeError, "the gradient of 'n' .* an integer leaf cannot be trained"),
    ],
)  # fmt: skip
def test_what_is_no_array_or_does_not_fit_is_named(options, make, error, words):
    options = {k: v() if callable(v) else v for k, v in options.items()}
    options |= {"data_axis": AXES} if options else {}
    with pytest.raises(error, match=words):
        make(**options)


def test_an_axis_named_twice():
    words = r"data_axis must name each mesh axis once; got \('a', 'a'\)"
    with pytest.raises(ValueError, match=words):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), mesh=mesh(), data_axis=("a", "a"))
