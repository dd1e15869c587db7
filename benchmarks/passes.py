"""What keeps LAMB and 8-bit moments from the floor? Their passes over memory, one by one.

    python -m benchmarks.passes [--rounds 15] [--toy] [--json FILE]

Each pass is a program of its own, in place where it writes, on a tensor of 12.8 M elements. The
floor is the time of its bytes at the bandwidth of `y += a·x`, measured in the same rounds. A pass
over its floor computes more than memory delivers, or is one that XLA on CPU does not vectorize.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from optfn.core import numerics
from optfn.transforms import codes
from optfn.transforms.lamb import lamb_direction

HEAD = (
    "| rule | pass | bytes an element | ms (min) | floor ms | ms/floor |\n|---|---|---|---|---|---|"
)


def advance_m(k: jax.Array, g: jax.Array, scale: jax.Array, bits: jax.Array) -> jax.Array:
    """Return the 8-bit codes of the next m."""
    m = numerics.moving_average(codes.decode_signed(k, scale), g, 0.9)
    return codes.encode_signed(m, scale, bits >> 16)


def advance_v(k: jax.Array, g: jax.Array, scale: jax.Array, bits: jax.Array) -> jax.Array:
    """Return the 8-bit codes of the next v."""
    v = numerics.moving_average(codes.decode_unsigned(k, scale), jnp.square(g), 0.999)
    return codes.encode_unsigned(v, scale, bits & 0xFFFF)


def step_8_bits(p: jax.Array, m: jax.Array, v: jax.Array, scale: jax.Array) -> jax.Array:
    """Return p after a step with decoded moments."""
    m, v = codes.decode_signed(m, scale), codes.decode_unsigned(v, scale)
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)


class Pass:
    """A program on arrays; the first one changes in place, or is returned beside the result."""

    def __init__(self, rule: Callable[..., Any], *arrays: jax.Array, reads: bool = False) -> None:
        def program(x: jax.Array, *others: jax.Array) -> Any:
            result = rule(x, *others)
            return (x, result) if reads else (result, ())

        self.arrays = [arrays[0] + 0, *arrays[1:]]
        self.program = jax.jit(program, donate_argnums=0)

    def __call__(self) -> Any:
        """Run it."""
        self.arrays[0], result = self.program(*self.arrays)
        return self.arrays[0], result


def passes(shape: tuple[int, int]) -> dict[tuple[str, str], tuple[int, Pass]]:
    """Return the bytes an element and the program of each (rule, pass)."""
    g, m, p = (measure.arrays({"x": shape}, seed)["x"] for seed in range(3))
    v, seed, scale = jnp.square(m), jnp.uint32(7), jnp.ones(shape[0])
    k, u = jnp.zeros(shape, jnp.int8), jnp.zeros(shape, jnp.uint8)

    def direction(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return lamb_direction(m, v, p, eps=1e-6, scale=1.0, weight_decay=0.01)

    def hashed(advance: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda k, g, scale, seed: advance(k, g, scale, codes.random_bits(g.shape, seed))

    return {
        ("lamb", "m"): (12, Pass(lambda m, g: 0.9 * m + 0.1 * g, m, g)),
        ("lamb", "v"): (12, Pass(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)),
        ("lamb", "norm of p"): (4, Pass(numerics.norm, p, reads=True)),
        ("lamb", "norm of r"): (
            12,
            Pass(lambda *x: numerics.norm(direction(*x)), p, m, v, reads=True),
        ),
        ("lamb", "p"): (16, Pass(lambda p, m, v: p - 1e-3 * direction(p, m, v), p, m, v)),
        ("int8", "scales"): (4, Pass(lambda g: codes.row_max(jnp.abs(g)), g, reads=True)),
        ("int8", "m"): (6, Pass(hashed(advance_m), k, g, scale, seed)),
        ("int8", "m, without the hash"): (6, Pass(advance_m, k, g, scale, seed)),
        ("int8", "v"): (6, Pass(hashed(advance_v), u, g, scale, seed)),
        ("int8", "v, without the hash"): (6, Pass(advance_v, u, g, scale, seed)),
        ("int8", "p"): (10, Pass(step_8_bits, p, k, u, scale)),
    }


def run(rounds: int, num_rows: int) -> list[measure.Row]:
    """Return a row for each pass, and print it."""
    shape = (num_rows, codes.ROW)
    found, machine = passes(shape), measure.Machine(num_rows * codes.ROW)
    calls = {" ".join(name): program for name, (_, program) in found.items()}
    times = measure.interleaved({**calls, **machine.calls()}, rounds)
    rows = []
    for (rule, name), (num_bytes, _) in found.items():
        time = times[f"{rule} {name}"]
        floor = machine.floor(num_bytes * num_rows * codes.ROW, times)
        rows.append(
            {
                "rule": rule,
                "pass": name,
                "bytes": num_bytes,
                "ms": 1e3 * time.median,
                "min_ms": 1e3 * time.minimum,
                "floor_ms": 1e3 * floor,
                "over_floor": time.median / floor,
            }
        )
        print(
            f"| {rule} | {name} | {num_bytes} | {1e3 * time.median:.1f} ({1e3 * time.minimum:.1f}) "
            f"| {1e3 * floor:.1f} | {time.median / floor:.1f} |",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=50_000)
    options = measure.parse(parser, rounds=1, rows=4)
    measure.report(options, HEAD, lambda: run(options.rounds, options.rows))


if __name__ == "__main__":
    main()
