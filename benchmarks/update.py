"""How long is one update of each optimizer, compared with optax's and with the copy bandwidth?

    python -m benchmarks.update [--tree resnet50|gpt2|one|toy] [--rounds 15] [--only NAME …]

Both sides are `step(params, state, gradients) -> (params, state)`, jitted, params and state donated
in this order, so that JAX updates both in place. The floor is the time of the bytes that the rule
must move (parameters, gradients and state read once, parameters and state written once) at the
bandwidth of an addition in place, y += a·x, measured in the same rounds. Expect parity for plain
rules, which XLA fuses in the same way, and a gain where optax keeps temporaries: global-norm clip,
LARS, LAMB, Adadelta. Adam is `eps_hat=False` and LAMB has bias correction, as in optax.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

import optfn
from benchmarks import measure

CLIP = 1.0
# optfn's optimizer, and optax's with the same rule, if it has one.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "sgd": (lambda: optfn.sgd(0.1), lambda: optax.sgd(0.1)),
    "momentum": (lambda: optfn.momentum(0.1, 0.9), lambda: optax.sgd(0.1, 0.9)),
    "lars": (lambda: optfn.lars(0.1, 0.9), lambda: optax.lars(0.1, 5e-4)),
    "asgd": (lambda: optfn.asgd(0.1), None),
    "adagrad": (lambda: optfn.adagrad(0.1), lambda: optax.adagrad(0.1)),
    "decayed_adagrad": (lambda: optfn.decayed_adagrad(0.1), None),
    "adadelta": (lambda: optfn.adadelta(1.0), lambda: optax.adadelta(1.0)),
    "rmsprop": (
        lambda: optfn.rmsprop(0.1, momentum=0.9),
        lambda: optax.rmsprop(0.1, momentum=0.9),
    ),
    "rmsprop, no momentum": (lambda: optfn.rmsprop(0.1), lambda: optax.rmsprop(0.1)),
    "adam": (lambda: optfn.adam(1e-3, eps_hat=False), lambda: optax.adam(1e-3)),
    "adam, clip by global norm": (
        lambda: optfn.adam(1e-3, eps_hat=False, grad_clip=optfn.clip_by_global_norm(CLIP)),
        lambda: optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(1e-3)),
    ),
    "accumulate(adam, 4), 4 gradients": (
        lambda: optfn.accumulate(optfn.adam(1e-3, eps_hat=False), 4),
        lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    ),
    "adamw": (lambda: optfn.adamw(1e-3), lambda: optax.adamw(1e-3, weight_decay=0.01)),
    "adamax": (lambda: optfn.adamax(1e-3), lambda: optax.adamax(1e-3)),
    "ftrl": (lambda: optfn.ftrl(0.1), None),
    "lamb": (
        lambda: optfn.lamb(1e-3, bias_correction=True),
        lambda: optax.lamb(1e-3, weight_decay=0.01),
    ),
}


class Side:
    """One optimizer with its own arrays, stepped in place; `options` are the compiler's."""

    def __init__(
        self,
        tx: Any,
        shapes: dict[str, tuple[int, ...]],
        steps: int = 1,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.steps = steps
        self.params = measure.arrays(shapes, 0)
        self.gradients = measure.arrays(shapes, 1)
        self.state = tx.init(self.params)
        kept, given = map(measure.num_bytes, ((self.params, self.state), self.gradients))
        # All steps of a round but the last add their gradient to a sum.
        self.bytes_moved = 2 * kept + given + 3 * given * (steps - 1)

        def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            self.params, self.state, self.gradients
        )
        self.compiled = lowered.compile(options)
        memory = self.compiled.memory_analysis()
        self.temp_per_param = memory.temp_size_in_bytes / measure.size(self.params)

    def __call__(self) -> Any:
        """Make the steps of a round."""
        for _ in range(self.steps):
            self.params, self.state = self.compiled(self.params, self.state, self.gradients)
        return self.params


def measured(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    machine: measure.Machine,
    rounds: int,
    options: dict[str, Any] | None = None,
) -> measure.Row:
    """Return the row of one optimizer; `options` are the compiler's."""
    ours, theirs = PAIRS[name]
    steps = 4 if name.startswith("accumulate") else 1
    sides = {"optfn": Side(ours(), shapes, steps, options)}
    if theirs is not None:
        sides["optax"] = Side(theirs(), shapes, steps, options)
    times = measure.interleaved({**sides, **machine.calls()}, rounds)
    bandwidth = machine.bandwidth(times)
    floor = machine.floor(sides["optfn"].bytes_moved, times)
    row = {
        "optimizer": name,
        "copy_GBps": bandwidth["copy"] / 1e9,
        "in_place_GBps": bandwidth["in place"] / 1e9,
        "floor_ms": 1e3 * floor,
        "over_floor": times["optfn"].median / floor,
    }
    for side, runner in sides.items():
        row[f"{side}_ms"] = 1e3 * times[side].median
        row[f"{side}_min_ms"] = 1e3 * times[side].minimum
        row[f"{side}_temp"] = runner.temp_per_param
    if theirs is not None:
        row["ratio"] = times["optax"].median / times["optfn"].median
        row["ratio_min"] = times["optax"].minimum / times["optfn"].minimum
    return row


def run(tree: str, rounds: int, names: list[str] | None = None) -> list[measure.Row]:
    """Return one row per optimizer; print them, and the bandwidths."""
    shapes = measure.TREES[tree]()
    machine = measure.Machine(sum(map(math.prod, shapes.values())))
    rows = []
    for name in names or list(PAIRS):
        rows.append(measured(name, shapes, machine, rounds))
        print(_line(rows[-1]), flush=True)
    for what in ("copy", "in_place"):
        best = [row[f"{what}_GBps"] for row in rows]
        print(f"\n{what} bandwidth {min(best):.1f} to {max(best):.1f} GB/s")
    return rows


HEAD = (
    "| optimizer | optfn ms (min) | optax ms (min) | optax/optfn (min) "
    "| temporaries B/param, optfn / optax | floor ms | optfn/floor |\n|---|---|---|---|---|---|---|"
)


def _line(row: measure.Row) -> str:
    peer = ratio = temp = "-"
    if "ratio" in row:
        peer = f"{row['optax_ms']:.1f} ({row['optax_min_ms']:.1f})"
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f})"
        temp = f"{row['optax_temp']:.2f}"
    return (
        f"| {row['optimizer']} | {row['optfn_ms']:.1f} ({row['optfn_min_ms']:.1f}) | {peer} "
        f"| {ratio} | {row['optfn_temp']:.2f} / {temp} | {row['floor_ms']:.1f} "
        f"| {row['over_floor']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", choices=measure.TREES, default="resnet50")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=list(PAIRS))
    options = measure.parse(parser, tree="toy", rounds=1)
    measure.report(options, HEAD, lambda: run(options.tree, options.rounds, options.only))


if __name__ == "__main__":
    main()
