"""Train a byte-level transformer on the standard library's source, with several optimizers.

    make demo            or            python -m examples.demo [--steps N] [--optimizers adamw ...]

Each optimizer trains the same model, with the same seed and batches. Prints a summary of its state
and the bits per byte of held-out text before and after, compared with zlib and lzma on the same
bytes, and draws the curves. The compressors start from nothing while the model has read the
training text, so they are a yardstick, not competitors. --average also evaluates the averaged
parameters; --resume continues a run that was stopped.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python examples/demo.py

import optfn
from examples import text, transformer

# Many small steps learn most in a given time here, and take as many examples a second as large ones
# (benchmarks/studies/tune_examples.py).
BATCH = 4
CONFIG = transformer.Config()


def schedule(rate: float, steps: int) -> Any:
    """Return a warm-up over a twentieth of the steps, then a cosine to zero."""
    return optfn.schedules.linear_warmup(
        optfn.schedules.cosine(rate, 1, steps), max(1, steps // 20), start_lr=0.0, end_lr=rate
    )


# Learning rates: the best on the held-out text after 1,800 steps, by factors of two, of 0.4 to 1.6
# for momentum, 2e-3 to 16e-3 for adamw, 1e-2 to 4e-2 for lamb. The held-out text chose them, so the
# results on it are slightly optimistic.
CLIP = optfn.clip_by_global_norm(1.0)
VECTORS = r".*(norm.*|bias)"  # get no weight decay
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    "momentum": lambda n: optfn.momentum(schedule(0.8, n), 0.9, nesterov=True, grad_clip=CLIP),
    "adamw": lambda n: optfn.adamw(
        schedule(8e-3, n), b2=0.95, weight_decay=0.1, exclude=VECTORS, grad_clip=CLIP
    ),
    "lamb": lambda n: optfn.lamb(
        schedule(2e-2, n),
        b2=0.95, weight_decay=0.1, bias_correction=True, exclude=VECTORS, grad_clip=CLIP,
    ),
}  # fmt: skip
AVERAGE = optfn.exponential_moving_average(0.99, thres_steps=True)


def main() -> None:
    """Train, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--average", action="store_true", help="also average the parameters")
    parser.add_argument("--resume", action="store_true", help="save, and go on from what is saved")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    began = time.perf_counter()

    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(options.seed), CONFIG)
    size = sum(p.size for p in jax.tree.leaves(params))
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out; {size:,} parameters")
    losses = jax.jit(partial(transformer.losses, config=CONFIG))
    evaluate = partial(text.bits_per_byte, losses, text=held_out, length=CONFIG.length)
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
            text.batches(training, BATCH, CONFIG.length, options.seed),
            steps=options.steps,
            checkpoint=options.out / f"checkpoints-{name}" if options.resume else None,
        )
        seconds = time.perf_counter() - start
        curves[name] = history["loss"] / np.log(2)
        after[name] = evaluate(state.params)
        if options.average:
            averaged[name] = evaluate(optfn.averaged_params(state.opt_state, state.params))
        print(f"{name}: {after[name]:.3f} bits per byte held out, {seconds:.0f} s", flush=True)

    baselines = text.compressors(held_out)
    print(f"\n{'held-out bits per byte':24}  before   after" + "  average" * options.average)
    for name in options.optimizers:
        average = f"{averaged[name]:9.3f}" if options.average else ""
        print(f"{name:24}{before:8.3f}{after[name]:8.3f}{average}")
    for name, bits in baselines.items():
        print(f"{name:24}{'':8}{bits:8.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "curves.png"
    draw(path, curves, before, after, baselines)
    print(f"{time.perf_counter() - began:.0f} s in all\npicture: {path}")


def draw(
    path: Path,
    curves: dict[str, np.ndarray],
    before: float,
    after: dict[str, float],
    baselines: dict[str, float],
) -> None:
    """Draw the training curves, smoothed, the held-out results beside them, and the compressors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (axes, ends) = plt.subplots(
        1, 2, figsize=(9, 5), layout="constrained", sharey=True, width_ratios=(6, 1)
    )
    steps = max(map(len, curves.values()))
    window = max(1, steps // 25)
    for name, curve in curves.items():
        # The first means are over fewer steps; a full window would hide the start.
        sums = np.cumsum(np.insert(curve, 0, 0.0))
        last = np.arange(1, len(curve) + 1)
        first = np.maximum(0, last - window)
        label = f"{name}: held out {before:.2f} → {after[name]:.2f}"
        (line,) = axes.plot(last, (sums[last] - sums[first]) / (last - first), label=label)
        ends.plot(name, after[name], "o", color=line.get_color(), markersize=9)
    for (name, bits), style in zip(baselines.items(), ("--", ":"), strict=False):
        axes.axhline(bits, color="black", linestyle=style, label=f"{name}: {bits:.2f}")
        ends.axhline(bits, color="black", linestyle=style)
    bottom = min([*after.values(), *baselines.values()]) - 0.25
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, steps), ylim=(bottom, 4.5))
    axes.set_title("A small transformer learns the source of Python's standard library", loc="left")
    ends.set_title("held-out files", fontsize="medium")
    ends.margins(x=0.3)
    ends.tick_params(axis="x", rotation=60)
    for ax in (axes, ends):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"training batches, mean of {window} steps")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
