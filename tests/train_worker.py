"""One process of a distributed run, as `test_processes` starts it.

    python train_worker.py PORT PROCESSES ID STEPS DIRECTORY WORD...

"dgc" and "exchange" train on a loopback mesh, one device per process, by Deep Gradient Compression
and with compressors of both kinds. They write a checkpoint into DIRECTORY/ID/WORD every second
step, and print a hash of their replica of the parameters at the end. The other words print a line
each, in JSON: the word and what was found; their files lie in DIRECTORY/WORD. "sharded" trains
four times: with the state, the params and a table spread over the processes, and with the
optimizer's state on their hosts. "two_levels" trains with params divided over the devices of each
process, which is one worker. "nonfinite" trains with a NaN in a batch, and resumes. "unlike" makes
the mistakes of a program for one process. "tuned" tries three ways, of which one fails in the last
process alone.
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import (
    data_mesh,
    exchange,
    power_sgd,
    quantize,
    rescale_residuals,
    sharded,
    top_k,
    tune,
)
from optfn.mesh.compilers import memories


def loss_fn(params, batch):
    return jnp.mean((batch[:, :20] @ params["w"] + params["b"] - batch[:, 20:]) ** 2)


def optimizer(scheme):
    if scheme == "exchange":
        choice = {"w": power_sgd(2), "b": top_k(0.3, values="int8")}
        return optfn.chain(exchange(choice, min_size=1, warmup_steps=1), optfn.adamw(0.01))
    return optfn.dgc_momentum(
        0.05, 0.9, rampup_begin_step=1, rampup_step=4, sparsity=(0.5, 0.9, 0.99), min_size=100
    )


def train(scheme, processes, steps, directory):
    tx = optimizer(scheme)
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh())
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    state = restored(directory, state, processes)
    rng = np.random.default_rng(0)
    for t, batch in enumerate(rng.standard_normal((steps, 12, 50)).astype(np.float32)):
        if t < int(state.step):
            continue
        state, metrics = step(state, batch)
        print("step", t, float(metrics["loss"]), flush=True)
        if t % 2:
            optfn.save_checkpoint(directory, state)
    own = hashlib.sha256()
    for leaf in jax.tree.leaves(state.params):
        own.update(np.asarray(leaf).tobytes())
    print("replica", own.hexdigest(), "workers", int(state.opt_state[0].num_workers), flush=True)


def table_loss(params, batch):
    ids, y = batch
    return jnp.mean((params["w"][ids] + params["b"] - y) ** 2)


SHARDED = ("state", "params", "tables", "host")


def sharded_run(kind):
    """Return the loss, the optimizer, the options and the batches of a run that is sharded so."""
    rng = np.random.default_rng(0)
    if kind != "tables":
        tx = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
        batches = rng.standard_normal((4, 8, 50)).astype(np.float32)
        on_host = {"shard": "params", "state_memory": "pinned_host"}
        return loss_fn, tx, on_host if kind == "host" else {"shard": kind}, batches
    tx = optfn.adam(0.01, lazy=True, grad_clip=optfn.clip_by_global_norm(1.0))
    ids, y = rng.integers(0, 20, (4, 8)), rng.standard_normal((4, 8, 30)).astype(np.float32)
    batches = list(zip(ids.astype(np.int32), y, strict=True))
    return table_loss, tx, {"tables": "w", "shard_tables": True}, batches


def train_sharded(kind, directory):
    """Train with params, state or tables spread over the processes, or with the optimizer's state
    on their hosts, and return what comes out."""
    memories.LARGE = 512
    loss, tx, options, batches = sharded_run(kind)
    step = optfn.make_train_step(loss, tx, mesh=data_mesh(), **options)
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    for batch in batches:
        state, metrics = step(state, batch)
    mu = state.opt_state[1].mu["w"]
    shared = directory.parent / kind
    optfn.save_checkpoint(shared, state)
    found, _ = optfn.restore_checkpoint(
        shared, step.init({"w": np.ones((20, 30), np.float32), "b": np.ones(30, np.float32)})
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a.addressable_data(0), b.addressable_data(0))
    path = optfn.save_checkpoint(directory / kind, state, sharded=False)
    with np.load(path) as file:
        params = {k: file[f"train/params/{k}"].tolist() for k in ("w", "b")}
    place = {"mu": mu.addressable_shards[0].data.shape, "memory": mu.sharding.memory_kind}
    return {"loss": float(metrics["loss"]), **place, **params}


def loss_with_nan(params, batch):
    """The loss; of a batch with an entry above 100 one entry of the gradient is NaN."""
    bad = jnp.any(batch > 100.0)
    return loss_fn(params, batch) + jnp.where(bad, jnp.nan, 0.0) * params["w"][7, 3]


def two_levels(devices):
    """Return the losses and params of runs on two workers of so many devices each."""
    mesh = Mesh(np.array(jax.devices()[: 2 * devices]).reshape(2, devices), ("slow", "fast"))
    link = exchange(quantize(4, chunk=50), axis_name="slow", min_size=30)
    adam = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
    runs = {
        "local_steps": (adam, {"local_steps": 2}),
        "outer": (adam, {"local_steps": 2, "outer": optfn.chain(link, optfn.sgd(1.0))}),
        "exchange": (optfn.skip_nonfinite(optfn.chain(link, adam)), {}),
    }
    batches = np.random.default_rng(0).standard_normal((5, 16, 50)).astype(np.float32)
    batches[3, 13] = 1000.0  # an example of the second worker
    found = {}
    for name, (tx, options) in runs.items():
        step = optfn.make_train_step(
            loss_with_nan, tx, mesh=mesh, data_axis=("slow", "fast"),
            shard=sharded("params", axis="fast"), **options,
        )  # fmt: skip
        state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
        losses, hashes = [], []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            params = gathered(state.params)
            hashes.append(hashlib.sha256(params.tobytes()).hexdigest())
        found[name] = {"losses": losses, "hashes": hashes, "params": params.tolist()}
    return found


def train_nonfinite(directory):
    """Train with a NaN in the last batch, resume, and go on without it; return what there is.

    Both save in parts in one directory; with `whole` each writes files into its own.
    """
    rng = np.random.default_rng(0)
    good = rng.standard_normal((4, 8, 512)).astype(np.float32)
    bad = good.copy()
    bad[2, 7, 0] = np.nan  # an example of the second worker
    found = {}
    for kind in ("parts", "whole"):
        place = directory.parent / kind if kind == "parts" else directory / kind
        options = {"mesh": data_mesh(), "checkpoint": place, "keep": 1, "save_every": 1}
        options |= {"progress": False, "shard": "params" if kind == "parts" else None}

        def run(batches, options=options, place=place):
            params = {"w": np.zeros((1024, 512), np.float32)}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state, _ = optfn.minimize(
                    lambda p, x: jnp.mean((x @ p["w"].T - 1.0) ** 2), optfn.sgd(0.1), params,
                    batches, **options,
                )  # fmt: skip
            said = [str(x.message) for x in caught if x.category is UserWarning]
            multihost_utils.sync_global_devices("saved")
            names = sorted(path.name.removesuffix(".npz") for path in place.iterdir())
            multihost_utils.sync_global_devices("listed")
            digest = hashlib.sha256(gathered(state.params).tobytes()).hexdigest()
            return {"names": names, "said": said, "digest": digest}

        found[kind] = [run(bad), run(good)]
        found[kind].append(run(good, options | {"checkpoint": None}))
    return found


def make_mistakes(directory):
    """Pass examples of its own, and one directory for files of all; return the errors.

    Then train on both kinds of right batches, with a directory of its own and a shared one.
    """
    mesh, process = data_mesh(), jax.process_index()
    examples = np.random.default_rng(0).standard_normal((16, 50)).astype(np.float32)
    own = examples[8 * process :][:8]
    shared = directory.parent / "shared"
    found = {}

    def run(name, batches, place=None, **options):
        params = {"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)}
        try:
            state, history = optfn.minimize(
                loss_fn, optfn.adam(0.1), params, batches, mesh=mesh, checkpoint=place,
                progress=False, **options,
            )  # fmt: skip
            found[name] = [int(state.step), float(history["loss"][0])]
        except ValueError as error:
            found[name] = str(error)
        multihost_utils.sync_global_devices(name)

    run("own examples", [own])
    run("same examples", [examples])
    placed = NamedSharding(mesh, P("data"))
    whole = jax.tree.map(lambda x: jax.make_array_from_process_local_data(placed, x), own)
    run("global array", [whole])
    run("one directory", [examples], shared)
    found["left"] = sorted(path.name for path in shared.iterdir())
    run("own directories", [examples], shared / str(process))
    run("in parts", [examples], directory.parent / "parts", shard="state")
    # One batch fewer in process 1; a callback, and a directory, of process 0 alone.
    fewer = [examples] * (4 - process)
    run("fewer", fewer)
    run("fewer of a stream", iter(fewer))
    run("enough", fewer, steps=3)
    run("callback of one", [examples] * 4, callback=None if process else lambda n, s, m: n == 2)
    run("directory of one", [examples], None if process else directory.parent / "one")
    return found


def tune_ways(directory):
    """Return what `tune` finds in this process."""

    def loss(params, batch):
        if len(batch) == 3 and jax.process_index() == jax.process_count() - 1:
            raise ValueError("no batch of three here")
        return loss_fn(params, batch)

    params = {"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)}
    ways = [{"microbatches": 2}, {"shard": "params"}, {}]
    batch = jax.ShapeDtypeStruct((12, 50), np.float32)
    tuning = tune(
        loss, optfn.adam(0.1), params, batch, data_mesh(), ways=ways, measure=3, progress=False
    )
    return [[dict(row.way), row.seconds, row.problem] for row in tuning.rows]


def gathered(params):
    """Return arrays in one row of numbers, whole on every device."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(params)
    return np.concatenate([x.addressable_data(0).ravel() for x in jax.tree.leaves(whole)])


def restored(directory, state, processes):
    """Return what the newest checkpoint holds, for as many workers as there are now."""
    found = sorted(Path(directory).glob("step_*.npz"))
    if not found:
        return state
    with np.load(found[-1]) as file:
        mapping = {name: file[name] for name in file.files}
    return optfn.load_state_dict(state, rescale_residuals(mapping, processes))


# Each gets a directory of the process; its parent is shared by all.
RUNS = {
    "sharded": lambda d: [train_sharded(kind, d) for kind in SHARDED],
    "nonfinite": train_nonfinite,
    "unlike": make_mistakes,
    "tuned": tune_ways,
    "two_levels": lambda d: two_levels(jax.local_device_count()),
}


def main():
    port, processes, process, steps = map(int, sys.argv[1:5])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10
    )
    directory, words = Path(sys.argv[5]), sys.argv[6:]
    for word in words:
        if word in RUNS:
            print(json.dumps([word, RUNS[word](directory / word / str(process))]), flush=True)
    for scheme in ("dgc", "exchange"):
        if scheme in words:
            own = directory / str(process) / scheme
            train(scheme, processes, steps, own)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
