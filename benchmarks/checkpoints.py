"""How long does a checkpoint of a sharded state stop the training, and what memory does it take?

    python -m benchmarks.checkpoints [--megabytes 1000] [--leaves 48] [--processes 1] [--rounds 3]

Params and the moments of Adam, spread over eight devices of the CPU with `shard="params"`, saved as
one file, at once and in the background, and in parts, which orbax writes in the background.
"Blocking" is the time until `save_checkpoint` returns, "delay" the time until a program that
changes every array in place is done after it, which waits for the copy of the state, and "whole"
the time until all is on the disk. Memory is the most that the process held meanwhile beyond what it
held before, as a multiple of the bytes of the state on its devices. The floor is the time of
writing as many bytes to one file, with fsync. The first save, which compiles the checksums, does
not count.

With two processes of four devices each the numbers are those of process 0. A file has all of the
state there, gathered while the training waits; of parts, each process writes its own. With two
thousand arrays the dispatch of sixteen thousand copies takes most of the blocking time.
"""

import argparse
import functools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before jax is imported. Devices of the CPU also where there are others: there must be eight.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import optfn
from benchmarks import measure
from optfn.checkpoint import background
from optfn.distributed import data_mesh

DEVICES = 8
SECONDS = ("blocking", "delay", "whole")
FORMS = {
    "one file, at once": {"sharded": False},
    "one file": {"sharded": False, "background": True},
    "parts": {"sharded": True},
}
HEAD = (
    "| checkpoint | arrays | processes | MB | written MB | blocking s (min) | delay s (min) "
    "| whole s (min) | blocking/whole | delay/whole | memory, × its part "
    "| floor s | whole/floor |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Save(NamedTuple):
    """Seconds and bytes of a save."""

    blocking: float
    delay: float
    whole: float
    memory: float
    written: float


def state_of(megabytes: float, leaves: int) -> Any:
    """Return a training state of so many bytes, in three times as many arrays as params has."""
    size = int(megabytes * 1e6 / 4 / leaves / 512)
    rng = np.random.default_rng(0)
    params = {f"w{k}": rng.standard_normal((512, size), np.float32) for k in range(leaves // 3)}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(x) * sum(jnp.vdot(w, w) for w in params.values())

    step = optfn.make_train_step(loss_fn, optfn.adam(1e-3), mesh=data_mesh(DEVICES), shard="params")
    # Moments of zeros would be compressed to nothing.
    return step(step.init(params), np.ones(DEVICES, np.float32))[0]


def resident(field: str) -> float:
    """Return the bytes of a field of this process: VmRSS, or VmHWM, the most since `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith(field)))


def reset() -> None:
    """Begin anew with VmHWM."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise measure.Refused(f"no peak memory of this process: {error}") from error


def save(state: Any, folder: Path, **form: bool) -> tuple[Any, Save]:
    """Save a state and wait for it; the folder is empty before and after. The state is used up."""
    reset()
    before, start = resident("VmRSS"), time.perf_counter()
    optfn.save_checkpoint(folder, state, **form)
    blocking = time.perf_counter() - start
    state = jax.block_until_ready(touched(state))
    delay = time.perf_counter() - start
    background.wait_for_writes()
    whole = time.perf_counter() - start
    memory = resident("VmHWM") - before
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    barrier()
    if jax.process_index() == 0:
        shutil.rmtree(folder)
    barrier()
    return state, Save(blocking, delay, whole, memory, written)


@functools.partial(jax.jit, donate_argnums=0)
def touched(state: Any) -> Any:
    """Return a state with another first number in each array, in place."""
    return jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1), state)


def barrier() -> None:
    """Wait for the other processes."""
    multihost_utils.sync_global_devices("checkpoints")


def write(data: bytes, folder: Path) -> float:
    """Return the seconds that it takes to write bytes to a file."""
    start = time.perf_counter()
    with (folder / f"floor{jax.process_index()}").open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Return a row for each form, and print them."""
    state = state_of(options.megabytes, options.leaves)
    arrays = jax.tree.leaves(state)
    own = [shard.data for x in arrays for shard in x.addressable_shards]
    data = b"".join(np.asarray(x).tobytes() for x in own)
    machine = measure.Machine(len(data) // 4)
    times = measure.interleaved(machine.calls(), 3)
    saves: dict[str, list[Save]] = {name: [] for name in FORMS}
    floors = []
    for _ in range(options.rounds + 1):
        floors.append(write(data, Path(options.folder)))
        for name, form in FORMS.items():
            # Each process has its own folder of files; that of parts is shared.
            own_name = "parts" if form["sharded"] else f"file{jax.process_index()}"
            state, found = save(state, Path(options.folder) / own_name, **form)
            saves[name].append(found)
    about = {
        "arrays": len(arrays),
        "processes": jax.process_count(),
        "bytes": len(data),
    }
    rows = [
        {"checkpoint": name} | about | _row(each[1:], len(data), statistics.median(floors))
        for name, each in saves.items()
    ]
    for row in rows:
        print(_line(row), flush=True)
    print(machine.conditions(times))
    return rows


def _row(saves: list[Save], num_bytes: int, floor: float) -> measure.Row:
    blocking, delay, whole, memory, written = zip(*saves, strict=True)
    return {
        "written": statistics.median(written),
        "blocking_s": statistics.median(blocking),
        "min_blocking_s": min(blocking),
        "delay_s": statistics.median(delay),
        "min_delay_s": min(delay),
        "whole_s": statistics.median(whole),
        "min_whole_s": min(whole),
        "blocking_share": statistics.median(b / w for b, w in zip(blocking, whole, strict=True)),
        "delay_share": statistics.median(d / w for d, w in zip(delay, whole, strict=True)),
        "memory": max(memory) / num_bytes,
        "floor_s": floor,
        "over_floor": statistics.median(whole) / floor,
    }


def _line(row: measure.Row) -> str:
    seconds = (f"{row[f'{k}_s']:.2f} ({row[f'min_{k}_s']:.2f})" for k in SECONDS)
    return (
        f"| {row['checkpoint']} | {row['arrays']} | {row['processes']} | {row['bytes'] / 1e6:.0f} "
        f"| {row['written'] / 1e6:.0f} | {' | '.join(seconds)} | {row['blocking_share']:.1%} "
        f"| {row['delay_share']:.1%} | {row['memory']:.2f} | {row['floor_s']:.2f} "
        f"| {row['over_floor']:.1f} |"
    )


def start_others(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Become process 0 of several, and start the others; return them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options.address = f"127.0.0.1:{probe.getsockname()[1]}"
    count = DEVICES // options.processes  # the last flag counts, here and in the others
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={count}"
    sizes = [f"--{k}={getattr(options, k)}" for k in ("megabytes", "leaves", "rounds", "folder")]
    words = [sys.executable, "-m", "benchmarks.checkpoints", *sizes]
    words += [f"--processes={options.processes}", f"--address={options.address}"]
    each = range(1, options.processes)
    return [subprocess.Popen([*words, f"--process={i}"], stdout=subprocess.DEVNULL) for i in each]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--leaves", type=int, default=48, help="arrays of params and moments")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = measure.parse(parser, megabytes=1, leaves=6, rounds=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if not options.process:
            options.folder = folder
        others = start_others(options) if options.processes > 1 and not options.process else []
        if options.processes > 1:
            jax.distributed.initialize(options.address, options.processes, options.process)
        measure.report(options, HEAD, lambda: run(options))
        if options.processes > 1:
            jax.distributed.shutdown()
        for other in others:
            other.wait()


if __name__ == "__main__":
    main()
