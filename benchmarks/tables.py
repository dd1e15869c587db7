"""What does a step cost on a table whose rows are spread over the devices?

    python -m benchmarks.tables [--rows 262144] [--width 64] [--ids 4096] [--rounds 9]

A table that eight devices of the CPU share, `shard_tables=True`, beside the same step with the
whole table on every device; lazy Adam, 4,096 ids a step, 512 of them on each device, for ids that
are uniform, follow Zipf's law (exponent 1.05, the rows by frequency or hashed), are all the same,
or all have one owner. Bytes are those of the compiled step, on each device: its arguments, its
temporaries, and what it sends in a ring, with the rounds of the exchange, and their sizes, that a
batch needs, the mean over 20 batches. The ideal to send is the rows that a device needs and does
not keep, and their gradients.

Eight devices share the cores, so that speed is not that of eight machines. Measured are the time
of a step, and the CPU time of all threads as a multiple of that of the step with the whole table on
every device. The floor is the time of the bytes that must move in memory: the rows that are
touched, once each, of table and moments, read and written, and their gradients.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

# Before jax is imported. Devices of the CPU also where there are others: there must be eight.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import optfn
from benchmarks import measure, wire
from optfn.distributed import data_mesh
from optfn.sparse import hash_ids
from optfn.tables.tables import _choose_sizes

DEVICES = 8
HEAD = (
    "| ids | table | MB a device | temporaries MB | kB sent | ideal kB | sent/ideal "
    "| CPU s, × whole | ms (min) | floor ms | ms/floor |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def zipf(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Return ids that follow Zipf's law, the most frequent first in the table."""
    cumulative = np.cumsum(np.arange(1, rows + 1) ** -1.05)
    return np.searchsorted(cumulative, cumulative[-1] * rng.random(count))


IDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "uniform": lambda rng, rows, count: rng.integers(0, rows, count),
    "Zipf": zipf,
    "Zipf, hashed": lambda rng, rows, count: hash_ids(zipf(rng, rows, count), rows),
    "all the same": lambda rng, rows, count: np.full(count, rows // 3),
    "one owner": lambda rng, rows, count: DEVICES * rng.integers(0, rows // DEVICES, count),
}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the loss of a linear model of the rows."""
    ids, target = batch
    return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)


BATCHES = 20  # over which the bytes of each kind of ids are averaged


class Exchange:
    """What a batch of ids asks of an exchange: `needed[k]` are the distinct ids of device k."""

    def __init__(self, ids: np.ndarray) -> None:
        self.needed = [np.unique(part) for part in np.split(ids, DEVICES)]
        self.sizes = _choose_sizes(len(ids) // DEVICES, DEVICES)

    def rounds(self) -> list[int]:
        """Return the rounds that the fullest owner needs, as numbers of their sizes."""
        rest = max(np.bincount(ids % DEVICES).max() for ids in self.needed)
        found = []
        while rest > 0:
            found.append(min(np.searchsorted(self.sizes, rest), len(self.sizes) - 1))
            rest -= self.sizes[found[-1]]
        return found

    def ideal(self, row_bytes: int) -> float:
        """Return the bytes of the rows that are elsewhere, there and back, mean over devices."""
        foreign = [np.sum(ids % DEVICES != k) for k, ids in enumerate(self.needed)]
        return 2 * row_bytes * float(np.mean(foreign))

    def touched(self) -> int:
        """Return how many rows of the table the batch touches."""
        return len(np.unique(np.concatenate(self.needed)))


def mean_sent(compiled: Any, exchanges: Sequence[Exchange]) -> float:
    """Return the bytes that a device sends in a compiled step, with the rounds of each batch."""
    once = wire.bytes_sent(compiled, DEVICES, rounds=0)
    sizes = range(len(exchanges[0].sizes))
    in_round = [wire.bytes_sent(compiled, DEVICES, branch=k) - once for k in sizes]
    return once + float(np.mean([sum(in_round[k] for k in x.rounds()) for x in exchanges]))


class Step:
    """A training step on one batch, and its state."""

    def __init__(self, params: Any, batch: Any, *, shard_tables: bool) -> None:
        tx, mesh = optfn.adam(1e-3, lazy=True), data_mesh(DEVICES)
        step = optfn.make_train_step(
            loss_fn, tx, tables="table", mesh=mesh, shard_tables=shard_tables
        )
        self.state = step.init(params)
        self.batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
        self.compiled = step.compiled.lower(self.state, self.batch).compile()

    def __call__(self) -> Any:
        """Make a step."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return metrics


def run(kinds: Sequence[str], rows: int, width: int, count: int, rounds: int) -> list[measure.Row]:
    """Return the rows of both layouts for each kind of ids, and print them."""
    machine, found = measure.Machine(rows * width), []
    for kind in kinds:
        more, times = compared(kind, machine, rows, width, count, rounds)
        found += more
        for row in more:
            print(_line(row), flush=True)
    print(machine.conditions(times))
    return found


def compared(
    kind: str, machine: measure.Machine, rows: int, width: int, count: int, rounds: int
) -> tuple[list[measure.Row], dict[str, measure.Timing]]:
    """Return the rows of both layouts for one kind of ids, and all times."""
    rng = np.random.default_rng(0)
    ids = IDS[kind](rng, rows, count).astype(np.int32)
    params = {
        "table": rng.standard_normal((rows, width), np.float32),
        "w": rng.standard_normal((width, 2), np.float32),
    }
    batch = ids, rng.standard_normal((count, 2), np.float32)
    draws = [IDS[kind](np.random.default_rng(seed), rows, count) for seed in range(BATCHES)]
    exchanges = [Exchange(ids) for ids in draws]
    steps = {
        "whole": Step(params, batch, shard_tables=False),
        "spread": Step(params, batch, shard_tables=True),
    }
    times = measure.interleaved({**steps, **machine.calls()}, rounds)
    cpu = dict(zip(steps, measure.cpu_seconds(list(steps.values()), rounds), strict=True))
    floor = machine.floor(exchanges[0].touched() * width * 4 * (2 * 3 + 1), times)
    ideal, found = float(np.mean([x.ideal(4 * width) for x in exchanges])), []
    for name, step in steps.items():
        memory = step.compiled.memory_analysis()
        sent = mean_sent(step.compiled, exchanges)
        row: measure.Row = {
            "ids": kind,
            "table": name,
            "bytes": float(memory.argument_size_in_bytes),
            "temporaries": memory.temp_size_in_bytes,
            "sent": sent,
            "ideal": ideal,
            "over_ideal": sent / ideal,
            "cpu_ratio": cpu[name] / cpu["whole"],
            "ms": 1e3 * times[name].median,
            "min_ms": 1e3 * times[name].minimum,
            "floor_ms": 1e3 * floor,
            "over_floor": times[name].median / floor,
        }
        found.append(row)
    return found, times


def _line(row: measure.Row) -> str:
    return (
        f"| {row['ids']} | {row['table']} | {row['bytes'] / 1e6:.1f} "
        f"| {row['temporaries'] / 1e6:.2f} | {row['sent'] / 1e3:.0f} | {row['ideal'] / 1e3:.0f} "
        f"| {row['over_ideal']:.2f} | {row['cpu_ratio']:.2f} | {row['ms']:.1f} "
        f"({row['min_ms']:.1f}) | {row['floor_ms']:.2f} | {row['over_floor']:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=IDS, default=list(IDS), help="of ids")
    parser.add_argument("--rows", type=int, default=1 << 18)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ids", type=int, default=4096, help="in a step, of all devices")
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, kinds=["Zipf"], rows=1024, width=8, ids=1024, rounds=1)
    sizes = options.rows, options.width, options.ids
    measure.report(
        options, HEAD, lambda: run(options.kinds, *sizes, options.rounds), devices=DEVICES
    )


if __name__ == "__main__":
    main()
