"""What does Muon cost on N devices, with work divided by matrix?

    python -m benchmarks.matrices [--layers 16] [--width 128] [--devices 2 4 8] [--rounds 5]

The step of a stack of layers, six matrices each, of a small GPT: q, k, v, o, and two of the hidden
layer; with an embedding and biases, which AdamW moves. `optfn.muon` with `sharded("state", whole=)`
stands beside the same without `whole=`, `optax.contrib.muon` with the compiler's division of the
same state, and one device. The loss is a sum over params, so that nearly all FLOPs are those of the
update. Read from the compiled step of each device:

* FLOPs of a device, times N, over those of one device: 1 is ideal, N is all of it on each device.
* bytes sent in a ring, over those of ZeRO-1, 2(N − 1)/N·P.
* temporaries, in bytes a parameter.

Measured is the CPU time of all devices for a step, over that of one device, in interleaved rounds.
The devices share the cores.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

# Before jax is imported. Devices of the CPU also where there are others: there must be eight.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import optfn
from benchmarks import measure, wire
from optfn.distributed import data_mesh, sharded

MATRICES = "layers/w_.*"
HEAD = (
    "| optimizer | shard | N | FLOPs·N, × one device | sent, × ZeRO-1 | collectives "
    "| temporaries B/param | CPU s, × one device |\n|---|---|---|---|---|---|---|---|"
)


def model(layers: int, width: int) -> dict[str, Any]:
    """Return the params."""
    shapes = {f"w_{name}": (width, width) for name in "qkvo"}
    shapes |= {"w_in": (width, 4 * width), "w_out": (4 * width, width), "b": (4 * width,)}
    rng = np.random.default_rng(0)
    return {
        "embedding": rng.standard_normal((256, width), np.float32),
        "layers": optfn.Stacked(
            {k: rng.standard_normal((layers, *shape), np.float32) for k, shape in shapes.items()}
        ),
    }


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Return a loss whose gradients, another for each leaf, cost next to nothing."""
    leaves = enumerate(jax.tree.leaves(params))
    return sum((jnp.mean(p * jnp.mean(x[:, i % 4] ** (i + 1))) for i, p in leaves), jnp.zeros(()))


def ours() -> optax.GradientTransformation:
    """Return optfn's Muon."""
    return optfn.muon(0.02, matrices=MATRICES, others=optfn.adamw(1e-3), weight_decay=0.1)


def theirs() -> optax.GradientTransformation:
    """Return optax's, which has to be told which axes are a matrix."""

    def dimensions(params: Any) -> Any:
        def of_leaf(path: Any, p: Any) -> Any:
            is_matrix = any("w_" in str(key) for key in path)
            return MuonDimensionNumbers((1,), (2,)) if is_matrix else None

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    numbers = dimensions(model(1, 2))
    return optax.contrib.muon(0.02, weight_decay=0.1, muon_weight_dimension_numbers=numbers)


class Step:
    """A training step on one batch, its state and its program."""

    def __init__(self, tx: Any, params: Any, devices: int, shard: Any) -> None:
        options = {} if devices == 1 else {"mesh": data_mesh(devices), "shard": shard}
        step = optfn.make_train_step(loss_fn, tx, **options)
        self.step, self.state = step, step.init(params)
        self.batch = np.ones((8, 4), np.float32)
        self.compiled = step.compiled.lower(self.state, self.batch).compile()

    def __call__(self) -> Any:
        """Make a step."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    @property
    def flops(self) -> float:
        """The FLOPs of a device."""
        return float(self.compiled.cost_analysis()["flops"])

    @property
    def temporaries(self) -> float:
        """The bytes that the program of a device needs beside its arguments."""
        return float(self.compiled.memory_analysis().temp_size_in_bytes)


def sides(devices: int) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield the names and arguments of the steps on so many devices."""
    yield "optfn", "`whole=`", ours(), sharded("state", whole=MATRICES)
    yield "optfn", '`"state"`', ours(), "state"
    yield "optfn", "`None`", ours(), None
    yield "optax", '`"state"`', theirs(), "state"


def run(layers: int, width: int, counts: list[int], rounds: int) -> list[measure.Row]:
    """Return a row for each step, and print them."""
    params = model(layers, width)
    size = measure.size(params)
    rows = []
    alone = {
        name: Step(tx, params, 1, None) for name, tx in (("optfn", ours()), ("optax", theirs()))
    }
    for devices in counts:
        found = list(sides(devices))
        steps = [Step(tx, params, devices, shard) for _, _, tx, shard in found]
        *cpu, cpu_alone, _ = measure.cpu_seconds([*steps, *alone.values()], rounds)
        for (name, shard, *_), step, seconds in zip(found, steps, cpu, strict=True):
            row: measure.Row = {
                "optimizer": name,
                "shard": shard,
                "devices": devices,
                "flops_over": devices * step.flops / alone["optfn"].flops,
                "sent_over": wire.bytes_sent(step.compiled, devices)
                / (2 * (devices - 1) / devices * 4 * size),
                "collectives": len(wire.collectives(step.compiled)),
                "temporaries": step.temporaries / size,
                "cpu_over": seconds / cpu_alone,
            }
            rows.append(row)
            print(
                f"| {name} | {shard} | {devices} | {row['flops_over']:.3f} "
                f"| {row['sent_over']:.3f} | {row['collectives']} | {row['temporaries']:.1f} "
                f"| {row['cpu_over']:.2f} |",
                flush=True,
            )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = measure.parse(parser, layers=4, width=16, devices=[4], rounds=1)
    sizes = options.layers, options.width, options.devices, options.rounds
    measure.report(options, HEAD, lambda: run(*sizes))


if __name__ == "__main__":
    main()
