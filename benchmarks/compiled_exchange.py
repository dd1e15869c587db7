"""What does an exchange cost as the compilers of TPUs make it?

    python -m benchmarks.compiled_exchange [--target v5e:4x4 v5p:4x4x4 cpu:16] [--model scale gpt2]
        [--only "quantize*"] [--dry]

A step of adam is compiled for chips that are not there (`make compiled` makes the environment), or
for devices of the CPU, with each way to exchange gradients, and with the dense mean beside it. The
model "scale" is the one of `benchmarks.scale`, four layers of width 512 in a stack, 8.4 M
parameters; "gpt2" has the shapes of GPT-2 small, 148 leaves, 124 M, and a product for each matrix.

Temporaries and HBM are bytes a parameter and device; the compiler keeps buffers of up to 100 MB in
fast memory, which are not counted. Seconds are those of the CPU, all threads, to compile. Rows are
kept in `benchmarks/compiled_exchange.json`; a run of some of them replaces these.

A gathered step holds the packets of all workers: with 16 of them 16 bytes a parameter at 8 bits and
8 at 4 bits, with 64 workers 64 and 32.
"""

import argparse
import fnmatch
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import optfn
from benchmarks import hlo, measure, scale, targets
from optfn.distributed import exchange, power_sgd, quantize, sharded, top_k

KEPT = measure.Kept(
    Path(__file__).with_suffix(".json"), ("target", "model", "step"), ("jax", "libtpu")
)
HEAD = (
    "| target | model | step | temporaries B | over plain | HBM B | / plain | M cycles "
    "| compile s | / plain |\n|---|---|---|---|---|---|---|---|---|---|"
)
GROUP = 4  # the devices of a machine, in two levels
TARGETS = ("v5e:4x4", "v5p:4x4x4", "cpu:16")


def _exchanging(*compressor: Any, **options: Any) -> Callable[[], Any]:
    return lambda: optfn.chain(exchange(*compressor, **options), optfn.adam(1e-3))


def _dgc() -> Any:
    return optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, sparsity=(0.999,))


def _quantized(kind: str, bits: int, **options: Any) -> dict[str, Any]:
    return {"shard": sharded(kind, gather=quantize(bits), reduce=quantize(bits), **options)}


LEVELS = {"shard": sharded("params", axis="fast")}
# The optimizer of a step, options of `make_train_step`, and the row that it is compared with.
STEPS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "plain": (lambda: optfn.adam(1e-3), {}, "plain"),
    "quantize(8), gathered": (_exchanging(quantize(8)), {}, "plain"),
    "quantize(4), gathered": (_exchanging(quantize(4)), {}, "plain"),
    "quantize(4), by parts": (_exchanging(quantize(4), route="parts"), {}, "plain"),
    "quantize(1), by parts": (_exchanging(quantize(1), route="parts"), {}, "plain"),
    "power_sgd(4)": (_exchanging(power_sgd(4)), {}, "plain"),
    "top_k(0.01)": (_exchanging(top_k(0.01)), {}, "plain"),
    "dgc": (_dgc, {}, "plain"),
    "FSDP": (lambda: optfn.adam(1e-3), {"shard": "params"}, "FSDP"),
    "FSDP, quantize(8)": (lambda: optfn.adam(1e-3), _quantized("params", 8), "FSDP"),
    "two levels": (lambda: optfn.adam(1e-3), LEVELS, "two levels"),
    "two levels, quantize(4)": (_exchanging(quantize(4)), LEVELS, "two levels"),
}


def loss_of_matrices(params: Any, x: jax.Array) -> jax.Array:
    """Return a loss in which each matrix has a product, so that its gradient is one too."""
    total = jnp.float32(0)
    for w in params.values():
        product = x[:, : w.shape[0]] @ w if w.ndim == 2 else x[:, : w.size] * w
        total += jnp.mean(jnp.tanh(product))
    return total


def division(model: str, step: str) -> scale.Division:
    """Return how a model is divided in a step."""
    make, options, _ = STEPS[step]
    levels = {"inner": {"fast": GROUP}, "data_axis": ("data", "fast")}
    options = {"tx": make(), "options": options, **(levels if step.startswith("two") else {})}
    if model == "scale":
        plain = scale.divisions(scale.Size())["data"]
        return plain._replace(**options)
    if model == "toy":
        return scale.divisions(scale.TOY)["data"]._replace(**options)
    shapes = measure.gpt2_small()
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    batch = jax.ShapeDtypeStruct((16, max(s[0] for s in shapes.values())), jnp.float32)
    return scale.Division(params, batch, loss=loss_of_matrices, **options)


def devices(target: str) -> list[Any]:
    """Return the devices of a topology, or of the CPU."""
    if target.startswith("cpu"):
        return list(jax.devices()[: int(target.partition(":")[2])])
    return targets.devices(targets.Target("tpu", target))


def measured(target: str, model: str, step: str) -> measure.Row:
    """Return the row of a step."""
    made = division(model, step)
    mesh = made.mesh(devices(target))
    train, batch = scale.made(made, mesh), scale.batch_of_all(made, mesh)
    start = time.process_time()
    program = train.lower(made.params, batch).compile()
    seconds = time.process_time() - start
    cost = hlo.cost(program.as_text())
    size = measure.size(made.params)
    return {
        "target": target, "model": model, "step": step, "of": STEPS[step][2],
        "temporaries": program.memory_analysis().temp_size_in_bytes / size,
        "hbm": cost.num_bytes / size,
        "cycles": cost.cycles,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def prepare(target: str) -> None:
    """Set what the compiler of a target reads when it is loaded."""
    targets.prepare(targets.Target("cpu" if target.startswith("cpu") else "tpu", target))
    if target.startswith("cpu"):
        jax.config.update("jax_num_cpu_devices", int(target.partition(":")[2]))


def line(row: measure.Row, rows: dict[tuple[str, ...], measure.Row]) -> str:
    """Return a row of the table, beside the one that it is compared with."""
    plain = rows.get((row["target"], row["model"], row["of"]), row)
    cells = [
        *KEPT.name(row),
        f"{row['temporaries']:.2f}", f"{row['temporaries'] - plain['temporaries']:+.2f}",
        f"{row['hbm']:.0f}", f"{row['hbm'] / plain['hbm']:.2f}",
        f"{row['cycles'] / 1e6:.2f}" if row["cycles"] else "-",
        f"{row['seconds']:.1f}", f"{row['seconds'] / max(plain['seconds'], 0.1):.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=[*TARGETS])
    parser.add_argument("--model", nargs="+", default=["scale", "gpt2"])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    print(HEAD)
    spawn, rows = multiprocessing.get_context("spawn"), KEPT.rows()
    for target in options.target:
        with ProcessPoolExecutor(1, spawn, prepare, (target,)) as pool:
            for model in options.model:
                for step in STEPS:
                    if any(fnmatch.fnmatch(step, pattern) for pattern in options.only):
                        row = pool.submit(measured, target, model, step).result()
                        rows[KEPT.name(row)] = row
                        print(line(row, rows), flush=True)
                        if not options.dry:
                            KEPT.keep(row)


if __name__ == "__main__":
    main()
