"""How close does Adam come to one pass over memory? Variants, compared with torch's fused kernel.

    python -m benchmarks.fused_adam [--rounds 9] [--toy] [--json FILE]
    XLA_FLAGS=--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true \\
        python -m benchmarks.fused_adam

XLA on CPU makes one pass for each array that a fusion writes, three for Adam; torch's fused kernel
makes one. 25 M parameters. The variants: one buffer, one buffer per core, and a loop over chunks
that stay in the cache, which updates params and moments in place. The loop needs a compiler option,
or it copies whole arrays in each iteration; a row says so if the option is refused. Multi-output
fusion can only be enabled through XLA_FLAGS, for a whole process.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optfn
from benchmarks import measure

REGION_ANALYSIS = {"xla_cpu_copy_insertion_use_region_analysis": True}
HEAD = (
    "| Adam | ms (min) | speed-up over optax (min) | GB/s | of in-place bandwidth "
    "| temporaries B/param |\n"
    "|---|---|---|---|---|---|"
)


def adam(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """Return (p, m, v) of one step, in one expression."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def in_chunks(most: int, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
    """Return the same, in place, by chunks of at most `most` elements."""
    size = max(d for d in range(1, most + 1) if p.size % d == 0)

    def body(i: jax.Array, kept: Any) -> Any:
        parts = [lax.dynamic_slice(x, (i * size,), (size,)) for x in (*kept, g)]
        new = adam(*parts)
        return tuple(
            lax.dynamic_update_slice(x, y, (i * size,)) for x, y in zip(kept, new, strict=True)
        )

    return lax.fori_loop(0, p.size // size, body, (p, m, v))


class Side:
    """A step (p, m, v, g) -> (p, m, v) over lists of arrays of these sizes, in place."""

    def __init__(self, rule: Callable[..., Any], sizes: list[int], options: Any = None) -> None:
        columns = [[jnp.full(n, x) for n in sizes] for x in (1.0, 0.0, 0.0, 0.5)]
        self.kept, self.gradient = columns[:3], columns[3]

        def step(p: Any, m: Any, v: Any, g: Any) -> Any:
            results = [rule(*leaf) for leaf in zip(p, m, v, g, strict=True)]
            return tuple(map(list, zip(*results, strict=True)))

        lowered = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*self.kept, self.gradient)
        self.compiled = lowered.compile(compiler_options=options)
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes / sum(sizes)

    def __call__(self) -> Any:
        """Make one step."""
        self.kept = self.compiled(*self.kept, self.gradient)
        return self.kept


class Optax:
    """A gradient transformation over one array, in place."""

    def __init__(self, tx: Any, n: int) -> None:
        self.params = jnp.ones(n)
        self.state, self.gradient = tx.init(self.params), jnp.full(n, 0.5)

        def step(params: Any, state: Any, gradient: Any) -> Any:
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.compiled = jitted.lower(self.params, self.state, self.gradient).compile()
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes / n

    def __call__(self) -> Any:
        """Make one step."""
        self.params, self.state = self.compiled(self.params, self.state, self.gradient)
        return self.params


class Torch:
    """torch.optim.Adam, fused or foreach."""

    temporaries = None

    def __init__(self, n: int, **options: Any) -> None:
        import torch

        p = torch.nn.Parameter(torch.ones(n))
        p.grad = torch.full((n,), 0.5)
        self.optimizer = torch.optim.Adam([p], lr=1e-3, **options)

    def __call__(self) -> None:
        """Make one step."""
        self.optimizer.step()


def sides(n: int) -> dict[str, Callable[[], Any]]:
    """Return what makes each side."""
    cores = os.cpu_count() or 1
    split = [n // cores] * cores
    found: dict[str, Callable[[], Any]] = {
        "optax": lambda: Optax(optax.adam(1e-3), n),
        "optfn": lambda: Optax(optfn.adam(1e-3, eps_hat=False), n),
        "one expression": lambda: Side(adam, [n]),
        f"one expression, {cores} buffers": lambda: Side(adam, split),
    }
    for most in (8_192, 32_768):
        rule = partial(in_chunks, most)
        name = f"chunks of {most:,}"
        found[name] = partial(Side, rule, [n], REGION_ANALYSIS)
        found[f"{name}, {cores} buffers"] = partial(Side, rule, split, REGION_ANALYSIS)
    if measure.torch_stands_beside():
        found["torch, foreach"] = lambda: Torch(n, foreach=True)
        found["torch, fused"] = lambda: Torch(n, fused=True)
    return found


def run(size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each side, and print it."""
    machine = measure.Machine(size)
    made: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, make in sides(size).items():
        try:
            made[name] = make()
        except jax.errors.JaxRuntimeError as why:
            rows.append({"adam": name, "refused": str(why).splitlines()[0]})
            print(f"| {name} | not here: {rows[-1]['refused']} | | | | |")
    times = measure.interleaved({**made, **machine.calls()}, rounds)
    best = machine.bandwidth(times)["in place"]
    peer = times["optax"]
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
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser, size=10_000, rounds=2)
    measure.report(options, HEAD, lambda: run(options.size, options.rounds))


if __name__ == "__main__":
    main()
