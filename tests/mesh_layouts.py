"""Random ways of dividing a run over a mesh, each trained in a child process beside one device.

    python tests/mesh_layouts.py "specs 3" "tables 7"

trains each of these layouts and prints a line before and after it. A compiler may end the process
(`outcomes` then names the layout, and goes on with the next one in another process).
"""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from arrays import weights
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import wire
from optfn.distributed import (
    pipeline_value_and_grad,
    plan_memory,
    scan_layers,
    sharded,
    stack_stages,
    sum_over,
)
from optfn.mesh.layout import mesh_layout
from optfn.tables.sharded_table import to_logical

ROOT = Path(__file__).parents[1]
# "one of two": along the other data axis devices are workers.
WAYS = (
    "specs", "specs, one of two", "state", "state, one of two", "params", "params, one of two",
    "tables", "pipeline", "pipeline of a list", "pipeline in a step",
)  # fmt: skip
STEPS, EXAMPLES, WIDTH, LAYERS, STAGES = 3, 16, 8, 8, 2
SHAPES = {"vector": (16,), "matrix": (16, 8), "cube": (8, 8, 8)}
STACKED = {"w": (LAYERS, WIDTH, WIDTH), "bias": (LAYERS, WIDTH)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how a run is divided over it.

    sizes: of the axes of the mesh, in order.
    data: the axes that split the batch.
    specs: the PartitionSpecs of leaves, drawn from `axes`.
    scans: whether the loss uses `scan_layers`.
    """

    way: str
    sizes: dict[str, int]
    data: tuple[str, ...]
    specs: dict[str, P]
    scans: bool

    @property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[:8]).reshape(tuple(self.sizes.values()))
        return Mesh(devices, tuple(self.sizes))


def drawn(way: str, seed: int) -> Layout:
    """Return a random layout of a way of sharding."""
    rng = np.random.default_rng([WAYS.index(way), seed])
    of_two, in_pipeline = way.endswith("one of two"), way.startswith("pipeline")
    data = ("data", "fast")[: 2 if of_two else 1 if in_pipeline else rng.integers(1, 3)]
    others = ("stage", "model") if in_pipeline else ("model", "other")
    count = 3 if in_pipeline else rng.integers(max(2, len(data)), 4)
    names = rng.permutation([*data, *others][:count]).tolist()
    sizes = dict.fromkeys(names, 2)
    if count == 2:
        sizes[names[rng.integers(2)]] = 4
    # Along the first data axis devices are workers, so no leaf is divided over it.
    free = [name for name in names if name != "stage" and not (of_two and name == data[0])]
    shapes = SHAPES | {f"layers/{name}": shape for name, shape in STACKED.items()}
    specs = {name: random_spec(rng, len(shape), free) for name, shape in shapes.items()}
    named = {name for spec in specs.values() for entry in spec for name in np.atleast_1d(entry)}
    if of_two or (way == "specs" and len(named & {*data}) < len(data)):
        sizes = workers_first(sizes, [name for name in data if name not in named], data)
    data = tuple(rng.permutation(data).tolist())
    return Layout(way, sizes, data, specs, bool(rng.integers(2)))


def workers_first(sizes: dict[str, int], workers: list[str], data: list[str]) -> dict[str, int]:
    """Return the axes of a mesh with those of workers before the other data axes.

    A step refuses another order (tests/mesh/test_mesh_layouts.py).
    """
    order = iter([*workers, *(name for name in data if name not in workers)])
    names = [next(order) if name in data else name for name in sizes]
    return dict(zip(names, sizes.values(), strict=True))


def random_spec(rng: np.random.Generator, ndim: int, names: list[str]) -> P:
    """Return a PartitionSpec that divides `ndim` dimensions over some of these axes."""
    entries: list[list[str]] = [[] for _ in range(ndim)]
    for name in rng.permutation(names).tolist():
        if rng.random() < 0.8:
            entries[rng.integers(ndim)].append(name)
    return P(*(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries))


PARAMS: dict[str, Any] = {name: weights(1, *shape) for name, shape in SHAPES.items()} | {
    "layers": optfn.Stacked({name: weights(2, *shape) for name, shape in STACKED.items()}),
    "table": weights(3, 16, WIDTH),
}


def batches() -> list[Any]:
    rng = np.random.default_rng(4)
    return [
        (
            rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32),
            rng.integers(0, 16, EXAMPLES).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


def loss_fn(scans, params, batch):
    """Return a loss that depends on the place of each element."""
    x, ids = batch
    y = jnp.sum(params["table"][ids] * x, -1)
    for name in SHAPES:
        w = jnp.ravel(params[name])
        y = y + jnp.sin(x[:, :1] * (1 + jnp.arange(w.size))) @ w / 8

    def layer(w, h):
        return jnp.tanh(h @ w["w"] + w["bias"])

    h = x
    if scans:
        h = scan_layers(layer, params["layers"], h)
    else:
        for i in range(LAYERS):
            h = layer(jax.tree.map(lambda w, i=i: w[i], params["layers"].layers), h)
    return jnp.mean((y + jnp.sum(h, -1) - x[:, 0]) ** 2)


def optimizer():
    return optfn.momentum(0.05, 0.9, grad_clip=optfn.clip_by_global_norm(1.0))


def shard_of(layout: Layout) -> Any:
    """Return the argument `shard` of a training step."""
    kind, _, of_two = layout.way.partition(", ")
    kind = kind if kind in ("state", "params") else layout.specs
    return sharded(kind, axis="fast") if of_two else kind


def step_of(layout: Layout) -> tuple[Any, Any]:
    """Return the step of a layout, and its params."""
    if layout.way.startswith("pipeline"):
        return pipeline_of(layout)
    tables = {"tables": "table", "shard_tables": True} if layout.way == "tables" else {}
    options = {"mesh": layout.mesh, "data_axis": layout.data, "shard": shard_of(layout)}
    loss = functools.partial(loss_fn, layout.scans)
    return optfn.make_train_step(loss, optimizer(), **options, **tables), PARAMS


def trained(step, params, some):
    """Return params and losses after some steps."""
    state, losses = step.init(params), []
    for batch in some:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.device_get(to_logical(state.params)), losses


# Stages of a pipeline: each device sums its shards of a leaf, times numbers of each place.

BLOCKS = [{name: weights(i, *shape) for name, shape in SHAPES.items()} for i in (5, 6)]


def pipeline_of(layout: Layout) -> tuple[Any, Any]:
    """Return the step of a pipeline, and its params."""
    is_list, in_step = (layout.way == f"pipeline {x}" for x in ("of a list", "in a step"))
    specs = {name: layout.specs[name] for name in SHAPES}
    stage, of_model = functools.partial(divided_stage, specs), dict.fromkeys(SHAPES, P())
    for name, spec in specs.items():
        of_model[name] = P(*("model" if "model" in np.atleast_1d(e) else None for e in spec))
    f = pipeline_value_and_grad(
        [stage] * STAGES if is_list else stage,
        lambda y, target: jnp.mean((y - target) ** 2),
        mesh=layout.mesh,
        num_microbatches=2,
        # The step gathers what is divided over the data axis.
        param_specs=of_model if in_step else [specs] * STAGES if is_list else specs,
        data_axis=None if in_step else "data",
    )
    placed = {f"^{name}$": P("stage", *spec) for name, spec in specs.items()}
    options = {"mesh": layout.mesh, "data_axis": "data", "shard": placed} if in_step else {}
    step = optfn.make_train_step(None, optimizer(), value_and_grad=f, **options)
    return step, BLOCKS if is_list else stack_stages(BLOCKS)


def divided_stage(specs, params, x):
    """Return a stage, on a device that has its shards along "model"."""
    sums = []
    for name, w in sorted(params.items()):
        places = jnp.cos(jnp.arange(float(np.prod(SHAPES[name])))).reshape(SHAPES[name])
        along = [d for d, entry in enumerate(specs[name]) if "model" in np.atleast_1d(entry)]
        for d in along:
            here = lax.axis_index("model") * w.shape[d]
            places = lax.dynamic_slice_in_dim(places, here, w.shape[d], d)
        total = jnp.sum(w * places)
        sums.append(sum_over(total, "model") if along else total)
    return jnp.tanh(x * sums[0] + sums[1] - sums[2])


def whole_pipeline(blocks, batch):
    x, target = batch
    for params in blocks:
        x = divided_stage(dict.fromkeys(SHAPES, ()), params, x)
    return jnp.mean((x - target) ** 2)


# A layout beside one device, in a child process.


@functools.cache
def alone(in_pipeline: bool, scans: bool) -> tuple[Any, Any, list[float]]:
    """Return params before and after the steps of one device, and the losses."""
    loss = whole_pipeline if in_pipeline else functools.partial(loss_fn, scans)
    params = BLOCKS if in_pipeline else PARAMS
    return params, *trained(optfn.make_train_step(loss, optimizer()), params, data(in_pipeline))


def data(in_pipeline: bool) -> list[Any]:
    if not in_pipeline:
        return batches()
    return [(weights(7, EXAMPLES, WIDTH), weights(8, EXAMPLES, WIDTH))] * STEPS


def difference(layout: Layout) -> str:
    """Return how training by a layout differs from that of one device; "" if it does not."""
    in_pipeline = layout.way.startswith("pipeline")
    before, expected, losses = alone(in_pipeline, layout.scans)
    step, params = step_of(layout)
    # Gradients of these small leaves are averaged over workers in the loss too.
    with mock.patch.object(mesh_layout, "SMALL_BYTES", 0):
        after, found = trained(step, params, data(in_pipeline))
    if in_pipeline and layout.way != "pipeline of a list":
        after = [jax.tree.map(lambda w, i=i: w[i], after.layers) for i in range(STAGES)]
    if not np.allclose(found, losses, rtol=1e-5):
        return f"the losses are {found} for {losses}"
    if not in_pipeline and (text := misplanned(layout, step, data(in_pipeline)[0])):
        return text
    worst = 0.0
    for start, want, got in zip(*map(jax.tree.leaves, (before, expected, after)), strict=True):
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want - start).max()))
    return "" if worst < 1e-3 else f"params are off by {worst:.1g} of the way they went"


def misplanned(layout: Layout, step: Any, batch: Any) -> str:
    """Return how the bytes of the compiled step differ from its plan; "" if they do not."""
    options = {
        "shard": step.options.shard, "data_axis": layout.data, "tables": step.options.tables,
        "shard_tables": step.options.shard_tables, "batch": batch,
    }  # fmt: skip
    with mock.patch.object(mesh_layout, "SMALL_BYTES", 0):
        loss = functools.partial(loss_fn, layout.scans)
        plan = plan_memory(step.tx, PARAMS, layout.mesh, loss_fn=loss, **options)
        state, shapes = step.shapes(PARAMS, batch)
        program = step.compiled.lower(state, shapes).compile()
    kept = sum(
        np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize
        for x in jax.tree.leaves((state.params, state.opt_state))
    )
    along = wire.bytes_by_axes(program, layout.mesh).items()
    sent = sum(count for axes, count in along if {*axes} & {*layout.data})
    if plan.params + plan.state != kept:
        return f"the plan keeps {plan.params + plan.state} bytes for {kept}"
    # Along axes that are left to the compiler, the equations of the step do not show its shards.
    named = {
        name for spec in layout.specs.values() for entry in spec for name in np.atleast_1d(entry)
    }
    is_seen = layout.way.startswith(("state", "params")) or named <= {*layout.data, None}
    is_wrong = is_seen and not np.isclose(plan.sent, sent, rtol=0.02)
    return f"the plan sends {plan.sent} bytes for {sent}" if is_wrong else ""


def outcomes(cases: list[tuple[str, int]]) -> dict[str, str]:
    """Return what is wrong with some layouts, by their description."""
    wrong, remaining = {}, [f"{way} {seed}" for way, seed in cases]
    while remaining:
        program = [sys.executable, str(Path(__file__)), *remaining]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # An example that another test has imported sets four devices; `machine` sets eight.
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
        environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags}
        run = subprocess.run(program, env=environment, capture_output=True, text=True)
        lines = [line.split("\t") for line in run.stdout.splitlines() if "\t" in line]
        started = [layout for _, layout, *ended in lines if not ended]
        ended = {layout: text for _, layout, *texts in lines for text in texts}
        wrong |= {layout: text for layout, text in ended.items() if text}
        if len(started) > len(ended):
            wrong[started[-1]] = f"the process ended with {run.returncode}: {run.stderr[-3000:]}"
        elif run.returncode:
            raise RuntimeError(run.stderr)
        remaining = remaining[len(started) :]
    return wrong


def main(cases: list[str]) -> None:
    """Train by each of these layouts, on eight devices."""
    import machine  # noqa: F401 (it sets them)

    for case in cases:
        way, _, seed = case.rpartition(" ")
        layout = drawn(way, int(seed))
        words = f"{case}: {layout}"
        print("begins", words, sep="\t", flush=True)
        try:
            text = difference(layout)
        except Exception as error:  # a layout that cannot be traced is named as well
            text = f"{type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")
        print("ended", words, text, sep="\t", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
