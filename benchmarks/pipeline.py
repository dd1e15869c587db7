"""How many ticks does each schedule of the pipeline take, and how much memory?

    python -m benchmarks.pipeline [--microbatches 16 64]

Four stages on four devices of the CPU; microbatches of one size, so that more of them make a larger
batch. Ticks, bubble and activations are those of the plan; temporaries are those of the compiled
loss and gradients, per device.

Speed cannot be measured with devices that share the cores of one machine. Measured instead is the
CPU time of all threads of the process, as a multiple of that of the same model's gradient on one
device, microbatch after microbatch, in interleaved rounds. A device also computes in the bubble,
and discards the results: with residuals the ideal multiple is 1 + bubble; with inputs, where every
forward runs twice, 4/3 of that. Threads that spin while they wait for another device count too.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Before jax is imported. Devices of the CPU also where there are others: there must be four.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optfn
from benchmarks import measure
from optfn.distributed import pipeline_value_and_grad, plan

STAGES = 4


class Size(NamedTuple):
    """The model's layers per device and widths, and the examples in a microbatch."""

    layers: int = 4
    width: int = 64
    hidden: int = 256
    examples: int = 256


class Form(NamedTuple):
    """One way to run the pipeline."""

    schedule: str
    stash: str
    virtual_stages: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        chunks = f", v = {self.virtual_stages}" if self.virtual_stages > 1 else ""
        return f"{self.schedule}, {self.stash}{chunks}" + ", recompute" * self.recompute


FORMS = (
    Form("gpipe", "residual"),
    Form("gpipe", "input"),
    Form("1f1b", "residual"),
    Form("1f1b", "input"),
    Form("1f1b", "residual", recompute=True),
    Form("1f1b", "input", recompute=True),
    Form("1f1b", "residual", virtual_stages=2),
    Form("1f1b", "input", virtual_stages=2),
    Form("zb", "residual"),
    Form("zb", "input"),
)
TOY = (Form("gpipe", "residual"), Form("1f1b", "residual"))


def stage(params: Any, x: jax.Array) -> jax.Array:
    """Run the layers of a stage, each named."""
    for p in params:
        x = checkpoint_name(x + jax.nn.gelu(x @ p["up"]) @ p["down"], "layer")
    return x


def gradients(form: Form, size: Size, m: int) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """Return the compiled pipeline, a call of it, and a call of the gradient on one device."""
    v = form.virtual_stages
    lead = (v, STAGES) if v > 1 else (STAGES,)
    mesh = Mesh(np.array(jax.devices()[:STAGES]), ("stage",))
    by_stage = NamedSharding(mesh, PartitionSpec(*[None] * (v > 1), "stage"))
    rng = np.random.default_rng(0)

    def normal(*sizes: int) -> np.ndarray:
        return 0.1 * rng.standard_normal(sizes, np.float32)

    def loss(y: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((y - target) ** 2)

    def unpipelined_loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        for index in np.ndindex(lead):
            x = stage(jax.tree.map(lambda w, index=index: w[index], params), x)
        return loss(x, target)

    def one_by_one(params: Any, *batch: jax.Array) -> Any:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(unpipelined_loss)(params, *part)
            ), None

        parts = jax.tree.map(lambda a: a.reshape(m, size.examples, size.width), batch)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)), parts)[0]

    up, down = (*lead, size.width, size.hidden), (*lead, size.hidden, size.width)
    params = [{"up": normal(*up), "down": normal(*down)} for _ in range(size.layers // v)]
    batch = normal(m * size.examples, size.width), normal(m * size.examples, size.width)
    fn = optfn.recompute(stage, checkpoints=("layer",)) if form.recompute else stage
    value_and_grad = pipeline_value_and_grad(
        fn,
        loss,
        mesh=mesh,
        num_microbatches=m,
        schedule=form.schedule,
        stash=form.stash,
        virtual_stages=v,
    )
    placed = (
        jax.device_put(params, by_stage),
        *jax.device_put(batch, NamedSharding(mesh, PartitionSpec())),
    )
    compiled = jax.jit(value_and_grad).lower(*placed).compile()
    alone = jax.device_put((params, *batch), jax.devices()[0])
    unpipelined = jax.jit(one_by_one)
    return compiled, lambda: compiled(*placed), lambda: unpipelined(*alone)


def run(
    size: Size, microbatches: Sequence[int], forms: Sequence[Form], rounds: int = 7
) -> list[measure.Row]:
    """Return a row per form and number of microbatches."""
    rows = []
    for form in forms:
        for m in microbatches:
            timetable = plan(STAGES, m, form.virtual_stages, form.schedule)
            compiled, *calls = gradients(form, size, m)
            pipelined, unpipelined = measure.cpu_seconds(calls, rounds)
            rows.append(
                {
                    "form": str(form),
                    "microbatches": m,
                    "ticks": timetable.ticks,
                    "bubble": timetable.bubble,
                    "held": timetable.stash,
                    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
                    "cpu_ratio": pipelined / unpipelined,
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


HEAD = (
    "| schedule, stash | microbatches | ticks | bubble | activations held | temporaries MiB "
    "| CPU s, × one device |\n|---|---|---|---|---|---|---|"
)


def _line(row: measure.Row) -> str:
    return (
        f"| {row['form']} | {row['microbatches']} | {row['ticks']} | {row['bubble']:.1%} "
        f"| {row['held']} | {row['temporaries'] / 2**20:.2f} | {row['cpu_ratio']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64])
    options = measure.parse(parser, microbatches=[8, 16])
    size, forms = (Size(2, 8, 8, 64), TOY) if options.toy else (Size(), FORMS)
    about = {"stages": STAGES, **size._asdict()}
    measure.report(options, HEAD, lambda: run(size, options.microbatches, forms), **about)


if __name__ == "__main__":
    main()
