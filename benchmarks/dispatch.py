"""What does a call cost before the device works?

    python -m benchmarks.dispatch [--leaves 4 100 1000] [--devices 1 8] [--rounds 30]

Adam on leaves of four numbers, whose update takes no time: by hand, `jax.jit` with optax and the
state donated; by `make_train_step`; and by `fit`, for a batch of JAX and one of NumPy. A round is a
loop of 200 steps of each, in turns. Figures are microseconds of CPU for a step, of all threads,
with the work of the devices; medians and minima of the rounds. "Over" is the median of what a step
adds to the step by hand in the same round; the goals are 15 µs and a twentieth of the step by hand,
and for `fit` 30 µs more, or 60 with NumPy.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optfn
from benchmarks import measure

STEPS = 200  # of a run of `fit`
HEAD = (
    "| leaves | devices | call | µs (min) | by hand | over | goal |\n|---|---|---|---|---|---|---|"
)
GOALS = {"make_train_step": 15.0, "fit": 45.0, "fit, NumPy": 75.0}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return a loss in which each leaf counts."""
    return sum(jnp.sum(p * jnp.mean(batch)) for p in params.values())  # type: ignore[return-value]


def make_loops(leaves: int, devices: int) -> dict[str, Callable[[], Any]]:
    """Return for each way a function that goes on by `STEPS` steps and returns the new state."""
    mesh = optfn.distributed.data_mesh(devices) if devices > 1 else None
    params = {f"w{k}": np.zeros(4, np.float32) for k in range(leaves)}
    batch = np.ones(8, np.float32)
    tx = optax.adam(1e-3)

    def by_hand(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(by_hand, donate_argnums=(0, 1))
    kept: dict[str, Any] = {}
    here = jax.tree.map(jnp.array, params)
    on_device: Any = jnp.asarray(batch)
    if mesh is not None:
        here = jax.device_put(here, NamedSharding(mesh, PartitionSpec()))
        on_device = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    kept["by hand"] = here, tx.init(here)
    step = optfn.make_train_step(loss_fn, optfn.adam(1e-3, eps_hat=False), mesh=mesh)
    kept |= {name: step.init(params) for name in GOALS}

    def loop_by_hand() -> Any:
        params, state = kept["by hand"]
        for _ in range(STEPS):
            params, state, loss = jitted(params, state, on_device)
            if mesh is not None:  # as a step does: several steps at once may block CPU devices
                loss.block_until_ready()
        kept["by hand"] = params, state
        return kept["by hand"]

    def loop_step() -> Any:
        state = kept["make_train_step"]
        for _ in range(STEPS):
            state, _ = step(state, on_device)
        kept["make_train_step"] = state
        return state

    def run(name: str, batch: Any) -> Callable[[], Any]:
        def loop() -> Any:
            kept[name], _ = optfn.fit(step, kept[name], [batch] * STEPS, progress=False)
            return kept[name]

        return loop

    return {
        "by hand": loop_by_hand,
        "make_train_step": loop_step,
        "fit": run("fit", on_device),
        "fit, NumPy": run("fit, NumPy", batch),
    }


def time_loop(loop: Callable[[], Any]) -> float:
    """Return the microseconds of CPU that a step of a loop takes."""
    start = time.process_time()
    jax.block_until_ready(loop())
    return 1e6 * (time.process_time() - start) / STEPS


def run(leaves: list[int], devices: list[int], rounds: int) -> list[measure.Row]:
    """Return a row for each way; print them."""
    rows: list[measure.Row] = []
    for count in leaves:
        for number in devices:
            loops = make_loops(count, number)
            seen = [{name: time_loop(x) for name, x in loops.items()} for _ in range(rounds + 1)]
            seen = seen[1:]  # the first round compiles
            hand = statistics.median(x["by hand"] for x in seen)
            for name, goal in GOALS.items():
                times = [x[name] for x in seen]
                median, least = statistics.median(times), min(times)
                over = statistics.median(x[name] - x["by hand"] for x in seen)
                goal += 0.05 * hand
                missed = "" if over <= goal else " (missed)"
                cells = f"{median:.0f} ({least:.0f}) | {hand:.0f} | {over:.0f} | {goal:.0f}{missed}"
                print(f"| {count} | {number} | {name} | {cells} |", flush=True)
                row = {"leaves": count, "devices": number, "call": name, "ratio": hand / median}
                rows.append(row | {"us": median, "us_min": least, "hand_us": hand})
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, nargs="*", default=[4, 100, 1000])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=30)
    options = measure.parse(parser, leaves=[2], devices=[1], rounds=1)
    sizes = options.leaves, options.devices, options.rounds
    measure.report(options, HEAD, lambda: run(*sizes))


if __name__ == "__main__":
    main()
