"""Does a long run stay as large as it was? Memory, objects and compilations over 10,000 steps.

    make soak      or      python -m benchmarks.studies.soak [--steps 10000] [--save-every 10]

The demo's transformer at a small width in bfloat16, with every wrapper around the optimizer, by
`minimize`, with evaluations, a log and a checkpoint every ten steps. Each row is the state of the
process after so many steps. In the second half of the run the resident memory stays within 1 %,
there are at most 1 % more live arrays and Python objects than in the first half, and nothing is
compiled; else the exit status is 1.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import optfn
from benchmarks import measure
from examples import text, transformer

CONFIG = transformer.Config(width=16, hidden=32, blocks=1, length=16)
BATCH = 2
ROWS = 20
ALLOWED = 0.01
HEAD = "| step | RSS MB | live arrays | Python objects | compilations | checkpoints | s |\n" + (
    "|---|---|---|---|---|---|---|"
)


def optimizer(steps: int) -> Any:
    """Return AdamW with a clip, a schedule, both averages, and every wrapper."""
    rate = optfn.schedules.linear_warmup(
        optfn.schedules.cosine(8e-3, 1, steps), max(1, steps // 20), start_lr=0.0, end_lr=8e-3
    )
    adamw = optfn.adamw(
        rate,
        exclude=r".*(norm.*|bias)",
        grad_clip=optfn.clip_by_global_norm(1.0),
        param_attrs={r".*bias": optfn.ParamAttr(learning_rate=0.5)},
    )
    averages = optfn.exponential_moving_average(0.99), optfn.model_average(0.15)
    tx = optfn.accumulate(optfn.chain(adamw, *averages), 2)
    return optfn.record_metrics(optfn.skip_nonfinite(optfn.master_weights(tx)))


class Watch:
    """Counts compilations, and takes a sample of the process after some steps."""

    def __init__(self, every: int) -> None:
        self.every, self.compilations, self.began = every, 0, time.perf_counter()
        self.rows: list[measure.Row] = []
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def __call__(self, step: int, state: Any, metrics: dict[str, Any]) -> None:
        """Take a sample, as a callback of `minimize`."""
        if step % self.every:
            return
        gc.collect()
        row = {
            "step": step,
            "rss": resident(),
            "arrays": len(jax.live_arrays()),
            "objects": len(gc.get_objects()),
            "compilations": self.compilations,
            "seconds": time.perf_counter() - self.began,
        }
        self.rows.append(row)


def resident() -> float:
    """Return the bytes that this process holds."""
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Train; print and return the samples."""
    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(0), CONFIG)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    losses = jax.jit(partial(transformer.losses, config=CONFIG))
    sample = jnp.asarray(held_out[: CONFIG.length + 1][None])
    watch = Watch(max(1, options.steps // ROWS))
    with tempfile.TemporaryDirectory() as directory:
        optfn.minimize(
            partial(transformer.loss_fn, config=CONFIG),
            optimizer(options.steps),
            params,
            text.batches(training, BATCH, CONFIG.length, 0),
            steps=options.steps,
            progress=True,
            evaluate=lambda p: float(jnp.mean(losses(p, sample))),
            evaluate_every=max(1, options.steps // 20),
            keep_best=True,
            callback=watch,
            log=Path(directory) / "log.jsonl",
            checkpoint=Path(directory) / "run",
            save_every=options.save_every,
        )
    for row in watch.rows:
        row["checkpoints"] = row["step"] // options.save_every
        print(
            f"| {row['step']:,} | {row['rss'] / 1e6:.1f} | {row['arrays']} | {row['objects']:,} "
            f"| {row['compilations']} | {row['checkpoints']:,} | {row['seconds']:.0f} |"
        )
    return watch.rows


def grown(rows: list[measure.Row]) -> dict[str, float]:
    """Return the spread of the memory in the second half, and what else is more than in the first.

    Relatively, but for compilations, which are counted.
    """
    half = rows[-1]["step"] / 2
    before = [row for row in rows if row["step"] <= half]
    later = [row for row in rows if row["step"] > half]
    rss = [row["rss"] for row in later]
    found = {"rss": max(rss) / min(rss) - 1}
    for key in ("arrays", "objects"):
        found[key] = max(row[key] for row in later) / max(row[key] for row in before) - 1
    return found | {"compilations": later[-1]["compilations"] - before[-1]["compilations"]}


def main() -> None:
    """Run, print the table, and say whether anything grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--save-every", type=int, default=10)
    options = measure.parse(parser, steps=40)
    rows: list[measure.Row] = []
    measure.report(options, HEAD, lambda: rows.extend(run(options)) or rows)
    found = grown(rows)
    print(
        f"\nin the second half: RSS {found['rss']:.2%}, live arrays {found['arrays']:.2%}, Python "
        f"objects {found['objects']:.2%}, {found['compilations']} compilations"
    )
    sys.exit(any(found[key] > ALLOWED for key in ("rss", "arrays", "objects", "compilations")))


if __name__ == "__main__":
    main()
