"""Train a recommender on a click log: DeepFM with two tables whose rows lie on eight devices.

    make demo-recommender        or        python -m examples.recommender [--steps N] [--devices 8]

Users, items and hours have ids of 64 bits, which `optfn.sparse.hash_ids` turns into rows. The
embeddings are trained by lazy Adam, the weights of the wide part by FTRL with l1, which leaves the
weights of features without effect exactly 0. Devices of the CPU stand for real ones. At this size
`shard="params"` is three times as fast (benchmarks/studies/tune_examples.py), but it gathers whole
tables, as no device could that is too small for them, and gradients of all rows make Adam dense.

The log is synthetic: its users and items are drawn by Zipf's law, its clicks with a probability
that is known. The area under the ROC curve (AUC) of this probability on the held-out part is the
most that any model can expect; it stands beside that of the trained model.

Source: Guo et al. 2017, arXiv 1703.04247 (DeepFM); Cheng et al. 2016, arXiv 1606.07792 (wide &
deep); McMahan et al. 2013, "Ad click prediction: a view from the trenches" (FTRL, its zeros).
The rates and l1 are the best of three on the held-out part.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before jax is imported. The last flag counts: the environment may give another number.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python examples/recommender.py

import optfn
from optfn.distributed import data_mesh
from optfn.sparse import hash_ids

TABLES = "embed|wide"
Batch = dict[str, np.ndarray]


class Sizes(NamedTuple):
    """Of the log, and of the model."""

    users: int = 20_000
    items: int = 5_000
    hours: int = 24
    factors: int = 4  # of the generating model
    batch: int = 8192
    held_out: int = 100_000
    embed_rows: int = 2**17
    wide_rows: int = 2**19
    width: int = 16
    hidden: int = 64


class Log:
    """A click log with a known probability of each click.

        p(click) = σ(−1.5 + a_user + b_item + c_hour + ⟨u_user, v_item⟩/√factors)

    a, b, c are normal with deviations 0.5, 1 and 0.5, the entries of u and v with 1. Users are
    drawn in proportion to rank^−1.05, items to rank^−1.1, hours evenly. Products of user or item
    with the hour have no effect: their weights should be 0.
    """

    def __init__(self, sizes: Sizes, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = sizes
        counts = (sizes.users, sizes.items, sizes.hours)
        self.names = [rng.integers(-(2**63), 2**63, n) for n in counts]  # ids of 64 bits
        scales = (0.5, 1.0, 0.5)
        self.effects = [s * rng.normal(size=n) for s, n in zip(scales, counts, strict=True)]
        self.factors = [rng.normal(size=(n, sizes.factors)) for n in counts[:2]]
        self.cumulative = [
            np.cumsum(np.arange(1, n + 1) ** -power)
            for n, power in zip(counts, (1.05, 1.1, 0.0), strict=True)
        ]

    def events(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return ranks (count, 3) of user, item and hour, and the log-odds of each click."""
        ranks = [np.searchsorted(c, c[-1] * rng.random(count)) for c in self.cumulative]
        score = -1.5 + sum(e[k] for e, k in zip(self.effects, ranks, strict=True))
        users, items = (f[k] for f, k in zip(self.factors, ranks[:2], strict=True))
        return np.stack(ranks, 1), score + np.sum(users * items, 1) / np.sqrt(self.sizes.factors)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Batch, np.ndarray]:
        """Return a batch of events, and the log-odds of each click."""
        ranks, score = self.events(count, rng)
        ids = np.stack([name[k] for name, k in zip(self.names, ranks.T, strict=True)], 1)
        clicked = rng.random(count) < 1 / (1 + np.exp(-score))
        return self.features(ids) | {"clicked": clicked.astype(np.float32)}, score

    def features(self, ids: np.ndarray) -> Batch:
        """Return the rows of both tables for ids (b, 3): of the fields, and of their products."""
        user, item, hour = ids.T
        products = [31 * user + hour, 31 * item + hour]  # where they overflow, it is no matter
        embed, wide = self.sizes.embed_rows, self.sizes.wide_rows
        return {
            "embed": _rows([user, item, hour], embed),
            "wide": _rows([user, item, hour, *products], wide),
        }

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield batches for ever."""
        rng = np.random.default_rng(seed)
        while True:
            yield self.sample(self.sizes.batch, rng)[0]


def _rows(fields: list[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the rows (b, fields); each field has its own seed."""
    return np.stack([hash_ids(x, num_rows, seed=k) for k, x in enumerate(fields)], 1)


