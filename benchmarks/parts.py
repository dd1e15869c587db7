"""What do parts cost? The loss of exchanges by parts, and of packets in sharded training.

    python -m benchmarks.parts [--steps 400] [--seeds 3] [--rows 'exchange*' ...]

Four workers, devices of one CPU, train two models on text with adamw: the demo's transformer, and
an MLP of the last eight bytes. All rows of a model have the same batches, initial params and rate;
the loss is bits per byte of held-out text, paired with the dense row of the same seed. A run takes
a quarter of an hour, and measures no time: it is not part of the suite.
"""

import argparse
import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure
from examples import demo, text, transformer
from optfn.distributed import data_mesh, exchange, quantize, sharded

WORKERS, BATCH, RATE, RECENT, WINDOWS = 4, 16, 1e-3, 8, 256


class Model(NamedTuple):
    """A model of bytes: its params from a key, and the loss of each byte of windows."""

    init: Callable[[jax.Array], Any]
    losses: Callable[[Any, Any], jax.Array]


def _of_recent_bytes(width: int) -> Model:
    """Return an MLP of the last RECENT bytes."""

    def init(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "table": 0.1 * jax.random.normal(first, (RECENT, 256, width)),
            "hidden": width**-0.5 * jax.random.normal(second, (width, 2 * width)),
            "bias": jnp.zeros(2 * width),
            "out": jnp.zeros((2 * width, 256)),
        }

    def losses(params: Any, windows: Any) -> jax.Array:
        windows = jnp.asarray(windows).astype(jnp.int32)
        before, following = windows[:, :-1], windows[:, RECENT:]
        shifted = [before[:, k : before.shape[1] - RECENT + 1 + k] for k in range(RECENT)]
        x = sum(params["table"][k][part] for k, part in enumerate(shifted))
        x = jax.nn.relu(jax.nn.relu(x) @ params["hidden"] + params["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], following)

    return Model(init, losses)


def models(width: int) -> dict[str, Model]:
    """Return the models by name."""
    config = transformer.Config()._replace(width=width, hidden=4 * width)
    return {
        "transformer": Model(
            partial(transformer.init, config=config), partial(transformer.losses, config=config)
        ),
        "MLP": _of_recent_bytes(width),
    }


def _exchanged(bits: int, route: str) -> dict[str, Any]:
    return {"before": exchange(quantize(bits, chunk=256), route=route)}


ROWS: dict[str, dict[str, Any]] = {
    "dense": {},
    'exchange(quantize(8)), "gather"': _exchanged(8, "gather"),
    'exchange(quantize(8)), "parts"': _exchanged(8, "parts"),
    'exchange(quantize(4)), "gather"': _exchanged(4, "gather"),
    'exchange(quantize(4)), "parts"': _exchanged(4, "parts"),
    'sharded("params"), 8 and 8 bits': {
        "shard": sharded("params", gather=quantize(8, chunk=256), reduce=quantize(8, chunk=256))
    },
    'sharded("params"), 8 and 4 bits': {
        "shard": sharded(
            "params",
            gather=quantize(8, chunk=256),
            reduce=quantize(4, chunk=256, stochastic=True),
        )
    },
}


def trained(model: Model, row: dict[str, Any], steps: int, seeds: int) -> list[float]:
    """Return the bits per byte of held-out text after a run with each seed."""
    options = {name: x for name, x in row.items() if name != "before"}
    tx = optfn.adamw(demo.schedule(RATE, steps), 0.9, 0.99)
    tx = optfn.chain(row["before"], tx) if "before" in row else tx
    step = optfn.make_train_step(
        lambda p, x: jnp.mean(model.losses(p, x)), tx, mesh=data_mesh(WORKERS), **options
    )
    training, held_out = text.standard_library()
    windows = next(text.batches(held_out, WINDOWS, 128, 0))
    evaluate = jax.jit(lambda p: jnp.mean(model.losses(p, windows)) / np.log(2))
    found = []
    for seed in range(seeds):
        state, batches = step.init(model.init(jax.random.key(seed))), None
        batches = text.batches(training, BATCH, 128, seed)
        for _ in range(steps):
            state, _ = step(state, next(batches))
        found.append(float(evaluate(jax.device_get(state.params))))
    return found


HEAD = "| model | step | bits per byte | from dense, % | of each seed |\n|---|---|---|---|---|"


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Return the rows, and print them."""
    rows = []
    for name, model in models(options.width).items():
        dense = []
        for scheme in ROWS:
            if not any(fnmatch.fnmatch(scheme, p) for p in ["dense", *options.rows]):
                continue
            bits = trained(model, ROWS[scheme], options.steps, options.seeds)
            dense = dense or bits
            percent = [100 * (b / a - 1) for a, b in zip(dense, bits, strict=True)]
            rows.append({"model": name, "step": scheme, "bits": bits, "percent": percent})
            each = ", ".join(f"{x:+.2f}" for x in percent)
            print(
                f"| {name} | {scheme} | {np.mean(bits):.4f} | {np.mean(percent):+.2f} | {each} |",
                flush=True,
            )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN")
    options = measure.parse(parser, steps=3, seeds=1, width=16)
    measure.report(options, HEAD, lambda: run(options))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
