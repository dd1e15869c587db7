"""One process of the run that `faults` disturbs.

    python worker.py '{"directory": …, "process": 0, "processes": 2, "port": …, …}'

It trains a small model by `minimize`, one device a process, prints each step, and at the end a hash
of its params. The other options make it the worker that something is wrong with.
"""

import ctypes
import datetime
import hashlib
import json
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

import optfn
from optfn.distributed import compare_replicas, data_mesh, exchange, top_k
from optfn.tables.sharded_table import to_logical

STEPS = 12
ROWS = 24  # of the table
OPTIONS = {
    "process": 0,
    "processes": 1,
    "address": "127.0.0.1",
    "port": 0,
    "steps": STEPS,
    "pause": 0.0,  # seconds before each batch
    "save_every": 1,
    "save_seconds": 0.0,  # between checkpoints, instead of steps
    "slow_disk": 0.0,  # seconds for each write to the disk
    "seed": 0,  # of the params
    "examples": 8,  # in a batch
    "bad": [],  # what steps 3, 4, … have in a target of the second of two workers
    "version": None,  # of optfn
    "shard": None,  # "state" or "params": checkpoints in parts, in one directory
    "table": False,  # a further parameter whose rows are looked up, and divided with `shard`
    "exchange": False,  # of compressed gradients, with residuals
    "local_steps": 1,
    "two_level": False,  # a mesh of two machines
    "flip": 0,  # the step after which a bit of a parameter is another one in this process
    "agent": False,  # whether a launcher says in the environment who and where the processes are
    "clock": 0.0,  # seconds that Python's clock is ahead
    "heartbeat": 10,
    "initialization": 60,
}


def loss_fn(params, batch):
    x = batch[:, :6]
    if "table" in params:
        x = x + params["table"][jnp.int32(100 * jnp.abs(batch[:, 0])) % ROWS]
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - batch[:, 6:]) ** 2)


def optimizer(exchanges=False):
    tx = optfn.adamw(0.01, grad_clip=optfn.clip_by_global_norm(1.0))
    if exchanges:
        tx = optfn.chain(exchange(top_k(0.25), min_size=1), tx)
    return optfn.skip_nonfinite(tx)


def params_of(seed=0, table=False):
    rng = np.random.default_rng(seed)
    shapes = {"w": (6, 16), "b": (16,), "v": (16, 2)}
    if table:
        shapes["table"] = (ROWS, 6)
    return {k: rng.standard_normal(s).astype(np.float32) * 0.3 for k, s in shapes.items()}


def batches(examples=8, bad=()):
    rng = np.random.default_rng(1)
    found = rng.standard_normal((STEPS, examples, 8)).astype(np.float32)
    for step, value in enumerate(bad, 2):
        found[step, -1, -1] = value
    return found


def digest(params):
    own = hashlib.sha256()
    for x in jax.tree.leaves(to_logical(params)):
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = process_allgather(x, tiled=True)
        own.update(np.asarray(x).tobytes())
    return own.hexdigest()


def train(
    mesh,
    directory,
    batches,
    *,
    steps=STEPS,
    save_every=1,
    seed=0,
    exchange=False,
    table=False,
    **options,
):
    return optfn.minimize(
        loss_fn,
        optimizer(exchange),
        params_of(seed, table),
        batches,
        steps=steps,
        mesh=mesh,
        progress=False,
        tables="table" if table else None,
        checkpoint=directory,
        save_every=save_every,
        **options,
    )[0]


def own_part(x):
    """Return the part of an array that this process has; with local steps each has its own."""
    return x.addressable_data(0) if isinstance(x, jax.Array) else x


def flip_a_bit(x):
    """Change the memory of an array in this process, as a fault of the hardware does."""
    place = x.addressable_data(0).unsafe_buffer_pointer()
    # A high bit of the mantissa: the lowest one may be lost when the next step rounds.
    ctypes.c_uint8.from_address(place + 2).value ^= 1


def mesh_of(two_level):
    """Return the mesh of all devices, and the names of its axes over which batches are divided."""
    if two_level:
        return Mesh(np.array(jax.devices()).reshape(2, -1), ("slow", "fast")), ("slow", "fast")
    return data_mesh(), "data"


def say(*words):
    """Print a line by one write, between whose parts no other thread can write."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def disturb(options):
    if options["version"]:
        optfn._version.__version__ = options["version"]
    if options["clock"]:
        now = time.time
        time.time = lambda: now() + options["clock"]
    if options["slow_disk"]:
        sync = os.fsync

        def slowly(descriptor):
            say("saving")
            time.sleep(options["slow_disk"])
            sync(descriptor)

        os.fsync = slowly


def main():
    options = OPTIONS | json.loads(sys.argv[1])
    process, processes = options["process"], options["processes"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    disturb(options)
    address = f"{options['address']}:{options['port']}"
    if options["agent"]:
        processes, process = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    say("worker", process, "of", processes, "pid", os.getpid())
    if processes > 1:
        jax.distributed.initialize(
            address,
            processes,
            process,
            initialization_timeout=options["initialization"],
            heartbeat_timeout_seconds=options["heartbeat"],
            shutdown_timeout_seconds=60,
        )

    def paused():
        for batch in batches(options["examples"], options["bad"]):
            time.sleep(options["pause"])
            yield batch

    def callback(step, state, metrics):
        say("step", step, metrics["loss"])
        if mesh is not None:
            compare_replicas(state, mesh)
        if step == options["flip"]:
            flip_a_bit(state.params["w"])

    seconds = options["save_seconds"]
    mesh, data_axis = mesh_of(options["two_level"])
    state = train(
        mesh,
        options["directory"],
        paused(),
        steps=options["steps"],
        save_every=datetime.timedelta(seconds=seconds) if seconds else options["save_every"],
        seed=options["seed"],
        callback=callback,
        shard=options["shard"],
        exchange=options["exchange"],
        table=options["table"],
        local_steps=options["local_steps"],
        data_axis=data_axis,
    )
    names = optfn.state_dict(state.opt_state)
    (skipped,) = (x for name, x in names.items() if name.endswith("skip_nonfinite/skipped"))
    skipped = int(np.sum(own_part(skipped)))
    say("ended", int(state.step), digest(state.params), skipped)
    if processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
