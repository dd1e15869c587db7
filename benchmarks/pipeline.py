"""How long is the clock of each schedule of the pipeline, and what memory does it need?

    python -m benchmarks.pipeline [--microbatches 16 64]

Four stages on four devices of the CPU; microbatches of one size, so that more of them are a larger
batch. Ticks, bubble and activations are those of the plan; temporaries are those of the compiled
loss and gradients, a device. Nothing is run: several devices that share the cores of one machine
say nothing about speed.
"""

import argparse
import os
from collections.abc import Sequence
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
from jax.sharding import Mesh

import optfn
from benchmarks import measure
from optfn.distributed import pipeline_value_and_grad, plan

STAGES = 4


class Size(NamedTuple):
    """Of the model: layers on a device, widths, examples in a microbatch."""

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


def temporaries(form: Form, size: Size, m: int) -> int:
    """Return the bytes that a device needs beside params, gradients and batch."""
    v = form.virtual_stages
    lead = (v, STAGES) if v > 1 else (STAGES,)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layer = {
        "up": shape(*lead, size.width, size.hidden),
        "down": shape(*lead, size.hidden, size.width),
    }
    fn = optfn.recompute(stage, checkpoints=("layer",)) if form.recompute else stage
    value_and_grad = pipeline_value_and_grad(
        fn,
        lambda y, target: jnp.mean((y - target) ** 2),
        mesh=Mesh(np.array(jax.devices()[:STAGES]), ("stage",)),
        num_microbatches=m,
        schedule=form.schedule,
        stash=form.stash,
        virtual_stages=v,
    )
    batch = shape(m * size.examples, size.width)
    params = [layer] * (size.layers // v)
    compiled = jax.jit(value_and_grad).lower(params, batch, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def run(size: Size, microbatches: Sequence[int], forms: Sequence[Form]) -> list[measure.Row]:
    """Return a row per form and number of microbatches."""
    rows = []
    for form in forms:
        for m in microbatches:
            timetable = plan(STAGES, m, form.virtual_stages, form.schedule)
            rows.append(
                {
                    "form": str(form),
                    "microbatches": m,
                    "ticks": timetable.ticks,
                    "bubble": timetable.bubble,
                    "held": timetable.stash,
                    "temporaries": temporaries(form, size, m),
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


HEAD = (
    "| schedule, stash | microbatches | ticks | bubble | activations held | temporaries MiB |\n"
    "|---|---|---|---|---|---|"
)


def _line(row: measure.Row) -> str:
    return (
        f"| {row['form']} | {row['microbatches']} | {row['ticks']} | {row['bubble']:.1%} "
        f"| {row['held']} | {row['temporaries'] / 2**20:.2f} |"
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
