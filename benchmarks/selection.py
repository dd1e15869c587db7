"""How long does it take to find the k largest of n, compared with `lax.top_k` and one pass?

    python -m benchmarks.selection [--sizes 100000 1000000 10000000] [--rounds 9]

Each row is one (n, k) on normal numbers, all sides jitted, in interleaved rounds; torch.topk too,
where torch is installed. The floor is one pass over the data, max|x|. In the last row the sample is
misleading, so that `select_top_k` takes its exact path.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import measure
from optfn.distributed import select_top_k

SIZES = (100_000, 1_000_000, 10_000_000)
FRACTIONS = (1000, 100)
HEAD = (
    "| data | n | k | select_top_k ms (min) | lax.top_k ms (min) | top_k/select (min) "
    "| torch.topk ms (min) | torch/select (min) | max\\|x\\| ms (min) | select/max (min) |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def data(kind: str, n: int) -> jax.Array:
    """Return normal numbers; or as many equal ones, where no sample can tell the largest."""
    if kind == "constant":
        return jnp.ones(n, jnp.float32)
    return jnp.asarray(np.random.default_rng(0).standard_normal(n, np.float32))


def sides(x: jax.Array, k: int) -> dict[str, Callable[[], Any]]:
    """Return the programs, compiled."""
    programs = {
        "select": lambda x: select_top_k(x, k),
        "top_k": lambda x: lax.top_k(jnp.abs(x), k),
        "max": lambda x: jnp.max(jnp.abs(x)),
    }
    compiled = {name: jax.jit(fn).lower(x).compile() for name, fn in programs.items()}
    found: dict[str, Callable[[], Any]] = {
        name: lambda run=run: run(x) for name, run in compiled.items()
    }
    if measure.torch_stands_beside():
        import torch

        same = torch.tensor(np.asarray(x))
        found["torch"] = lambda: torch.topk(same.abs(), k)
    return found


def measured(kind: str, n: int, k: int, rounds: int) -> measure.Row:
    """Return one row."""
    times = measure.interleaved(sides(data(kind, n), k), rounds)
    row: measure.Row = {"data": kind, "n": n, "k": k}
    for name, timing in times.items():
        row[f"{name}_ms"] = 1e3 * timing.median
        row[f"{name}_min_ms"] = 1e3 * timing.minimum
    select = times["select"]
    for ratio, peer in {"ratio": "top_k", "torch_ratio": "torch"}.items():
        if peer in times:
            row[ratio] = times[peer].median / select.median
            row[f"{ratio}_min"] = times[peer].minimum / select.minimum
    row["over_floor"] = select.median / times["max"].median
    row["over_floor_min"] = select.minimum / times["max"].minimum
    return row


def run(sizes: list[int], rounds: int) -> list[measure.Row]:
    """Return one row per size and k, and one on the exact path; print them."""
    cases = [("normal", n, n // part) for n in sizes for part in FRACTIONS]
    cases.append(("constant", max(sizes), max(sizes) // FRACTIONS[0]))
    rows = []
    for case in cases:
        rows.append(measured(*case, rounds))
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: measure.Row) -> str:
    def both(median: str, minimum: str, digits: int) -> str:
        if median not in row:
            return "-"
        return f"{row[median]:.{digits}f} ({row[minimum]:.{digits}f})"

    def ms(side: str) -> str:
        return both(f"{side}_ms", f"{side}_min_ms", 2)

    def ratio(name: str) -> str:
        return both(name, f"{name}_min", 1)

    return (
        f"| {row['data']} | {row['n']:,} | {row['k']:,} | {ms('select')} "
        f"| {ms('top_k')} | {ratio('ratio')} | {ms('torch')} | {ratio('torch_ratio')} "
        f"| {ms('max')} | {ratio('over_floor')} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, sizes=[4000], rounds=1)
    measure.report(options, HEAD, lambda: run(options.sizes, options.rounds))


if __name__ == "__main__":
    main()
