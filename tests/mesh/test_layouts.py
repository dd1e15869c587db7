"""A checkpoint of one layout goes on in any other: values, and the run of one device after it."""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from compilations import compilations
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import exchange, rescale_residuals, sharded, top_k
from optfn.tables.sharded_table import to_logical

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


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how a run lies on it.

    sizes: of the axes of the mesh, in order; none without a mesh.
    data: how many of them, the first ones, split the batch.
    workers: the number of workers.
    """

    sizes: dict
    data: int
    workers: int
    options: dict = dataclasses.field(default_factory=dict)

    def step(self, tx, **more):
        options = {**self.options, **more}
        if self.sizes:
            names, sizes = tuple(self.sizes), tuple(self.sizes.values())
            devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
            options |= {"mesh": Mesh(devices, names), "data_axis": names[: self.data]}
        return optfn.make_train_step(loss_fn, tx, **options)


def on(sizes, data, workers, **options):
    return Layout(sizes, data, workers, options)


TWO = {"data": 2, "fast": 2}
LAYOUTS = {
    "one device": on({}, 0, 1),
    "packed": on({}, 0, 1, packed=True),
    "two workers": on({"data": 2}, 1, 2),
    "four workers": on({"data": 4}, 1, 4),
    "packed workers": on({"data": 2}, 1, 2, packed=True),
    "state": on({"data": 4}, 1, 0, shard="state"),
    "params": on({"data": 4}, 1, 0, shard="params"),
    "tables": on({"data": 4}, 1, 0, shard_tables=True, tables="table"),
    "model axis": on({"data": 2, "model": 2}, 1, 2, shard={"layers/w": P(None, None, "model")}),
    "two levels, state": on(TWO, 2, 2, shard=sharded("state", axis="fast")),
    "two levels, params": on(TWO, 2, 2, shard=sharded("params", axis="fast")),
    "two levels, specs": on(TWO, 2, 2, shard=sharded({"table": P("fast")}, axis="fast")),
    "two levels, packed": on(TWO, 2, 2, shard=sharded("params", axis="fast"), packed=True),
    "four groups": on({"data": 4, "fast": 2}, 2, 4, shard=sharded("params", axis="fast")),
}
OF_WORKERS = [name for name, layout in LAYOUTS.items() if layout.workers and layout.sizes]
DENSE = functools.partial(optfn.adam, 1e-2, grad_clip=optfn.clip_by_global_norm(1.0))


def linked():
    return optfn.chain(exchange(top_k(0.5, chunk=8), axis_name="data", min_size=16), DENSE())


def advanced(step, state, some):
    for batch in some:
        state, _ = step(state, batch)
    return state


@functools.cache
def saved(name, kind, directory):
    """Return the directory of a checkpoint of two steps of a run, and its state by name."""
    step = step_of(name, kind)
    state = advanced(step, step.init(PARAMS), batches(4)[:2])
    optfn.save_checkpoint(directory / name / kind, state, sharded=False)
    return directory / name / kind, optfn.state_dict(state)


def step_of(name, kind):
    if kind == "local_steps":
        return LAYOUTS[name].step(DENSE(), local_steps=2, outer=linked())
    return LAYOUTS[name].step(DENSE() if kind == "dense" else linked())


@functools.cache
def alone():
    step = LAYOUTS["one device"].step(DENSE())
    return advanced(step, step.init(PARAMS), batches(4)).params


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
    ("before", "after"),
    [*itertools.permutations(LAYOUTS, 2)],
)
def test_a_run_goes_on_in_another_layout(before, after, directory):
    where, mapping = saved(before, "dense", directory)
    step = step_of(after, "dense")
    state, _ = optfn.restore_checkpoint(where, step.init(PARAMS))
    assert_same_values(optfn.state_dict(state), mapping)
    state = advanced(step, state, batches(4)[2:])
    assert compilations(step) == 1
    params = optfn.unpack(state.params) if "packed" in after else to_logical(state.params)
    for x, y in zip(jax.tree.leaves(alone()), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(y, x, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (a, b, kind)
        for kind in ("exchange", "local_steps")
        for a, b in itertools.permutations(OF_WORKERS, 2)
    ],
)
def test_what_each_worker_keeps_goes_on_in_another_layout(before, after, kind, directory):
    where, mapping = saved(before, kind, directory)
    step = step_of(after, kind)
    state, _ = optfn.restore_checkpoint(where, step.init(PARAMS))
    residuals = [key for key in mapping if "residual" in key]
    assert len(residuals) == 2 and all(np.any(mapping[key]) for key in residuals)
    workers = LAYOUTS[after].workers
    if workers != LAYOUTS[before].workers:
        mapping = rescale_residuals(mapping, workers)
    assert_same_values(optfn.state_dict(state), mapping)
    advanced(step, state, batches(3)[2:])
    assert compilations(step) == 1


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="needs the extra orbax")
@pytest.mark.parametrize(
    ("before", "after"),
    [*itertools.permutations(OF_WORKERS[-4:-1], 2)],
)
def test_a_directory_goes_on_in_another_layout(before, after, tmp_path):
    step = step_of(before, "exchange")
    state = advanced(step, step.init(PARAMS), batches(2))
    optfn.save_checkpoint(tmp_path, state, sharded=True)
    found, _ = optfn.restore_checkpoint(tmp_path, step_of(after, "exchange").init(PARAMS))
    assert_same_values(optfn.state_dict(found), optfn.state_dict(state))
