"""What does Deep Gradient Compression at 99.9 % do to accuracy, and what do masking and ramp do?

    python -m benchmarks.studies.compression_accuracy [--seeds 5] [--epochs 15] [--steps 400]
        [--text-seeds 2]

Four workers, simulated by `vmap` on one device, train an MLP on scikit-learn's digits and the
demo's transformer on text, with dense momentum, and with `dgc_momentum` with and without masking
and ramp. Batches, learning rates and initial params are the same for all. Leaves from 1,000
elements on are compressed; with the default of 16,384 hardly any of these small models would be.
The script measures no time and is not part of the suite (`python -m benchmarks`).
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure, moments
from examples import demo
from optfn.mesh.state.per_worker import has_exchange

WORKERS = 4
RAMP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
MIN_SIZE = 1000
ROWS: dict[str, dict[str, Any] | None] = {
    "dense momentum": None,
    "DGC": {"sparsity": RAMP},
    "DGC, no ramp": {"sparsity": RAMP[-1:]},
    "DGC, no masking": {"sparsity": RAMP, "momentum_masking": False},
    "DGC, neither": {"sparsity": RAMP[-1:], "momentum_masking": False},
}


def make(name: str, rate: Any, ramp: int, nesterov: bool = False) -> Any:
    """Return the optimizer of a row; `ramp` is how many steps the ramp takes."""
    options = ROWS[name]
    if options is None:
        return optfn.momentum(rate, 0.9, nesterov=nesterov)
    return optfn.dgc_momentum(
        rate,
        0.9,
        nesterov=nesterov,
        rampup_begin_step=0,
        rampup_step=ramp,
        min_size=MIN_SIZE,
        **options,
    )


def of_workers(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return (params, batch) -> (mean loss, gradients (WORKERS, …) of the workers' parts)."""
    each = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))

    def value_and_grad(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        parts = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        losses, grads = each(params, parts)
        return jnp.mean(losses), grads

    return value_and_grad


def simulated(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return `tx` run by all workers at once, on the gradients of `of_workers`."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), tx.init(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del extra

        def one(g: Any, state: Any) -> tuple[Any, Any]:
            g = g if has_exchange(state) else jax.lax.pmean(g, "data")
            return tx.update(g, state, params)

        directions, state = jax.vmap(one, axis_name="data")(grads, state)
        return jax.tree.map(lambda x: x[0], directions), state

    return optax.GradientTransformationExtraArgs(init, update)


def compare(
    task: str, run: Callable[[Any, int], float], tx_of: Callable[[str], Any], seeds: int
) -> dict[str, list[float]]:
    """Return the result of each seed for each row, the same seeds for all; print them."""
    found: dict[str, list[float]] = {}
    for name in ROWS:
        figures = found[name] = [run(tx_of(name), seed) for seed in range(seeds)]
        from_dense = np.subtract(figures, found["dense momentum"])
        each = ", ".join(f"{figure:.3f}" for figure in figures)
        print(
            f"| {task} | {name} | {np.mean(figures):.3f} ± {np.std(figures):.3f} "
            f"| {np.mean(from_dense):+.3f} | {each} |",
            flush=True,
        )
    return found


def digits(seeds: int, epochs: int) -> dict[str, list[float]]:
    """Return the accuracies on held-out digits, in per cent; the ramp takes a fifth of the run."""
    return compare(
        "digits, % held out",
        lambda tx, seed: moments.digits_accuracy(simulated(tx), seed, epochs, of_workers),
        lambda name: make(name, 0.05, max(5, epochs * 42 // 5)),
        seeds,
    )


def language(seeds: int, steps: int) -> dict[str, list[float]]:
    """Return the held-out bits per byte of the demo's model; the ramp takes a fifth of the run."""
    rate = demo.schedule(0.4, steps)
    return compare(
        "text, bits per byte held out",
        lambda tx, seed: moments.text_bits(simulated(tx), seed, steps, of_workers),
        lambda name: make(name, rate, max(5, steps // 5), nesterov=True),
        seeds,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--text-seeds", type=int, default=2)
    options = parser.parse_args()
    began = time.perf_counter()
    print(", ".join(f"{k} {v}" for k, v in measure.where().items()), "\n")
    print("| task | step | mean ± deviation | from dense | seeds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        # Seeds differ in numbers only: a row is compiled once.
        jax.config.update("jax_compilation_cache_dir", directory)
        if options.seeds:
            digits(options.seeds, options.epochs)
        if options.text_seeds:
            language(options.text_seeds, options.steps)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
