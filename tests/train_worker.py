"""One process of a distributed run, as `test_processes` starts it.

    python train_worker.py PORT PROCESSES ID STEPS DIRECTORY [dies] [exchange]

It trains on a loopback mesh, one device per process, writes a checkpoint into DIRECTORY/ID every
second step, and prints a hash of its replica of the parameters at the end. With "dies", the last
process leaves without a word after the step 4. With "exchange" it compresses by `exchange` instead
of Deep Gradient Compression.
"""

import hashlib
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


def optimizer(by_exchange):
    if by_exchange:
        choice = {"w": power_sgd(2), "b": top_k(0.3, values="int8")}
        return optfn.chain(exchange(choice, min_size=1, warmup_steps=1), optfn.adamw(0.01))
    return optfn.dgc_momentum(
        0.05, 0.9, rampup_begin_step=1, rampup_step=4, sparsity=(0.5, 0.9, 0.99), min_size=100
    )


def train(process, processes, steps, directory, *, dies=False, by_exchange=False):
    tx = optimizer(by_exchange)
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
    words = {"dies": "dies" in sys.argv, "by_exchange": "exchange" in sys.argv}
    train(process, processes, steps, directory, **words)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
