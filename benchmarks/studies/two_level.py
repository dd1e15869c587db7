"""What does a model that is divided inside a machine send to the next, and how long is a step?

    python -m benchmarks.studies.two_level [--mbits 0 1000 100] [--rounds 5] [--layers 4]
        [--width 128] [--examples 16] [--json FILE]

Two processes of four CPU devices each stand for two machines: they are in two network namespaces,
see `network`, joined by a link of so many Mbit/s; 0 is as fast as the machine. Bytes by axis are
those that each device sends, for a parameter and local step, read from the compiled program: "fast"
inside a process, "slow" between them; along both where one ring goes through all devices. The last
bytes are those that the kernel counted on a process's link, for a parameter and local step. Rounds
are interleaved; the time of a round is that of the slower process, for a local step.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import optfn
from benchmarks import measure, network, wire
from benchmarks.sharding import loss_fn, model
from optfn.distributed import exchange, quantize, sharded
from optfn.mesh.layout.data_parallel import split_batch

PROCESSES, DEVICES = 2, 4
AXES = ("slow", "fast")
HEAD = (
    "| scheme | params a device | state a device | fast, B | slow, B | both, B | on the link, B "
    "| Mbit/s: ms a step (min) |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Scheme(NamedTuple):
    """How a model lies and what its workers exchange.

    shard, local_steps: of `make_train_step`.
    links: whether gradients, or the drift of local steps, are sent in 4 bits.
    """

    shard: Any = None
    local_steps: int = 1
    links: bool = False

    def step(self, mesh: Mesh) -> optfn.TrainStep:
        """Return the training step."""
        tx, options = optfn.adam(1e-3), {}
        names = tuple(a for a in AXES if a not in getattr(self.shard, "axis", ()))
        link = exchange(quantize(4), axis_name=names)
        if self.local_steps > 1:
            outer = optfn.chain(link, optfn.sgd(1.0)) if self.links else None
            options = {"local_steps": self.local_steps, "outer": outer}
        elif self.links:
            tx = optfn.chain(link, tx)
        return optfn.make_train_step(
            loss_fn, tx, mesh=mesh, data_axis=AXES, shard=self.shard, **options
        )


INSIDE = sharded("params", axis="fast")
SCHEMES = {
    "data parallel": Scheme(),
    "FSDP over all devices": Scheme("params"),
    "FSDP inside, the mean between": Scheme(INSIDE),
    "local steps, H=5": Scheme(None, 5),
    "two levels, H=5": Scheme(INSIDE, 5),
    "two levels, exchange(quantize(4))": Scheme(INSIDE, 1, True),
    "two levels, H=5, quantize(4)": Scheme(INSIDE, 5, True),
}


def work(options: argparse.Namespace) -> None:
    """Run one process, inside its namespace; print what it measured as JSON."""
    from jax.experimental import multihost_utils

    index, processes = options.worker
    jax.config.update("jax_num_cpu_devices", DEVICES)
    network.join(index, processes)
    mesh = Mesh(np.array(jax.devices()).reshape(processes, DEVICES), AXES)
    params = model(options.layers, options.width)["scanned"]
    count = measure.size(params)
    runs, found = {}, {}
    for name, scheme in SCHEMES.items():
        step, h = scheme.step(mesh), scheme.local_steps
        state = step.init(params)
        x = np.random.default_rng(0).normal(size=(h * options.examples, options.width))
        batch = split_batch(x.astype(np.float32), mesh, step.layout.data_axes, h)
        sent = wire.bytes_by_axes(step.compiled.lower(state, batch).compile(), mesh)
        found[name] = {
            "params": bytes_on_a_device(state.params),
            "state": bytes_on_a_device(state.opt_state),
            **{"+".join(axes) or "none": total / count / h for axes, total in sent.items()},
        }
        state, _ = step(state, batch)
        runs[name] = [step, state, batch, h]
    for mbits in options.mbits:
        network.Network(options.network, processes).limit(index, mbits)
        for name in SCHEMES:
            found[name][f"seconds at {mbits}"] = []
            found[name][f"bytes at {mbits}"] = []
        for _ in range(options.rounds):
            for name, (step, state, batch, h) in runs.items():
                multihost_utils.sync_global_devices("start")
                before, start = network.all_sent(), time.perf_counter()
                runs[name][1], _ = jax.block_until_ready(step(state, batch))
                found[name][f"seconds at {mbits}"].append((time.perf_counter() - start) / h)
                after = network.all_sent()
                found[name][f"bytes at {mbits}"].append((after - before) / count / h)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


def bytes_on_a_device(values: Any) -> int:
    """Return the bytes of arrays on one device."""
    return sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(values))


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Measure all schemes and print the rows."""
    with network.network(PROCESSES) as net:
        passed = ["--network", net.name, "--mbits", *map(str, options.mbits)]
        for name in ("rounds", "layers", "width", "examples"):
            passed += [f"--{name}", str(getattr(options, name))]
        each = network.run_workers(net, "benchmarks.studies.two_level", passed, timeout=7200)
    rows = []
    for name in SCHEMES:
        one, other = (found[name] for found in each)
        row: measure.Row = {"scheme": name, **{k: one[k] for k in ("params", "state")}}
        row |= {axis: one.get(axis, 0.0) for axis in ("fast", "slow", "slow+fast")}
        first = options.mbits[0]
        row["link"] = statistics.median(one[f"bytes at {first}"] + other[f"bytes at {first}"])
        times = []
        for mbits in options.mbits:
            slower = list(map(max, one[f"seconds at {mbits}"], other[f"seconds at {mbits}"]))
            ms, least = 1e3 * statistics.median(slower), 1e3 * min(slower)
            row[f"ms at {mbits}"], row[f"min ms at {mbits}"] = ms, least
            times.append(f"{mbits or 'not limited'}: {ms:.0f} ({least:.0f})")
        print(
            f"| {name} | {row['params']:,} | {row['state']:,} | {row['fast']:.2f} "
            f"| {row['slow']:.2f} | {row['slow+fast']:.2f} | {row['link']:.2f} "
            f"| {', '.join(times)} |",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Print the table, or say why it cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbits", type=int, nargs="+", default=[0, 1000, 100])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--examples", type=int, default=16, help="in a local step of all devices")
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    options = measure.parse(parser, mbits=[0], rounds=1, layers=2, width=32)
    if options.worker:
        return work(options)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up
    try:
        measure.report(options, HEAD, lambda: run(options))
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
