"""What does it cost to send less? Loss against bytes, for each way of exchanging updates.

    python -m benchmarks.exchange [--steps 1600] [--seeds 5] [--rows all] [--width 96] [--batch 16]
        [--json FILE] [--picture FILE]

Four workers, devices of one CPU, train the demo's transformer on text. A row is a scheme and an
optimizer; all rows of an optimizer have the same batches, initial params and rates, which were
chosen for the dense one. Bytes are those that a worker sends for each parameter and local step, by
the formulas of the compressors; the loss is bits per byte of held-out text. A run of all rows takes
hours: it is not part of the suite.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import optfn
from benchmarks import measure
from examples import demo, text, transformer
from optfn.distributed import data_mesh, exchange, power_sgd, quantize, top_k

WORKERS, MIN_SIZE = 4, 1000
NESTEROV = {"nesterov": True}
INNER: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda rate: optfn.adamw(rate, weight_decay=0.01),
    "momentum": lambda rate: optfn.momentum(rate, 0.9, nesterov=True),
    "lamb": lambda rate: optfn.lamb(rate),
}
RATES = {"adamw": 4e-3, "momentum": 0.4, "lamb": 2e-2}  # the best for dense, by factors of two


class Row(NamedTuple):
    """A scheme and an optimizer.

    inner: the optimizer of the workers.
    compressor: of `exchange`; None for float32 in an all-reduce.
    error_feedback: of `exchange`.
    local_steps: H; 1 exchanges each gradient.
    outer: what follows the exchange of drifts, by name and rate.
    dgc: options of `dgc_momentum`, in the place of `exchange`.
    """

    inner: str
    compressor: Any = None
    error_feedback: float = 1.0
    local_steps: int = 1
    outer: tuple[str, float] | None = None
    dgc: dict[str, Any] | None = None

    def optimizers(self, rate: Any) -> dict[str, Any]:
        """Return the arguments tx, local_steps and outer of the training step."""
        inner = INNER[self.inner](rate)
        send = exchange(self.compressor, error_feedback=self.error_feedback, min_size=MIN_SIZE)
        if self.dgc is not None:
            return {
                "tx": optfn.dgc_momentum(
                    rate, 0.9, rampup_begin_step=0, min_size=MIN_SIZE, **NESTEROV, **self.dgc
                )
            }
        if self.local_steps == 1:
            return {"tx": inner if self.compressor is None else optfn.chain(send, inner)}
        name, outer_rate = self.outer or ("sgd", 1.0)
        step = (
            optfn.sgd(outer_rate) if name == "sgd" else optfn.momentum(outer_rate, 0.9, **NESTEROV)
        )
        outer = step if self.compressor is None else optfn.chain(send, step)
        return {"tx": inner, "local_steps": self.local_steps, "outer": outer}

    def bytes_sent(self, params: Any) -> float:
        """Return the bytes that a worker sends for each parameter and local step."""
        sizes = [p.size for p in jax.tree.leaves(params)]
        total = 0.0
        for p in jax.tree.leaves(params):
            if p.size < MIN_SIZE or (self.compressor is None and self.dgc is None):
                total += all_reduce(4 * p.size)
            elif self.dgc is not None:
                k = max(1, round(p.size * (1 - self.dgc["sparsity"][-1])))
                total += min((WORKERS - 1) * 8 * k, all_reduce(4 * p.size))
            else:
                packet = self.compressor.num_bytes(p.shape)
                is_reduced = repr(self.compressor).startswith("power_sgd")
                total += all_reduce(packet) if is_reduced else (WORKERS - 1) * packet
        return total / sum(sizes) / self.local_steps


def all_reduce(size: float) -> float:
    """Return the bytes that a worker sends in a ring's all-reduce of `size` bytes."""
    return 2 * (WORKERS - 1) / WORKERS * size


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for inner in ("adamw", "momentum", "lamb"):
        rows[f"{inner}, dense"] = Row(inner)
        for compressor in (
            top_k(0.05), top_k(0.05, values="bfloat16"), top_k(0.05, values="int8"),
            top_k(0.01, values="bfloat16"), quantize(8), quantize(4), quantize(2), quantize(1),
            power_sgd(4),
        ):  # fmt: skip
            rows[f"{inner}, {compressor!r}"] = Row(inner, compressor)
        for count in (5, 20):
            rows[f"{inner}, H={count}"] = Row(inner, local_steps=count)
            rows[f"{inner}, H={count}, DiLoCo"] = Row(
                inner, local_steps=count, outer=("momentum", 0.5)
            )
            rows[f"{inner}, H={count}, quantize(1)"] = Row(
                inner, quantize(1), local_steps=count, outer=("sgd", 1.7)
            )
        rows[f"{inner}, H=20, SparseLoCo"] = Row(
            inner, top_k(1 / 64, values="int2"), 0.95, local_steps=20, outer=("sgd", 0.4)
        )
    for masking in (True, False):
        for sparsity in (0.99, 0.95):
            words = "masked" if masking else "unmasked"
            rows[f"DGC {words}, {1 - sparsity:.0%}"] = Row(
                "momentum", dgc={"sparsity": (sparsity,), "momentum_masking": masking}
            )
    return rows


