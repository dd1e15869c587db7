"""How long is the wait at the start, for each way of training on several devices?

    python -m benchmarks.studies.compile_time [--trees resnet50 many] [--only DGC] [--rounds 1]

Every start of a run traces, lowers and compiles its step. The seconds of CPU that this takes are
compared with those of the plain step, data-parallel Adam, on the same leaves: ResNet-50's 161, or
with "many" 2,000 of 1,000 entries each, which takes minutes a step. The loss is a sum over leaves.
Nothing is run, and arrays are abstract.

With the cache: the compiled program comes from JAX's persistent cache, where an earlier start left
it; tracing and lowering remain. The goal is at most twice the plain step's seconds.
"""

import argparse
import fnmatch
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import measure
from benchmarks.scale import Division, batch_of_all, made, piped
from optfn.distributed import exchange, quantize, sharded, top_k

DEVICES, GOAL = 8, 2.0
TREES = measure.TREES | {"many": lambda: {f"w{k}": (1000,) for k in range(2000)}}
HEAD = (
    "| leaves | step | trace s | lower s | compile s | all, CPU s | × plain | with the cache s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    """Return a loss in which each leaf counts."""
    target = jnp.mean(batch)
    return sum(jnp.mean((leaf - target) ** 2) for leaf in jax.tree.leaves(params))  # type: ignore[return-value]


def stage(params: Any, x: jax.Array) -> jax.Array:
    """Run a stage of a pipeline in which each leaf counts."""
    return x + sum(jnp.mean(leaf) for leaf in jax.tree.leaves(params))


def linked(compressor: Any, route: str = "gather") -> optax.GradientTransformation:
    """Return Adam behind an exchange."""
    return optfn.chain(exchange(compressor, min_size=1000, route=route), optfn.adam(1e-3))


def steps(params: Any) -> dict[str, Division]:
    """Return the ways of training these leaves."""
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    rounds = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    stages = jax.tree.map(lambda p: jax.ShapeDtypeStruct((4, *p.shape), p.dtype), params)
    inside: dict[str, Any] = {"inner": {"fast": 4}, "data_axis": ("data", "fast")}
    two_levels = {"shard": sharded("params", axis="fast")}

    def division(tx: Any = None, batch: Any = x, **others: Any) -> Division:
        return Division(params, batch, tx=tx or optfn.adam(1e-3), loss=loss_fn, **others)

    return {
        "plain": division(),
        "ZeRO": division(options={"shard": "state"}),
        "FSDP": division(options={"shard": "params"}),
        "local steps": division(batch=rounds, options={"local_steps": 4}),
        "DGC": division(optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=1000)),
        "DGC, a ramp of 4": division(
            optfn.dgc_momentum(
                0.1, 0.9, min_size=1000, rampup_begin_step=10, rampup_step=10,
                sparsity=(0.75, 0.9375, 0.984, 0.999),
            )
        ),
        "exchange(quantize(4))": division(linked(quantize(4))),
        "exchange(top_k(0.01))": division(linked(top_k(0.01))),
        "exchange(quantize(4)), by parts": division(linked(quantize(4), "parts")),
        "two levels": division(**inside, options=two_levels),
        "two levels, quantize(4)": division(linked(quantize(4)), **inside, options=two_levels),
        "pipeline": Division(
            stages, (x, x), {"stage": 4}, options={"shard": {".*": P("stage")}},
            pipeline=piped(stage, 8),
        ),
    }  # fmt: skip


def seconds(step: optfn.TrainStep, *arguments: Any) -> dict[str, float]:
    """Return the CPU seconds of each part, and those of another start that finds the program."""
    jax.clear_caches()
    times = [time.process_time()]

    def after(part: Callable[[], Any]) -> Any:
        result = part()
        times.append(time.process_time())
        return result

    traced = after(lambda: step.compiled.trace(*arguments))
    lowered = after(traced.lower)
    after(lowered.compile)
    jax.clear_caches()
    times.append(time.process_time())
    after(lambda: step.compiled.lower(*arguments).compile())
    start, trace, lower, end, again, cached = times
    return {
        "trace_s": trace - start,
        "lower_s": lower - trace,
        "compile_s": end - lower,
        "all_s": end - start,
        "cached_s": cached - again,
    }


def of_tree(tree: str, options: argparse.Namespace) -> list[measure.Row]:
    """Return the rows of the steps on one tree of leaves, and print them."""
    sizes = TREES[tree]()
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    rows: list[measure.Row] = []
    for name, division in steps(params).items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ["plain", *options.only]):
            continue
        mesh = division.mesh(jax.devices()[:DEVICES])
        step = made(division, mesh)
        arguments = step.shapes(division.params, batch_of_all(division, mesh))
        each = [seconds(step, *arguments) for _ in range(options.rounds)]
        row: measure.Row = {"leaves": len(params), "step": name}
        row |= {part: statistics.median(x[part] for x in each) for part in each[0]}
        row["over_plain"] = row["all_s"] / (rows or [row])[0]["all_s"]
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: measure.Row) -> str:
    missed = " (missed)" if row["over_plain"] > GOAL else ""
    return (
        f"| {row['leaves']:,} | {row['step']} | {row['trace_s']:.1f} | {row['lower_s']:.1f} "
        f"| {row['compile_s']:.1f} | {row['all_s']:.1f} | {row['over_plain']:.1f}{missed} "
        f"| {row['cached_s']:.1f} |"
    )


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Return the rows of all trees, with a persistent cache in a directory of its own."""
    old = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    with tempfile.TemporaryDirectory() as directory:
        _cache_in(directory, 0.0)
        try:
            return [row for tree in options.trees for row in of_tree(tree, options)]
        finally:
            _cache_in(*old)


def _cache_in(directory: str | None, least_seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    compilation_cache.reset_cache()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="+", choices=TREES, default=["resnet50"])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--rounds", type=int, default=1)
    options = measure.parse(parser, trees=["toy"], only=["DGC", "local steps"])
    measure.report(options, HEAD, lambda: run(options))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # also where there are other devices
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
