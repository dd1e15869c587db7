"""What does a step hold, send and take on many chips? It is compiled for them, and not run.

    make pods
    make pods OPTIONS="--model small --topology 'v5e:4x4;v5p:8x8x8' --only 'FSDP;ZeRO'"

The compilers are those of `make compiled`. Each way of dividing a model is lowered by
`TrainStep.lower` for a topology of chips, and compiled. Beside our ways is GSPMD's: the same loss
and optimizer under `jax.jit`, with params, state and batch divided as in FSDP, and activations
constrained to the batch's division. "Sparse cores" are steps with the compiler options of
`optfn.distributed.overlap_options`, which leave gathers and scatters to the sparse cores of v5p and
v6e. "Overlap options" are the same on other chips. Meshes have the chips in the order of their
torus, as `optfn.distributed.data_mesh` sorts them.

* "small" is the stack of layers of `benchmarks.scale`, 8.4 M parameters, adam.
* "7B" and "70B" are Llama 2 in bfloat16 with float32 masters, adamw, clipping by the global norm,
  each layer recomputed, 2,048 tokens on each chip. The pipeline has no embedding: its batch is that
  of the first layer. "7B by heads" has q, k and v as products of weights of heads, an einsum. Of a
  product that is divided into heads, XLA for v5p copies the gathered weights into another layout,
  where a chip has one example.

Bytes are those of a chip: kept are params, state and batch; temporaries are without the fast memory
of the chip. Collectives are those of a step, in loops as often as they run. Whole are the
all-reduces of as many bytes as the smallest matrix of a layer, in bfloat16, or more. FLOPs are 8
for each parameter and token: a forward and a backward pass and the recomputation.

Milliseconds of a step are those of `optfn.distributed.estimate_step`, which reads the compiled
schedule with assumed speeds of links: step is compute and exposed, the communication for which
compute waits. MFU is the model FLOPs utilization of it; in a pipeline it counts the bubbles, in
which products run too. No chip ran any of it.

Rows are kept in `benchmarks/pods.json`; a run of some of them replaces these.
"""

import argparse
import fnmatch
import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import measure, scale, targets, wire
from benchmarks.scale import Division
from optfn.distributed import (
    PipelineParams,
    data_mesh,
    estimate_step,
    overlap_options,
    pipeline_value_and_grad,
    scan_layers,
    sharded,
)

KEPT = measure.Kept(
    Path(__file__).with_suffix(".json"),
    ("model", "topology", "way"),
    ("jax", "libtpu", "jax-cuda12-plugin"),
)
ADAMW = optfn.adamw(1e-4, multi_precision=True, grad_clip=optfn.clip_by_global_norm(1.0))
Keep = Callable[[jax.Array], jax.Array]
HEAD = (
    "| model | topology | way | GB kept | GB of temporaries | compute ms | communication ms "
    "| exposed ms | step ms | MFU % | all-reduce | all-gather | reduce-scatter | all-to-all "
    "| permute | whole all-reduces | MB sent | sent/plan | B sent a MFLOP | compile s |\n"
    + "|---" * 20
    + "|"
)
TOPOLOGIES = {
    "small": (
        "v5e:4x4", "v5e:8x8", "v5e:16x16", "v6e:16x16", "v5p:4x4x4", "v5p:8x8x8", "1x8x1", "8x8x1",
    ),
    "7B": ("v5e:16x16", "v5e:4x4", "v5p:4x4x4", "v6e:16x16", "1x8x1", "8x8x1"),
    "7B by heads": ("v5p:4x4x4",),
    "70B": ("v5p:8x8x8",),
}  # fmt: skip
SECONDS = ("compute", "communication", "exposed", "step")
# The ending of a way whose gathers and scatters are left to the sparse cores of v5p and v6e.
SPARSE = ", sparse cores"
# The ending of a way with `overlap_options` on other chips.
OPTIONS = ", overlap options"
# The way for H100s, of which a switch joins 8.
IN_NODES = "two levels, nodes of 8"


