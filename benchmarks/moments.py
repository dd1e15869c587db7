"""What do moments in 8 and 16 bits cost, in time and in accuracy?

    python -m benchmarks.moments [--tree resnet50|gpt2|one|toy] [--rounds 9] [--steps 600]
        [--seeds 3] [--rules adam momentum lamb lars adamax rmsprop signs]

First the update of Adam alone: time compared with float32 moments, state and temporaries in bytes
a parameter; the floor is the time of the bytes that the rule must move, as in benchmarks.update.
Then training of the rules in `--rules` with three seeds (none with `--seeds 0`): an MLP on
scikit-learn's digits (held-out accuracy and loss), and the demo's transformer on text (held-out
bits per byte). "signs" updates by the signs of a momentum, as Lion does. Rates are not tuned;
differences from float32 are within the spread of seeds, or about it.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure
from benchmarks.update import Side
from examples import text, transformer

# Makes the value_and_grad of make_train_step from a loss; None for jax.value_and_grad.
Gradient = Callable[[Callable[..., Any]], Callable[..., Any]] | None
DTYPES = (None, "bfloat16", "int8")
HEAD = (
    "| moments | ms (min) | speed of float32 | state B/param | temporaries B/param | floor ms "
    "| ms/floor |\n|---|---|---|---|---|---|---|"
)


def name_of(dtype: str | None) -> str:
    """Return the name of a row."""
    return dtype or "float32"


def cost(tree: str, rounds: int) -> list[measure.Row]:
    """Return time and memory of the update for each dtype, and of optax's float32 Adam."""
    shapes = measure.TREES[tree]()
    sides = {"optax": Side(optax.adam(1e-3), shapes)}
    for dtype in DTYPES:
        tx = optfn.adam(1e-3, eps_hat=False, moment_dtype=dtype)
        sides[name_of(dtype)] = Side(tx, shapes)
    machine = measure.Machine(measure.size(sides["optax"].params))
    times = measure.interleaved({**sides, **machine.calls()}, rounds)
    rows = []
    for name, side in sides.items():
        floor = machine.floor(side.bytes_moved, times)
        row = {
            "moments": name,
            "ms": 1e3 * times[name].median,
            "min_ms": 1e3 * times[name].minimum,
            "speed": times["float32"].median / times[name].median,
            "state": measure.num_bytes(side.state) / measure.size(side.params),
            "temporaries": side.temp_per_param,
            "floor_ms": 1e3 * floor,
            "over_floor": times[name].median / floor,
        }
        rows.append(row)
        print(
            f"| {name} | {row['ms']:.1f} ({row['min_ms']:.1f}) | {row['speed']:.2f} "
            f"| {row['state']:.2f} | {row['temporaries']:.2f} | {row['floor_ms']:.1f} "
            f"| {row['over_floor']:.2f} |",
            flush=True,
        )
    return rows


def digits_accuracy(tx: Any, seed: int, epochs: int, gradient: Gradient = None) -> float:
    """Return the held-out accuracy, in per cent, of an MLP on the digits."""
    return digits_figures(tx, seed, epochs, gradient)[0]


def digits_figures(
    tx: Any, seed: int, epochs: int, gradient: Gradient = None
) -> tuple[float, float]:
    """Return the held-out accuracy, in per cent, and loss of an MLP on the digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))  # the same split for all seeds
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    train, test = slice(0, 1347), slice(1347, None)
    rng = np.random.default_rng(seed)
    sizes = (64, 256, 256, 10)
    params = [
        {"w": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32), "b": jnp.zeros(b)}
        for a, b in itertools.pairwise(sizes)
    ]

    def logits(params: Any, x: Any) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def batches() -> Any:
        for _ in range(epochs):
            for rows in np.array_split(rng.permutation(1347), 42):
                yield x[train][rows[:32]], y[train][rows[:32]]

    own = gradient and gradient(loss_fn)
    state, _ = optfn.minimize(loss_fn, tx, params, batches(), progress=False, value_and_grad=own)
    found = jnp.argmax(logits(state.params, x[test]), axis=1)
    loss = float(loss_fn(state.params, (x[test], y[test])))
    return 100 * float(jnp.mean(found == y[test])), loss


def text_bits(tx: Any, seed: int, steps: int, gradient: Gradient = None) -> float:
    """Return the held-out bits per byte of the demo's transformer."""
    config = transformer.Config()
    train, held_out = text.standard_library()
    params = transformer.init(jax.random.key(seed), config)

    def loss_fn(params: Any, windows: Any) -> jax.Array:
        return transformer.loss_fn(params, windows, config)

    state, _ = optfn.minimize(
        loss_fn,
        tx,
        params,
        text.batches(train, 4, config.length, seed),
        steps=steps,
        progress=False,
        value_and_grad=gradient and gradient(loss_fn),
    )
    return text.bits_per_byte(
        lambda p, w: transformer.losses(p, w, config),
        state.params,
        held_out[:60_000],
        config.length,
    )


