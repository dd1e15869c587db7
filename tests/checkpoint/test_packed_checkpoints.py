"""Checkpoints of packed runs and of runs of the tree, whose workers keep state of their own."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from grids import suite
from problems import state_after

import optfn
from optfn.distributed import data_mesh, exchange, rescale_residuals, top_k

RNG = np.random.default_rng(0)
# Two dtypes, shapes that repeat, a scalar, and leaves that are in no buffer.
PARAMS = {
    "a": {"w": RNG.normal(size=(5, 4)).astype(np.float32), "b": np.float32(0.5)},
    "c": {"w": RNG.normal(size=(5, 4)).astype(np.float32)},
    "h": RNG.normal(size=(4, 3)).astype(jnp.bfloat16),
    "n": np.int32(3),
    "empty": np.zeros((0, 2), np.float32),
}
X = RNG.normal(size=(8, 16, 5)).astype(np.float32)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"]) * (x @ params["c"]["w"])
    return jnp.mean((hidden @ params["h"].astype(jnp.float32) - 1.0) ** 2)


RUNS = {
    "local steps": (
        lambda: optfn.adam(0.01),
        {"local_steps": 2, "outer": optfn.momentum(0.7, 0.9, nesterov=True)},
    ),
    "local steps, an exchange outside": (
        lambda: optfn.lamb(0.01),
        {"local_steps": 2, "outer": optfn.chain(exchange(top_k(0.5), min_size=8), optfn.sgd(0.7))},
    ),
    "an exchange": (lambda: optfn.chain(exchange(top_k(0.5), min_size=8), optfn.adam(0.01)), {}),
    # These are other numbers than those of the tree: a scale and a selection span a buffer.
    "local steps, 8 bits": (lambda: optfn.adam(0.01, moment_dtype="int8"), {"local_steps": 2}),
    "a whole buffer": (
        lambda: optfn.dgc_momentum(0.01, 0.9, rampup_begin_step=1, sparsity=(0.99,), min_size=8),
        {},
    ),
}
OF_THE_TREE = [name for name in RUNS if name not in ("local steps, 8 bits", "a whole buffer")]


WAYS = [
    (name, here, there, sharded)
    for name, here, there, sharded in itertools.product(RUNS, *[(False, True)] * 3)
    if here == there or name in OF_THE_TREE
]


@functools.cache
def made(name, packed, workers=4):
    make, options = RUNS[name]
    mesh = data_mesh(workers)
    return optfn.make_train_step(loss_fn, make(), mesh=mesh, packed=packed, **options)


@pytest.mark.parametrize(
    ("name", "workers"), suite(itertools.product(OF_THE_TREE, [4, 1]), ("local steps", 4))
)
def test_the_names_and_arrays_of_a_packed_run_are_those_of_the_tree(name, workers):
    tree, packed = (
        optfn.state_dict(state_after(step, step.init(PARAMS), X[:3]))
        for step in (made(name, False, workers), made(name, True, workers))
    )
    np.testing.assert_array_equal(tree.pop("per_worker"), packed.pop("per_worker"))
    assert list(tree) == list(packed)
    for key, x in tree.items():
        assert x.dtype == packed[key].dtype, key
        if x.dtype == np.uint16:
            x, packed[key] = (y.view(jnp.bfloat16).astype(np.float32) for y in (x, packed[key]))
        np.testing.assert_allclose(packed[key], x, rtol=2e-2, atol=1e-4, err_msg=key)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "here", "there", "sharded"), [*WAYS])
def test_a_checkpoint_loads_into_either_and_goes_on(name, here, there, sharded, tmp_path):
    """From packed params (`here`) or the tree into packed params (`there`) or the tree."""
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    step, other = made(name, here), made(name, there)
    state = state_after(step, step.init(PARAMS), X[:3])
    want = optfn.state_dict(state)
    optfn.save_checkpoint(tmp_path, state, sharded=sharded)
    template = other.init(PARAMS)
    lies = [x.sharding for x in jax.tree.leaves(template)]
    state_after(other, other.init(PARAMS), X[:2])
    compiled = compilations(other)
    loaded, _ = optfn.restore_checkpoint(tmp_path, template)
    chex.assert_trees_all_equal(optfn.state_dict(loaded), want)
    assert [x.sharding for x in jax.tree.leaves(loaded)] == lies
    after, expected = (
        optfn.unpack(state_after(a, b, X[3:5]).params) for a, b in ((other, loaded), (step, state))
    )
    chex.assert_trees_all_close(after, expected, rtol=2e-2, atol=1e-4)
    assert compilations(other) == compiled


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sharded", "workers"),
    [*itertools.product(RUNS, [False, True], [2, 1])],
)
def test_a_packed_run_goes_on_with_fewer_workers(name, sharded, workers, tmp_path):
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    step = made(name, True)
    state = state_after(step, step.init(PARAMS), X[:3])
    optfn.save_checkpoint(tmp_path, state, sharded=sharded)
    mapping = rescale_residuals(optfn.state_dict(state), workers)
    for packed in (False, True) if name in OF_THE_TREE else (True,):
        other = made(name, packed, workers)
        loaded, _ = optfn.restore_checkpoint(tmp_path, other.init(PARAMS))
        chex.assert_trees_all_equal(optfn.state_dict(loaded), mapping)
        assert np.isfinite(other(loaded, X[3])[1]["loss"])
