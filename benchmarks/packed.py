"""What does one buffer in place of many leaves gain? `optfn.pack`, compared with optax on the tree.

    python -m benchmarks.packed [--rounds 9] [--toy] [--json FILE]

"update": the update alone, gradients given, on 2,000 leaves of 1,000 elements, on 300, and on
ResNet-50's 161. "train step": loss, gradient and update of a residual network of 150 layers, 300
leaves, by `make_train_step(packed=True)`, compared with the same step with optax on the tree. Its
"gradient" is the gradient of the packed params alone, without an update: no step takes less. The
first call traces, lowers and compiles; nothing is cached. Both sides are donated in matching order.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optfn
from benchmarks import measure
from benchmarks.update import PAIRS
from optfn.leaves.packed import pack_like

HEAD = (
    "| what | leaves | step ms, packed (min) | optfn on the tree | optax on the tree "
    "| optax/packed (min) | optax/gradient (min) | floor ms "
    "| first call s, packed | optfn | optax | optax/packed |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Side:
    """A step that is called repeatedly, in place, and the seconds of its first call."""

    def __init__(self, step: Any, state: Any, fixed: Any) -> None:
        jax.clear_caches()
        start = time.perf_counter()
        self.step, self.state, self.fixed = step, state, fixed
        jax.block_until_ready(self())
        self.first = time.perf_counter() - start

    def __call__(self) -> Any:
        """Make one step."""
        self.state, out = self.step(self.state, self.fixed)
        return self.state, out


def _update(tx: Any) -> Any:
    def step(state: Any, gradients: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    return jax.jit(step, donate_argnums=0)


def of_update(rule: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Callable[[], Side]]:
    """Return functions that make the update alone, for each side."""

    def make(tx: Any, arrange: Callable[[Any], Any]) -> Side:
        params, gradients = (arrange(measure.arrays(shapes, seed)) for seed in (0, 1))
        return Side(_update(tx), (params, tx.init(params)), gradients)

    return _sides(rule, make)


def of_train_step(layers: int, width: int) -> dict[str, Callable[[], Side]]:
    """Return functions that make the whole training step, for each side."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(layers):
        shapes |= {f"layer{k}/w": (width, width), f"layer{k}/b": (width,)}
    x = measure.arrays({"x": (16, width)}, 2)["x"]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for k in range(layers):
            x = x + 0.1 * jnp.tanh(x @ params[f"layer{k}/w"] + params[f"layer{k}/b"])
        return jnp.mean(x**2)

    def make(tx: Any, arrange: Callable[[Any], Any]) -> Side:
        step = optfn.make_train_step(loss_fn, tx, packed=arrange is optfn.pack)
        return Side(step, step.init(measure.arrays(shapes, 0)), x)

    def gradient() -> Side:
        def run(params: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss_fn)(optfn.unpack(params), x)
            return params, (value, pack_like(params.layout, grads))

        step = jax.jit(run, donate_argnums=0)
        return Side(step, optfn.pack(measure.arrays(shapes, 0)), x)

    return _sides("adam", make) | {"gradient": gradient}


def _sides(
    rule: str, make: Callable[[Any, Callable[[Any], Any]], Side]
) -> dict[str, Callable[[], Side]]:
    ours, theirs = (side() for side in PAIRS[rule] if side is not None)
    return {
        "packed": lambda: make(ours, optfn.pack),
        "optfn": lambda: make(ours, lambda tree: tree),
        "optax": lambda: make(theirs, lambda tree: tree),
    }


def measured(what: str, leaves: int, size: int, sides: Any, rounds: int) -> dict[str, Any]:
    """Return the row of one task, and print it."""
    machine = measure.Machine(max(size, 1_000_000))
    made = {name: make() for name, make in sides.items()}
    times = measure.interleaved({**made, **machine.calls()}, rounds)
    # p, m and v are read and written, g is read.
    floor = 28 * size / machine.bandwidth(times)["in place"]
    row: dict[str, Any] = {
        "what": what,
        "leaves": leaves,
        "elements": size,
        "floor_ms": 1e3 * floor,
    }
    for name, side in made.items():
        row[f"{name}_ms"] = 1e3 * times[name].median
        row[f"{name}_min_ms"] = 1e3 * times[name].minimum
        row[f"{name}_first_s"] = side.first
    row["ratio"] = row["optax_ms"] / row["packed_ms"]
    row["ratio_min"] = row["optax_min_ms"] / row["packed_min_ms"]
    limit = "-"
    if "gradient" in made:
        row["gradient_limit"] = row["optax_ms"] / row["gradient_ms"]
        row["gradient_limit_min"] = row["optax_min_ms"] / row["gradient_min_ms"]
        limit = f"{row['gradient_limit']:.1f} ({row['gradient_limit_min']:.1f})"
    row["first_ratio"] = row["optax_first_s"] / row["packed_first_s"]
    steps = " | ".join(
        f"{row[f'{name}_ms']:.2f} ({row[f'{name}_min_ms']:.2f})"
        for name in ("packed", "optfn", "optax")
    )
    firsts = " | ".join(f"{row[f'{name}_first_s']:.2f}" for name in ("packed", "optfn", "optax"))
    print(
        f"| {what} | {leaves:,} | {steps} | {row['ratio']:.1f} ({row['ratio_min']:.1f}) "
        f"| {limit} | {row['floor_ms']:.2f} | {firsts} | {row['first_ratio']:.1f} |",
        flush=True,
    )
    return row


def run(rounds: int, toy: bool = False) -> list[dict[str, Any]]:
    """Return the rows, and print them."""
    rows = []
    trees = [
        ("adam", "equal leaves", {f"w{k}": (1000,) for k in range(20 if toy else 2000)}),
        ("adam", "equal leaves", {f"w{k}": (1000,) for k in range(3 if toy else 300)}),
        ("adam", "ResNet-50", measure.TREES["toy" if toy else "resnet50"]()),
        ("lamb", "ResNet-50", measure.TREES["toy" if toy else "resnet50"]()),
    ]
    for rule, tree, shapes in trees:
        size, what = sum(map(math.prod, shapes.values())), f"update, {rule}, {tree}"
        rows.append(measured(what, len(shapes), size, of_update(rule, shapes), rounds))
    for layers, width in [(3, 4)] if toy else [(150, 8), (150, 32)]:
        size = layers * (width + 1) * width
        what = f"train step, adam, width {width}"
        rows.append(measured(what, 2 * layers, size, of_train_step(layers, width), rounds))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = measure.parse(parser)
    measure.report(options, HEAD, lambda: run(options.rounds, options.toy))


if __name__ == "__main__":
    main()
