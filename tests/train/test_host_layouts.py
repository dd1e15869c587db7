"""Optimizer state on the host under explicit axes, and after a kill in another layout."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import by_name, suite
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh, scan_layers
from optfn.loss.jaxprs import row_loops
from optfn.mesh.compilers import memories

RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(6, 16, 16)).astype(np.float32)
SHAPES = {"in": (16, 32), "layers": (8, 32, 32), "out": (32, 24)}
PARAMS = {k: jnp.asarray(RNG.normal(size=s) / 6, jnp.float32) for k, s in SHAPES.items()}
PARAMS["layers"] = optfn.Stacked(PARAMS["layers"])
TX = optfn.adamw(1e-2, grad_clip=optfn.clip_by_global_norm(0.5))
ON_HOST = {"state_memory": "pinned_host"}


@pytest.fixture(autouse=True, scope="module")
def small_arrays():
    """Send arrays of half a kilobyte, in several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield


def shrink(patch):
    patch.setattr(memories, "LARGE", 512)
    patch.setattr(row_loops, "CHUNK", 1024)


def loss_fn(p, x):
    h = scan_layers(lambda w, h: h + jnp.tanh(h @ w), p["layers"], x @ p["in"])
    return jnp.mean((h @ p["out"]) ** 2)


def grid(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(kind,) * 2)


def kinds(state):
    found = filter(memories.is_large, jax.tree.leaves(state.opt_state))
    return {x.sharding.memory_kind for x in found}


def assert_near(found, want):
    for x, y in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-5, atol=1e-5
        )


SPECS = {"in|out": P(None, "model"), "layers": P(None, None, "model")}
EXPLICIT = {
    "data": {},
    "state": {"shard": "state"},
    "params": {"shard": "params"},
    "specs": {"shard": SPECS},
    "compiler": {"shard": SPECS, "partitioner": "compiler"},
}


@pytest.mark.parametrize("name", suite(EXPLICIT, "params", "compiler"))
def test_explicit_axes(name):
    found = []
    for more in ({}, ON_HOST):
        step = optfn.make_train_step(
            loss_fn, TX, mesh=grid(AxisType.Explicit), **EXPLICIT[name], **more
        )
        state = step.init(PARAMS)
        for batch in BATCHES[:2]:
            state, _ = step(state, batch)
        found.append(state)
    assert kinds(found[1]) == {"pinned_host"}
    assert_near(found[1], found[0])


def train(directory, batches, **options):
    state, _ = optfn.minimize(
        loss_fn, TX, PARAMS, batches, checkpoint=directory, save_every=1, keep=2, progress=False,
        **options,
    )  # fmt: skip
    return state


def give_and_die():
    yield from BATCHES[:4]
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the directory of a run with its state on the host, which is killed in step 5."""
    pytest.importorskip("orbax.checkpoint")
    directory = tmp_path_factory.mktemp("killed")
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert run.returncode == -signal.SIGKILL
    return directory


AFTER = {
    "the same": lambda: {"mesh": data_mesh(), "shard": "params", **ON_HOST},
    "one device": lambda: {},
    "one device, on the host": lambda: ON_HOST,
    "another mesh": lambda: {"mesh": grid(), "shard": SPECS, **ON_HOST},
}


@pytest.mark.nightly
@pytest.mark.parametrize("options", by_name(AFTER, *AFTER))
def test_a_killed_run_goes_on_in_another_layout(killed, tmp_path, options):
    directory, options = tmp_path / "run", options()
    shutil.copytree(killed, directory)
    seen = []
    state = train(directory, BATCHES, **options, callback=lambda step, *_: seen.append(step))
    assert 0 < len(seen) < len(BATCHES) and state.step == len(BATCHES)
    assert ("pinned_host" in kinds(state)) == ("state_memory" in options)
    want, _ = optfn.minimize(loss_fn, TX, PARAMS, BATCHES, progress=False)
    assert_near(state, want)


if __name__ == "__main__":
    shrink(pytest.MonkeyPatch())
    train(sys.argv[1], give_and_die(), mesh=data_mesh(), shard="params", steps=6, **ON_HOST)
