"""How long does a step take on a slow link, for each way of exchanging updates?

    python -m benchmarks.studies.exchange_link [--mbits 0 1000 100 10] [--rounds 5] [--width 96]
        [--batch 16] [--length 128] [--rows 'adamw, dense' …] [--json FILE]

Four processes in four network namespaces, see `network`, make whole training steps of the demo's
transformer; 0 Mbit is a link as fast as the machine, where computing is all that takes time. Rounds
are interleaved; the time of a round is that of its slowest worker, and times are given for a local
step. Bytes are those that the kernel counted on a worker's link, beside the formula's. The last
column is the time that computing and sending the formula's bytes would take one after the other.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np

import optfn
from benchmarks import measure, network
from benchmarks.studies.exchange import RATES, chosen
from benchmarks.studies.schemes import ROWS, WORKERS
from examples import text, transformer
from optfn.distributed import data_mesh

HEAD = (
    "| Mbit/s | scheme | ms a step (min) | CPU ms | bytes a step and worker | formula | over "
    "| compute + bytes/rate, ms | measured over that |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def measured(options: argparse.Namespace, names: list[str]) -> list[measure.Row]:
    """Return a row for each link and scheme: the slowest worker's seconds, the mean of bytes."""
    with network.network(WORKERS) as net:
        passed = ["--network", net.name, "--rows", *names, "--mbits", *map(str, options.mbits)]
        for name in ("rounds", "width", "batch", "length"):
            passed += [f"--{name}", str(getattr(options, name))]
        each = network.run_workers(net, "benchmarks.studies.exchange_link", passed, timeout=7200)
    return [
        {
            "mbits": mbits,
            "scheme": name,
            "seconds": list(map(max, *(worker[i]["seconds"] for worker in each))),
            "cpu": statistics.mean(statistics.median(worker[i]["cpu"]) for worker in each),
            "bytes": statistics.mean(statistics.median(worker[i]["bytes"]) for worker in each),
        }
        for i, (mbits, name) in enumerate((m, n) for m in options.mbits for n in names)
    ]


def work(options: argparse.Namespace) -> None:
    """Run one worker, inside its namespace; print what it measured as JSON."""
    from jax.experimental import multihost_utils

    index, workers = options.worker
    network.join(index, workers)
    config = model(options)
    training, _ = text.standard_library()
    mesh, steps, states, batches = data_mesh(), {}, {}, {}
    params = jax.device_get(transformer.init(jax.random.key(0), config))
    for name in options.rows:
        row = ROWS[name]
        loss = partial(transformer.loss_fn, config=config)
        steps[name] = optfn.make_train_step(loss, mesh=mesh, **row.optimizers(RATES[row.inner]))
        states[name] = steps[name].init(params)
        size = options.batch * row.local_steps
        batches[name] = next(text.batches(training, size, config.length, 0))
        states[name], _ = steps[name](states[name], batches[name])  # compiles
    found = []
    for mbits in options.mbits:
        network.Network(options.network, workers).limit(index, mbits)
        rows: dict[str, Any] = {n: {"seconds": [], "cpu": [], "bytes": []} for n in options.rows}
        for _ in range(options.rounds):
            for name, row_found in rows.items():
                multihost_utils.sync_global_devices("start")
                sent = network.all_sent()
                start, cpu = time.perf_counter(), time.process_time()
                states[name], _ = jax.block_until_ready(steps[name](states[name], batches[name]))
                row_found["seconds"].append(time.perf_counter() - start)
                row_found["cpu"].append(time.process_time() - cpu)
                row_found["bytes"].append(network.all_sent() - sent)
        found += rows.values()
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


def model(options: argparse.Namespace) -> transformer.Config:
    """Return the model of the options."""
    return transformer.Config()._replace(
        width=options.width, hidden=4 * options.width, length=options.length
    )


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Measure all links and print the rows."""
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model(options)))
    rows = measured(options, chosen(options.rows))
    compute: dict[str, float] = {}
    for row in rows:
        scheme = ROWS[row["scheme"]]
        seconds = np.asarray(row["seconds"]) / scheme.local_steps
        row["ms"], row["min_ms"] = 1e3 * float(np.median(seconds)), 1e3 * float(seconds.min())
        row["cpu_ms"] = 1e3 * row.pop("cpu") / scheme.local_steps
        row["bytes"] /= scheme.local_steps
        row["formula"] = scheme.sent(params) / scheme.local_steps
        if not row["mbits"]:
            compute[row["scheme"]] = row["ms"]
        link = 8e-3 * row["formula"] / row["mbits"] if row["mbits"] else 0.0
        row["sum_ms"] = compute.get(row["scheme"], float("nan")) + link
        del row["seconds"]
        print(
            f"| {row['mbits'] or 'not limited'} | {row['scheme']} | {row['ms']:.1f} "
            f"({row['min_ms']:.1f}) | {row['cpu_ms']:.1f} | {row['bytes']:,.0f} "
            f"| {row['formula']:,.0f} | {100 * (row['bytes'] / row['formula'] - 1):+.1f} % "
            f"| {row['sum_ms']:.1f} | {row['ms'] / row['sum_ms']:.2f} |",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table, or say why it cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbits", type=int, nargs="+", default=[0, 1000, 100, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="examples in a step of all workers")
    parser.add_argument("--length", type=int, default=128, help="bytes of an example")
    parser.add_argument("--rows", nargs="+", default=["adamw, dense"], metavar="PATTERN")
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    options = measure.parse(
        parser, mbits=[0, 100], rounds=2, width=16, batch=8, length=16,
        rows=["adamw, dense", "adamw, H=2, quantize(1)"],
    )  # fmt: skip
    if options.worker:
        return work(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up
    measure.report(options, HEAD, lambda: run(options))


if __name__ == "__main__":
    main()
