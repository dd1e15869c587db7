"""A training step on a mesh: data parallel, and with Deep Gradient Compression."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from grids import nightly
from hlo import collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import trained
from simulation import follow, one_step

import optfn
from optfn.compression.dgc import DeepGradientCompressionState
from optfn.distributed import data_mesh, init_state, rescale_residuals, state_specs

N = 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 40)).astype(np.float32)
Y = RNG.standard_normal((16, 30)).astype(np.float32)
BATCH = {"x": X, "y": Y}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def start():
    return {"w": 0.1 * RNG.standard_normal((40, 30)).astype(np.float32), "b": np.zeros(30)}


def dgc(**options):
    options = {"rampup_begin_step": 1, "rampup_step": 2, "sparsity": (0.75, 0.99)} | options
    return optfn.dgc_momentum(0.1, 0.9, min_size=100, **options)


def run(tx, params, steps=4, mesh=None, batch=BATCH, **options):
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh, **options)
    return trained(step, step.init(params), [batch] * steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optfn.adam(0.1, grad_clip=optfn.clip_by_global_norm(0.5)),
        lambda: optfn.skip_nonfinite(optfn.record_metrics(optfn.momentum(0.1, 0.9))),
        lambda: optfn.accumulate(optfn.sgd(0.1), 2),
    ],
    ids=["adam", "guarded", "accumulate"],
)
def test_an_ordinary_optimizer_sees_the_whole_batch(make):
    """The step on four workers is the step of one on all examples."""
    params = start()
    one, losses = run(make(), params)
    many, own = run(make(), params, mesh=data_mesh(N))
    np.testing.assert_allclose(own, losses, rtol=1e-5)
    chex.assert_trees_all_close(
        jax.device_get(many.params), jax.device_get(one.params), rtol=1e-5, atol=1e-6
    )
    assert many.params["w"].sharding == NamedSharding(data_mesh(N), P())


def test_compression_keeps_gradients_local():
    """make_train_step is the transform on each worker's own gradient."""
    params, tx = jax.tree.map(jnp.float32, start()), dgc()
    state, _ = run(tx, params, mesh=data_mesh(N))
    p, gradients = params, []
    for _ in range(4):
        parts = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], BATCH) for i in range(N)]
        own = [jax.grad(loss_fn)(p, part) for part in parts]
        gradients.append(jax.tree.map(lambda *x: np.stack(x), *own))
        p, (kept, _) = follow(tx, params, gradients)[-1]
        p = jax.tree.map(lambda x: x[0], p)
    chex.assert_trees_all_close(jax.device_get(state.params), p, rtol=1e-5, atol=1e-6)
    v = state.opt_state[0].residual.value["w"]
    assert v.shape == (N * 1200,) and v.sharding.spec == P("data")
    np.testing.assert_allclose(
        np.asarray(v).reshape(N, -1), kept.residual.value["w"], rtol=1e-4, atol=1e-5
    )
    assert int(state.opt_state[0].num_workers) == N


@pytest.mark.optimized
def test_the_compiled_step_is_in_place_and_sparse():
    n, mesh = 1 << 20, data_mesh(N)

    def gradient(params, x):
        return jnp.mean(x), {"w": jnp.full_like(params["w"], jnp.mean(x))}

    tx, batch = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0), np.ones(N, np.float32)
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh, value_and_grad=gradient)
    state = step.init({"w": jnp.ones(n)})
    compiled = step.compiled.lower(state, batch).compile()
    found = collectives(compiled.as_text())
    k = round(n * 0.001)
    assert sum(found["all-gather"]) == N * 8 * k
    assert sum(found["all-reduce"]) <= 100
    assert compiled.memory_analysis().alias_size_in_bytes >= 12 * n
    optfn.assert_in_place(step, state, batch, min_size=n)
    old = state.params["w"], state.opt_state[0].residual.value["w"]
    compiled(state, batch)
    assert all(x.is_deleted() for x in old)


@pytest.mark.optimized
@pytest.mark.nightly  # three compilations; the step above has one
def test_rows_pass_a_chain_of_transforms_that_know_them():
    """Others get arrays: one more of n."""
    n, mesh = 1 << 20, data_mesh(N)

    def gradient(params, x):
        return jnp.mean(x), {"w": jnp.full_like(params["w"], jnp.mean(x))}

    tx, batch = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0), np.ones(N, np.float32)
    temporaries = []
    for chained in (tx, optax.chain(tx), optax.chain(tx, optax.scale(1.0))):
        step = optfn.make_train_step(loss_fn, chained, mesh=mesh, value_and_grad=gradient)
        program = step.compiled.lower(step.init({"w": jnp.ones(n)}), batch).compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] == temporaries[1] <= temporaries[2] - 4 * n


