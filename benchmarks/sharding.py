"""What does a step cost whose params and optimizer state are spread over the devices?

    python -m benchmarks.sharding [--layers 12] [--width 256] [--rounds 9]

Adam on a stack of layers (width 256, hidden width 1,024), on eight devices of the CPU: the params
and state whole on each of them, with `shard="state"` and with `shard="params"`; layers in a list,
and stacked for `scan_layers`. Bytes are those of the compiled step, on each device: params and
state, temporaries, and what it sends in a ring, loops counted as often as they run. Beside them is
the ideal: 1/8 of the bytes of what is spread, and what `plan_memory` says is sent.

Eight devices share the cores, so that speed is not that of eight machines. Measured are the time
of a step, and the CPU time of all threads as a multiple of that of the step with everything whole.
The floor is the time to read and write once what all devices hold; the time of a step includes the
gradient of the model, which the floor does not. With everything whole each device updates all
params, so that the machine does eight times the work.
"""

import argparse
import os
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
from optfn.distributed import data_mesh, plan_memory, scan_layers

DEVICES = 8
SHARDS = (None, "state", "params")
HEAD = (
    "| layers | shard | MB a device | ideal MB | temporaries MB | MB sent | ideal MB sent "
    "| CPU s, × whole | ms (min) | floor ms | ms/floor |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def layer(params: Any, x: jax.Array) -> jax.Array:
    """Run a layer."""
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Return the loss of all layers, stacked or in a list."""
    if isinstance(params, optfn.Stacked):
        return jnp.mean(scan_layers(layer, params, x) ** 2)
    for layer_params in params:
        x = layer(layer_params, x)
    return jnp.mean(x**2)


def model(layers: int, width: int) -> dict[str, Any]:
    """Return the params of both forms."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return 0.1 * rng.standard_normal(shape, np.float32)

    stacked = {
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
    }
    each = [jax.tree.map(lambda x, k=k: x[k], stacked) for k in range(layers)]
    return {"in a list": each, "scanned": optfn.Stacked(stacked)}


class Step:
    """A training step on one batch, and its state."""

    def __init__(self, params: Any, batch: np.ndarray, shard: str | None) -> None:
        tx, mesh = optfn.adam(1e-3), data_mesh(DEVICES)
        self.plan = plan_memory(tx, params, mesh, shard=shard)
        step = optfn.make_train_step(loss_fn, tx, mesh=mesh, shard=shard)
        self.state = step.init(params)
        self.batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
        self.compiled = step.compiled.lower(self.state, self.batch).compile()
        self.memory = self.compiled.memory_analysis()

    @property
    def num_bytes(self) -> float:
        """The bytes of params and state on each device, of the compiled step."""
        return float(self.memory.argument_size_in_bytes - self.batch.nbytes / DEVICES)

    def __call__(self) -> Any:
        """Make a step."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return metrics


def run(layers: int, width: int, examples: int, rounds: int) -> list[measure.Row]:
    """Return a row for each form and way of spreading, and print them."""
    found, batch = [], np.ones((examples, width), np.float32)
    for form, params in model(layers, width).items():
        steps = {str(shard): Step(params, batch, shard) for shard in SHARDS}
        machine = measure.Machine(measure.size(params))
        times = measure.interleaved({**steps, **machine.calls()}, rounds)
        cpu = dict(zip(steps, measure.cpu_seconds(list(steps.values()), rounds), strict=True))
        whole = measure.num_bytes(params)
        ideal = {"None": 3 * whole, "state": whole + 2 * whole / 8, "params": 3 * whole / 8}
        for name, step in steps.items():
            floor = machine.floor(2 * DEVICES * step.num_bytes, times)
            row: measure.Row = {
                "layers": form,
                "shard": name,
                "bytes": step.num_bytes,
                "ideal_bytes": ideal[name],
                "temporaries": step.memory.temp_size_in_bytes,
                "sent": wire.bytes_sent(step.compiled, DEVICES),
                "ideal_sent": step.plan.sent,
                "cpu_ratio": cpu[name] / cpu["None"],
                "ms": 1e3 * times[name].median,
                "min_ms": 1e3 * times[name].minimum,
                "floor_ms": 1e3 * floor,
                "over_floor": times[name].median / floor,
            }
            found.append(row)
            print(_line(row), flush=True)
    print(machine.conditions(times))
    return found


def _line(row: measure.Row) -> str:
    return (
        f"| {row['layers']} | {row['shard']} | {row['bytes'] / 1e6:.2f} "
        f"| {row['ideal_bytes'] / 1e6:.2f} | {row['temporaries'] / 1e6:.2f} "
        f"| {row['sent'] / 1e6:.2f} | {row['ideal_sent'] / 1e6:.2f} | {row['cpu_ratio']:.2f} "
        f"| {row['ms']:.1f} ({row['min_ms']:.1f}) | {row['floor_ms']:.1f} "
        f"| {row['over_floor']:.1f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--examples", type=int, default=256, help="in a step, of all devices")
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, layers=2, width=16, examples=8, rounds=1)
    sizes = options.layers, options.width, options.examples
    measure.report(options, HEAD, lambda: run(*sizes, options.rounds), devices=DEVICES)


if __name__ == "__main__":
    main()
