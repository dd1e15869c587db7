"""What does a call cost before the device works?

    python -m benchmarks.dispatch [--leaves 4 100 1000] [--devices 1 8] [--rounds 300]

Adam on leaves of four numbers, whose update takes no time: by hand, `jax.jit` with optax and the
state donated; by `make_train_step`; and by `fit`, for a batch of JAX and one of NumPy. Each round
makes one call of each, in turns; a round of `fit` is a run of 200 steps, of which a step is
counted. Figures are microseconds of CPU, of all threads, with the work of the devices; medians and
minima. "Over" is what optfn adds to the call by hand; the goals are 15 µs and a twentieth of it,
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


def make_calls(leaves: int, devices: int) -> dict[str, Callable[[], float]]:
    """Return for each way a function that makes a call, or a run, and returns seconds of a call."""
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
    kept["hand"] = here, tx.init(here)
    step = optfn.make_train_step(loss_fn, optfn.adam(1e-3, eps_hat=False), mesh=mesh)
    kept |= {name: step.init(params) for name in GOALS}

    def call_by_hand() -> float:
        start = time.process_time()
        params, state, _ = jitted(*kept["hand"], on_device)
        kept["hand"] = jax.block_until_ready((params, state))
        return time.process_time() - start

    def call_step() -> float:
        start = time.process_time()
        state, _ = step.dispatch(kept["make_train_step"], on_device)
        kept["make_train_step"] = jax.block_until_ready(state)
        return time.process_time() - start

    def run(name: str, batch: Any) -> Callable[[], float]:
        def call() -> float:
            start = time.process_time()
            state, _ = optfn.fit(step, kept[name], [batch] * STEPS, progress=False)
            kept[name] = jax.block_until_ready(state)
            return (time.process_time() - start) / STEPS

        return call

    return {
        "by hand": call_by_hand,
        "make_train_step": call_step,
        "fit": run("fit", on_device),
        "fit, NumPy": run("fit, NumPy", batch),
    }


def run(leaves: list[int], devices: list[int], rounds: int) -> list[measure.Row]:
    """Return a row for each call; print them."""
    rows: list[measure.Row] = []
    for count in leaves:
        for number in devices:
            calls = make_calls(count, number)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for round_number in range(rounds + 3):
                for name, call in calls.items():
                    if not name.startswith("fit") or round_number % 30 == 0:
                        seconds[name].append(1e6 * call())
            medians = {name: statistics.median(x[2:] or x) for name, x in seconds.items()}
            hand = medians.pop("by hand")
            for name, median in medians.items():
                over, goal = median - hand, GOALS[name] + 0.05 * hand
                missed = "" if over <= goal else " (missed)"
                least = min(seconds[name])
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
    parser.add_argument("--rounds", type=int, default=300)
    options = measure.parse(parser, leaves=[2], devices=[1], rounds=1)
    sizes = options.leaves, options.devices, options.rounds
    measure.report(options, HEAD, lambda: run(*sizes))


if __name__ == "__main__":
    main()