def test_it_is_compiled_once():
    step = optfn.make_train_step(loss_fn, dgc(), mesh=data_mesh(N))
    state = step.init(start())
    for batch in (BATCH, jax.tree.map(jnp.asarray, BATCH), BATCH):
        state, _ = step(state, batch)
    assert compilations(step) == 1


@pytest.mark.parametrize("bad", [True, nightly(False)])
def test_wrappers_judge_for_all_workers(bad):
    """One worker's NaN is skipped by all; the norms are over all workers."""
    spoiled = {"x": X.copy(), "y": Y}
    if bad:
        spoiled["x"][-1, 0] = np.nan
    params = start()
    tx = optfn.skip_nonfinite(optfn.record_metrics(dgc(rampup_begin_step=0)))
    state, _ = run(tx, params, steps=1, mesh=data_mesh(N), batch=spoiled)
    assert int(state.opt_state.skipped) == bad
    if bad:
        np.testing.assert_array_equal(state.params["w"], params["w"])
        assert not np.any(state.opt_state.inner_state.inner_state[0].residual.value["w"])
        return
    parts = [{k: x[4 * i : 4 * i + 4] for k, x in BATCH.items()} for i in range(N)]
    norms = [optax.tree.norm(jax.grad(loss_fn)(params, part)) for part in parts]
    got = optfn.metrics(state.opt_state)["grad_norm"]
    np.testing.assert_allclose(got, np.sqrt(np.mean(np.square(norms))), rtol=1e-5)


@pytest.mark.nightly  # test_workers.py compares replicas around and beside other transforms
def test_replicas_stay_the_same_around_compression():
    """A clip before it is each worker's own; its factor is the smallest of all."""
    norm = optfn.clip_by_global_norm(1e-3)
    only = {"w": True, "b": False}, {"w": False, "b": True}
    masked = optfn.chain(optax.masked(optfn.adam(0.1), only[1]), optax.masked(dgc(), only[0]))
    for tx in (optfn.chain(norm, dgc()), optfn.record_metrics(optfn.chain(norm, dgc())), masked):
        state, _ = run(tx, start(), mesh=data_mesh(N))
        for x in jax.tree.leaves(state):
            if x.is_fully_replicated:
                shards = [np.asarray(shard.data) for shard in x.addressable_shards]
                assert all(np.array_equal(shard, shards[0]) for shard in shards)


def test_no_moments_of_own_gradients():
    """Each worker would have other ones, in an array that stands for all."""
    for before in (optfn.scale_by_adam(), optfn.exponential_moving_average()):
        with pytest.raises(ValueError, match="part 0 of a chain would differ between workers"):
            run(optfn.chain(before, dgc()), start(), mesh=data_mesh(N))


def test_aux_is_averaged_and_counts_add_up():
    step = optfn.make_train_step(
        lambda p, x: (jnp.sum(p * 0.0), {"mean": x.mean(), "count": jnp.int32(x.size)}),
        optfn.sgd(0.1),
        mesh=data_mesh(N),
        has_aux=True,
    )
    _, metrics = step(step.init(jnp.zeros(2)), np.arange(8, dtype=np.float32))
    assert metrics["aux"]["mean"] == 3.5 and metrics["aux"]["count"] == 8


