"""How near to one pass over memory does Adam come: what was tried beside torch's fused kernel.

    python -m benchmarks.fused_adam [--tree one|resnet50|gpt2|toy] [--rounds 9] [--json FILE]
    XLA_FLAGS=--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true \\
        python -m benchmarks.fused_adam

XLA on CPU makes one pass for each array that a fusion writes, three for Adam; torch's fused kernel
makes one. Tried: the tree, packed into one buffer, packed into as many as there are cores, and a
loop over chunks that stay in the cache, which updates params and moments in place. The loop needs
an option of the compiler without which it copies whole arrays in each turn; where it is refused the
row says so. Multi-output fusion can only be had through XLA_FLAGS, for a whole process.
"""

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optfn
from benchmarks import measure

REGION_ANALYSIS = {"xla_cpu_copy_insertion_use_region_analysis": True}
HEAD = (
    "| Adam | ms (min) | optax / it (min) | GB/s | of in-place bandwidth | temporaries B/param |\n"
    "|---|---|---|---|---|---|"
)


def adam(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """Return (p, m, v) of one step, in one expression."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def in_chunks(chunk: int, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
    """Return the same, chunk after chunk, in place."""
    size = min(chunk, p.size)

    def body(i: jax.Array, kept: Any) -> Any:
        # The last chunk overlaps: a step twice would be wrong, so it is only started inside.
        start = i * size
        parts = [lax.dynamic_slice(x, (start,), (size,)) for x in (*kept, g)]
        new = adam(*parts)
        return tuple(
            lax.dynamic_update_slice(x, y, (start,)) for x, y in zip(kept, new, strict=True)
        )

    whole = p.size // size
    p, m, v = lax.fori_loop(0, whole, body, (p, m, v))
    rest = whole * size
    if rest < p.size:
        ends = adam(p[rest:], m[rest:], v[rest:], g[rest:])
        p, m, v = (x.at[rest:].set(y) for x, y in zip((p, m, v), ends, strict=True))
    return p, m, v


class Side:
    """A step (p, m, v, g) -> (p, m, v) over lists of arrays, in place."""

    def __init__(
        self, rule: Callable[..., Any], shapes: list[tuple[int, ...]], options: Any
    ) -> None:
        columns = [[jnp.full(s, x) for s in shapes] for x in (1.0, 0.0, 0.0, 0.5)]
        self.kept, self.gradient = columns[:3], columns[3]

        def step(p: Any, m: Any, v: Any, g: Any) -> Any:
            results = [rule(*leaf) for leaf in zip(p, m, v, g, strict=True)]
            return tuple(map(list, zip(*results, strict=True)))

        lowered = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*self.kept, self.gradient)
        self.compiled = lowered.compile(compiler_options=options)
        size = sum(map(math.prod, shapes))
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes / size

    def __call__(self) -> Any:
        """Make one step."""
        self.kept = self.compiled(*self.kept, self.gradient)
        return self.kept


class Optax:
    """optax.adam over a tree of these shapes, in place."""

    def __init__(self, tx: Any, shapes: list[tuple[int, ...]]) -> None:
        self.params = [jnp.ones(s) for s in shapes]
        self.state, self.gradient = tx.init(self.params), [jnp.full(s, 0.5) for s in shapes]

        def step(params: Any, state: Any, gradient: Any) -> Any:
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1))
        compiled = self.step.lower(self.params, self.state, self.gradient).compile()
        size = sum(map(math.prod, shapes))
        self.temporaries = compiled.memory_analysis().temp_size_in_bytes / size

    def __call__(self) -> Any:
        """Make one step."""
        self.params, self.state = self.step(self.params, self.state, self.gradient)
        return self.params


class Torch:
    """torch.optim.Adam, fused or foreach."""

    temporaries = None

    def __init__(self, shapes: list[tuple[int, ...]], **options: Any) -> None:
        import torch

        params = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
        for p in params:
            p.grad = torch.full(p.shape, 0.5)
        self.optimizer = torch.optim.Adam(params, lr=1e-3, **options)

    def __call__(self) -> None:
        """Make one step."""
        self.optimizer.step()


def sides(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """Return what makes each side."""
    size = sum(map(math.prod, shapes))
    cores = os.cpu_count() or 1
    split = [(size // cores,)] * cores
    found: dict[str, Callable[[], Any]] = {
        "optax, the tree": lambda: Optax(optax.adam(1e-3), shapes),
        "optfn, the tree": lambda: Optax(optfn.adam(1e-3, eps_hat=False), shapes),
        "one expression, packed": lambda: Side(adam, [(size,)], None),
        f"one expression, {cores} buffers": lambda: Side(adam, split, None),
    }
    for chunk in (8_192, 32_768):
        rule = jax.tree_util.Partial(in_chunks, chunk)
        found |= {
            f"chunks of {chunk:,}, packed": lambda rule=rule: Side(
                rule, [(size,)], REGION_ANALYSIS
            ),
            f"chunks of {chunk:,}, {cores} buffers": lambda rule=rule: Side(
                rule, split, REGION_ANALYSIS
            ),
        }
    found["torch, foreach"] = lambda: Torch(shapes, foreach=True)
    found["torch, fused"] = lambda: Torch(shapes, fused=True)
    return found


def run(tree: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each side, and print it."""
    shapes = list(measure.TREES[tree]().values())
    size = sum(map(math.prod, shapes))
    machine = measure.Machine(25_000_000 if tree != "toy" else 10_000)
    made: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, make in sides(shapes).items():
        try:
            made[name] = make()
        except (ImportError, jax.errors.JaxRuntimeError) as why:
            rows.append({"adam": name, "refused": str(why).splitlines()[0]})
            print(f"| {name} | not here: {rows[-1]['refused']} | | | | |")
    times = measure.interleaved({**made, **machine.calls()}, rounds)
    best = machine.bandwidth(times)["in place"]
    peer = times["optax, the tree"]
    for name, side in made.items():
        t = times[name]
        speed = 28 * size / t.median
        rows.append(
            {
                "adam": name, "ms": 1e3 * t.median, "min_ms": 1e3 * t.minimum,
                "ratio": peer.median / t.median, "ratio_min": peer.minimum / t.minimum,
                "GBps": speed / 1e9, "of_floor": speed / best, "temporaries": side.temporaries,
            }
        )  # fmt: skip
        print(
            f"| {name} | {1e3 * t.median:.1f} ({1e3 * t.minimum:.1f}) "
            f"| {peer.median / t.median:.2f} ({peer.minimum / t.minimum:.2f}) "
            f"| {speed / 1e9:.1f} | {100 * speed / best:.0f} % "
            f"| {'-' if side.temporaries is None else f'{side.temporaries:.2f}'} |",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", choices=measure.TREES, default="one")
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, tree="toy")
    measure.report(options, HEAD, lambda: run(options.tree, options.rounds))


if __name__ == "__main__":
    main()
