"""Train a small ResNet with BatchNorm on 8 × 8 digits, in the library of your choice.

    python -m examples.digits [--library linen|nnx|equinox|haiku] [--steps N] [--processes 2]

The net of each library is a module of this folder; the rest of the program is the same for all: the
loss returns the new batch statistics, `minimize` keeps them beside the params, averages them over
the workers, and hands them to the evaluation. With --processes several processes of this host share
the mesh, as those of several hosts would.
"""

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import optfn
from examples import processes
from optfn.distributed import data_mesh

LIBRARIES = ("linen", "nnx", "equinox", "haiku")
BATCH, HELD_OUT = 64, 397


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the training set and the held-out one."""
    found = load_digits()
    images = (found.images[..., None] / 16.0).astype(np.float32)
    both = {"image": images, "label": found.target.astype(np.int32)}
    return tuple({k: v[part] for k, v in both.items()}
                 for part in (slice(HELD_OUT, None), slice(HELD_OUT)))  # fmt: skip


def net(library: str) -> Callable[..., Any]:
    """Return the function that makes the net: params, model state, forward pass."""
    make: Callable[..., Any] = importlib.import_module(f"examples.digits.{library}_net").make
    return make


def train(library: str, steps: int, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return the last state and the history of a run; what is evaluated is the accuracy."""
    training, held_out = digits()
    params, stats, forward = net(library)(training["image"][:2])

    def loss_fn(params: Any, stats: Any, batch: Any) -> Any:
        logits, stats = forward(params, stats, batch["image"], True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), stats

    @jax.jit
    def accuracy(params: Any, stats: Any) -> jax.Array:
        logits, _ = forward(params, stats, held_out["image"], False)
        return (logits.argmax(-1) == held_out["label"]).mean()

    order = np.random.default_rng(0).integers(0, len(training["label"]), (steps, BATCH))
    batches = [{k: v[i] for k, v in training.items()} for i in order]
    tx = optfn.adamw(optax.cosine_decay_schedule(0.02, steps), weight_decay=0.01)
    return optfn.minimize(
        loss_fn, tx, params, batches, model_state=stats,
        mesh=mesh, evaluate=accuracy, evaluate_every=max(1, steps // 4), **options,
    )  # fmt: skip


def main() -> None:
    """Train, and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=LIBRARIES, default="linen")
    parser.add_argument("--steps", type=int, default=300)
    processes.add_argument(parser, 1, 2, 4)
    options = parser.parse_args()
    processes.join(options, options.processes)
    mesh = data_mesh() if options.processes > 1 else None
    quiet = options.process > 0
    _, history = train(options.library, options.steps, mesh, progress=not quiet)
    if not quiet:
        found = ", ".join(f"{100 * x:.1f} %" for x in history["evaluation"])
        print(f"{options.library}: accuracy on {HELD_OUT} held-out digits: {found}")


if __name__ == "__main__":
    main()
