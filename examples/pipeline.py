"""Train a byte-level transformer as a pipeline, 4 stages × 2 data workers, and on one device.

    python -m examples.pipeline [--steps N] [--schedule 1f1b|gpipe|zb] [--dgc]
        [--processes 2] [--out DIR]

Embedding, blocks and head are heterogeneous stages on four devices of a mesh; each stage recomputes
its blocks one by one. The same model, seed and batches train on one device as well: the losses
agree. Eight devices of the CPU stand for eight real ones, so the pipeline is not faster here. The
program prints the schedule, draws it where matplotlib is installed, and prints the memory that each
device needs.

The optimizer is adam, on the mean over workers. With --dgc it is dgc_momentum, on each worker's own
gradients, compared with the same two workers simulated on one device by vmap. With --processes
several processes of this host share the mesh, as those of several hosts would.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Before jax is imported. The last flag counts: each of several processes is given its own number.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python examples/pipeline.py

import optfn
from examples import processes, text, transformer
from optfn.distributed import pipeline_value_and_grad, plan
from optfn.pipeline.plan import SCHEDULES

STAGES, WORKERS, MICROBATCHES, BATCH = 4, 2, 8, 48
CONFIG = transformer.Config(width=32, heads=2, hidden=64, blocks=8, length=64)


def split(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the params of the stages: equal numbers of blocks, embedding first, head last."""
    each = len(params["blocks"]) // STAGES
    stages = [{"blocks": params["blocks"][i * each : (i + 1) * each]} for i in range(STAGES)]
    stages[0]["embed"], stages[-1]["head"] = params["embed"], params["head"]
    return stages


def stage(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Run a stage's part of the model: tokens or activations in, activations or logits out."""
    if "embed" in params:
        x = transformer.embed(params["embed"], x)
    for block in params["blocks"]:
        x = checkpoint_name(transformer.block(block, x, CONFIG.heads), "block")
    return transformer.head(params["head"], x) if "head" in params else x


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean nats of the target bytes."""
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def unpipelined_loss(params: Sequence[Any], batch: tuple[Any, Any]) -> jax.Array:
    """Return the loss of all stages on one device."""
    x, targets = batch
    for stage_params in params:
        x = stage(stage_params, x)
    return cross_entropy(x, targets)


def optimizer(steps: int, dgc: bool) -> Any:
    """Return the optimizer of all runs."""
    peak = 0.1 if dgc else 1e-2
    rate = optfn.schedules.linear_warmup(
        optfn.schedules.cosine(peak, 1, steps), max(1, steps // 10), start_lr=0.0, end_lr=peak
    )
    if not dgc:
        return optfn.adam(rate, grad_clip=optfn.clip_by_global_norm(1.0))
    return optfn.dgc_momentum(
        rate, 0.9, rampup_begin_step=2, rampup_step=4, sparsity=(0.75, 0.99), min_size=1024
    )


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the batches of both runs: bytes, and the bytes after them."""
    windows = text.batches(text.standard_library()[0], BATCH, CONFIG.length, seed=0)
    return [(w[:, :-1], w[:, 1:]) for w, _ in zip(windows, range(steps), strict=False)]


def train(step: optfn.TrainStep, params: Any, data: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Return the losses, and the bytes of temporaries per device."""
    state = step.init(params)
    memory = step.compiled.lower(state, data[0]).compile().memory_analysis()
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return np.array(jax.device_get(losses)), memory.temp_size_in_bytes


def simulated(tx: Any, params: Any, data: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Return the losses and temporaries of the workers simulated on one device."""

    def worker(params: Any, state: Any, part: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(unpipelined_loss)(params, part)
        updates, state = tx.update(grads, state, params)
        return optfn.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    def split_batch(batch: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)

    step = jax.jit(jax.vmap(worker, axis_name="data"))
    params, state = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), (params, tx.init(params)))
    memory = step.lower(params, state, split_batch(data[0])).compile().memory_analysis()
    losses = []
    for batch in data:
        params, state, loss = step(params, state, split_batch(batch))
        losses.append(loss[0])
    return np.array(jax.device_get(losses)), memory.temp_size_in_bytes


def runs(schedule: str, steps: int, dgc: bool) -> dict[str, Callable[[Any, Sequence[Any]], Any]]:
    """Return the runs to compare: (params, batches) -> (losses, temporaries)."""
    devices = np.array(jax.devices()[: WORKERS * STAGES])
    mesh = Mesh(devices.reshape(WORKERS, STAGES), ("data", "stage"))
    replicated = NamedSharding(mesh, PartitionSpec())
    tx = optimizer(steps, dgc)

    def pipelined(fns: list[Any], params: Any, data: Sequence[Any]) -> Any:
        value_and_grad = pipeline_value_and_grad(
            fns,
            cross_entropy,
            mesh=mesh,
            num_microbatches=MICROBATCHES,
            schedule=schedule,
        )
        step = optfn.make_train_step(None, tx, value_and_grad=value_and_grad, mesh=mesh)
        return train(step, jax.device_put(params, replicated), data)

    def one_device(params: Any, data: Sequence[Any]) -> Any:
        return train(optfn.make_train_step(unpipelined_loss, tx), params, data)

    recomputing = optfn.recompute(stage, checkpoints=("block",))
    name = f"{schedule}, {STAGES} × {WORKERS}"
    return {
        "one device": partial(simulated, tx) if dgc else one_device,
        name: partial(pipelined, [stage] * STAGES),
        f"{name}, recompute": partial(pipelined, [recomputing] * STAGES),
    }


def draw(schedule: optfn.distributed.Plan, directory: Path) -> None:
    """Save the picture of the schedule, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    schedule.draw().figure.savefig(directory / "schedule.png", dpi=120)
    print(f"picture: {directory / 'schedule.png'}")


def compare(schedule: str, steps: int, dgc: bool, quiet: bool) -> None:
    """Print the runs, each compared with the first."""
    # Host arrays, which are the same in every process.
    params = jax.device_get(split(transformer.init(jax.random.key(0), CONFIG)))
    data = batches(steps)
    reference = None
    for name, run in runs(schedule, steps, dgc).items():
        start = time.perf_counter()
        losses, temporaries = run(params, data)
        reference = losses if reference is None else reference
        if quiet:
            continue
        print(
            f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, at most "
            f"{abs(losses - reference).max():.1e} from one device; "
            f"{temporaries / 2**20:.2f} MiB of temporaries a device; "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


def main() -> None:
    """Print the schedule and the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--dgc", action="store_true")
    processes.add_argument(parser, 1, 2, 4, 8)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    processes.join(options, STAGES * WORKERS)
    if options.process == 0:
        schedule = plan(STAGES, MICROBATCHES, schedule=options.schedule)
        print(schedule)
        draw(schedule, options.out)
    compare(options.schedule, options.steps, options.dgc, quiet=options.process > 0)


if __name__ == "__main__":
    main()
