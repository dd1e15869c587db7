"""What does a step cost on 512 devices? It is compiled for them, and not run.

    python -m benchmarks.scale [--devices 8 64 512] [--only FSDP tables] [--json FILE]

A process has 512 devices of the CPU, for which the compiler divides a program as it does for
others. Each way of dividing a model is compiled for meshes of 8, 64 and 512 of them, of abstract
arrays, so that nothing is allocated. What a device works on stays the same:

* a stack of four layers of width 512, 8.4 M parameters, and 16 examples on each device; adam. A
  pipeline has eight stages of one layer and 16 microbatches of one example.
* with tables one of 2²⁰ rows of 64 entries, in which each device looks up 1,024 ids; lazy adam.

Collectives are those of a step, in loops as often as they run. Sent are the bytes of each device,
in rings, and the formula is `plan_memory`, with what goes between stages and inside of a
tensor-parallel layer, which the plan does not count. Kept are params and state. CPU s are those of
all threads, to trace, lower and compile.

The exit status is 1 if the collectives, or the bytes kept or held as temporaries, grow with the
devices, or the bytes sent are not the formula's within 2 %, and no line of TOLD says why.
"""

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import measure, wire
from benchmarks.sharding import layer, loss_fn
from optfn.distributed import (
    MemoryPlan,
    data_mesh,
    exchange,
    pipeline_value_and_grad,
    plan,
    plan_memory,
    quantize,
    sharded,
)

DEVICES = 512
HEAD = (
    "| division | devices | collectives | kB sent | formula | sent/formula | kB kept "
    "| kB of temporaries | CPU s | grows |\n|---|---|---|---|---|---|---|---|---|---|"
)
TOLERANCE = 0.02
_PACKETS = 'the packets of all workers are gathered, which route="parts" does not do'
# The columns of a division that grow with the devices or leave the formula, and why.
TOLD = {
    ("two levels, quantize(4)", "temporaries"): _PACKETS,
    ("exchange, gathered", "temporaries"): _PACKETS,
    ("tables", "temporaries"): "a device has room for the ids that all others may send it, and for "
    "rows of gradients up to those that it keeps",
}


class Size(NamedTuple):
    """The size of the models, and of what a device works on."""

    layers: int = 4
    width: int = 512
    examples: int = 16
    rows: int = 1 << 20
    entries: int = 64
    lookups: int = 1024
    group: int = 4  # the devices of a machine, and of a tensor-parallel layer
    stages: int = 8


TOY = Size(2, 64, 4, 1024, 8, 64, group=2, stages=2)


class Division(NamedTuple):
    """A way of dividing a model over devices.

    params: the shapes of params.
    batch: the shapes of what a worker works on in a step.
    inner: the axes of the mesh behind "data", and their sizes.
    data_axis: the axes over which the batch is split.
    options: of `make_train_step`; `value_and_grad` is made of a mesh.
    tx: the optimizer.
    loss: of params and a batch.
    planned: options of `plan_memory` alone.
    activations: the bytes that a device sends and the plan does not count.
    pipeline: makes the `value_and_grad` of a pipeline on a mesh; None for none.
    """

    params: Any
    batch: Any
    inner: Mapping[str, int] = {}
    data_axis: tuple[str, ...] = ("data",)
    options: Mapping[str, Any] = {}
    tx: Any = optfn.adam(1e-3)
    loss: Callable[[Any, Any], jax.Array] = loss_fn
    planned: Mapping[str, Any] = {}
    activations: float = 0.0
    pipeline: Callable[[Mesh], Any] | None = None

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Return a mesh of devices, of a TPU's chips in the order of their torus."""
        shape = len(devices) // math.prod(self.inner.values()), *self.inner.values()
        chips = data_mesh(devices=devices).devices
        return Mesh(chips.reshape(shape), ("data", *self.inner))