class Llama(NamedTuple):
    """The sizes of a Llama 2, and of the groups of devices of two levels and of a pipeline.

    by_heads: whether q, k and v are products of weights of heads, rather than products that are
      divided into heads.
    """

    width: int
    hidden: int
    layers: int
    keys: int
    heads: int
    group: int
    vocabulary: int = 32_000
    tokens: int = 2048
    stages: int = 8
    pipeline_group: int = 16
    by_heads: bool = False

    def weights(self, *leading: int) -> Any:
        """Return the shapes of the weights of layers, with these axes in front."""
        d, k, h = self.width, self.keys, self.hidden
        shapes = {
            "q": (d, d), "k": (d, k), "v": (d, k), "out": (d, d),
            "gate": (d, h), "up": (d, h), "down": (h, d), "before": (d,), "after": (d,),
        }  # fmt: skip
        return {name: _bfloat16(*leading, *shape) for name, shape in shapes.items()}

    def head(self) -> Any:
        """Return the shapes of the params behind the layers."""
        return {"norm": _bfloat16(self.width), "head": _bfloat16(self.width, self.vocabulary)}

    def layer(self, w: Any, x: jax.Array) -> jax.Array:
        """Return the result of a layer."""

        size = self.width // self.heads

        def heads(y: jax.Array, w: jax.Array) -> jax.Array:
            if self.by_heads:
                return jnp.einsum("bsd,dhk->bshk", y, w.reshape(self.width, -1, size))
            return (y @ w).reshape(*y.shape[:2], -1, size)

        y = _normalized(x, w["before"])
        q, k, v = (heads(y, w[name]) for name in "qkv")
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        y = _normalized(x, w["after"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def loss(self, params: Any, tokens: jax.Array, keep: Keep = lambda x: x) -> jax.Array:
        """Return the mean loss of the next tokens; `keep` is applied to each layer's result."""
        layer = jax.checkpoint(lambda w, x: keep(self.layer(w, x)))
        x = scan_layers(layer, params["layers"], keep(params["embedding"][tokens[:, :-1]]))
        return self.head_loss(x, tokens[:, 1:], params)

    def head_loss(self, x: jax.Array, following: jax.Array, shared: Any) -> jax.Array:
        """Return the mean loss, given the result of the last layer and the tokens that follow."""
        logits = (_normalized(x, shared["norm"]) @ shared["head"]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, following))

    def divisions(self) -> dict[str, Division]:
        """Return the ways of dividing it."""
        params = {"layers": optfn.Stacked(self.weights(self.layers)), **self.head()}
        params["embedding"] = _bfloat16(self.vocabulary, self.width)
        tokens = jax.ShapeDtypeStruct((1, self.tokens + 1), jnp.int32)
        fsdp = Division(params, tokens, options={"shard": "params"}, tx=ADAMW, loss=self.loss)

        def in_groups(size: int) -> Division:
            options = {"shard": sharded("params", axis="fast")}
            axes = ("data", "fast")
            return fsdp._replace(inner={"fast": size}, data_axis=axes, options=options)

        rows = {"shard": "params", "tables": "embedding", "shard_tables": True}
        return {
            "FSDP": fsdp,
            "FSDP, rows of the embedding": fsdp._replace(options=rows),
            "two levels": in_groups(self.group),
            IN_NODES: in_groups(8),
            "pipeline": self.pipeline(),
        }

    def pipeline(self) -> Division:
        """Return stages of some layers, divided over some devices, without embedding."""
        stages = self.weights(self.stages, self.layers // self.stages)
        x = _bfloat16(self.stages, self.tokens, self.width)  # a microbatch for each stage
        following = jax.ShapeDtypeStruct((self.stages, self.tokens), jnp.int32)
        layer = jax.checkpoint(self.layer)

        def stage(w: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

        def made(mesh: Mesh) -> Any:
            def loss(x: jax.Array, following: jax.Array, shared: Any) -> jax.Array:
                return self.head_loss(x, following, shared)

            return pipeline_value_and_grad(stage, loss, mesh=mesh, num_microbatches=self.stages)

        matrices = P("stage", None, None, "fast")
        shard = {"stages/(before|after)": P("stage"), "stages/.*": matrices}
        return Division(
            PipelineParams(stages, self.head()), (x, following),
            {"fast": self.pipeline_group, "stage": self.stages}, ("data", "fast"),
            {"shard": sharded(shard, axis="fast")}, ADAMW, pipeline=made,
            activations=scale.sends(self.stages, self.stages) * self.tokens * self.width * 2,
        )  # fmt: skip


def _bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _normalized(x: jax.Array, scales: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * scales


LLAMAS = {
    "7B": Llama(4096, 11_008, 32, 4096, 32, group=16),
    "7B by heads": Llama(4096, 11_008, 32, 4096, 32, group=16, by_heads=True),
    "70B": Llama(8192, 28_672, 80, 1024, 64, group=64),
    "toy": Llama(64, 128, 4, 32, 4, group=4, vocabulary=256, tokens=64, stages=2, pipeline_group=2),
}
SMALL = ("data", "ZeRO", "FSDP", "two levels", "two levels, quantize(4)", "tables",
         "exchange, gathered", "exchange by parts", "pipeline")  # fmt: skip


def divisions(model: str) -> dict[str, Division]:
    """Return the ways of dividing a model."""
    if model in LLAMAS:
        return LLAMAS[model].divisions()
    found = {name: x for name, x in scale.divisions(scale.Size()).items() if name in SMALL}
    in_turn = {"shard": "params", "microbatches": 4}
    return found | {"FSDP, 4 microbatches": found["FSDP"]._replace(options=in_turn)}


def gspmd(
    division: Division, mesh: Mesh, keeps: bool, options: dict[str, Any] | None
) -> jax.stages.Lowered:
    """Return the loss and the optimizer of FSDP, lowered for the compiler to divide.

    Args:
      division: the params, divided over all devices.
      mesh: the devices.
      keeps: whether the loss takes `keep`, for a constraint on activations.
      options: options of the compiler.
    """
    step = scale.made(division, mesh)
    state, batch = step.shapes(division.params, scale.batch_of_all(division, mesh))
    split = NamedSharding(mesh, P("data"))
    keep = {"keep": lambda x: jax.lax.with_sharding_constraint(x, split)} if keeps else {}

    def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, g = jax.value_and_grad(division.loss)(state.params, batch, **keep)
        updates, opt_state = step.tx.update(g, state.opt_state, state.params)
        params = optfn.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), loss

    placed = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(
        train, donate_argnums=0, out_shardings=(placed, None), compiler_options=options
    )
    return jitted.lower(state, batch)


def strip_ending(way: str) -> str:
    """Return the way without the ending for options of the compiler."""
    return way.removesuffix(SPARSE).removesuffix(OPTIONS)


def lowered(model: str, way: str, chips: Sequence[Any]) -> jax.stages.Lowered:
    """Return a step lowered for some chips."""
    options = overlap_options(data_mesh(devices=chips)) if strip_ending(way) != way else None
    way = strip_ending(way)
    if way == "GSPMD":
        division = divisions(model)["FSDP"]
        return gspmd(division, division.mesh(chips), model in LLAMAS, options)
    division = divisions(model)[way]
    division = division._replace(options={**division.options, "compiler_options": options})
    mesh = division.mesh(chips)
    batch = scale.batch_of_all(division, mesh)
    return scale.made(division, mesh).lower(division.params, batch)


def measured(model: str, topology: str, way: str, texts: Path | None = None) -> measure.Row:
    """Return the row of a way of dividing a model over the chips of a topology.

    Args:
      model: the name of the model.
      topology: the name of the topology.
      way: the way.
      texts: the folder to write the text of the program to, for `benchmarks.schedule`.
    """
    chips = targets.devices(target_of(topology))
    start = time.process_time()
    program = lowered(model, way, chips).compile()
    seconds = time.process_time() - start
    if texts is not None:
        name = f"{model} {topology} {way}".replace(":", "_")
        (texts / f"{name}.hlo").write_text(program.as_text())
    found, memory = wire.collectives(program), program.memory_analysis()
    found = [x if x.devices else x._replace(devices=tuple(range(len(chips)))) for x in found]
    sent = sum(x.sent for x in found)
    division = divisions(model).get(strip_ending(way))
    row: measure.Row = {
        "model": model, "topology": topology, "way": way, "chips": len(chips),
        "kept": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
    }  # fmt: skip
    for kind in wire.FACTORS:
        row[kind] = sum(x.times for x in found if x.kind == kind)
    group = math.prod(division.inner.values()) if division and division.inner else len(chips)
    row["whole"] = sum(x.times for x in found if is_whole(x, model, group))
    row |= {"sent": sent, "seconds": round(seconds, 1)} | estimated(program)
    if division is not None:
        step = scale.made(division, division.mesh(chips))
        row["planned"] = scale.planned(division, step).sent + division.activations
    if model in LLAMAS:
        size = sum(x.size for x in jax.tree.leaves(divisions(model)["FSDP"].params))
        row["flops"] = 8 * size * LLAMAS[model].tokens
    return row


def estimated(program: jax.stages.Compiled) -> measure.Row:
    """Return the columns of the seconds of a step, none where an instruction's cost is not known.

    The small model is sent by top_k and row by row too, with sorts that a library runs.
    """
    try:
        found = estimate_step(program)
    except ValueError as why:
        print(why, file=sys.stderr)
        return {}
    return {
        "compute": found.compute,
        "communication": sum(found.communication.values()),
        "exposed": sum(found.exposed.values()),
        "step": found.seconds,
        "utilization": found.utilization,
        "products": found.flops,
    }


def is_whole(x: wire.Collective, model: str, group: int) -> bool:
    """Tell whether a collective is an all-reduce of what devices of one group divide.

    Args:
      x: the collective.
      model: the name of the model.
      group: the number of devices, next to each other on the mesh, that divide the model.
    """
    shapes = [x.shape[-2:] for x in jax.tree.leaves(divisions(model)["FSDP"].params)]
    smallest = min(math.prod(shape) for shape in shapes if len(shape) > 1 and min(shape) > 256)
    inside = len({device // group for device in x.devices}) < len(x.devices)
    return x.kind == "all-reduce" and inside and x.size / x.times >= 2 * smallest


def ways(model: str, topology: str) -> list[str]:
    """Return the names of the ways to compile a model for a topology that has chips for them."""
    chips = math.prod(int(n) for n in re.findall(r"\d+", topology.split(":")[-1]))
    sparse = ["FSDP" + SPARSE, "GSPMD" + SPARSE] if topology.startswith(("v5p", "v6e")) else []
    found = [
        name
        for name, x in divisions(model).items()
        if math.prod(x.inner.values()) <= chips and not (name == IN_NODES and ":" in topology)
    ]
    with_options = {
        "1x8x1": ["FSDP", "GSPMD"],
        "8x8x1": ["FSDP", IN_NODES, "GSPMD"],
        "v5e:4x4": ["FSDP", "GSPMD"],
        "v5e:16x16": ["FSDP", "GSPMD"],
    }
    options = [way + OPTIONS for way in with_options.get(topology, []) if model in LLAMAS]
    return [*found, "GSPMD", *sparse, *options]


def target_of(topology: str) -> targets.Target:
    """Return the target of a topology: "v5e:4x4", or "1x8x1" of H100s."""
    return targets.Target("tpu" if ":" in topology else "cuda", topology)


def _prepare(topology: str) -> None:
    targets.prepare(target_of(topology))


def found_rows(
    chosen: Sequence[tuple[str, str, str]], texts: Path | None = None
) -> Iterator[measure.Row]:
    """Yield the rows of some (model, topology, way), those of each topology from one process."""
    spawn = multiprocessing.get_context("spawn")
    for topology in dict.fromkeys(topology for _, topology, _ in chosen):
        with ProcessPoolExecutor(1, spawn, _prepare, (topology,)) as pool:
            for one in (one for one in chosen if one[1] == topology):
                yield pool.submit(measured, *one, texts).result()


def line(row: measure.Row) -> str:
    """Return a row of the table."""
    kinds = [f"{row[x]:,}" for x in wire.FACTORS]
    times = [f"{1e3 * row[x]:.2f}" if x in row else "-" for x in SECONDS]
    times.append(f"{100 * row['utilization']:.1f}" if "utilization" in row else "-")
    planned = f"{row['sent'] / row['planned']:.2f}" if row.get("planned") else "-"
    flops = f"{1e6 * row['sent'] / row['flops']:.1f}" if "flops" in row else "-"
    cells = [
        row["model"], row["topology"], row["way"], f"{row['kept'] / 1e9:.3f}",
        f"{row['temporaries'] / 1e9:.3f}", *times, *kinds, f"{row['whole']:,}",
        f"{row['sent'] / 1e6:,.1f}", planned, flops, f"{row['seconds']:.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def add_choices(parser: argparse.ArgumentParser, models: list[str], names: str) -> None:
    """Add the arguments that choose rows by model, topology and way, and the file for them."""

    def add(name: str, default: list[str], about: str) -> None:
        parser.add_argument(
            name, default=default, type=lambda names: names.split(";"), metavar="A;B", help=about
        )

    add("--model", models, names)
    add("--topology", ["*"], "topologies, or patterns")
    add("--only", ["*"], "ways, or patterns of their names")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, and keep none")


def choose(
    options: argparse.Namespace,
    topologies: Mapping[str, Iterable[str]],
    ways_of: Callable[[str, str], Iterable[str]],
) -> list[tuple[str, str, str]]:
    """Return the (model, topology, way) that the arguments choose."""
    return [
        (model, topology, way)
        for model in options.model
        for topology in topologies[model]
        for way in ways_of(model, topology)
        if any(fnmatch.fnmatch(topology, pattern) for pattern in options.topology)
        and any(fnmatch.fnmatch(way, pattern) for pattern in options.only)
    ]


def print_rows(
    found: Iterable[measure.Row],
    shown: Callable[[measure.Row], str],
    kept: measure.Kept,
    json_file: str | None,
) -> None:
    """Print rows as they come, and keep each, or write all to a file if one is given."""
    rows = []
    for row in found:
        print(shown(row), flush=True)
        rows.append(row)
        if not json_file:
            kept.keep(row)
    if json_file:
        Path(json_file).write_text(json.dumps(rows))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, list(TOPOLOGIES), "small, 7B, 70B")
    parser.add_argument("--texts", metavar="FOLDER", type=Path, help="write the programs there")
    options = parser.parse_args()
    chosen = choose(options, TOPOLOGIES, ways)
    print(HEAD)
    print_rows(found_rows(chosen, options.texts), line, KEPT, options.json)


if __name__ == "__main__":
    main()
