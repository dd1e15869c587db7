"""Does the loop read the next batch while a step runs?

    python -m benchmarks.studies.prefetch [--steps 30] [--devices 8]

A loader that waits, as for a disk or the network, for as long as a step takes. Given are
milliseconds per step of `fit`: with a loader that has its batches at once, of the loader alone, and
of both, without and with `prefetch`; with a callback, which makes the loop wait for each step, and
without. If nothing overlaps, both take the sum; if all does, the larger of the two.
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

HEAD = (
    "| devices | callback | step ms | loader ms | both, prefetch=0 | both, prefetch=1 |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    # Before JAX is imported, which reads the number of simulated devices once.
    flag = f" --xla_force_host_platform_device_count={arguments.devices}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flag
    print(HEAD)
    for has_mesh in (False, True):
        for has_callback in (False, True):
            print(measure(arguments.steps, has_mesh, has_callback), flush=True)


def measure(steps: int, has_mesh: bool, has_callback: bool) -> str:
    """Return a row of the table."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import optfn
    from optfn.distributed import data_mesh

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    options: dict[str, Any] = {"mesh": data_mesh()} if has_mesh else {}
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), **options)
    batch = np.ones((256, 512), np.float32)

    def load(seconds: float) -> Iterator[np.ndarray]:
        for _ in range(steps):
            time.sleep(seconds)
            yield batch

    def seconds_per_step(wait: float, prefetch: int) -> float:
        state = step.init(jnp.eye(512))
        callback = (lambda *_: None) if has_callback else None
        begin = time.perf_counter()
        state, _ = optfn.fit(
            step, state, load(wait), prefetch=prefetch, callback=callback, progress=False
        )
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / steps

    seconds_per_step(0.0, 1)  # compiles
    alone = seconds_per_step(0.0, 1)
    both = [seconds_per_step(alone, prefetch) for prefetch in (0, 1)]
    times = " | ".join(f"{1000 * x:.1f}" for x in (alone, alone, *both))
    devices = step.mesh.devices.size if step.mesh is not None else 1
    return f"| {devices} | {'yes' if has_callback else 'no'} | {times} |"


if __name__ == "__main__":
    main()