def divisions(size: Size) -> dict[str, Division]:
    """Return the ways of dividing a model."""
    n, d = size.layers, size.width
    shapes = {"up": (n, d, 4 * d), "down": (n, 4 * d, d)}
    weights = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    layers, x = optfn.Stacked(weights), jax.ShapeDtypeStruct((size.examples, d), jnp.float32)
    each = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), weights)] * n
    inside = {"inner": {"fast": size.group}, "data_axis": ("data", "fast")}
    fsdp_inside = {"shard": sharded("params", axis="fast")}
    four_bits = exchange(quantize(4))

    def linked(route: str) -> Any:
        return optfn.chain(exchange(quantize(4), route=route), optfn.adam(1e-3))

    return {
        "data": Division(layers, x),
        "ZeRO": Division(layers, x, options={"shard": "state"}),
        "FSDP": Division(layers, x, options={"shard": "params"}),
        "two levels": Division(layers, x, **inside, options=fsdp_inside),
        "two levels, quantize(4)": Division(
            layers, x, **inside, options=fsdp_inside, tx=optfn.chain(four_bits, optfn.adam(1e-3))
        ),
        "tensor": tensor(each, x, size.group),
        "tables": tables(size),
        "pipeline": pipeline(size),
        "exchange, gathered": Division(layers, x, tx=linked("gather")),
        "exchange by parts": Division(layers, x, tx=linked("parts")),
        "local steps": Division(
            layers,
            jax.ShapeDtypeStruct((4 * size.examples, d), jnp.float32),
            options={"local_steps": 4},
        ),
    }


def tensor(layers: Any, x: jax.ShapeDtypeStruct, group: int) -> Division:
    """Return tensor-parallel layers, a group of devices each, and workers beside them."""
    shard = {".*/up": P(None, "model"), ".*/down": P("model")}
    # Sums of each layer's result, and of its input's cotangent, which the first layer has not.
    sums = (2 * len(layers) - 1) * 2 * (group - 1) / group * x.size * 4
    return Division(layers, x, {"model": group}, options={"shard": shard}, activations=sums)


def tables(size: Size) -> Division:
    """Return a table whose rows are divided."""

    def loss(params: Any, batch: Any) -> jax.Array:
        ids, target = batch
        return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)

    params = {
        "table": jax.ShapeDtypeStruct((size.rows, size.entries), jnp.float32),
        "w": jax.ShapeDtypeStruct((size.entries, 2), jnp.float32),
    }
    batch = (
        jax.ShapeDtypeStruct((size.lookups,), jnp.int32),
        jax.ShapeDtypeStruct((size.lookups, 2), jnp.float32),
    )
    return Division(
        params, batch, loss=loss, tx=optfn.adam(1e-3, lazy=True),
        options={"tables": "table", "shard_tables": True},
        planned={"lookups": size.lookups},
    )  # fmt: skip


