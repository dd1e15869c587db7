"""One process of a distributed run, as `test_processes` starts it.

    python train_worker.py PORT PROCESSES ID STEPS DIRECTORY [dies | state | params]

It trains on a loopback mesh, one device per process, writes a checkpoint into DIRECTORY/ID every
second step, and prints a hash of its replica of the parameters at the end. With "dies", the last
process leaves without a word after the step 4. With "state" or "params", these are sharded, and
the last line has the parameters themselves.
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
from optfn.distributed import data_mesh, rescale_residuals


def loss_fn(params, batch):
    return jnp.mean((batch[:, :20] @ params["w"] + params["b"] - batch[:, 20:]) ** 2)


def train(process, processes, steps, directory, dies=False):
    tx = optfn.dgc_momentum(
        0.05, 0.9, rampup_begin_step=1, rampup_step=4, sparsity=(0.5, 0.9, 0.99), min_size=100
    )
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh())
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    state = restored(directory, state, processes)
    rng = np.random.default_rng(0)
    for t, batch in enumerate(rng.standard_normal((steps, 8, 50)).astype(np.float32)):
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


def train_sharded(kind, steps, directory):
    """Train with params or state spread over the processes; print what comes out."""
    tx = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
    step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(), shard=kind)
    state = step.init({"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)})
    rng = np.random.default_rng(0)
    for batch in rng.standard_normal((steps, 8, 50)).astype(np.float32):
        state, metrics = step(state, batch)
    mu = state.opt_state[1].mu["w"].addressable_shards[0].data.shape
    directory.mkdir(parents=True)
    path = optfn.save_checkpoint(directory, state)
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
    directory = Path(sys.argv[5]) / str(process)
    if sys.argv[-1] in ("state", "params"):
        train_sharded(sys.argv[-1], steps, directory)
    else:
        train(process, processes, steps, directory, dies="dies" in sys.argv)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
