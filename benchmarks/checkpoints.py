"""How long does a checkpoint of a sharded state stop the training, and what memory does it take?

    python -m benchmarks.checkpoints [--megabytes 1000] [--leaves 48] [--rounds 3] [--folder /tmp]

Params and the moments of Adam, spread over eight devices of the CPU with `shard="params"`, saved in
both forms: one file, and parts that orbax writes in the background. "Blocking" is the time until
`save_checkpoint` returns and the state may be overwritten, "whole" the time until all is on the
disk. Memory is the most that the process held meanwhile beyond what it held before, as a multiple
of the bytes of its part of the state, here all of it. The floor is the time of writing as many
bytes to one file, with fsync. The first save, which compiles the checksums, does not count.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before jax is imported. Devices of the CPU also where there are others: there must be eight.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from benchmarks import measure
from optfn.distributed import data_mesh
from optfn.run import sharded_checkpoint

DEVICES = 8
FORMS = {"one file": False, "parts": True}
HEAD = (
    "| checkpoint | MB | written MB | blocking s (min) | whole s (min) | blocking/whole "
    "| memory, × its part | floor s | whole/floor |\n|---|---|---|---|---|---|---|---|---|"
)


class Save(NamedTuple):
    """Seconds and bytes of a save."""

    blocking: float
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


def save(state: Any, folder: Path, sharded: bool) -> Save:
    """Save a state and wait for it; the folder is empty before and after."""
    reset()
    before, start = resident("VmRSS"), time.perf_counter()
    optfn.save_checkpoint(folder, state, sharded=sharded)
    blocking = time.perf_counter() - start
    sharded_checkpoint.wait()
    whole = time.perf_counter() - start
    memory = resident("VmHWM") - before
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return Save(blocking, whole, memory, written)


def write(data: bytes, folder: Path) -> float:
    """Return the seconds that it takes to write bytes to a file."""
    start = time.perf_counter()
    with (folder / "floor").open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def run(megabytes: float, leaves: int, rounds: int, parent: str | None) -> list[measure.Row]:
    """Return a row for each form, and print them."""
    state = state_of(megabytes, leaves)
    data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    machine = measure.Machine(len(data) // 4)
    times = measure.interleaved(machine.calls(), 3)
    saves: dict[str, list[Save]] = {form: [] for form in FORMS}
    floors = []
    with tempfile.TemporaryDirectory(dir=parent) as name:
        for _ in range(rounds + 1):
            floors.append(write(data, Path(name)))
            for form, sharded in FORMS.items():
                saves[form].append(save(state, Path(name) / "saved", sharded))
    found = []
    for form, each in saves.items():
        row = _row(form, each[1:], len(data), statistics.median(floors))
        found.append(row)
        print(_line(row), flush=True)
    print(machine.conditions(times))
    return found


def _row(form: str, saves: list[Save], num_bytes: int, floor: float) -> measure.Row:
    blocking, whole, memory, written = zip(*saves, strict=True)
    return {
        "checkpoint": form,
        "bytes": num_bytes,
        "written": statistics.median(written),
        "blocking_s": statistics.median(blocking),
        "min_blocking_s": min(blocking),
        "whole_s": statistics.median(whole),
        "min_whole_s": min(whole),
        "blocking_share": statistics.median(b / w for b, w in zip(blocking, whole, strict=True)),
        "memory": max(memory) / num_bytes,
        "floor_s": floor,
        "over_floor": statistics.median(whole) / floor,
    }


def _line(row: measure.Row) -> str:
    return (
        f"| {row['checkpoint']} | {row['bytes'] / 1e6:.0f} | {row['written'] / 1e6:.0f} "
        f"| {row['blocking_s']:.2f} ({row['min_blocking_s']:.2f}) "
        f"| {row['whole_s']:.2f} ({row['min_whole_s']:.2f}) | {row['blocking_share']:.1%} "
        f"| {row['memory']:.2f} | {row['floor_s']:.2f} | {row['over_floor']:.1f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--leaves", type=int, default=48, help="arrays of params and moments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = measure.parse(parser, megabytes=1, leaves=6, rounds=1)
    sizes = options.megabytes, options.leaves
    measure.report(options, HEAD, lambda: run(*sizes, options.rounds, options.folder))


if __name__ == "__main__":
    main()