def signs(rate: Any, moment_dtype: str | None) -> optax.GradientTransformation:
    """Return the rule of the signs of a momentum: Lion without its second average."""
    return optfn.chain(
        optfn.scale_by_momentum(0.95, moment_dtype=moment_dtype),
        optax.scale_by_sign(),
        optfn.scale_by_learning_rate(rate),
    )


# The rule for the digits, by the dtype of its moments; for the text, by the steps and the dtype.
OfDigits = Callable[[str | None], optax.GradientTransformation]
OfText = Callable[[int, str | None], optax.GradientTransformation]
cosine = optfn.schedules.cosine
RULES: dict[str, tuple[OfDigits, OfText]] = {
    "adam": (
        lambda d: optfn.adam(1e-3, moment_dtype=d),
        lambda n, d: optfn.adamw(cosine(6e-3, 1, n), 0.9, 0.99, moment_dtype=d),
    ),
    "momentum": (
        lambda d: optfn.momentum(0.05, 0.9, moment_dtype=d),
        lambda n, d: optfn.momentum(cosine(0.4, 1, n), 0.9, moment_dtype=d),
    ),
    "lamb": (
        lambda d: optfn.lamb(2e-3, moment_dtype=d),
        lambda n, d: optfn.lamb(cosine(0.02, 1, n), moment_dtype=d),
    ),
    "lars": (
        lambda d: optfn.lars(1.0, 0.9, moment_dtype=d),
        lambda n, d: optfn.lars(cosine(10.0, 1, n), 0.9, moment_dtype=d),
    ),
    "adamax": (
        lambda d: optfn.adamax(2e-3, moment_dtype=d),
        lambda n, d: optfn.adamax(cosine(6e-3, 1, n), moment_dtype=d),
    ),
    "rmsprop": (
        lambda d: optfn.rmsprop(1e-3, moment_dtype=d),
        lambda n, d: optfn.rmsprop(cosine(3e-3, 1, n), moment_dtype=d),
    ),
    "signs": (lambda d: signs(1e-4, d), lambda n, d: signs(cosine(1e-3, 1, n), d)),
}


def accuracy(
    tasks: Sequence[str],
    rule: str,
    run: Callable[[Any, int], Sequence[float]],
    make: Callable[[str | None], Any],
    seeds: int,
) -> list[measure.Row]:
    """Return the figures of each seed for each dtype; `run` returns one for each of the tasks."""
    rows = []
    for dtype in DTYPES:
        of_seeds = [run(make(dtype), seed) for seed in range(seeds)]
        for task, figures in zip(tasks, zip(*of_seeds, strict=True), strict=True):
            moments = name_of(dtype)
            rows.append({"task": task, "rule": rule, "moments": moments, "figures": [*figures]})
            each = ", ".join(f"{figure:.3f}" for figure in figures)
            deviation = np.std(figures, ddof=min(1, seeds - 1))
            spread = f"{np.mean(figures):.3f} ({deviation:.3f})"
            print(f"| {task} | {rule} | {moments} | {spread} | {each} |", flush=True)
    return rows


def training(rules: list[str], seeds: int, epochs: int, steps: int) -> list[measure.Row]:
    """Return the rows of both tasks, and print them."""
    print("\n| task | rule | moments | mean (deviation) | seeds |\n|---|---|---|---|---|")
    rows = []
    for rule in rules:
        of_digits, of_text = RULES[rule]
        rows += accuracy(
            ["digits, % held out", "digits, loss held out"],
            rule,
            lambda tx, seed: digits_figures(tx, seed, epochs),
            of_digits,
            seeds,
        )
        rows += accuracy(
            ["text, bits per byte held out"],
            rule,
            lambda tx, seed: [text_bits(tx, seed, steps)],
            partial(of_text, steps),
            seeds,
        )
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", choices=measure.TREES, default="resnet50")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["adam"])
    options = measure.parse(parser, tree="toy", rounds=1, seeds=0)

    def run() -> list[measure.Row]:
        rows = cost(options.tree, options.rounds)
        if options.seeds:
            rows += training(options.rules, options.seeds, options.epochs, options.steps)
        return rows

    measure.report(options, HEAD, run)


if __name__ == "__main__":
    main()
