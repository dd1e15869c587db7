"""How long is a step on a real chip, beside the estimate of `optfn.distributed.estimate_step`?

    python -m benchmarks.chip [--rounds 10] [--soak 3000]

A Llama in bfloat16 with float32 masters, adamw and a clip by the global norm, each layer
recomputed, trains on one device: no link is used, so the estimate is of compute alone. The time is
that of calls one after another, each waited for, without input. Then masters in each form train for
`--soak` steps of a small model: no warning, and a finite loss, is expected of them.

The page has updates on the same chip too. With a clip optfn's update alone takes longer than
optax's there, and as long without XLA's command buffers (`--xla_gpu_enable_command_buffer=`). The
factor of the clip is a new array in each call, which may be why XLA updates them. A training step
returns its loss, a new array too.
"""

import argparse
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from benchmarks import measure
from benchmarks.pods import ADAMW, Llama
from optfn.distributed import estimate_step

# By name: the model, and the examples of a step.
MODELS = {
    "0.6B": (Llama(2048, 5632, 8, 2048, 16, 1), 1),
    "0.6B, 4 examples": (Llama(2048, 5632, 8, 2048, 16, 1), 4),
    "1.9B": (Llama(4096, 11008, 8, 4096, 32, 1), 1),
}
TOY = {"toy": (Llama(64, 128, 2, 64, 4, 1, vocabulary=256, tokens=32), 1)}
FORMS = {"copies": True, "32 bits": 32, "24 bits": 24}
HEAD = (
    "| model | estimated ms | measured ms, median | minimum | measured/estimated | MFU % |\n"
    "|---|---|---|---|---|---|"
)


def train(name: str, model: Llama, examples: int, rounds: int) -> measure.Row:
    """Return the estimated and the measured seconds of a step."""
    shapes, key = model.divisions()["FSDP"].params, jax.random.key(0)
    params = jax.tree.map(lambda x: 0.02 * jax.random.normal(key, x.shape, x.dtype), shapes)
    tokens = jax.random.randint(key, (examples, model.tokens + 1), 0, model.vocabulary)
    step = optfn.make_train_step(model.loss, ADAMW)
    state = step.init(params)
    del params
    compiled = step.lower(state, tokens).compile()
    estimate = None if jax.devices()[0].platform == "cpu" else estimate_step(compiled)
    held = [state]

    def call() -> Any:
        held[0], metrics = step(held[0], tokens)
        return metrics["loss"]

    timing = measure.interleaved({name: call}, rounds)[name]
    row = {"model": name, "median": timing.median, "minimum": timing.minimum}
    if estimate is not None:
        row |= {"estimated": estimate.seconds, "utilization": estimate.utilization}
    return row


def soak(form: Any, steps: int) -> str:
    """Return what a long run with masters in a form says and ends with."""
    rng = np.random.default_rng(0)
    sizes = (64, 256, 256, 8)
    params = [
        jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.bfloat16)
        for a, b in itertools.pairwise(sizes)
    ]
    x = rng.normal(size=(64, 128, 64)).astype(np.float32)
    y = np.tanh(x[..., :8] * 2) + 0.1 * rng.normal(size=(64, 128, 8)).astype(np.float32)

    def loss(w: Any, batch: Any) -> jax.Array:
        h, y = batch
        for layer in w[:-1]:
            h = jnp.tanh(h.astype(layer.dtype) @ layer)
        return jnp.mean(((h @ w[-1]).astype(jnp.float32) - y) ** 2)

    tx = optfn.adamw(
        optfn.schedules.warmup_cosine(3e-3, warmup_steps=steps // 10, total_steps=steps),
        multi_precision=form, grad_clip=optfn.clip_by_global_norm(1.0),
    )  # fmt: skip
    batches = [(x[i % 64], y[i % 64]) for i in range(steps)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, history = optfn.minimize(loss, tx, params, batches, progress=False)
    losses = history["loss"]
    said = f"{len(caught)} warnings" + "".join(f": {x.message}" for x in caught[:1])
    return (
        f"{losses[0]:.3f} → {losses[-64:].mean():.4f}, finite {np.isfinite(losses).all()}, {said}"
    )


def line(row: measure.Row) -> str:
    """Return a row of the table."""
    estimated = row.get("estimated")
    shown = ["-", "-"] if estimated is None else [f"{1e3 * estimated:.1f}"]
    ratio = "-" if estimated is None else f"{row['median'] / estimated:.2f}"
    use = (
        "-" if estimated is None else f"{100 * row['utilization'] * estimated / row['median']:.1f}"
    )
    times = [f"{1e3 * row['median']:.1f}", f"{1e3 * row['minimum']:.1f}"]
    return f"| {row['model']} | {' | '.join([shown[0], *times, ratio, use])} |"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--soak", type=int, default=3000)
    options = measure.parse(parser, rounds=2, soak=20)

    def run() -> list[measure.Row]:
        rows = []
        for name, (model, examples) in (TOY if options.toy else MODELS).items():
            rows.append(train(name, model, examples, options.rounds))
            print(line(rows[-1]), flush=True)
        for name, form in FORMS.items():
            print(
                f"masters in {name}, {options.soak} steps: {soak(form, options.soak)}", flush=True
            )
        return rows

    measure.report(options, HEAD, run, device=jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
