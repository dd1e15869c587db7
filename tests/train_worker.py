"""One process of a distributed run, as `test_processes` starts it.

    python train_worker.py PORT PROCESSES ID STEPS DIRECTORY WORD...

"dgc" and "exchange" train on a loopback mesh, one device per process, by Deep Gradient Compression
and with compressors of both kinds. They write a checkpoint into DIRECTORY/ID/WORD every second
step, and print a hash of their replica of the parameters at the end. With "dies" as well, the last
process leaves without a word after step 4. "sharded" trains three times: with the state, the params
and a table spread over the processes; the last lines have the parameters of each.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from optfn.distributed import data_mesh, exchange, power_sgd, rescale_residuals, top_k


def loss_fn(params, batch):
    return jnp.mean((batch[:, :20] @ params["w"] + params["b"] - batch[:, 20:]) ** 2)


def optimizer(scheme):
    if scheme == "exchange":
        choice = {"w": power_sgd(2), "b": top_k(0.3, values="int8")}
        return optfn.chain(exchange(choice, min_size=1, warmup_steps=1), optfn.adamw(0.01))
    return optfn.dgc_momentum(
        0.05, 0.9, rampup_begin_step=1, rampup_step=4, sparsity=(0.5, 0.9, 0.99), min_size=100
    )


def train(scheme, process, processes, steps, directory, dies):
    tx = optimizer(scheme)
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh())
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    state = restored(directory, state, processes)
    rng = np.random.default_rng(0)
    for t, batch in enumerate(rng.standard_normal((steps, 12, 50)).astype(np.float32)):
        if t < int(state.step):
            continue
        if dies and process == processes - 1 and t == 4:
            os._exit(1)
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


def sharded_run(kind):
    """Return the loss, the optimizer, the options and the batches of a run that is sharded so."""
    rng = np.random.default_rng(0)
    if kind != "tables":
        tx = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
        batches = rng.standard_normal((4, 8, 50)).astype(np.float32)
        return loss_fn, tx, {"shard": kind}, batches
    tx = optfn.adam(0.01, lazy=True, grad_clip=optfn.clip_by_global_norm(1.0))
    ids, y = rng.integers(0, 20, (4, 8)), rng.standard_normal((4, 8, 30)).astype(np.float32)
    batches = list(zip(ids.astype(np.int32), y, strict=True))
    return table_loss, tx, {"tables": "w", "shard_tables": True}, batches


def train_sharded(kind, directory):
    """Train with params, state or tables spread over the processes; print what comes out."""
    loss, tx, options, batches = sharded_run(kind)
    step = optfn.make_train_step(loss, tx, mesh=data_mesh(), **options)
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    for batch in batches:
        state, metrics = step(state, batch)
    mu = state.opt_state[1].mu["w"].addressable_shards[0].data.shape
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
    print(json.dumps({"loss": float(metrics["loss"]), "mu": mu, **params}), flush=True)


def restored(directory, state, processes):
    """Return what the newest checkpoint holds, for as many workers as there are now."""
    found = sorted(Path(directory).glob("step_*.npz"))
    if not found:
        return state
    with np.load(found[-1]) as file:
        mapping = {name: file[name] for name in file.files}
    return optfn.load_state_dict(state, rescale_residuals(mapping, processes))


def main():
    port, processes, process, steps = map(int, sys.argv[1:5])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10
    )
    directory, words = Path(sys.argv[5]) / str(process), sys.argv[6:]
    if words == ["sharded"]:
        for kind in ("state", "params", "tables"):
            train_sharded(kind, directory)
    for scheme in ("dgc", "exchange"):
        if scheme in words:
            train(scheme, process, processes, steps, directory / scheme, "dies" in words)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
