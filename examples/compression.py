"""Train the demo's text model on four workers, and send all of the gradient, or less.

    make demo-compression    or    python -m examples.compression [--steps N] [--out DIR]

Four ways with momentum, the same model, seed and batches: the whole gradient in every step; Deep
Gradient Compression, the largest entries, 1 in 1,000 after a ramp; `exchange(top_k(0.1))`, 1 entry
in 10, in 8 bits; and five local steps between exchanges of signs. Four devices of the CPU stand for
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
from optfn.distributed import data_mesh, exchange, quantize, top_k

WORKERS, BATCH, MIN_SIZE = 4, 8, 1000
SPARSITY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
LOCAL_STEPS = 5
CONFIG = transformer.Config()


def schemes(steps: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of `minimize` of each scheme, by name."""
    rate = demo.schedule(0.4, steps)
    momentum = optfn.momentum(rate, 0.9, nesterov=True)
    dgc = optfn.dgc_momentum(
        rate, 0.9, nesterov=True, sparsity=SPARSITY, min_size=MIN_SIZE,
        rampup_begin_step=0, rampup_step=max(len(SPARSITY), steps // 5),
    )  # fmt: skip
    largest = exchange(top_k(0.1, values="int8"), min_size=MIN_SIZE)
    signs = exchange(quantize(1), min_size=MIN_SIZE)
    return {
        "dense momentum": {"tx": momentum},
        "dgc_momentum": {"tx": dgc},
        "exchange(top_k)": {"tx": optfn.chain(largest, momentum)},
        "local steps": {
            "tx": momentum,
            "local_steps": LOCAL_STEPS,
            "outer": optfn.chain(signs, optfn.sgd(1.0)),
        },
    }


def all_reduce(elements: int) -> float:
    """Return the bytes that a worker sends in a ring's all-reduce of float32."""
    return 2 * (WORKERS - 1) / WORKERS * 4 * elements


def train(
    scheme: dict[str, Any], params: Any, windows: list[np.ndarray]
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the trained params, and for each step the loss in bits per byte and bytes sent."""
    count = scheme.get("local_steps", 1)
    rounds = [rearranged(np.stack(windows[i : i + count])) for i in range(0, len(windows), count)]
    state, history = optfn.minimize(
        partial(transformer.loss_fn, config=CONFIG), params=params, batches=rounds,
        steps=len(windows), mesh=data_mesh(WORKERS), progress=False, **scheme,
    )  # fmt: skip
    size = sum(p.size for p in jax.tree.leaves(params))
    sent = history.get("bytes_sent", np.full(len(rounds), all_reduce(size)))
    losses = history["loss"] / np.log(2)
    return jax.device_get(state.params), np.repeat(losses, count), np.repeat(sent / count, count)


def rearranged(parts: np.ndarray) -> np.ndarray:
    """Return the batch of a round in which step h of all workers together sees parts[h]."""
    by_worker = parts.reshape(len(parts), WORKERS, -1, parts.shape[-1])
    return np.moveaxis(by_worker, 1, 0).reshape(-1, parts.shape[-1])


def main() -> None:
    """Train with each scheme, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help=f"a multiple of {LOCAL_STEPS}")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    steps = options.steps
    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(0), CONFIG)
    stream = text.batches(training, BATCH, CONFIG.length, 0)
    windows = [next(stream) for _ in range(steps)]
    losses = jax.jit(partial(transformer.losses, config=CONFIG))
    size = sum(p.size for p in jax.tree.leaves(params))
    print(f"{size:,} parameters, {WORKERS} workers, {steps} steps\n")
    print(
        f"{'':16}{'bits per byte':>14}{'held out':>10}{'bytes a step, last':>20}{'MB in all':>11}"
    )
    curves = {}
    for name, scheme in schemes(steps).items():
        start = time.perf_counter()
        trained, curve, sent = train(scheme, params, windows)
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
    most = max(sent.max() for _, sent in curves.values())
    below.set(xlabel="step", ylabel="kB sent by a worker, per step", yscale="log")
    below.set_ylim(top=50 * most / 1e3)  # the names stand above the lines
    above.set_title("Four workers: all of the gradient, and three ways of sending less", loc="left")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
