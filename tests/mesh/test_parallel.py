"""A training step on a mesh: data parallel, and with Deep Gradient Compression."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from hlo import collectives
from jax.sharding import PartitionSpec as P

import optfn
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


def test_no_moments_of_own_gradients():
    """Each worker would have other ones, in an array that stands for all."""
    for before in (optfn.scale_by_adam(), optfn.exponential_moving_average()):
        step = optfn.make_train_step(loss_fn, optfn.chain(before, dgc()), mesh=data_mesh(N))
        with pytest.raises(ValueError, match="part 0 of a chain would differ between workers"):
            step(step.init(start()), BATCH)


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
    assert optfn.summary(tx, params)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"are \('workers',\)\. Name those of the workers: data_"):
        optfn.make_train_step(loss_fn, dgc(), mesh=data_mesh(2, axis_name="workers"))
    with pytest.raises(ValueError, match="at most the 8 devices; got 9"):
        data_mesh(9)
    step = optfn.make_train_step(loss_fn, dgc(), mesh=data_mesh(N))
    with pytest.raises(ValueError, match=r"4 workers; leaf 'x' has shape \(6, 40\)"):
        step(step.init(start()), {"x": X[:6], "y": Y[:6]})


@pytest.mark.parametrize(
    ("shard", "before", "after"), [(None, 4, 8), ("state", 8, 4), nightly("params", 4, 8)]
)
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
