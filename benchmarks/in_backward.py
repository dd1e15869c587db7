"""What do updates inside the backward pass save, and what do they cost?

    python -m benchmarks.in_backward [--layers 12] [--width 256] [--batch 64] [--rounds 9]

A training step of residual layers, d → 4d → d, in one scan: as it is, with the activations of a
layer recomputed (`jax.checkpoint`), and with `update_in_backward`, which recomputes them as well.
Temporaries are those of the compiled step, in bytes a parameter; CPU time is that of a step, in
interleaved rounds.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from benchmarks import measure
from optfn.distributed import scan_layers

HEAD = "| optimizer | step | temporaries B/param | CPU ms | × as it is |\n|---|---|---|---|---|"
OPTIMIZERS = {
    "adam": lambda: optfn.adam(1e-3),
    "lamb": lambda: optfn.lamb(1e-3),
    "sgd": lambda: optfn.sgd(1e-3),
}


def model(layers: int, width: int) -> dict[str, Any]:
    """Return the params."""
    rng = np.random.default_rng(0)
    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    stack = {k: rng.standard_normal(s, np.float32) * s[1] ** -0.5 for k, s in shapes.items()}
    return {"layers": optfn.Stacked(stack), "head": np.ones((width, 1), np.float32)}


def layer(w: Any, x: jax.Array) -> jax.Array:
    """Return the output of a layer."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


class Step:
    """A training step on one batch, and its state."""

    def __init__(self, tx: Any, params: Any, x: np.ndarray, fn: Any, **options: Any) -> None:
        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean((scan_layers(fn, params["layers"], x) @ params["head"]) ** 2)

        self.step, self.x = optfn.make_train_step(loss_fn, tx, **options), x
        self.state = self.step.init(params)
        compiled = self.step.compiled.lower(self.state, x).compile()
        self.temporaries = compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> Any:
        """Make a step."""
        self.state, metrics = self.step(self.state, self.x)
        return metrics


def run(layers: int, width: int, batch: int, rounds: int) -> list[measure.Row]:
    """Return a row for each step, and print them."""
    params = model(layers, width)
    x = np.random.default_rng(1).standard_normal((batch, width), np.float32)
    rows = []
    for name, make in OPTIMIZERS.items():
        steps = {
            "as it is": Step(make(), params, x, layer),
            "recomputed": Step(make(), params, x, jax.checkpoint(layer, prevent_cse=False)),
            "in backward": Step(make(), params, x, layer, update_in_backward="layers/.*"),
        }
        seconds = measure.cpu_seconds(list(steps.values()), rounds)
        for (kind, step), cpu in zip(steps.items(), seconds, strict=True):
            row: measure.Row = {
                "optimizer": name,
                "step": kind,
                "temporaries": step.temporaries / measure.size(params),
                "cpu_ms": 1e3 * cpu,
                "cpu_ratio": cpu / seconds[0],
            }
            rows.append(row)
            print(
                f"| {name} | {kind} | {row['temporaries']:.2f} | {row['cpu_ms']:.1f} "
                f"| {row['cpu_ratio']:.2f} |",
                flush=True,
            )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, layers=3, width=16, batch=8, rounds=1)
    sizes = options.layers, options.width, options.batch, options.rounds
    measure.report(options, HEAD, lambda: run(*sizes))


if __name__ == "__main__":
    main()
