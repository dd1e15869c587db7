"""What do parts cost? The loss of exchanges by parts, and of packets in sharded training.

    python -m benchmarks.studies.parts [--steps 400] [--rows 'exchange*' ...] [--kept FILE]

Four workers, devices of one CPU, train two models on text with adamw: the demo's transformer, and
an MLP of the last eight bytes. All rows of a model have the same batches, initial params and rate;
the loss is bits per byte of held-out text, paired with the dense row of the same seed. A run takes
half an hour on two cores, and measures no time: it is not part of the suite. With `--kept FILE`
the figure of each model, row and seed is kept in the file as soon as it is known, and not computed
again: `--models`, `--rows` and `--seeds` choose pieces, and the last call, over all, prints the
table.
"""

import argparse
import fnmatch
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure
from examples import demo, text, transformer
from optfn.distributed import data_mesh, exchange, quantize, sharded

WORKERS, BATCH, RECENT, WINDOWS = 4, 16, 8, 256


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
    'sharded("params"), 8 and 4 bits in chunks of 64': {
        "shard": sharded(
            "params",
            gather=quantize(8, chunk=256),
            reduce=quantize(4, chunk=64, stochastic=True),
        )
    },
}


def trained(
    model: Model, row: dict[str, Any], rate: float, steps: int, seeds: list[int]
) -> Iterator[float]:
    """Yield the bits per byte of held-out text after a run with each seed."""
    options = {name: x for name, x in row.items() if name != "before"}
    tx = optfn.adamw(demo.schedule(rate, steps), 0.9, 0.99)
    tx = optfn.chain(row["before"], tx) if "before" in row else tx
    step = optfn.make_train_step(
        lambda p, x: jnp.mean(model.losses(p, x)), tx, mesh=data_mesh(WORKERS), **options
    )
    training, held_out = text.standard_library()
    windows = next(text.batches(held_out, WINDOWS, 128, 0))
    evaluate = jax.jit(lambda p: jnp.mean(model.losses(p, windows)) / np.log(2))
    for seed in seeds:
        state = step.init(model.init(jax.random.key(seed)))
        batches = text.batches(training, BATCH, 128, seed)
        for _ in range(steps):
            state, _ = step(state, next(batches))
        yield float(evaluate(jax.device_get(state.params)))


class Kept:
    """The figures that are known already, in a file if there is one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.kept and Path(options.kept)
        self.figures: dict[str, float] = {}
        self._read()

    def _read(self) -> None:
        if self.path and self.path.exists():
            self.figures |= json.loads(self.path.read_text())

    def bits(self, name: str, model: Model, scheme: str) -> list[float]:
        """Return the bits per byte of a row with each seed; those that are new are computed."""
        steps, seeds = self.options.steps, self.options.seeds
        rate = self.options.rate
        run = f"{name}, width {self.options.width}, rate {rate}, {steps} steps"
        keys = {seed: f"{run}, seed {seed}: {scheme}" for seed in seeds}
        missing = [seed for seed in seeds if keys[seed] not in self.figures]
        if missing:
            runs = trained(model, ROWS[scheme], rate, steps, missing)
            for seed, figure in zip(missing, runs, strict=True):
                self._read()  # another piece may have written
                self.figures[keys[seed]] = figure
                if self.path:
                    self.path.write_text(json.dumps(self.figures, indent=1, sort_keys=True))
        return [self.figures[keys[seed]] for seed in seeds]


HEAD = "| model | step | bits per byte | from dense, % | of each seed |\n|---|---|---|---|---|"


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Return the rows, and print them."""
    rows, kept = [], Kept(options)
    for name, model in models(options.width).items():
        if not any(fnmatch.fnmatch(name, p) for p in options.models):
            continue
        dense = kept.bits(name, model, "dense")
        for scheme in ROWS:
            if not any(fnmatch.fnmatch(scheme, p) for p in ["dense", *options.rows]):
                continue
            bits = kept.bits(name, model, scheme)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    parser.add_argument("--models", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--kept", metavar="FILE", help="the figures that are known already")
    options = measure.parse(parser, steps=3, seeds=[0], width=16)
    measure.report(options, HEAD, lambda: run(options))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
