"""Draw the pictures of docs/gallery.md.

    make gallery           or            python -m examples.gallery [--out DIR] [--only NAME …]

The paths of every optimizer on two surfaces, schedules, the ramp of Deep Gradient Compression,
timetables of pipelines, memory by way of splitting a model, memory against FLOPs of recomputation,
the history of a run, and the files of `benchmarks.studies.exchange` and `exchange_link`: loss
against bytes and seconds.
"""

import argparse
import functools
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python examples/gallery.py

import optfn
from benchmarks.studies import front
from docs import tables
from optfn import schedules
from optfn.distributed import plan, plan_memory

WIDTH = 8.0  # inches; a page of the site is 8 inches of 100 pixels wide


class Surface(NamedTuple):
    """A function of two variables, how it is shown, and how it is descended."""

    title: str
    value: Callable[[jax.Array], jax.Array]
    start: tuple[float, float]
    minima: tuple[tuple[float, float], ...]
    x: tuple[float, float]
    y: tuple[float, float]
    levels: Any
    noise: float  # standard deviation of what is added to the gradient
    steps: int


SURFACES = {
    "rosenbrock": Surface(
        "Rosenbrock's valley, (1 − x)² + 100(y − x²)²",
        lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2,
        start=(-1.5, 1.5),
        minima=((1.0, 1.0),),
        x=(-2.0, 2.0),
        y=(-0.7, 2.6),
        levels=np.logspace(-0.5, 3.2, 8),
        noise=0.0,
        steps=300,
    ),
    "saddle": Surface(
        "A saddle between two minima, x⁴/4 − x²/2 + 2y², with noisy gradients",
        lambda p: p[0] ** 4 / 4 - p[0] ** 2 / 2 + 2 * p[1] ** 2,
        start=(0.02, 1.0),
        minima=((1.0, 0.0), (-1.0, 0.0)),
        x=(-1.6, 1.6),
        y=(-0.8, 1.2),
        levels=np.array([-0.2, 0, 0.2, 0.5, 1, 1.5, 2, 2.5, 3]),
        noise=0.05,
        steps=60,
    ),
}

# What these need beside the learning rate, for these surfaces.
OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "nesterov": True},
    "lars": {"momentum": 0.9, "lars_weight_decay": 0.0},
    "lamb": {"weight_decay": 0.0},
    "asgd": {"batch_num": 4},
}
OPTIMIZERS = {
    name: functools.partial(optimizer, **OPTIONS.get(name, {}))
    for name, optimizer in tables.named("optfn.optimizers").items()
}
RATES = np.logspace(-4, 3, 43)  # six in a decade

STEPS = 1000
SCHEDULES = {
    "noam": schedules.noam(512, 200),
    "exponential": schedules.exponential(1.0, 200, 0.5),
    "natural_exp": schedules.natural_exp(1.0, 200, 0.7),
    "inverse_time": schedules.inverse_time(1.0, 200, 1.0),
    "polynomial": schedules.polynomial(1.0, 1000, 0.0, power=2.0),
    "polynomial, cycle": schedules.polynomial(1.0, 300, 0.0, cycle=True),
    "piecewise": schedules.piecewise([300, 600], [1.0, 0.5, 0.1]),
    "cosine": schedules.cosine(1.0, 100, 10),
    "linear_warmup, cosine": schedules.linear_warmup(schedules.cosine(1.0, 1, 1000), 100, 0.0, 1.0),
    "warmup_cosine": schedules.warmup_cosine(1.0, 100, 1000, end=0.1),
    "warmup_stable_decay": schedules.warmup_stable_decay(1.0, 100, 500, 400),
    "one_cycle": schedules.one_cycle(1.0, 1000),
    "step_decay": schedules.step_decay(1.0, 250, 0.5),
    "multi_step": schedules.multi_step(1.0, [300, 800], 0.3),
    "lambda_decay": schedules.lambda_decay(1.0, lambda i: 0.5 + 0.5 * jnp.cos(i % 250 / 80)),
}