def test_small_leaves_share_an_all_reduce_with_the_metrics():
    """On a slow link the messages of an all-reduce of a bias cost more than its bytes."""
    params = {
        "weights": jnp.ones((100, 200)),  # 80,000 bytes: more than what shares one
        "biases": [jnp.arange(n, dtype=jnp.float32) for n in (1, 7, 100)],
        "scales": [jnp.ones(5, jnp.bfloat16), jnp.ones((), jnp.bfloat16)],
    }

    def loss(p, x):
        squares = sum(jnp.sum((a.astype(jnp.float32) * x[0]) ** 2) for a in jax.tree.leaves(p))
        return squares, {"mean": x.mean(), "count": jnp.int32(x.size)}

    step = optfn.make_train_step(loss, optfn.sgd(1.0), mesh=data_mesh(N), has_aux=True)
    state, x = step.init(params), np.arange(N, dtype=np.float32)
    # Each array of a collective is sent by itself between processes, also where XLA combines some.
    text = step.compiled.lower(state, x).as_text()
    shapes = re.findall(r'"stablehlo.all_reduce".*?-> tensor<(\w+)>', text, re.DOTALL)
    assert sorted(shapes) == ["100x200xf32", "110xf32", "6xbf16", "i32"]
    state, metrics = step(state, x)
    # p − 2·p·mean of the workers' squares, each in the dtype of p
    square = np.mean(x**2)
    want = jax.tree.map(lambda p: p - (2 * p * square).astype(p.dtype), params)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(want), rtol=1e-2)
    for got, expected in zip(state.params["biases"], want["biases"], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert metrics["aux"]["mean"] == x.mean() and metrics["aux"]["count"] == N


@pytest.mark.nightly
def test_a_mesh_of_explicit_axes():
    """jax.make_mesh makes them so."""
    mesh, params = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Explicit,)), start()
    with jax.set_mesh(mesh):
        state, losses = run(dgc(), params, mesh=mesh)
    want, expected = run(dgc(), params, mesh=data_mesh(N))
    assert losses == expected
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(want.params))


