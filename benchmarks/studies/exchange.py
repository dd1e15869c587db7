"""What does it cost to send less? Loss against bytes, for each way of exchanging updates.

    python -m benchmarks.studies.exchange [--steps 1600] [--seeds 5] [--rows 'adamw, *']
        [--width 96] [--batch 16] [--length 128] [--json FILE]

Four workers, devices of one CPU, train the demo's transformer on text. A row of `schemes` is a
scheme and an optimizer; all rows of an optimizer have the same batches, initial params and rates,
which were chosen for the dense one. Bytes are by the formulas of the compressors; the loss is bits
per byte of held-out text.

A run of all rows takes hours: it is not part of the suite. The file of `--json` is written after
each run, and the runs that it has already are not repeated: stop it at any time, and call it again.
"""

import argparse
import fnmatch
import functools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import optfn
from benchmarks import measure
from benchmarks.studies.schemes import ROWS, WORKERS
from examples import demo, text, transformer
from optfn.distributed import data_mesh

RATES = {"adamw": 4e-3, "momentum": 0.4, "lamb": 2e-2}  # the best for dense, by factors of two
POINTS = 40  # of a curve
WINDOWS = 4, 16  # of held-out text, for the curve of the loss on it


class Setting(NamedTuple):
    """What all rows have in common; `rate` takes the place of RATES."""

    steps: int
    batch: int
    width: int
    length: int
    rate: float | None

    @property
    def config(self) -> transformer.Config:
        """The model."""
        return transformer.Config()._replace(
            width=self.width, hidden=4 * self.width, length=self.length
        )


@functools.cache
def _texts() -> tuple[np.ndarray, np.ndarray]:
    return text.standard_library()


@functools.cache
def _losses(config: transformer.Config) -> Callable[..., jax.Array]:
    return jax.jit(partial(transformer.losses, config=config))


def trained(name: str, setting: Setting, seeds: list[int]) -> Any:
    """Train a row with each seed, and yield what there is to say of the run."""
    row = ROWS[name]
    config, count = setting.config, row.local_steps
    rate = demo.schedule(setting.rate or RATES[row.inner], setting.steps)
    step = optfn.make_train_step(
        partial(transformer.loss_fn, config=config), mesh=data_mesh(WORKERS), **row.optimizers(rate)
    )
    training, held_out = _texts()
    samples = text.batches(held_out, WINDOWS[1], config.length, 0)
    windows = [next(samples) for _ in range(WINDOWS[0])]
    for seed in seeds:
        start = time.perf_counter()
        params = transformer.init(jax.random.key(seed), config)
        stream = text.batches(training, setting.batch, config.length, seed)
        state, losses, held = step.init(params), [], []
        for n in range(0, setting.steps, count):
            parts = [next(stream) for _ in range(count)]
            # The part of worker w in each of the H steps, one worker after the other.
            whole = np.stack(parts).reshape(count, WORKERS, -1, parts[0].shape[-1])
            batch = np.moveaxis(whole, 1, 0).reshape(-1, parts[0].shape[-1])
            state, metrics = step(state, batch)
            losses += [float(metrics["loss"]) / np.log(2)] * count
            if (n + count) * POINTS // setting.steps > n * POINTS // setting.steps:
                params = jax.device_get(state.params)
                nats = np.mean([_losses(config)(params, sample) for sample in windows])
                held.append([n + count, round(float(nats) / np.log(2), 4)])
        final = jax.device_get(state.params)
        yield {
            "scheme": name, "inner": row.inner, "seed": seed, **setting._asdict(),
            "local_steps": count, "packet": row.packet(params), "bytes": row.bytes_sent(params),
            "bits": text.bits_per_byte(_losses(config), final, held_out[:60_000], config.length),
            "training": _thinned(losses),
            "held_out": held, "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip


def _thinned(losses: list[float]) -> list[float]:
    """Return the means of POINTS equal parts of a curve."""
    parts = np.array_split(losses, min(POINTS, len(losses)))
    return [round(float(part.mean()), 4) for part in parts]


HEAD = (
    "| scheme | seed | B a parameter and step | sent | bits per byte | s |\n"
    "|---|---|---|---|---|---|"
)


def run(options: argparse.Namespace) -> list[measure.Row]:
    """Train what the file does not have yet; print it, and write the file after each run."""
    setting = Setting(*(getattr(options, name) for name in Setting._fields))
    found, about = _read(options.json), measure.where()
    done = {(_setting_of(r), r["scheme"], r["seed"]) for r in found}
    for name in chosen(options.rows):
        seeds = [s for s in range(options.seeds) if (setting, name, s) not in done]
        for result in trained(name, setting, seeds):
            found.append(result)
            print(
                f"| {name} | {result['seed']} | {result['packet']:.4f} | {result['bytes']:.4f} "
                f"| {result['bits']:.3f} | {result['seconds']:.0f} |",
                flush=True,
            )
            if options.json:
                _write(Path(options.json), about, found)
    return found


def chosen(patterns: list[str]) -> list[str]:
    """Return the names of the rows that a pattern matches."""
    return [name for p in patterns for name in fnmatch.filter(ROWS, p)]


def _setting_of(result: measure.Row) -> Setting:
    return Setting(*(result[name] for name in Setting._fields))


def _read(file: str | None) -> list[measure.Row]:
    if file is None or not Path(file).exists():
        return []
    return list(json.loads(Path(file).read_text())["rows"])


def _write(file: Path, about: dict[str, str], found: list[measure.Row]) -> None:
    """Write the runs, one a line."""
    rows = ",\n".join(map(json.dumps, found))
    file.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{rows}\n]}}\n')


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="examples in a step of all workers")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--length", type=int, default=128, help="bytes of an example")
    parser.add_argument("--rate", type=float, help="the learning rate, for all rows")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], metavar="PATTERN", help="such as 'adamw, H=*'"
    )
    options = measure.parse(
        parser, steps=8, seeds=1, width=16,
        rows=["momentum, dense", "momentum, quantize(1)"],
    )  # fmt: skip
    printed = argparse.Namespace(**vars(options) | {"json": None})  # `run` writes the file
    measure.report(printed, HEAD, lambda: run(options))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