ROWS = _rows()


def trained(
    row: Row, seed: int, steps: int, batch: int, config: transformer.Config
) -> tuple[float, list[float], float]:
    """Return held-out bits per byte, the losses, and bytes a parameter and step of a run."""
    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(seed), config)
    rate = demo.schedule(RATES[row.inner], steps)
    stream = text.batches(training, batch, config.length, seed)
    count = row.local_steps
    step = optfn.make_train_step(
        partial(transformer.loss_fn, config=config), mesh=data_mesh(WORKERS), **row.optimizers(rate)
    )
    state, losses = step.init(params), []
    for _ in range(steps // count):
        parts = [next(stream) for _ in range(count)]
        # The part of worker w in each of the H steps, one worker after the other.
        whole = np.stack(parts).reshape(count, WORKERS, -1, parts[0].shape[-1])
        state, metrics = step(state, np.moveaxis(whole, 1, 0).reshape(-1, parts[0].shape[-1]))
        losses.append(float(metrics["loss"]) / np.log(2))
    losses_of = jax.jit(partial(transformer.losses, config=config))
    final = jax.device_get(state.params)
    bits = text.bits_per_byte(losses_of, final, held_out[:60_000], config.length)
    return bits, losses, row.bytes_sent(params)


HEAD = (
    "| scheme | B a parameter and step | bits per byte, held out | from dense | seeds | s a run |\n"
    "|---|---|---|---|---|---|"
)


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Train all rows, print them, and write what there is after each."""
    config = transformer.Config()._replace(width=options.width, hidden=4 * options.width)
    chosen = list(ROWS) if options.rows == ["all"] else options.rows
    found: list[measure.Row] = []
    dense: dict[str, list[float]] = {}
    for name in chosen:
        row, bits, curves, start = ROWS[name], [], [], time.perf_counter()
        for seed in range(options.seeds):
            result, curve, sent = trained(row, seed, options.steps, options.batch, config)
            bits.append(result)
            curves.append(curve)
        if row.local_steps == 1 and row.compressor is None and row.dgc is None:
            dense[row.inner] = bits
        seconds = (time.perf_counter() - start) / options.seeds
        base = dense.get(row.inner)
        change = [100 * (a / b - 1) for a, b in zip(bits, base or bits, strict=True)]
        found.append(
            {"scheme": name, "inner": row.inner, "bytes": sent, "bits": bits, "percent": change,
             "curves": curves, "local_steps": row.local_steps, "seconds": seconds}
        )  # fmt: skip
        print(
            f"| {name} | {sent:.4f} | {np.mean(bits):.3f} ± {np.std(bits):.3f} "
            f"| {np.mean(change):+.1f} % | {len(bits)} | {seconds:.0f} |",
            flush=True,
        )
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": found}))
    if options.picture:
        draw(Path(options.picture), found)
    return found


def panels_of(rows: list[measure.Row]) -> Any:
    """Draw the held-out loss of each row against its bytes, a panel for each optimizer.

    At the width of a page, so that labels stay readable.
    """
    import matplotlib.pyplot as plt

    inners = list(dict.fromkeys(row["inner"] for row in rows))
    figure, panels = plt.subplots(
        len(inners),
        figsize=(8, 3.6 * len(inners)),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for panel, inner in zip(panels[:, 0], inners, strict=True):
        for row in (row for row in rows if row["inner"] == inner):
            mean, spread = np.mean(row["bits"]), np.std(row["bits"])
            panel.errorbar(row["bytes"], mean, spread, marker="o", capsize=3)
            label = row["scheme"].removeprefix(f"{inner}, ")
            panel.annotate(label, (row["bytes"], mean), fontsize=8, xytext=(5, 3),
                           textcoords="offset points")  # fmt: skip
        panel.set(title=inner, ylabel="bits per byte, held out", xscale="log")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("bytes sent a parameter and step")
    return figure


def draw(path: Path, rows: list[measure.Row]) -> None:
    """Save the picture of `panels_of`."""
    import matplotlib

    matplotlib.use("Agg")
    panels_of(rows).savefig(path, dpi=130)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="examples in a step of all workers")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rows", nargs="+", default=["all"], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--picture", metavar="FILE")
    options = measure.parse(
        parser, steps=8, seeds=1, width=16, rows=["momentum, dense", "momentum, quantize(1)"]
    )
    measure.report(options, HEAD, lambda: run(options))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
