"""Train the demo's text model on four workers, with and without Deep Gradient Compression.

    python -m examples.compression [--steps N] [--out DIR]

Dense momentum sends the whole gradient in every step, `dgc_momentum` only the largest entries, 1 in
1,000 after a ramp. Both have the same model, seed and batches; four devices of the CPU stand for
four hosts. Prints and draws the losses and the bytes that a worker sends.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

# Before jax is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python examples/compression.py

import optfn
from examples import demo, text, transformer
from optfn.distributed import PacketFormat, data_mesh

WORKERS, BATCH, MIN_SIZE = 4, 8, 1000
SPARSITY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
CONFIG = transformer.Config()


def bytes_sent(params: Any, steps: int, ramp: int) -> np.ndarray:
    """Return the bytes that a worker sends in each step: those of its packets or an all-reduce."""
    sizes = [p.size for p in jax.tree.leaves(params)]
    large = tuple(n for n in sizes if n >= MIN_SIZE)
    small = sum(n for n in sizes if n < MIN_SIZE)
    ramp_steps = []
    for sparsity in SPARSITY:
        k = tuple(max(1, round(n * (1 - sparsity))) for n in large)
        packets = (WORKERS - 1) * PacketFormat(large, k).num_bytes
        ramp_steps.append(min(packets, all_reduce(sum(large))) + all_reduce(small))
    last = len(ramp_steps) - 1
    ramp_step = np.minimum(np.arange(steps) * len(ramp_steps) // ramp, last)
    return np.asarray(ramp_steps)[ramp_step]


def all_reduce(elements: int) -> float:
    """Return the bytes that a worker sends in a ring's all-reduce of float32."""
    return 2 * (WORKERS - 1) / WORKERS * 4 * elements


def train(tx: Any, params: Any, windows: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """Return the trained params and the loss of each step in bits per byte."""
    mesh = data_mesh(WORKERS)
    step = optfn.make_train_step(partial(transformer.loss_fn, config=CONFIG), tx, mesh=mesh)
    state, losses = step.init(params), []
    for batch in windows:
        state, metrics = step(state, batch)
        # Wait: devices that share a few cores can lock up with several steps under way.
        losses.append(float(metrics["loss"]) / np.log(2))
    return jax.device_get(state.params), np.asarray(losses)


def main() -> None:
    """Train both, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    steps, ramp = options.steps, max(5, options.steps // 5)
    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(0), CONFIG)
    stream = text.batches(training, BATCH, CONFIG.length, 0)
    windows = [next(stream) for _ in range(steps)]
    rate = demo.schedule(0.4, steps)
    compressed = optfn.dgc_momentum(
        rate,
        0.9,
        nesterov=True,
        rampup_begin_step=0,
        rampup_step=ramp,
        sparsity=SPARSITY,
        min_size=MIN_SIZE,
    )
    size = sum(p.size for p in jax.tree.leaves(params))
    rules = {
        "dense momentum": (
            optfn.momentum(rate, 0.9, nesterov=True),
            np.full(steps, all_reduce(size)),
        ),
        "dgc_momentum": (compressed, bytes_sent(params, steps, ramp)),
    }
    losses = jax.jit(partial(transformer.losses, config=CONFIG))
    print(f"{size:,} parameters, {WORKERS} workers, {steps} steps\n")
    print(
        f"{'':16}{'bits per byte':>14}{'held out':>10}{'bytes a step, last':>20}{'MB in all':>11}"
    )
    curves = {}
    for name, (tx, sent) in rules.items():
        start = time.perf_counter()
        trained, curve = train(tx, params, windows)
        curves[name] = curve, sent
        bits = text.bits_per_byte(losses, trained, held_out[:60_000], CONFIG.length)
        last = curve[-max(1, steps // 10) :].mean()
        print(
            f"{name:16}{last:14.3f}{bits:10.3f}{sent[-1]:20,.0f}{sent.sum() / 1e6:11,.1f}"
            f"   {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "compression.png"
    draw(path, curves)
    print(f"picture: {path}")


def draw(path: Path, curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw the losses, smoothed, and below them the bytes sent in each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 7), layout="constrained")
    for name, (curve, sent) in curves.items():
        window = max(1, len(curve) // 25)
        smooth = np.convolve(curve, np.full(window, 1 / window), "valid")
        ends = np.arange(window, len(curve) + 1)
        above.plot(ends, smooth, label=f"{name}: {curve[-window:].mean():.3f} at the end")
        steps = np.arange(1, len(sent) + 1)
        below.plot(
            steps, sent / 1e3, drawstyle="steps-post", label=f"{name}: {sent.sum() / 1e6:,.0f} MB"
        )
    above.set(ylabel="bits per byte, training")
    below.set(xlabel="step", ylabel="kB sent by a worker, per step", yscale="log")
    above.set_title("Four workers: all of the gradient, and 1 entry in 1,000", loc="left")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
