"""Is Muon better than a tuned AdamW on the demo's model, at equal steps and at equal seconds?

    python -m benchmarks.studies.muon [--steps 1200] [--seeds 3] [--tune adamw muon]

Held-out bits per byte of the transformer of `make demo`. Muon moves the matrices of the blocks, and
AdamW the rest. At equal seconds Muon makes fewer steps, by the CPU time of a step of both, and its
schedule ends with them.

With `--tune` the settings in TUNING are compared instead, on seed 0, which the other table leaves
out. None of it is part of the suite: it takes half an hour.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import optfn
from benchmarks import measure
from examples import demo, text, transformer

HEAD = "| optimizer | steps | mean | standard deviation | seeds |\n|---|---|---|---|---|"
MATRICES = r"blocks/.*/(qkv|out|up|down)"
# The best of TUNING.
ADAMW_RATE, ADAMW_DECAY, ADAMW_B2 = 5.6e-3, 0.3, 0.95
MUON_RATE, MUON_DECAY, REST_RATE = 0.02, 0.1, 8e-3
TUNING: dict[str, Sequence[tuple[float, ...]]] = {
    "adamw": [
        *[(rate, 0.1, 0.95) for rate in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)],
        *[(rate, 0.3, 0.95) for rate in (2.8e-3, 4e-3, 5.6e-3, 8e-3, 11e-3)],
        *[(4e-3, decay, 0.95) for decay in (0.0, 1.0)],
        *[(rate, 0.6, 0.95) for rate in (5.6e-3, 8e-3)],
        *[(rate, 0.1, 0.99) for rate in (2e-3, 4e-3, 8e-3)],
        *[(rate, 0.3, 0.9) for rate in (4e-3, 5.6e-3)],
    ],
    "muon": [
        *[(rate, 0.1, 8e-3) for rate in (0.01, 0.02, 0.04, 0.08)],
        *[(0.02, decay, 8e-3) for decay in (0.0, 0.3)],
        *[(0.02, 0.1, rest) for rest in (4e-3, 16e-3)],
    ],
}


def adamw(
    steps: int, rate: float = ADAMW_RATE, decay: float = ADAMW_DECAY, b2: float = ADAMW_B2
) -> optax.GradientTransformation:
    """Return AdamW for all leaves."""
    return optfn.adamw(
        demo.schedule(rate, steps),
        b2=b2,
        weight_decay=decay,
        exclude=demo.VECTORS,
        grad_clip=demo.CLIP,
    )


def muon(
    steps: int, rate: float = MUON_RATE, decay: float = MUON_DECAY, rest: float = REST_RATE
) -> optax.GradientTransformation:
    """Return Muon for the matrices of the blocks, and AdamW for the rest."""
    others = optfn.adamw(
        demo.schedule(rest, steps), b2=0.95, weight_decay=0.1, exclude=demo.VECTORS
    )
    return optfn.muon(
        demo.schedule(rate, steps),
        matrices=MATRICES,
        weight_decay=decay,
        others=others,
        grad_clip=demo.CLIP,
    )


MAKERS: dict[str, Callable[..., optax.GradientTransformation]] = {"adamw": adamw, "muon": muon}


def held_out_bits(tx: optax.GradientTransformation, seed: int, steps: int) -> float:
    """Return the held-out bits per byte after training with the batches of a seed."""
    training, held_out = text.standard_library()
    params = transformer.init(jax.random.key(seed), demo.CONFIG)
    state, _ = optfn.minimize(
        partial(transformer.loss_fn, config=demo.CONFIG),
        tx,
        params,
        text.batches(training, demo.BATCH, demo.CONFIG.length, seed),
        steps=steps,
        progress=False,
    )
    losses = jax.jit(partial(transformer.losses, config=demo.CONFIG))
    return text.bits_per_byte(losses, state.params, held_out, demo.CONFIG.length)


class Step:
    """A training step on one batch, and its state."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self.step = optfn.make_train_step(partial(transformer.loss_fn, config=demo.CONFIG), tx)
        self.state = self.step.init(transformer.init(jax.random.key(0), demo.CONFIG))
        training, _ = text.standard_library()
        self.batch = next(text.batches(training, demo.BATCH, demo.CONFIG.length, 0))

    def __call__(self) -> Any:
        """Make a step."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def row(name: str, steps: int, figures: list[float], **about: Any) -> measure.Row:
    """Print a row and return it."""
    each = ", ".join(f"{figure:.3f}" for figure in figures)
    spread = np.std(figures, ddof=1) if len(figures) > 1 else 0.0
    print(f"| {name} | {steps} | {np.mean(figures):.3f} | {spread:.3f} | {each} |", flush=True)
    return {"optimizer": name, "steps": steps, "figures": figures, **about}


def tuned(names: Sequence[str], steps: int) -> list[measure.Row]:
    """Return a row for each setting of TUNING of these optimizers."""
    return [
        row(
            f"{name}{setting}",
            steps,
            [held_out_bits(MAKERS[name](steps, *setting), 0, steps)],
        )
        for name in names
        for setting in TUNING[name]
    ]


def compared(steps: int, seeds: int, rounds: int) -> list[measure.Row]:
    """Return the rows at equal steps and at equal seconds."""
    cpu = measure.cpu_seconds([Step(make(steps)) for make in MAKERS.values()], rounds)
    share = cpu[0] / cpu[1]
    fewer = round(share * steps)

    def trained(name: str, steps: int) -> list[float]:
        return [held_out_bits(MAKERS[name](steps), 1 + seed, steps) for seed in range(seeds)]

    return [
        row("adamw", steps, trained("adamw", steps), cpu_seconds=cpu[0]),
        row("muon", steps, trained("muon", steps), cpu_seconds=cpu[1]),
        row("muon, as many seconds", fewer, trained("muon", fewer)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50, help="steps that are timed")
    parser.add_argument("--tune", nargs="+", choices=MAKERS, help="compare rates, on seed 0")
    options = measure.parse(parser, steps=20, seeds=1, rounds=1)

    def run() -> list[measure.Row]:
        if options.tune:
            return tuned(options.tune, options.steps)
        return compared(options.steps, options.seeds, options.rounds)

    measure.report(options, HEAD, run)


if __name__ == "__main__":
    main()
