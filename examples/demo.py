"""Train a byte-level transformer on the standard library's source, with several optimizers.

    make demo            or            python -m examples.demo [--steps N] [--optimizers adamw ...]

The same model, the same seed, the same batches for each. Prints what the optimizer keeps, held-out
bits per byte before and after, beside zlib's and lzma's on the same bytes, and draws the curves.
With --average also the bits per byte of the averaged parameters; with --resume a run that was
stopped goes on where it was.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import optfn
from examples import text, transformer

BATCH = 4
CONFIG = transformer.Config()


def schedule(rate: float, steps: int) -> Any:
    """Return a warm-up over a twentieth of the steps, then a cosine to zero."""
    warmup = max(1, steps // 20)
    return optfn.schedules.linear_warmup(
        optfn.schedules.cosine(rate, 1, steps), warmup, start_lr=0.0, end_lr=rate
    )


AVERAGE = optfn.exponential_moving_average(0.99, thres_steps=True)

# Rates are the best of a grid by factors of two: momentum 0.05 to 0.8, adamw 2e-3 to 8e-3, lamb
# 1e-2 to 4e-2, at 400 steps, the best of each once more at 1200.
CLIP = optfn.clip_by_global_norm(1.0)
VECTORS = r".*(norm.*|bias)"  # get no weight decay
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    "momentum": lambda n: optfn.momentum(schedule(0.8, n), 0.9, nesterov=True, grad_clip=CLIP),
    "adamw": lambda n: optfn.adamw(
        schedule(4e-3, n), b2=0.95, weight_decay=0.1, exclude=VECTORS, grad_clip=CLIP
    ),
    "lamb": lambda n: optfn.lamb(
        schedule(2e-2, n), b2=0.95, bias_correction=True, exclude=VECTORS, grad_clip=CLIP
    ),
}


def main() -> None:
    """Train, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--average", action="store_true", help="also average the parameters")
    parser.add_argument("--resume", action="store_true", help="save, and go on from what is saved")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()

    train, held_out = text.standard_library()
    baselines = text.compressors(held_out)
    params = transformer.init(jax.random.key(options.seed), CONFIG)
    size = sum(p.size for p in jax.tree.leaves(params))
    print(f"{len(train):,} bytes to train on, {len(held_out):,} held out; {size:,} parameters")
    evaluate = partial(
        text.bits_per_byte, partial(transformer.losses, config=CONFIG), text=held_out,
        length=CONFIG.length,
    )  # fmt: skip
    before = evaluate(params)

    curves, after, averaged = {}, {}, {}
    for name in options.optimizers:
        tx = OPTIMIZERS[name](options.steps)
        if options.average:
            tx = optfn.chain(tx, AVERAGE)
        print(f"\n{name}\n{optfn.summary(tx, params)}", flush=True)
        start = time.perf_counter()
        state, history = optfn.minimize(
            partial(transformer.loss_fn, config=CONFIG),
            tx,
            params,
            text.batches(train, BATCH, CONFIG.length, options.seed),
            steps=options.steps,
            checkpoint=options.out / f"checkpoints-{name}" if options.resume else None,
        )
        seconds = time.perf_counter() - start
        curves[name] = history["loss"] / np.log(2)
        after[name] = evaluate(state.params)
        if options.average:
            averaged[name] = evaluate(optfn.averaged_params(state.opt_state, state.params))
        print(f"{name}: {after[name]:.3f} bits per byte held out, {seconds:.0f} s", flush=True)

    print(
        f"\n{'held-out bits per byte':24}{'before':>8}{'after':>8}" + "  average" * options.average
    )
    for name in options.optimizers:
        average = f"{averaged[name]:9.3f}" if options.average else ""
        print(f"{name:24}{before:8.3f}{after[name]:8.3f}{average}")
    for name, bits in baselines.items():
        print(f"{name:24}{'':8}{bits:8.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "curves.png"
    draw(path, curves, after, baselines)
    print(f"picture: {path}")


def draw(
    path: Path,
    curves: dict[str, np.ndarray],
    after: dict[str, float],
    baselines: dict[str, float],
) -> None:
    """Draw the training curves, smoothed, with held-out marks and the compressors as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    steps = max(map(len, curves.values()))
    window = max(1, steps // 40)
    for name, curve in curves.items():
        # The first means are over what there is; a full window would hide the start.
        sums = np.cumsum(np.insert(curve, 0, 0.0))
        ends = np.arange(1, len(curve) + 1)
        starts = np.maximum(0, ends - window)
        label = f"{name}, held out {after[name]:.2f}"
        (line,) = axes.plot(ends, (sums[ends] - sums[starts]) / (ends - starts), label=label)
        axes.plot(steps * 1.02, after[name], "o", color=line.get_color(), clip_on=False)
    for (name, bits), style in zip(baselines.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, linewidth=1, label=f"{name} {bits:.2f}")
    axes.set(
        xlabel="step",
        ylabel="bits per byte",
        title="A transformer on the source of Python's standard library\n"
        "lines: training batches; dots: held-out files",
        xlim=(0, steps * 1.02),
        ylim=(min([*after.values(), *baselines.values()]) - 0.3, 6),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