def pipeline(size: Size) -> Division:
    """Return stages of a layer each, and workers beside them."""
    stages, microbatches, d = size.stages, size.examples, size.width
    params = {
        "up": jax.ShapeDtypeStruct((stages, d, 4 * d), jnp.float32),
        "down": jax.ShapeDtypeStruct((stages, 4 * d, d), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((microbatches, d), jnp.float32)
    return Division(
        params, (x, x), {"stage": stages}, options={"shard": {".*": P("stage")}},
        activations=sends(stages, microbatches) * d * 4, pipeline=piped(layer, microbatches),
    )  # fmt: skip


def sends(stages: int, microbatches: int) -> int:
    """Return how many activations and cotangents a stage of a pipeline sends in a step."""
    phases = plan(stages, microbatches).phases
    return sum((phase.stop - phase.start) * len({*phase.work} & {*"FB"}) for phase in phases)


def piped(stage: Callable[[Any, Any], Any], microbatches: int) -> Callable[[Mesh], Any]:
    """Return the function from a mesh to the `value_and_grad` of a pipeline of such stages."""

    def made(mesh: Mesh) -> Any:
        return pipeline_value_and_grad(
            stage, lambda y, target: jnp.mean((y - target) ** 2),
            mesh=mesh, num_microbatches=microbatches,
        )  # fmt: skip

    return made


def made(division: Division, mesh: Mesh) -> optfn.TrainStep:
    """Return the training step on a mesh."""
    options = dict(division.options)
    loss: Any = division.loss
    if division.pipeline is not None:
        loss, options["value_and_grad"] = None, division.pipeline(mesh)
    return optfn.make_train_step(
        loss, division.tx, mesh=mesh, data_axis=division.data_axis, **options
    )


def batch_of_all(division: Division, mesh: Mesh) -> Any:
    """Return the shapes of the batch of all workers."""
    workers = math.prod(mesh.shape[axis] for axis in division.data_axis)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((workers * x.shape[0], *x.shape[1:]), x.dtype),
        division.batch,
    )


def planned(division: Division, step: optfn.TrainStep) -> MemoryPlan:
    """Return the plan of a step."""
    options = step.options
    return plan_memory(
        division.tx, division.params, step.mesh,
        shard=options.shard, data_axis=division.data_axis, tables=options.tables,
        shard_tables=options.shard_tables, local_steps=options.local_steps,
        value_and_grad=options.value_and_grad is not None, microbatches=options.microbatches,
        **division.planned,
    )  # fmt: skip


def measured(name: str, division: Division, devices: int) -> measure.Row:
    """Return the row of a division on so many devices."""
    mesh = division.mesh(jax.devices()[:devices])
    step = made(division, mesh)
    start = time.process_time()
    compiled = step.lower(division.params, batch_of_all(division, mesh)).compile()
    seconds = time.process_time() - start
    memory = compiled.memory_analysis()
    found = wire.collectives(compiled)
    sent = sum(wire.bytes_by_axes(compiled, mesh).values())
    formula = planned(division, step).sent + division.activations
    return {
        "division": name,
        "devices": devices,
        "collectives": sum(x.times for x in found),
        "sent": sent,
        "formula": formula,
        "sent_over": sent / formula,
        "kept": memory.argument_size_in_bytes - measure.num_bytes(division.batch),
        "temporaries": memory.temp_size_in_bytes,
        "cpu_s": seconds,
    }


def grown(rows: Sequence[measure.Row]) -> list[str]:
    """Return which columns of a division grow with the devices, or leave the formula."""
    found = [
        column
        for column in ("collectives", "kept", "temporaries")
        if max(row[column] for row in rows) > (1 + TOLERANCE) * rows[0][column]
    ]
    if any(abs(row["sent_over"] - 1) > TOLERANCE for row in rows):
        found.append("sent")
    return found


def run(options: argparse.Namespace, size: Size) -> list[measure.Row]:
    """Return the rows, and print them."""
    rows: list[measure.Row] = []
    wrong: list[str] = []
    told: list[str] = []
    for name, division in divisions(size).items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        least = 2 * math.prod(division.inner.values())  # so that there are workers
        own = [measured(name, division, max(n, least)) for n in options.devices]
        columns = grown(own)
        for column in columns:
            why = TOLD.get((name, column))
            (told if why else wrong).append(f"{name}: {column}" + (f": {why}" if why else ""))
        for row in own:
            rows.append(row | {"grows": ", ".join(columns)})
            print(_line(rows[-1]), flush=True)
    print("", *told, sep="\n")
    if wrong:
        print("not as promised: " + "; ".join(wrong), file=sys.stderr)
        sys.exit(1)
    return rows


def _line(row: measure.Row) -> str:
    return (
        f"| {row['division']} | {row['devices']} | {row['collectives']} | {row['sent'] / 1e3:,.1f} "
        f"| {row['formula'] / 1e3:,.1f} | {row['sent_over']:.3f} | {row['kept'] / 1e3:,.1f} "
        f"| {row['temporaries'] / 1e3:,.1f} | {row['cpu_s']:.1f} | {row['grows']} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, DEVICES])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    options = measure.parse(parser, devices=[4, 8], only=["FSDP", "two levels", "pipeline"])
    size = TOY if options.toy else Size()
    measure.report(options, HEAD, lambda: run(options, size))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # also where there are other devices
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
