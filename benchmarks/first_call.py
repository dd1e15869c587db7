"""How long is the wait before the first step of a model of many leaves?

    python -m benchmarks.first_call [--leaves 2000] [--size 1000] [--rounds 3] [--no-compile]
        [--options | --tables]

Adam on equal leaves, with optfn and with optax: seconds to trace, to lower and to compile the step
(params, state, gradients) -> (params, state), in interleaved rounds; nothing is cached between
them. Then the learning rate is changed, and the compiled programs are counted. With --options what
is compared is what XLA's own options make of compiling optfn's step, in seconds of CPU.

With --tables a step that looks rows up in tables is compiled for eight CPU devices: the tables are
shared, or their rows divided, once each or, with "twice", by two arrays of ids a table.

optfn traces faster because leaves of one shape share a traced rule. XLA compiles a loop for each
leaf, and none of these options changes that.
"""

import argparse
import itertools
import os
import statistics
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure

SIDES = {
    "optfn": lambda: optfn.adam(1e-3, eps_hat=False),
    "optax": lambda: optax.adam(1e-3),
}


# XLA inlines calls, so that each leaf has code of its own; it cannot compile a call graph in which
# they share it (disabling the pass "flatten-call-graph" is an error).
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "no expensive passes of LLVM": {"xla_llvm_disable_expensive_passes": True},
    "code in one part": {"xla_cpu_parallel_codegen_split_count": 1},
    "level 1 of optimization": {"xla_backend_optimization_level": 1},
    "level 0 of optimization": {"xla_backend_optimization_level": 0},
    "calls are not inlined": {"xla_disable_hlo_passes": "call-inliner,inline"},
    "no fusion": {"xla_disable_hlo_passes": "fusion"},
}


