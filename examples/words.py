"""Word vectors of identifiers: skip-gram on the source of Python's standard library, with rows.

    python -m examples.words [--steps 6000] [--dense-steps 100] [--near self append ValueError ...]

Two tables of some 110,000 × 64, of which a step touches at most 14,336 rows. The same model is
trained twice with Adagrad, whose result is the same for rows and for dense gradients: with
`tables=` (row-sparse gradients), and without, for fewer steps, since each of them costs the whole
tables. Prints the losses and the times per step of both, and the nearest neighbours of some
identifiers.

Source: Mikolov et al. 2013, arXiv 1310.4546 (skip-gram with negative sampling, subsampling).
"""

import argparse
import collections
import re
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optfn

WIDTH, WINDOW, NEGATIVE, BATCH = 64, 4, 5, 2048
TABLES = "input|output"
NEAR = ("self", "append", "ValueError", "open", "float", "socket", "assertEqual", "encode")


def identifiers() -> tuple[list[str], np.ndarray]:
    """Return the vocabulary, most frequent first, and the text as int32 ids into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    words: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"}.intersection(path.relative_to(root).parts):
            words += re.findall(rb"[A-Za-z_]\w*", path.read_bytes())
    counts = collections.Counter(words)
    vocabulary = [word for word, _ in counts.most_common()]
    number = {word: k for k, word in enumerate(vocabulary)}
    ids = np.fromiter((number[word] for word in words), np.int32, len(words))
    return [word.decode() for word in vocabulary], ids


def batches(text: np.ndarray, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield centers (b,), contexts (b,) and negatives (b, 5), for ever.

    Frequent words are dropped with the probability given in the paper; negatives are drawn in
    proportion to count^¾.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(text, minlength=size)
    frequency = counts / len(text)
    kept = text[rng.random(len(text)) < np.sqrt(1e-4 / frequency)[text]]
    cumulative = np.cumsum(counts**0.75)
    while True:
        center = rng.integers(WINDOW, len(kept) - WINDOW, BATCH)
        offset = rng.integers(1, WINDOW + 1, BATCH) * rng.choice((-1, 1), BATCH)
        drawn = rng.random((BATCH, NEGATIVE)) * cumulative[-1]
        yield {
            "center": kept[center],
            "context": kept[center + offset],
            "negative": np.searchsorted(cumulative, drawn).astype(np.int32),
        }


def init(size: int, seed: int) -> dict[str, jax.Array]:
    """Return the two tables: small random vectors, and zeros."""
    start = jax.random.uniform(jax.random.key(seed), (size, WIDTH), minval=-0.5, maxval=0.5)
    return {"input": start / WIDTH, "output": jnp.zeros((size, WIDTH))}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return −log σ(x·y) − Σ log σ(−x·y⁻), the mean over the batch."""
    x = params["input"][batch["center"]]
    positive = jnp.sum(x * params["output"][batch["context"]], axis=-1)
    negative = jnp.einsum("bw,bnw->bn", x, params["output"][batch["negative"]])
    return jnp.mean(jax.nn.softplus(-positive) + jax.nn.softplus(negative).sum(axis=-1))


def train(
    tables: str | None, params: Any, text: np.ndarray, size: int, steps: int
) -> tuple[Any, np.ndarray, float]:
    """Return the parameters, the loss of each step, and the median milliseconds of a step."""
    step = optfn.make_train_step(loss_fn, optfn.adagrad(0.2), tables=tables)
    state, losses, seconds = step.init(params), [], []
    for k, batch in zip(range(steps), batches(text, size, seed=1), strict=False):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
        if (k + 1) % max(1, steps // 10) == 0:
            recent = np.mean(losses[-max(1, steps // 10) :])
            print(f"  step {k + 1:6} of {steps}, loss {recent:.4f}", flush=True)
    return state.params, np.asarray(losses), 1e3 * float(np.median(seconds[1:] or seconds))


def nearest(vectors: np.ndarray, word: int, most: int = 6) -> np.ndarray:
    """Return the ids of the largest cosines to the vector of `word`, without `word` itself."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    order = np.argsort(-(unit @ unit[word]))
    return order[order != word][:most]


def main() -> None:
    """Train with rows and with dense gradients, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--dense-steps", type=int, default=100)
    parser.add_argument("--near", nargs="*", default=list(NEAR))
    options = parser.parse_args()
    vocabulary, text = identifiers()
    size = len(vocabulary)
    print(
        f"{len(text):,} identifiers, {size:,} of them different; two tables of {size:,} × {WIDTH}"
    )
    params = init(size, seed=0)
    print("rows:")
    trained, rows, rows_ms = train(TABLES, params, text, size, options.steps)
    print("dense:")
    _, dense, dense_ms = train(None, params, text, size, options.dense_steps)
    common = min(len(rows), len(dense))
    gap = np.abs(rows[:common] / dense[:common] - 1).max()
    print(f"\nloss over the {common} steps that both made: within {gap:.1e} of each other")
    print(
        f"a step: {rows_ms:.1f} ms with rows, {dense_ms:.1f} ms dense, {dense_ms / rows_ms:.1f} ×"
    )
    print(
        f"loss {rows[:100].mean():.3f} in the first 100 steps, {rows[-100:].mean():.3f} in the last"
    )
    # Rare words are hardly trained: look for neighbours among the frequent ones.
    vectors = np.asarray(trained["input"])[:20_000]
    for word in options.near:
        if word in vocabulary[: len(vectors)]:
            near = nearest(vectors, vocabulary.index(word))
            print(f"{word:>12}: {', '.join(vocabulary[k] for k in near)}")


if __name__ == "__main__":
    main()
