"""Is the order of `tune(measure=)` the order of steps that are timed by hand?

    python -m benchmarks.studies.tune

On eight devices of a CPU, a deep network in five ways. Each way is timed by hand in a loop of its
own, interleaved, and the order of both is printed, with the load of the machine.
"""

import os
import statistics
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np

import optfn
from optfn.distributed import data_mesh, scan_layers, tune
from optfn.plan.tuning import describe_way

WIDTH, LAYERS, EXAMPLES, ROUNDS = 512, 8, 256, 15
WAYS: list[dict[str, Any]] = [
    {"microbatches": 8},
    {"shard": "params", "microbatches": 8},
    {},
    {"shard": "params"},
    {"shard": "state"},
]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Return the mean square of a network's outputs, less 1."""
    y = scan_layers(lambda layer, x: jnp.tanh(x @ layer["w"]), params["layers"], x)
    return jnp.mean((y - 1.0) ** 2)


def main() -> None:
    """Print the seconds of each way, by `tune` and by hand."""
    weights = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    params = {"layers": optfn.Stacked({"w": weights.astype(np.float32)})}
    batch = np.ones((EXAMPLES, WIDTH), np.float32)
    tx, mesh = optfn.adam(1e-3), data_mesh()
    tuning = tune(loss_fn, tx, params, batch, mesh, ways=WAYS, measure=ROUNDS)
    print(tuning)
    steps = [optfn.make_train_step(loss_fn, tx, mesh=mesh, **way) for way in WAYS]
    states = [step.init(params) for step in steps]
    taken: list[list[float]] = [[] for _ in WAYS]
    for _ in range(1 + ROUNDS):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            states[i], _metrics = jax.block_until_ready(step(states[i], batch))
            taken[i].append(time.perf_counter() - start)
    pairs = zip(taken, map(describe_way, WAYS), strict=True)
    for seconds, way in sorted((statistics.median(each[1:]), way) for each, way in pairs):
        print(f"by hand {1e3 * seconds:.1f} ms, {way}")
    print("load", os.getloadavg())


if __name__ == "__main__":
    main()
