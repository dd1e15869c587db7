"""How long does it take to find the k largest of n, beside `lax.top_k` and one pass over the data?

    python -m benchmarks.selection [--sizes 100000 1000000 10000000] [--rounds 9] [--json FILE]

Each row is one (n, k) on normal numbers, all sides jitted, in interleaved rounds. The floor is the
least that any of them can do: one pass, max|x|. The last row is data on which the sample misleads,
so that `select_top_k` takes its exact path.
"""

import argparse
import json
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
    "| max\\|x\\| ms (min) | select/max (min) |\n|---|---|---|---|---|---|---|---|"
)


def data(kind: str, n: int) -> jax.Array:
    """Return normal numbers; or as many equal ones, where no sample can tell the largest."""
    if kind == "constant":
        return jnp.ones(n, jnp.float32)
    return jnp.asarray(np.random.default_rng(0).standard_normal(n, np.float32))


def sides(x: jax.Array, k: int) -> dict[str, Callable[[], Any]]:
    """Return the three programs, compiled."""
    programs = {
        "select": lambda x: select_top_k(x, k),
        "top_k": lambda x: lax.top_k(jnp.abs(x), k),
        "max": lambda x: jnp.max(jnp.abs(x)),
    }
    compiled = {name: jax.jit(fn).lower(x).compile() for name, fn in programs.items()}
    return {name: lambda run=run: run(x) for name, run in compiled.items()}


def measured(kind: str, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return one row."""
    times = measure.interleaved(sides(data(kind, n), k), rounds)
    row: dict[str, Any] = {"data": kind, "n": n, "k": k}
    for name, timing in times.items():
        row[f"{name}_ms"] = 1e3 * timing.median
        row[f"{name}_min_ms"] = 1e3 * timing.minimum
    row["ratio"] = times["top_k"].median / times["select"].median
    row["ratio_min"] = times["top_k"].minimum / times["select"].minimum
    row["over_floor"] = times["select"].median / times["max"].median
    row["over_floor_min"] = times["select"].minimum / times["max"].minimum
    return row


def run(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return one row per size and k, and one on the exact path; print them."""
    cases = [("normal", n, n // part) for n in sizes for part in FRACTIONS]
    cases.append(("constant", max(sizes), max(sizes) // FRACTIONS[0]))
    rows = []
    for case in cases:
        rows.append(measured(*case, rounds))
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    times = (f"{row[f'{k}_ms']:.2f} ({row[f'{k}_min_ms']:.2f})" for k in ("select", "top_k", "max"))
    select, top_k, floor = times
    return (
        f"| {row['data']} | {row['n']:,} | {row['k']:,} | {select} | {top_k} "
        f"| {row['ratio']:.1f} ({row['ratio_min']:.1f}) | {floor} "
        f"| {row['over_floor']:.1f} ({row['over_floor_min']:.1f}) |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    about = measure.where() | {"rounds": str(options.rounds)}
    print(", ".join(f"{k} {v}" for k, v in about.items()) + "\n\n" + HEAD)
    rows = run(options.sizes, options.rounds)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