def paths(surface: Surface, make: Callable[[Any], Any]) -> tuple[np.ndarray, float]:
    """Return the path (steps + 1, 2) with the best of RATES, and that rate.

    Of the paths that stay in the picture, the best one has the least mean value over the last tenth
    of its steps.
    """
    start = jnp.array(surface.start)
    noise = surface.noise * jax.random.normal(jax.random.key(0), (surface.steps, 2))

    def run(rate: jax.Array) -> jax.Array:
        tx = make(rate)

        def step(carry: Any, noise: jax.Array) -> tuple[Any, jax.Array]:
            p, state = carry
            updates, state = tx.update(jax.grad(surface.value)(p) + noise, state, p)
            p = optfn.apply_updates(p, updates)
            return (p, state), p

        return jax.lax.scan(step, (start, tx.init(start)), noise)[1]

    points = jax.jit(jax.vmap(run))(jnp.asarray(RATES, jnp.float32))
    values = jax.vmap(jax.vmap(surface.value))(points)
    score = jnp.mean(values[:, -surface.steps // 10 :], axis=1)
    low, high = jnp.array([surface.x, surface.y]).T
    stays = jnp.all((low <= points) & (points <= high), axis=(1, 2))
    best = int(jnp.argmin(jnp.where(stays, score, jnp.inf)))
    return np.concatenate([start[None], points[best]]), RATES[best]


def draw_paths(name: str) -> Any:
    """Draw the path of every optimizer on a surface, each in a panel of its own."""
    from matplotlib import pyplot

    surface = SURFACES[name]
    rows = len(OPTIMIZERS) // 5 + 1  # the last panel is for text
    figure, panels = pyplot.subplots(
        rows, 5, figsize=(WIDTH, 1.8 * rows), sharex=True, sharey=True, layout="constrained"
    )
    figure.suptitle(surface.title, fontsize=11)
    x, y = np.meshgrid(np.linspace(*surface.x, 121), np.linspace(*surface.y, 121))
    z = np.asarray(surface.value(jnp.stack([x, y])))
    for ax, (optimizer, make) in zip(panels.flat, OPTIMIZERS.items(), strict=False):
        path, rate = paths(surface, make)
        ax.contour(x, y, z, levels=surface.levels, colors="0.75", linewidths=0.6)
        ax.plot(*path.T, ".-", color="tab:blue", linewidth=1.0, markersize=2.5)
        ax.plot(*surface.start, "o", color="black", markersize=4)
        ax.plot(*zip(*surface.minima, strict=True), "*", color="tab:red", markersize=9)
        ax.set_title(f"{optimizer}\nrate {rate:.2g}", fontsize=9)
        ax.set(xlim=surface.x, ylim=surface.y)
        ax.tick_params(labelsize=8)
    for ax in panels.flat[len(OPTIMIZERS) :]:
        ax.axis("off")
    text = (
        f"{surface.steps} steps from the dot;\nstars are minima;\nthe best of {len(RATES)} rates\n"
        "that stay in the picture"
    )
    ax = panels.flat[len(OPTIMIZERS)]
    ax.text(0, 0.5, text, transform=ax.transAxes, fontsize=9, va="center")
    figure.supxlabel("x", fontsize=9)
    figure.supylabel("y", fontsize=9)
    return figure


def draw_schedules() -> Any:
    """Draw every schedule in a panel of its own."""
    from matplotlib import pyplot

    rows = math.ceil(len(SCHEDULES) / 4)
    figure, panels = pyplot.subplots(
        rows, 4, figsize=(WIDTH, 1.6 * rows), sharex=True, layout="constrained"
    )
    for ax in panels.flat[len(SCHEDULES) :]:
        ax.axis("off")
    for ax, (name, schedule) in zip(panels.flat, SCHEDULES.items(), strict=False):
        optfn.plot.schedules({name: schedule}, STEPS, ax=ax)
        ax.get_legend().remove()
        ax.set_title(name, fontsize=9)
        ax.set(xlabel="", ylabel="", ylim=(0, None))
        ax.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("learning rate", fontsize=10)
    return figure


def draw_dgc_ramp() -> Any:
    """Draw the ramp of the paper on Deep Gradient Compression, 75 % to 99.9 % in five steps."""
    ax = optfn.plot.dgc_ramp(1000, 4000, (0.75, 0.9375, 0.984375, 0.996, 0.999))
    ax.set_title("dgc_momentum: what of a gradient is sent", fontsize=11)
    return ax.figure


def draw_timetables() -> Any:
    """Draw the schedules of a pipeline of four stages, on axes of the same time."""
    from matplotlib import pyplot

    plans = [
        plan(4, 8, schedule="gpipe"),
        plan(4, 8),
        plan(4, 8, virtual_stages=2),
        plan(4, 8, schedule="zb"),
    ]
    figure, panels = pyplot.subplots(len(plans), figsize=(WIDTH, 8), layout="constrained")
    for ax, drawn in zip(panels, plans, strict=True):
        optfn.plot.timetable(drawn, ax=ax)
        title = f"{drawn.schedule}: {drawn!r}\nidle / ideal {drawn.bubble:.1%}"
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlim(0, 34 * drawn.virtual_stages)
    return figure


def draw_memory() -> Any:
    """Draw what GPT-2 small takes on each of eight devices, by optimizer and way of splitting."""
    from benchmarks import measure

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in measure.TREES["gpt2"]().items()
    }
    mesh = AbstractMesh((8,), ("data",))
    optimizers = {"adam": optfn.adam(), "adam, int8 moments": optfn.adam(moment_dtype="int8")}
    plans = {
        f"{name}, shard={shard!r}": plan_memory(tx, params, mesh, shard=shard)
        for name, tx in optimizers.items()
        for shard in (None, "state", "params")
    }
    ax = optfn.plot.memory(plans)
    ax.set_title("GPT-2 small on eight devices", fontsize=11, pad=24)
    return ax.figure


def draw_recompute() -> Any:
    """Draw memory against FLOPs of the gradient of the demo's transformer, with twelve blocks."""
    from benchmarks import recompute

    rows = recompute.run("transformer", recompute.SHARES)
    return recompute.curve(rows, "the demo's transformer, 12 blocks")


def draw_run() -> Any:
    """Draw the history of a run that fits digits, with warm-up, clipping and evaluation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.images.reshape(-1, 64) / 16).astype(np.float32), digits.target
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    held_out, training = order[:300], order[300:]
    params = {"in": 0.1 * rng.normal(size=(64, 64)), "out": 0.1 * rng.normal(size=(64, 10))}

    def logits(params: Any, x: Any) -> jax.Array:
        return jax.nn.relu(x @ params["in"]) @ params["out"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        log_p = jax.nn.log_softmax(logits(params, x))
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

    def evaluate(params: Any) -> dict[str, jax.Array]:
        x, y = images[held_out], labels[held_out]
        accuracy = jnp.mean(jnp.argmax(logits(params, x), axis=1) == y)
        return {"loss": loss_fn(params, (x, y)), "accuracy": accuracy}

    rate = schedules.linear_warmup(schedules.cosine(0.01, 1, 600), 60, 0.0, 0.01)
    tx = optfn.adam(rate, grad_clip=optfn.clip_by_global_norm(0.5))
    picks = (rng.choice(training, 32) for _ in range(600))
    _, history = optfn.minimize(
        loss_fn,
        optfn.record_metrics(tx),
        jax.tree.map(jnp.float32, params),
        ((images[k], labels[k]) for k in picks),
        progress=False,
        evaluate=evaluate,
        evaluate_every=60,
    )
    return optfn.plot.history(history)


PICTURES: dict[str, Callable[[], Any]] = {
    "paths_rosenbrock": lambda: draw_paths("rosenbrock"),
    "paths_saddle": lambda: draw_paths("saddle"),
    "schedules": draw_schedules,
    "dgc_ramp": draw_dgc_ramp,
    "timetables": draw_timetables,
    "memory": draw_memory,
    "recompute": draw_recompute,
    "run": draw_run,
    "exchange": lambda: front.draw_bytes(front.read(front.RUNS, front.LINKS, 32)[0]),
    "links": lambda: front.draw_seconds(front.read(front.RUNS, front.LINKS, 32)[1]),
}


def save(figure: Any, path: Path) -> None:
    """Save a picture with 64 colors, which take a third of the bytes."""
    from matplotlib import pyplot
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, dpi=125)
    pyplot.close(figure)
    Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Draw the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    chosen = {name: PICTURES[name] for name in options.only}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in chosen.items():
        path = options.out / f"{name}.png"
        save(draw(), path)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