@pytest.mark.nightly
def test_two_axes():
    """The batch is split over both axes of a mesh."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device"))
    axes, params = ("host", "device"), start()
    state, losses = run(dgc(axis_name=axes), params, mesh=mesh, data_axis=axes)
    want, expected = run(dgc(), params, mesh=data_mesh(N))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(want.params), rtol=1e-5, atol=1e-6
    )


def test_minimize_on_a_mesh_goes_on_from_its_checkpoint(tmp_path):
    """Bit for bit, residuals of all workers included."""
    params = start()
    options = {"mesh": data_mesh(N), "progress": False}
    whole, history = optfn.minimize(loss_fn, dgc(), params, [BATCH] * 6, **options)
    options |= {"checkpoint": tmp_path, "save_every": 2}
    optfn.minimize(loss_fn, dgc(), params, [BATCH] * 3, **options)
    resumed, again = optfn.minimize(loss_fn, dgc(), params, [BATCH] * 6, **options)
    chex.assert_trees_all_equal(jax.device_get(whole), jax.device_get(resumed))
    np.testing.assert_array_equal(history["loss"], again["loss"])
    assert np.any(resumed.opt_state[0].residual.value["w"])


@pytest.mark.parametrize("workers", [2, nightly(1), nightly(8)])
def test_a_run_goes_on_with_other_workers(workers):
    """The mean of what is owed stays; u is the mean; the run goes on from the state dict."""
    params, tx = start(), optfn.skip_nonfinite(dgc())
    state, losses = run(tx, params, mesh=data_mesh(N))
    mapping = optfn.state_dict(state)
    scaled = rescale_residuals(mapping, workers)
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(workers))
    resumed = optfn.load_state_dict(step.init(params), scaled)
    old, new = (s.opt_state.inner_state[0] for s in (state, resumed))
    assert int(new.num_workers) == workers
    for field in ("local_velocity", "residual"):
        before = np.asarray(getattr(old, field).value["w"]).reshape(N, -1)
        before = before.mean(axis=0, dtype=np.float64)
        after = np.asarray(getattr(new, field).value["w"]).reshape(workers, -1)
        assert np.any(before)
        np.testing.assert_allclose(after, np.stack([before] * workers), rtol=1e-6, atol=1e-9)
    chex.assert_trees_all_equal(
        jax.device_get(rescale_residuals(state.opt_state, workers)),
        jax.device_get(resumed.opt_state),
    )
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(resumed.params))
    _, metrics = step(resumed, BATCH)
    assert float(metrics["loss"]) < losses[0]


def test_a_rescaled_state_says_what_is_wrong():
    with pytest.raises(ValueError, match="the state has no per-worker arrays"):
        rescale_residuals(optfn.sgd(0.1).init(jnp.zeros(3)), 2)
    with pytest.raises(ValueError, match="the mapping has no per-worker arrays"):
        rescale_residuals(optfn.state_dict(optfn.sgd(0.1).init(jnp.zeros(3))), 2)
    state = init_state(dgc(), start(), data_mesh(2))
    state = (state[0]._replace(num_workers=jnp.int32(7)), state[1])
    with pytest.raises(ValueError, match=r"shape \(2400,\).*7 workers"):
        rescale_residuals(state, 2)
    # The number of workers is one of the things that must fit.
    with pytest.raises(
        ValueError, match=r"residual/w.*shape \(2400,\), but the template has \(4800,\)"
    ):
        optfn.load_state_dict(
            init_state(dgc(), start(), data_mesh(4)),
            optfn.state_dict(init_state(dgc(), start(), data_mesh(2))),
        )


def test_specs_and_state_for_an_own_shard_map():
    """Through a chain, a mask and wrappers; what is replicated stays so."""
    params = {k: jnp.asarray(x, jnp.float32) for k, x in start().items()}
    tx = optfn.master_weights(
        optax.chain(optax.masked(dgc(), {"w": True, "b": False}), optfn.model_average(0.5))
    )
    mesh, specs = data_mesh(N), state_specs(tx, params)
    state = init_state(tx, params, mesh)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.spec == spec
    own = [x for x, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True) if
           spec == P("data")]  # fmt: skip
    assert [x.shape for x in own] == [(4800,), (4800,)]

    def body(params, state, x):
        g = jax.tree.map(lambda p: p * x[0], params)
        updates, state = tx.update(g, state, params)
        return optfn.apply_updates(params, updates), state

    step = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs), check_vma=False
    )
    new, state = jax.jit(step)(params, state, jnp.arange(4.0))
    assert not np.array_equal(new["w"], params["w"])
    assert optfn.summary(tx, params)


@pytest.mark.nightly  # its steps are compared with a reference in test_compression.py
@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_it_trains_as_dense_momentum_does(wire):
    """Eight workers, a regression that 99 % sparsity learns to the same loss."""
    workers, width = 8, 64
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((width, 20)).astype(np.float32)

    def batch(key):
        x = jax.random.normal(key, (16, width))
        return x, x @ truth + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (16, 20))

    def loss_fn(params, key):
        x, y = batch(key)
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def train(tx):
        def worker(number):
            params = {"w": jnp.zeros((width, 20)), "b": jnp.zeros(20)}

            def step(carry, t):
                params, state = carry
                key = jax.random.fold_in(jax.random.key(7), t * workers + number)
                loss, g = jax.value_and_grad(loss_fn)(params, key)
                if not isinstance(state[0], DeepGradientCompressionState):
                    g = jax.lax.pmean(g, "data")
                params, state = one_step(tx, params, state, g)
                return (params, state), jax.lax.pmean(loss, "data")

            (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(400))
            return params, losses

        return jax.jit(jax.vmap(worker, axis_name="data"))(jnp.arange(workers))

    ramp = {"rampup_begin_step": 20, "rampup_step": 40, "sparsity": (0.75, 0.9375, 0.99)}
    dense = train(optfn.momentum(0.1, 0.9))[1]
    assert dense[0, 0] > 20 and dense[0, -20:].mean() < 0.02
    params, sparse = train(optfn.dgc_momentum(0.1, 0.9, min_size=100, wire=wire, **ramp))
    for worker in range(workers):
        chex.assert_trees_all_equal(
            *(jax.tree.map(lambda x, w=w: x[w], params) for w in (0, worker))
        )
    assert sparse[0, -20:].mean() < 0.02


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"are \('workers',\)\. Name those of the workers: data_"):
        optfn.make_train_step(loss_fn, dgc(), mesh=data_mesh(2, axis_name="workers"))
    with pytest.raises(ValueError, match="at most the 8 devices; got 9"):
        data_mesh(9)
    step = optfn.make_train_step(loss_fn, dgc(), mesh=data_mesh(N))
    with pytest.raises(ValueError, match=r"4 workers; leaf 'x' has shape \(6, 40\)"):
        step(step.init(start()), {"x": X[:6], "y": Y[:6]})


@pytest.mark.parametrize("shard", [None, "state", "params"])
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8)])
def test_a_state_of_other_devices_is_refused_by_their_number(shard, before, after):
    def made(devices):
        tx, mesh = optfn.adam(0.1), data_mesh(devices)
        return optfn.make_train_step(
            lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh=mesh, shard=shard
        )

    params, x = {"w": np.ones((16, 8), np.float32)}, np.ones((16, 16), np.float32)
    state, _ = made(before)(made(before).init(params), x)
    step = made(after)
    words = f"the state lies on {before} devices, but the mesh of the step has {after}.*load_state_"
    with pytest.raises(ValueError, match=words):
        step(state, x)
    state = optfn.load_state_dict(step.init(params), optfn.state_dict(state))
    assert int(step(state, x)[0].step) == 2