def jitted_step(tx: Any, leaves: int, size: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the step (params, state, gradients) -> (params, state), and shapes of arguments."""
    params = {f"w{k}": jax.ShapeDtypeStruct((size,), jnp.float32) for k in range(leaves)}

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(tx.init, params), params)


def run_options(leaves: int, size: int, rounds: int) -> list[measure.Row]:
    """Print and return the CPU seconds of compiling with each option, medians."""
    jitted, args = jitted_step(SIDES["optfn"](), leaves, size)
    lowered = jitted.lower(*args)
    found: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(rounds):
        for name, options in OPTIONS.items():
            start = time.process_time()
            lowered.compile(compiler_options=options)
            found[name].append(time.process_time() - start)
    rows: list[measure.Row] = []
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ratio = statistics.median(found["none"]) / median
        print(f"| {name} | {median:.2f} ({min(seconds):.2f}) | {ratio:.2f} |", flush=True)
        rows.append({"option": name, "cpu_s": median, "ratio": ratio})
    return rows


def first_call(tx: Any, leaves: int, size: int, compiles: bool) -> dict[str, float]:
    """Return the seconds of each part."""
    jitted, args = jitted_step(tx, leaves, size)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jitted.trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    if compiles:
        lowered.compile()
    times.append(time.perf_counter())
    parts = dict(
        zip(
            ("trace", "lower", "compile"),
            (b - a for a, b in itertools.pairwise(times)),
            strict=True,
        )
    )
    return parts | {"trace + lower": parts["trace"] + parts["lower"]}


def run(leaves: int, size: int, rounds: int, compiles: bool) -> list[measure.Row]:
    """Return a row per part, with the median of each side; print them, and the programs."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, make in SIDES.items():
            found[name].append(first_call(make(), leaves, size, compiles))
    medians = {
        name: {part: statistics.median(r[part] for r in each) for part in each[0]}
        for name, each in found.items()
    }
    rows = []
    for part in medians["optfn"]:
        ours, theirs = medians["optfn"][part], medians["optax"][part]
        ratio = f"{theirs / ours:.2f}" if ours > 1e-3 else "-"
        print(f"| {part} | {ours:.2f} | {theirs:.2f} | {ratio} |", flush=True)
        rows.append({"part": part, "optfn_s": ours, "optax_s": theirs})
        if ours:
            rows[-1]["ratio"] = theirs / ours
    print(f"\nprograms after two changes of the learning rate: {programs_after_a_new_rate()}")
    return rows


def lookup_step(count: int, lookups: int, divided: bool, size: int) -> tuple[Any, Any, Any]:
    """Return a step that looks rows up in `count` tables, `lookups` times in each, with its state
    and a batch of `size` examples."""
    params = {f"table{k}": jnp.zeros((4096, 16)) for k in range(count)} | {"head": jnp.ones(16)}
    ids = np.arange(count * lookups * size, dtype=np.int32).reshape(count, lookups, size) * 7 % 4096

    def loss(params: Any, batch: Any) -> jax.Array:
        tables = [params[f"table{k}"] for k in range(count)]
        rows = [t[batch[f"ids{k}"][:, j]] for k, t in enumerate(tables) for j in range(lookups)]
        return jnp.mean((sum(rows) @ params["head"] - 1) ** 2)

    step = optfn.make_train_step(
        loss, optfn.adam(1e-3, lazy=True), mesh=optfn.distributed.data_mesh(),
        tables="table.*", shard_tables=divided,
    )  # fmt: skip
    return step, step.init(params), {f"ids{k}": ids[k].T for k in range(count)}


def run_tables(size: int, rounds: int) -> list[measure.Row]:
    """Return a row for each number of tables and lookups: CPU seconds of the whole wait, medians,
    and lines of the compiled program, of shared and of divided tables; print them."""
    rows: list[measure.Row] = []
    for count, lookups in ((1, 1), (1, 2), (3, 1)):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        lines = {}
        for _, divided in itertools.product(range(rounds), seconds):
            step, state, batch = lookup_step(count, lookups, divided, size)
            jax.clear_caches()
            start = time.process_time()
            text = step.lower(state, batch).compile().as_text()
            seconds[divided].append(time.process_time() - start)
            lines[divided] = len(text.splitlines())
        shared, divided_ = (statistics.median(seconds[divided]) for divided in (False, True))
        name = f"{count}, twice" if lookups > 1 else str(count)
        cells = f"{shared:.1f} | {divided_:.1f} | {divided_ / shared:.1f}"
        print(f"| {name} | {cells} | {lines[False]:,} | {lines[True]:,} |", flush=True)
        rows.append({"tables": name, "shared_s": shared, "divided_s": divided_})
    return rows


def programs_after_a_new_rate() -> int:
    """Return how often XLA compiles a train step whose learning rate is changed."""
    compiled = []

    def note(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.adam(1e-3))
    state = step.init(jnp.zeros(10))
    for rate in (1e-3, 1e-2, 1e-1):
        state = state._replace(opt_state=optfn.set_learning_rate(state.opt_state, rate))
        state, _ = step(state, jnp.ones(10))
    return compiled.count(f"jit({step.compiled.__name__})")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=2000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tables", action="store_true", help="compile steps with tables")
    parser.add_argument("--options", action="store_true", help="compare options of the compiler")
    options = measure.parse(parser, leaves=3, size=5, rounds=1)
    if options.options:
        head = "| option | CPU s (min) | none/option |\n|---|---|---|"
        sizes = options.leaves, options.size, options.rounds
        measure.report(options, head, lambda: run_options(*sizes))
        return
    if options.tables:
        head = (
            "| tables | shared, CPU s | divided, CPU s | divided/shared "
            "| lines of HLO, shared | divided |\n"
            "|---|---|---|---|---|---|"
        )
        measure.report(options, head, lambda: run_tables(8 * options.size, options.rounds))
        return
    head = "| seconds | optfn | optax | optax/optfn |\n|---|---|---|---|"
    measure.report(
        options,
        head,
        lambda: run(options.leaves, options.size, options.rounds, not options.no_compile),
    )


if __name__ == "__main__":
    main()
