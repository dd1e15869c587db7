"""What does Deep Gradient Compression gain on a real link, compared with dense momentum?

    python -m benchmarks.compression_link [--workers 2 4] [--mbits 1000 100] [--rounds 9]
        [--size 10000000]

N processes in N network namespaces on shaped links, see `network`. A step is the update alone,
gradients given: an all-reduce and momentum, or `dgc_momentum` at sparsity 99.9 %. Rounds are
interleaved; the time of a round is that of its slowest worker. Bytes are those that the kernel
counted on a worker's link; the floor is the time that the bytes that must be sent take at the
link's rate.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from benchmarks import measure, network
from optfn.distributed import data_mesh

SPARSITY = 0.999
SIDES = ("dense", "float32", "bfloat16")
HEAD = (
    "| N | Mbit/s | step | ms (min) | speed-up over dense (min) | bytes sent a worker | theory "
    "| over theory | dense bytes/bytes | floor ms | ms/floor |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def measured(workers: int, mbits: int, rounds: int, n: int) -> dict[str, dict[str, list[float]]]:
    """Return for each side the seconds of each round, and the bytes that a worker sent in it."""
    arguments = ["--rounds", str(rounds), "--size", str(n)]
    with network.network(workers, mbits) as net:
        each = network.run_workers(net, "benchmarks.compression_link", arguments, timeout=600)
    return _merged(each)


def _merged(each: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Return the time of the slowest worker, and the mean over workers of the bytes."""

    def columns(side: str, what: str) -> Any:
        return zip(*(worker[side][what] for worker in each), strict=True)

    return {
        side: {
            "seconds": list(map(max, columns(side, "seconds"))),
            "bytes": list(map(statistics.mean, columns(side, "bytes"))),
        }
        for side in each[0]
    }


def compressed(wire: str) -> Any:
    """Return the optimizer that sends the largest entries."""
    return optfn.dgc_momentum(1e-3, 0.9, rampup_begin_step=0, sparsity=(SPARSITY,), wire=wire)


def work(index: int, workers: int, rounds: int, n: int) -> None:
    """Run one worker, inside its namespace; print what it measured as JSON."""
    from jax.experimental import multihost_utils

    network.join(index, workers)
    mesh = data_mesh()
    own = np.random.default_rng(index).standard_normal(n, np.float32)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    grads = jax.make_array_from_process_local_data(sharding, own)
    steps, states = {}, {}
    for side in SIDES:
        tx = optfn.momentum(1e-3, 0.9) if side == "dense" else compressed(side)
        steps[side] = optfn.make_train_step(
            lambda params, g: jnp.zeros(()),
            tx,
            mesh=mesh,
            value_and_grad=lambda params, g: (jnp.zeros(()), {"w": g}),
        )
        states[side] = steps[side].init({"w": np.zeros(n, np.float32)})
    found: dict[str, Any] = {side: {"seconds": [], "bytes": []} for side in SIDES}
    for round_number in range(rounds + 1):
        for side in SIDES:
            multihost_utils.sync_global_devices("start")
            sent, start = network.sent_bytes(), time.perf_counter()
            states[side], _ = jax.block_until_ready(steps[side](states[side], grads))
            seconds = time.perf_counter() - start
            in_all = network.all_sent()
            if round_number:  # the first compiles
                found[side]["seconds"].append(seconds)
                found[side]["bytes"].append(in_all - sent)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


def theory(side: str, workers: int, n: int) -> float:
    """Return the bytes that a worker must send: a ring's all-reduce, or (N − 1)·packet."""
    if side == "dense":
        return 2 * (workers - 1) / workers * 4 * n
    traffic = jax.eval_shape(compressed(side).init, {"w": jnp.zeros(n)})[0].exchanged.traffic
    return (workers - 1) * traffic.packets[0]


def rows_of(
    workers: int, mbits: int, n: int, found: dict[str, dict[str, list[float]]]
) -> list[measure.Row]:
    """Return a row for each side, and print it."""
    rows = []
    ms = {s: 1e3 * statistics.median(x["seconds"]) for s, x in found.items()}
    least = {s: 1e3 * min(x["seconds"]) for s, x in found.items()}
    sent = {s: statistics.median(x["bytes"]) for s, x in found.items()}
    for side in found:
        must = theory(side, workers, n)
        row: measure.Row = {
            "workers": workers, "mbits": mbits, "step": side, "ms": ms[side],
            "min_ms": least[side], "ratio": ms["dense"] / ms[side],
            "ratio_min": least["dense"] / least[side], "bytes": sent[side],
            "theory": must, "over": sent[side] / must, "fewer": sent["dense"] / sent[side],
            "floor_ms": 8e3 * must / (1e6 * mbits),
        }  # fmt: skip
        row["over_floor"] = row["ms"] / row["floor_ms"]
        rows.append(row)
        name = "dense momentum" if side == "dense" else f"dgc_momentum, {side}"
        print(
            f"| {workers} | {mbits} | {name} | {row['ms']:.1f} ({row['min_ms']:.1f}) "
            f"| {row['ratio']:.1f} ({row['ratio_min']:.1f}) | {row['bytes']:,.0f} "
            f"| {must:,.0f} | {100 * (row['over'] - 1):+.1f} % | {row['fewer']:.0f} "
            f"| {row['floor_ms']:.1f} | {row['over_floor']:.1f} |",
            flush=True,
        )
    return rows


def run(workers: list[int], mbits: list[int], rounds: int, n: int) -> list[measure.Row]:
    """Return the rows of all links; print them."""
    rows = []
    for count in workers:
        for rate in mbits:
            rows += rows_of(count, rate, n, measured(count, rate, rounds, n))
    return rows


def main() -> None:
    """Print the table, or say why it cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbits", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=10_000_000, help="parameters")
    parser.add_argument("--worker", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    options = measure.parse(parser, workers=[2], mbits=[1000], rounds=1, size=100_000)
    if options.worker:
        return work(*options.worker, options.rounds, options.size)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up
    sizes = options.rounds, options.size
    try:
        measure.report(options, HEAD, lambda: run(options.workers, options.mbits, *sizes))
    except KeyboardInterrupt:
        sys.exit("stopped; the namespaces are gone")


if __name__ == "__main__":
    main()