def init(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Return the two tables and the layers of the deep part."""
    keys = jax.random.split(jax.random.key(seed), 3)
    wide = 3 * sizes.width
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (sizes.embed_rows, sizes.width)),
        "wide": jnp.zeros(sizes.wide_rows),
        "deep": {
            "hidden": jax.random.normal(keys[1], (wide, sizes.hidden)) / np.sqrt(wide),
            "bias": jnp.zeros(sizes.hidden),
            "out": jax.random.normal(keys[2], (sizes.hidden,)) / np.sqrt(sizes.hidden),
        },
    }


def log_odds(params: Any, batch: Any) -> jax.Array:
    """Return the model's log-odds of a click, (b,): wide part, products of pairs, deep part."""
    x = params["embed"][batch["embed"]]  # (b, fields, width)
    pairs = sum(
        jnp.sum(x[:, i] * x[:, j], -1) for i, j in itertools.combinations(range(x.shape[1]), 2)
    )
    deep = params["deep"]
    hidden = jax.nn.relu(x.reshape(len(x), -1) @ deep["hidden"] + deep["bias"])
    return params["wide"][batch["wide"]].sum(1) + pairs + hidden @ deep["out"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the mean negative log-likelihood of the clicks."""
    return optax.sigmoid_binary_cross_entropy(log_odds(params, batch), batch["clicked"]).mean()


def optimizer(rate: float, l1: float) -> Any:
    """Return lazy Adam for embeddings, FTRL for the wide part, Adam for the layers."""
    labels = {"embed": "rows", "wide": "wide", "deep": "dense"}
    rules = {
        "rows": optfn.adam(rate, lazy=True),
        "wide": optfn.ftrl(0.05, l1=l1),
        "dense": optfn.adam(rate),
    }
    return optax.partition(rules, lambda params: {k: labels[k] for k in params})


def auc(score: np.ndarray, clicked: np.ndarray) -> float:
    """Return the probability that a click has a higher score than an event without one."""
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # the mean of equal scores
    positive = int(clicked.sum())
    above = ranks[clicked > 0].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(score) - positive)))


def log_loss(score: np.ndarray, clicked: np.ndarray) -> float:
    """Return the mean negative log-likelihood."""
    return float(np.mean(np.logaddexp(0, score) - score * clicked))


def zeros(wide: np.ndarray, touched: np.ndarray) -> dict[str, tuple[int, int]]:
    """Return how many weights of the wide part training touched, and how many of them are 0.

    Args:
      wide: the trained weights.
      touched: the rows of all batches, (n, 5).
    """
    kinds = {"user, item, hour": touched[:, :3], "user × hour": touched[:, 3],
             "item × hour": touched[:, 4]}  # fmt: skip
    found = {}
    for name, rows in kinds.items():
        weights = wide[np.unique(rows)]
        found[name] = len(weights), int(np.sum(weights == 0))
    return found


def num_bytes(x: jax.Array) -> tuple[int, int]:
    """Return the bytes of an array, and those of them on the first device."""
    return x.nbytes, x.addressable_shards[0].data.nbytes


def main() -> None:
    """Train, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rate", type=float, default=4e-3, help="of Adam")
    parser.add_argument("--l1", type=float, default=5e-4, help="of FTRL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="the sizes of a test")
    options = parser.parse_args()
    toy = Sizes(200, 50, 24, 4, 256, 2000, 2**10, 2**12, 8, 16)
    run(toy if options.toy else Sizes(), options)


def run(sizes: Sizes, options: argparse.Namespace) -> None:
    """Train on a log of these sizes, and print the tables."""
    log = Log(sizes, options.seed)
    held_out, truth = log.sample(sizes.held_out, np.random.default_rng(options.seed + 1))
    clicked = held_out["clicked"]
    params, mesh = init(sizes, options.seed), data_mesh(options.devices)
    print(
        f"{sizes.users:,} users and {sizes.items:,} items by Zipf's law, "
        f"{clicked.mean():.1%} clicks; tables of {sizes.embed_rows:,} × {sizes.width} and "
        f"{sizes.wide_rows:,} rows on {options.devices} devices\n"
    )
    score = jax.jit(log_odds)
    touched: list[np.ndarray] = []

    def batches() -> Iterator[Batch]:
        for batch in log.batches(options.seed + 2):
            touched.append(batch["wide"])
            yield batch

    start = time.perf_counter()
    state, _ = optfn.minimize(
        loss_fn, optimizer(options.rate, options.l1), params, batches(),
        steps=options.steps, mesh=mesh, tables=TABLES, shard_tables=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    trained = jax.device_get(state.params)
    print(f"{'held out':24}{'AUC':>8}{'log loss':>10}")
    scores = {
        "initial model": np.asarray(score(params, held_out)),
        "trained model": np.asarray(score(trained, held_out)),
        "generating model": truth,
    }
    for name, x in scores.items():
        print(f"{name:24}{auc(x, clicked):8.4f}{log_loss(x, clicked):10.4f}")
    print(f"\n{'weights of FTRL':24}{'touched':>10}{'exactly 0':>11}")
    for name, (count, zero) in zeros(trained["wide"], np.concatenate(touched)).items():
        print(f"{name:24}{count:10,}{zero:11,}   {zero / count:.0%}")
    leaves = jax.tree.leaves(state)
    total, part = (sum(sizes) for sizes in zip(*map(num_bytes, leaves), strict=True))
    print(f"\nparams and state: {total / 1e6:.2f} MB, {part / 1e6:.2f} MB on each device")
    print(f"{options.steps} steps of {sizes.batch} events, {seconds:.0f} s")


if __name__ == "__main__":
    main()
