"""What does `packed=True` take before the first step? `step.init` tries a rule of another library.

    python -m benchmarks.studies.packed_init [--leaves 2000] [--rounds 3]

Seconds of `make_train_step(loss_fn, tx, packed=True).init(params)`, of leaves of five shapes. A
rule of optfn is not tried. The trial is two eager updates of the tree; most of the first one is the
compilation of functions that optax jits over all leaves. Each round begins with empty caches.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optfn
from benchmarks import measure

SHAPES = [(8, 16), (16,), (16, 8), (8,), (3, 3, 4, 8)]
RULES = {
    "optfn.adamw": optfn.adamw(1e-3),
    "optax.sgd": optax.sgd(1e-3, momentum=0.9),
    "optax.adamw": optax.adamw(1e-3),
    "optax.chain(clip_by_global_norm, adam)": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(1e-3)
    ),
}
HEAD = "| tx | leaves | init s, median (min) |\n|---|---|---|"


def loss_fn(params: Any, factor: jax.Array) -> jax.Array:
    """Return a loss in which each leaf counts; it is not run."""
    return factor * sum(jnp.sum(x) for x in jax.tree.leaves(params))


def measured(name: str, leaves: int, rounds: int) -> measure.Row:
    """Return the row of a rule, and print it."""
    params = {f"w{k}": jnp.ones(SHAPES[k % len(SHAPES)]) for k in range(leaves)}
    step, seconds = optfn.make_train_step(loss_fn, RULES[name], packed=True), []
    for _ in range(rounds):
        jax.clear_caches()
        optfn.pack(params)  # compiled once in a process, whatever the rule
        start = time.perf_counter()
        jax.block_until_ready(step.init(params))
        seconds.append(time.perf_counter() - start)
    row = {"tx": name, "leaves": leaves, "init_s": statistics.median(seconds)}
    print(f"| {name} | {leaves:,} | {row['init_s']:.2f} ({min(seconds):.2f}) |", flush=True)
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = measure.parse(parser, leaves=10, rounds=1)
    measure.report(
        options, HEAD, lambda: [measured(name, options.leaves, options.rounds) for name in RULES]
    )


if __name__ == "__main__":
    main()
