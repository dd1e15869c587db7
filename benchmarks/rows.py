"""How long is a step on a table of which it touches some rows?

    python -m benchmarks.rows [--rows 1000000] [--width 64] [--touched 4096] [--rounds 9]

A table of 1 M × 64, of which a step touches 4,096 random rows, different ones in each of the five
steps that a side makes per round: optfn's lazy and exact-lazy Adam on rows, its Adam on the dense
gradient, optax's Adam, and torch's SparseAdam where torch is installed. All in one process, in
interleaved rounds; JAX's sides donate params and state in the order in which they are updated in
place. The dense sides are given the dense gradient; making it is not timed. The floor is the
time of the bytes that a step must move (the rows of params and state that it touches, read and
written, and the gradient) at the bandwidth of an addition in place over contiguous memory.

Two more sides say what the distance of the rows costs: lazy Adam's arithmetic on rows that are
distinct and in order, so that nothing is merged, in three tables, and with the three rows of an
index side by side in one, which takes about half, in a layout that models would see. Between two
rounds the dense sides pass over their tables, so that no side finds its rows in a cache.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import measure

STEPS = 5  # of one side, in each round
HEAD = (
    "| optimizer | ms (min) | speed-up over optax dense (min) | temporaries MB | floor ms "
    "| ms/floor |\n"
    "|---|---|---|---|---|---|"
)


class Step:
    """One optimizer on the table, stepped in place."""

    def __init__(self, tx: Any, params: Any, gradients: list[Any]) -> None:
        self.params = jax.tree.map(jnp.copy, params)
        self.state, self.gradients = tx.init(self.params), gradients
        given = gradients[0]["table"]
        share = len(given.indices) / given.num_rows if isinstance(given, optfn.sparse.Rows) else 1
        kept = measure.num_bytes((self.params, self.state))
        self.bytes_moved = 2 * share * kept + measure.num_bytes(given)

        def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = tx.update(gradients, state, params)
            return optfn.apply_updates(params, updates), state

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            self.params, self.state, self.gradients[0]
        )
        self.compiled = lowered.compile()
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> Any:
        """Make STEPS steps."""
        for k in range(STEPS):
            gradients = self.gradients[k % len(self.gradients)]
            self.params, self.state = self.compiled(self.params, self.state, gradients)
            jax.block_until_ready(self.params)
        return self.params


class Accesses:
    """Lazy Adam's reads and writes of distinct rows: of three tables, or of one, side by side."""

    def __init__(self, table: jax.Array, touched: int, side_by_side: bool) -> None:
        rng = np.random.default_rng(1)
        chosen = [rng.choice(len(table), touched, replace=False) for _ in range(STEPS)]
        self.indices = [jnp.asarray(np.sort(i).astype(np.int32)) for i in chosen]
        self.g = jnp.ones((touched, table.shape[1]))
        tables = [jnp.copy(table) for _ in range(3)]
        self.tables: Any = jnp.stack(tables, axis=1) if side_by_side else tables

        def moved(p: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

        def step(tables: Any, i: Any, g: Any) -> Any:
            if side_by_side:
                old = tables.at[i].get(mode="clip")
                new = moved(*(old[:, k] for k in range(3)), g)
                return tables.at[i].set(jnp.stack(new, axis=1), mode="drop")
            new = moved(*(x.at[i].get(mode="clip") for x in tables), g)
            pairs = zip(tables, new, strict=True)
            return [x.at[i].set(y, mode="drop") for x, y in pairs]

        self.compiled = (
            jax.jit(step, donate_argnums=0).lower(self.tables, self.indices[0], self.g).compile()
        )

    def __call__(self) -> Any:
        """Make STEPS steps."""
        for i in self.indices:
            self.tables = self.compiled(self.tables, i, self.g)
            jax.block_until_ready(self.tables)
        return self.tables


def torch_steps(table: np.ndarray, gradients: list[tuple[Any, Any]]) -> Callable[[], Any]:
    """Return STEPS steps of torch's SparseAdam, its gradients made once."""
    import torch

    parameter = torch.nn.Parameter(torch.tensor(table))
    optimizer = torch.optim.SparseAdam([parameter], lr=1e-3)
    made = [
        torch.sparse_coo_tensor(
            torch.tensor(indices[None].astype(np.int64)), torch.tensor(values), table.shape
        )
        for indices, values in gradients
    ]

    def steps() -> None:
        for k in range(STEPS):
            parameter.grad = made[k]
            optimizer.step()

    return steps


def sides(rows: int, width: int, touched: int) -> dict[str, Any]:
    """Return the programs that make STEPS steps, optax's dense Adam first."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, width), np.float32)
    gradients = [
        (
            rng.integers(0, rows, touched).astype(np.int32),
            rng.standard_normal((touched, width), np.float32),
        )
        for _ in range(STEPS)
    ]
    params = {"table": jnp.asarray(table)}
    sparse = [
        {"table": optfn.sparse.Rows(jnp.asarray(indices), jnp.asarray(values), rows)}
        for indices, values in gradients
    ]
    dense = [{"table": jnp.zeros((rows, width)) + sparse[0]["table"]}]
    found: dict[str, Any] = {
        "optax adam, dense": Step(optax.adam(1e-3), params, dense),
        "optfn adam, dense": Step(optfn.adam(1e-3, eps_hat=False), params, dense),
        "optfn adam, lazy": Step(optfn.adam(1e-3, eps_hat=False, lazy=True), params, sparse),
        'optfn adam, "exact"': Step(optfn.adam(1e-3, eps_hat=False, lazy="exact"), params, sparse),
        "optfn sgd": Step(optfn.sgd(1e-3), params, sparse),
        "optfn adagrad": Step(optfn.adagrad(1e-3), params, sparse),
        "distinct rows of three tables": Accesses(params["table"], touched, False),
        "the same, side by side": Accesses(params["table"], touched, True),
    }
    if measure.torch_stands_beside():
        found["torch SparseAdam"] = torch_steps(table, gradients)
    return found


def run(rows: int, width: int, touched: int, rounds: int) -> list[measure.Row]:
    """Return one row per optimizer, and print them."""
    programs = sides(rows, width, touched)
    machine = measure.Machine(rows * width)
    times = measure.interleaved({**programs, **machine.calls()}, rounds)
    peer = times["optax adam, dense"]
    found = []
    for name, program in programs.items():
        row: measure.Row = {
            "optimizer": name,
            "ms": 1e3 * times[name].median / STEPS,
            "min_ms": 1e3 * times[name].minimum / STEPS,
            "ratio": peer.median / times[name].median,
            "ratio_min": peer.minimum / times[name].minimum,
        }
        if isinstance(program, Step):
            row["temporaries_MB"] = program.temporaries / 1e6
            row["floor_ms"] = 1e3 * machine.floor(program.bytes_moved, times)
            row["over_floor"] = row["ms"] / row["floor_ms"]
        found.append(row)
        print(_line(row), flush=True)
    return found


def _line(row: measure.Row) -> str:
    rest = "- | - | -"
    if "floor_ms" in row:
        rest = f"{row['temporaries_MB']:.2f} | {row['floor_ms']:.2f} | {row['over_floor']:.1f}"
    return (
        f"| {row['optimizer']} | {row['ms']:.2f} ({row['min_ms']:.2f}) "
        f"| {row['ratio']:.1f} ({row['ratio_min']:.1f}) | {rest} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--touched", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, rows=2000, width=8, touched=16, rounds=1)
    sizes = options.rows, options.width, options.touched
    measure.report(options, HEAD, lambda: run(*sizes, options.rounds))


if __name__ == "__main__":
    main()
