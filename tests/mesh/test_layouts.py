"""A checkpoint of workers with an exchange goes on in any other layout of workers."""

import functools
import importlib.util
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from compilations import compilations
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import state_after

import optfn
from optfn.distributed import exchange, rescale_residuals, sharded, top_k

ROWS, WIDTH, LAYERS, EXAMPLES = 32, 16, 4, 32


PARAMS = {
    "table": weights(0, ROWS, WIDTH),
    "layers": optfn.Stacked({"w": weights(1, LAYERS, WIDTH, WIDTH)}),
    "odd": np.ones(3, np.float32),
}


def loss_fn(params, batch):
    ids, target = batch
    x = params["table"][ids]
    for w in params["layers"].layers["w"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((jnp.mean(x, -1) * jnp.sum(params["odd"]) - target) ** 2)


def batches(count):
    rng = np.random.default_rng(2)
    ids = rng.integers(0, ROWS, (count, EXAMPLES))
    return list(zip(ids, rng.normal(size=(count, EXAMPLES)).astype(np.float32), strict=True))


def two_levels(shard, groups=2, **options):
    sizes = {"data": groups, "fast": 2}
    return sizes, {"shard": sharded(shard, axis="fast"), **options}


# The sizes of the axes of a mesh, of which "model" alone splits no batch, and how a run lies on it.
LAYOUTS = {
    "two workers": ({"data": 2}, {}),
    "four workers": ({"data": 4}, {}),
    "packed workers": ({"data": 2}, {"packed": True}),
    "model axis": ({"data": 2, "model": 2}, {"shard": {"layers/w": P(None, None, "model")}}),
    "two levels, state": two_levels("state"),
    "two levels, params": two_levels("params"),
    "two levels, specs": two_levels({"table": P("fast")}),
    "two levels, packed": two_levels("params", packed=True),
    "four groups": two_levels("params", groups=4),
}


def dense():
    return optfn.adam(1e-2, grad_clip=optfn.clip_by_global_norm(1.0))


def linked():
    return optfn.chain(exchange(top_k(0.5, chunk=8), axis_name="data", min_size=16), dense())


@functools.cache
def saved(name, kind, directory):
    """Return the directory of a checkpoint of two steps of a run, and its state by name."""
    step = step_of(name, kind)
    state = state_after(step, step.init(PARAMS), batches(2))
    optfn.save_checkpoint(directory / name / kind, state, sharded=False)
    return directory / name / kind, optfn.state_dict(state)


def step_of(name, kind):
    sizes, options = LAYOUTS[name]
    mesh = Mesh(
        np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values()), [*sizes]
    )
    axes = tuple(axis for axis in sizes if axis != "model")
    rounds = {"local_steps": 2, "outer": linked()} if kind == "local_steps" else {}
    tx = dense() if rounds else linked()
    return optfn.make_train_step(loss_fn, tx, mesh=mesh, data_axis=axes, **options, **rounds)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


def assert_same_values(found, expected):
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        if key != "per_worker":
            np.testing.assert_array_equal(np.ravel(found[key]), np.ravel(x), key)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (a, b, kind)
        for kind in ("exchange", "local_steps")
        for a, b in itertools.permutations(LAYOUTS, 2)
    ],
)
def test_what_each_worker_keeps_goes_on_in_another_layout(before, after, kind, directory):
    where, mapping = saved(before, kind, directory)
    step = step_of(after, kind)
    state, _ = optfn.restore_checkpoint(where, step.init(PARAMS))
    residuals = [key for key in mapping if "residual" in key]
    assert len(residuals) == 2 and all(np.any(mapping[key]) for key in residuals)
    workers, before_it = (LAYOUTS[name][0]["data"] for name in (after, before))
    if workers != before_it:
        mapping = rescale_residuals(mapping, workers)
    assert_same_values(optfn.state_dict(state), mapping)
    state_after(step, state, batches(3)[2:])
    assert compilations(step) == 1


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="needs the extra orbax")
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations([*LAYOUTS][-4:-1], 2)])
def test_a_directory_goes_on_in_another_layout(before, after, tmp_path):
    step = step_of(before, "exchange")
    state = state_after(step, step.init(PARAMS), batches(2))
    optfn.save_checkpoint(tmp_path, state, sharded=True)
    found, _ = optfn.restore_checkpoint(tmp_path, step_of(after, "exchange").init(PARAMS))
    assert_same_values(optfn.state_dict(found), optfn.state_dict(state))
