"""A run that goes on with the machines that are there: the program that a launcher starts.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=1234 python train.py checkpoints

docs/faults.md has how torchrun, Slurm and Kubernetes start it. The directory is one of each
machine, or "shared/{process}" on a disk that all share, of which each process takes its own.

It ends with status 0 when all steps are made, and with 75 when a signal has stopped it earlier; a
checkpoint is written then, and the program can be started again.
"""

import os
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import optfn

STEPS = 200


def join() -> None:
    """Meet the other processes: the launcher says how many they are, and where the first one is."""
    if "RANK" in os.environ:
        jax.distributed.initialize(
            coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            num_processes=int(os.environ["WORLD_SIZE"]),
            process_id=int(os.environ["RANK"]),
            heartbeat_timeout_seconds=20,
        )
    else:
        jax.distributed.initialize()  # Slurm, Open MPI


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the mean squared error of a network with one hidden layer."""
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the batches of all workers; 1, 2, 3, 4, 6 or 8 of them divide 48 examples."""
    rng = np.random.default_rng(0)
    target = rng.standard_normal((16, 4))
    for _ in range(STEPS):
        x = rng.standard_normal((48, 16)).astype(np.float32)
        yield x, np.tanh(x @ target).astype(np.float32)


def main() -> int:
    """Train; return the exit status."""
    join()
    rng = np.random.default_rng(1)
    shapes = {"in": (16, 32), "out": (32, 4)}
    params = {k: rng.standard_normal(s).astype(np.float32) / 4 for k, s in shapes.items()}
    state, _ = optfn.minimize(
        loss_fn,
        optfn.adamw(1e-2),
        params,
        batches(),
        steps=STEPS,
        mesh=optfn.distributed.data_mesh(),
        checkpoint=sys.argv[1].format(process=jax.process_index()),
        save_every=10,
    )
    return 0 if int(state.step) == STEPS else 75


if __name__ == "__main__":
    sys.exit(main())
