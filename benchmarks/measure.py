"""What the benchmarks share: options, report, trees, interleaved timing, the machine's bandwidth.

Absolute times are not comparable between runs on a shared machine. Every figure here is taken in
interleaved rounds, A B A B …, in one process, and reported as median and minimum.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CANNOT_RUN = 77  # exit status: the machine lacks what the benchmark needs
Row = dict[str, Any]


class Refused(Exception):
    """The machine lacks what a benchmark needs; the message says what."""


def parse(parser: argparse.ArgumentParser, **toy: Any) -> argparse.Namespace:
    """Return the options; `--toy` overrides them by `toy`."""
    parser.add_argument("--toy", action="store_true", help="the sizes of a test")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if options.toy:
        vars(options).update(toy)
    return options


def report(
    options: argparse.Namespace, head: str, run: Callable[[], list[Row]], **about: object
) -> None:
    """Print what the figures depend on and the table that `run` prints; write its rows as JSON."""
    found = where() | {name: str(value) for name, value in about.items()}
    for name, value in vars(options).items():
        if name != "json" and value not in (None, False):
            found[name] = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    print(", ".join(f"{k} {v}" for k, v in found.items()) + f"\n\n{head}", flush=True)
    try:
        rows = run()
    except Refused as why:
        print(why, file=sys.stderr)
        sys.exit(CANNOT_RUN)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": found, "rows": rows}, file, indent=1)


class Kept(NamedTuple):
    """A file of rows, in which a run of some programs replaces the rows of these.

    key: the columns that name a program.
    packages: those on whose versions the rows depend; the file has them.
    """

    file: Path
    key: tuple[str, ...]
    packages: tuple[str, ...]

    def name(self, row: Row) -> tuple[str, ...]:
        """Return the name of the program of a row."""
        return tuple(row[column] for column in self.key)

    def rows(self) -> dict[tuple[str, ...], Row]:
        """Return the rows of the file by the names of their programs."""
        rows = json.loads(self.file.read_text())["rows"] if self.file.exists() else []
        return {self.name(row): row for row in rows}

    def keep(self, row: Row, order: Sequence[tuple[str, ...]] = ()) -> None:
        """Write a row in the place of that of the same program; `order` has all names, if given."""
        rows = self.rows() | {self.name(row): row}
        about = {name: version(name) for name in self.packages}
        found = [rows[name] for name in order or rows if name in rows]
        self.file.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


class Timing(NamedTuple):
    """Seconds of one call."""

    median: float
    minimum: float


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Time each of `calls` once per round, one after the other; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(s), min(s)) for name, s in seconds.items()}


def cpu_seconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median CPU time of each call over interleaved rounds, without the first."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.process_time()
            jax.block_until_ready(call())
            times.append(time.process_time() - start)
    return [statistics.median(times[1:]) for times in seconds]


class Machine:
    """The bandwidth of memory, by the two simplest passes over arrays that exist already.

    The arrays have as many elements as what is measured, at most 25 M.
    """

    def __init__(self, elements: int = 25_000_000) -> None:
        self.elements = elements = min(elements, 25_000_000)
        self.x, self.y = jnp.ones(elements), jnp.zeros(elements)
        # By default jit drops arguments that are not read, and their buffers.
        keep = {"donate_argnums": 0, "keep_unused": True}
        self._copy = jax.jit(lambda y, x: x + 1, **keep)
        self._in_place = jax.jit(lambda y, x: y + 0.5 * x, **keep)

    def copy(self) -> jax.Array:
        """Copy: 8 bytes an element."""
        self.y = self._copy(self.y, self.x)
        return self.y

    def in_place(self) -> jax.Array:
        """Add to an array in place, as an update does: 12 bytes an element."""
        self.y = self._in_place(self.y, self.x)
        return self.y

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return the two passes, for `interleaved`."""
        return {"copy": self.copy, "in place": self.in_place}

    def bandwidth(self, times: dict[str, Timing]) -> dict[str, float]:
        """Return the best bytes per second of each pass."""
        return {
            "copy": 8 * self.elements / times["copy"].minimum,
            "in place": 12 * self.elements / times["in place"].minimum,
        }

    def conditions(self, times: dict[str, Timing]) -> str:
        """Return a line for below a table: the bandwidths, and how busy the machine is."""
        found = self.bandwidth(times)
        speeds = ", ".join(f"{name} {x / 1e9:.1f} GB/s" for name, x in found.items())
        return f"\nbandwidth: {speeds}; load average {os.getloadavg()[0]:.1f}"

    def floor(self, num_bytes: float, times: dict[str, Timing]) -> float:
        """Return the least seconds in which an update in place could move so many bytes."""
        return num_bytes / self.bandwidth(times)["in place"]


def resnet50() -> dict[str, tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters: 161 leaves, 25.6 M."""
    shapes: dict[str, tuple[int, ...]] = {"stem/conv": (7, 7, 3, 64), "stem/scale": (64,)}
    shapes["stem/bias"] = (64,)
    wide = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            at = f"stage{stage}/block{block}"
            convolutions = [(1, 1, wide, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, wide, 4 * width))
            for k, shape in enumerate(convolutions):
                shapes[f"{at}/conv{k}"] = shape
                shapes[f"{at}/scale{k}"] = shapes[f"{at}/bias{k}"] = (shape[-1],)
            wide = 4 * width
    return shapes | {"head/kernel": (2048, 1000), "head/bias": (1000,)}


def gpt2_small() -> dict[str, tuple[int, ...]]:
    """Return the shapes of GPT-2 small's parameters: 148 leaves, 124 M."""
    d = 768
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, d), "wpe": (1024, d)}
    for block in range(12):
        for name, shape in {
            "ln1/scale": (d,),
            "ln1/bias": (d,),
            "attn/qkv": (d, 3 * d),
            "attn/qkv_bias": (3 * d,),
            "attn/out": (d, d),
            "attn/out_bias": (d,),
            "ln2/scale": (d,),
            "ln2/bias": (d,),
            "mlp/in": (d, 4 * d),
            "mlp/in_bias": (4 * d,),
            "mlp/out": (4 * d, d),
            "mlp/out_bias": (d,),
        }.items():
            shapes[f"h{block}/{name}"] = shape
    return shapes | {"ln_f/scale": (d,), "ln_f/bias": (d,)}


TREES: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "resnet50": resnet50,
    "gpt2": gpt2_small,
    "one": lambda: {"w": (25_000_000,)},
    "toy": lambda: {"w": (64, 64), "b": (64,)},
}


def arrays(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, jax.Array]:
    """Return normal float32 arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s, np.float32)) * 0.1 for k, s in shapes.items()}


def size(tree: Any) -> int:
    """Return the number of elements."""
    return sum(x.size for x in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Return the bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def torch_stands_beside() -> bool:
    """Return whether torch is installed, and JAX on the CPU, where torch's arrays are."""
    return importlib.util.find_spec("torch") is not None and jax.default_backend() == "cpu"


def where() -> dict[str, str]:
    """Return what a figure depends on: device, versions, commit."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        kind = f"{len(names)} cores, {names[0]}" if names else kind
    versions = {package: version(package) for package in ("jax", "optax")}
    if torch_stands_beside():
        versions["torch"] = version("torch")
    return {"device": kind, **versions, "commit": _commit()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
