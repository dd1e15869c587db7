"""How long are steps and updates on a real chip, beside optax's and beside what they could take?

    make chip
    python -m benchmarks.chip [--rounds 10] [--soak 3000] [--seconds 480]

One page of one GPU or TPU, in less than nine minutes. What `--seconds` leave no time for, and what
does not fit in the memory, is named below its table and left out. Times are of calls one after
another, each waited for, without input, in turns with the other side; both sides donate their
state.

* Training steps: a Llama in bfloat16, adamw and a clip by the global norm, each layer recomputed.
  optfn keeps masters beside the params; by hand optax has float32 params, of which the loss reads
  a copy in bfloat16. The estimate is that of `optfn.distributed.estimate_step`, here of compute
  alone. MFU is the model FLOPs utilization, and that of optax is for the FLOPs of optfn's step.
* A clip by the global norm, in a whole step in float32 and in updates. With a clip optfn's update
  alone takes longer than optax's on an H100, and as long without XLA's command buffers
  (`--xla_gpu_enable_command_buffer=`). The factor of the clip is a new array in each call, which
  may be why XLA updates them. A training step returns its loss, a new array too.
* Updates: the floor is the time of the bytes that the rule must move, at the bandwidth of an
  addition in place, and at that of the chip's data sheet.
* Forms of the optimizer's state: masters, moments, and the memory of the host.
* Long runs: masters in each form train for `--soak` steps of a small model: no warning, and a
  finite loss, is expected of them.
"""

import argparse
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

# Two models of 1.9B and their states need more of an H100's 80 GB than the default share.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optfn
from benchmarks import dispatch, host, measure, moments, packed, update
from benchmarks.pods import ADAMW, Llama
from optfn.distributed import estimate_step
from optfn.mesh.compilers.chips import find_chip

# By name: the model, and the examples of a step.
MODELS = {
    "0.6B": (Llama(2048, 5632, 8, 2048, 16, 1), 1),
    "0.6B, 4 examples": (Llama(2048, 5632, 8, 2048, 16, 1), 4),
    "1.9B": (Llama(4096, 11008, 8, 4096, 32, 1), 1),
}
TOY = {"toy": (Llama(64, 128, 2, 64, 4, 1, vocabulary=256, tokens=32), 1)}
# Its update takes about as long as its loss and gradient.
SMALL = Llama(768, 3072, 12, 768, 12, 1, tokens=1024), 1
OPTAX_ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
CLIPPED = "adam, clip by global norm"
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
UPDATES = {
    "gpt2": ("adam", CLIPPED, "adamw", "lamb", "lars"),
    "resnet50": ("momentum", CLIPPED, "lamb", "lars"),
}
FORMS = {"copies": True, "32 bits": 32, "24 bits": 24}
STEP_HEAD = (
    "| step | optfn ms (min) | optax by hand ms (min) | optax/optfn (min) | estimated ms "
    "| measured/estimated | MFU % | optax: MFU % |\n|---|---|---|---|---|---|---|---|"
)
UPDATE_HEAD = (
    "| update | optfn ms (min) | optax ms (min) | optax/optfn (min) | floor ms: in place "
    "| data sheet | optfn/data sheet |\n|---|---|---|---|---|---|---|"
)
FORM_HEAD = "| state | step ms (min) | speed of copies | B a parameter |\n|---|---|---|---|"
SOAK_HEAD = "| masters | first loss | last losses | finite | warnings |\n|---|---|---|---|---|"


class Part(NamedTuple):
    """A table of the page, and what makes and prints its rows, by name."""

    title: str
    head: str
    rows: dict[str, Callable[[], list[measure.Row]]]


class Repeated:
    """A step that is called again and again on its own state."""

    def __init__(self, step: Any, state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        """Make one step."""
        self.state, out = self.step(self.state, self.batch)
        return self.state, out


def cast(tree: Any, dtype: Any) -> Any:
    """Return the tree with all leaves in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def make_params(model: Llama, dtype: Any) -> Any:
    """Return params of a model, the same ones in each dtype but for rounding."""
    shapes, key = model.divisions()["FSDP"].params, jax.random.key(0)
    return jax.tree.map(lambda x: (0.02 * jax.random.normal(key, x.shape)).astype(dtype), shapes)


def make_tokens(model: Llama, examples: int) -> jax.Array:
    """Return a batch of a model."""
    return jax.random.randint(jax.random.key(1), (examples, model.tokens + 1), 0, model.vocabulary)


def by_optfn(model: Llama, examples: int, tx: Any, dtype: Any, **options: Any) -> Repeated:
    """Return the step of optfn."""
    step = optfn.make_train_step(model.loss, tx, **options)
    return Repeated(step, step.init(make_params(model, dtype)), make_tokens(model, examples))


def by_hand(
    model: Llama, examples: int, tx: Any, dtype: Any, compiler_options: Any = None
) -> Repeated:
    """Return the step of float32 params and optax, whose loss reads the params in a dtype."""

    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(model.loss)(cast(params, dtype), tokens)
        updates, opt_state = tx.update(cast(gradients, jnp.float32), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    jitted = jax.jit(step, donate_argnums=0, compiler_options=compiler_options)
    params = make_params(model, jnp.float32)
    return Repeated(jitted, (params, tx.init(params)), make_tokens(model, examples))


def train(
    name: str,
    model: tuple[Llama, int],
    rounds: int,
    txs: tuple[Any, Any] = (ADAMW, OPTAX_ADAMW),
    dtype: Any = jnp.bfloat16,
    options: Any = None,
) -> list[measure.Row]:
    """Return the row of a training step, and print it; `options` are the compiler's."""
    ours = by_optfn(*model, txs[0], dtype, compiler_options=options)
    theirs = by_hand(*model, txs[1], dtype, options)
    row: measure.Row = {"what": f"step, {name}"}
    if find_chip(jax.devices()[0].device_kind):
        estimate = estimate_step(ours.step.lower(ours.state, ours.batch).compile())
        row |= {"estimated_ms": 1e3 * estimate.seconds, "utilization": estimate.utilization}
    row |= compared(measure.interleaved({"optfn": ours, "optax": theirs}, rounds))
    cells = ["-"] * 4
    if "estimated_ms" in row:
        estimated = row["estimated_ms"]
        ratio = row["optfn_ms"] / estimated
        uses = [100 * row["utilization"] * estimated / row[f"{x}_ms"] for x in ("optfn", "optax")]
        cells = [f"{estimated:.1f}", f"{ratio:.2f}", *(f"{use:.1f}" for use in uses)]
    print(f"| {name} | {shown(row)} | {' | '.join(cells)} |", flush=True)
    return [row]


def compared(times: dict[str, measure.Timing]) -> measure.Row:
    """Return the columns of optfn's and optax's times."""
    ours, theirs = times["optfn"], times["optax"]
    return {
        "optfn_ms": 1e3 * ours.median, "optfn_min_ms": 1e3 * ours.minimum,
        "optax_ms": 1e3 * theirs.median, "optax_min_ms": 1e3 * theirs.minimum,
        "ratio": theirs.median / ours.median, "ratio_min": theirs.minimum / ours.minimum,
    }  # fmt: skip


def shown(row: measure.Row) -> str:
    """Return the cells of optfn's and optax's times."""
    times = [f"{row[f'{x}_ms']:.2f} ({row[f'{x}_min_ms']:.2f})" for x in ("optfn", "optax")]
    return " | ".join([*times, f"{row['ratio']:.2f} ({row['ratio_min']:.2f})"])


def updated(rule: str, tree: str, rounds: int, options: Any = None) -> list[measure.Row]:
    """Return the row of an update alone, and print it; `options` are the compiler's."""
    shapes = measure.TREES[tree]()
    machine = measure.Machine(sum(map(math.prod, shapes.values())))
    name = f"{tree}, {rule}" + (", no command buffers" if options else "")
    row = {"what": f"update, {name}"} | update.measured(rule, shapes, machine, rounds, options)
    chip, cells = find_chip(jax.devices()[0].device_kind), ["-", "-"]
    if chip:
        row["sheet_ms"] = row["floor_ms"] * row["in_place_GBps"] * 1e9 / chip.hbm
        cells = [f"{row['sheet_ms']:.2f}", f"{row['optfn_ms'] / row['sheet_ms']:.2f}"]
    cells = [shown(row), f"{row['floor_ms']:.2f}", *cells]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return [row]


def of_forms(model: tuple[Llama, int], rounds: int) -> list[measure.Row]:
    """Return a row for each form of the optimizer's state, all in turns, and print them."""
    clip = optfn.clip_by_global_norm(1.0)
    txs = {
        f"masters in {name}": optfn.adamw(1e-4, multi_precision=form, grad_clip=clip)
        for name, form in FORMS.items()
    } | {"masters in 24 bits, int8 moments": host.SMALL}
    sides = {name: by_optfn(*model, tx, jnp.bfloat16) for name, tx in txs.items()}
    sides["masters in copies, on the host"] = by_optfn(
        *model, ADAMW, jnp.bfloat16, state_memory="pinned_host"
    )
    sides["optax by hand, float32 params"] = by_hand(*model, OPTAX_ADAMW, jnp.bfloat16)
    times, rows = measure.interleaved(sides, rounds), []
    size = measure.size(make_params(model[0], jnp.bfloat16))
    for name, (median, minimum) in times.items():
        speed, held = times["masters in copies"].median / median, sides[name].state
        row = {"what": name, "ms": 1e3 * median, "min_ms": 1e3 * minimum, "speed": speed}
        rows.append(row | {"state": measure.num_bytes(held) / size})
        cells = f"{1e3 * median:.2f} ({1e3 * minimum:.2f}) | {speed:.2f} | {rows[-1]['state']:.2f}"
        print(f"| {name} | {cells} |", flush=True)
    return rows


def soak(name: str, steps: int) -> list[measure.Row]:
    """Return what a long run with masters in a form ends with and warns of, and print it."""
    rng = np.random.default_rng(0)
    sizes = (64, 256, 256, 8)
    params = [
        jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.bfloat16)
        for a, b in itertools.pairwise(sizes)
    ]
    x = rng.normal(size=(64, 128, 64)).astype(np.float32)
    y = np.tanh(x[..., :8] * 2) + 0.1 * rng.normal(size=(64, 128, 8)).astype(np.float32)

    def loss(w: Any, batch: Any) -> jax.Array:
        h, y = batch
        for layer in w[:-1]:
            h = jnp.tanh(h.astype(layer.dtype) @ layer)
        return jnp.mean(((h @ w[-1]).astype(jnp.float32) - y) ** 2)

    tx = optfn.adamw(
        optfn.schedules.warmup_cosine(3e-3, warmup_steps=steps // 10, total_steps=steps),
        multi_precision=FORMS[name], grad_clip=optfn.clip_by_global_norm(1.0),
    )  # fmt: skip
    batches = [(x[i % 64], y[i % 64]) for i in range(steps)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, history = optfn.minimize(loss, tx, params, batches, progress=False)
    losses = history["loss"]
    first, last, finite = losses[0], losses[-64:].mean(), np.isfinite(losses).all()
    said = f"{len(caught)}" + "".join(f": {x.message}" for x in caught[:1])
    print(f"| {name} | {first:.3f} | {last:.4f} | {finite} | {said} |", flush=True)
    return [{"what": f"masters in {name}", "first": float(first), "last": float(last)}]


def step_parts(toy: bool, rounds: int, options: Any) -> Iterator[Part]:
    """Yield the parts of training steps; `options` are those of a compiler without command buffers,
    if it has any."""
    models = TOY if toy else MODELS
    small = TOY["toy"] if toy else SMALL
    steps = {name: partial(train, name, model, rounds) for name, model in models.items()}
    yield Part("Training steps", STEP_HEAD, steps)

    def clipped(name: str, rule: str, options: Any = None) -> list[measure.Row]:
        ours, theirs = (make() for make in update.PAIRS[rule] if make)
        return train(name, small, rounds, (ours, theirs), jnp.float32, options)

    steps = {name: partial(clipped, name, name) for name in ("adam", CLIPPED)}
    if options:
        name = f"{CLIPPED}, no command buffers"
        steps[name] = partial(clipped, name, CLIPPED, options)
    yield Part("A clip in a whole step in float32", STEP_HEAD, steps)
    forms = {"all": partial(of_forms, small, rounds)}
    yield Part("Forms of the optimizer's state", FORM_HEAD, forms)


def update_parts(toy: bool, rounds: int, options: Any) -> Iterator[Part]:
    """Yield the parts of updates alone; `options` as of `step_parts`."""
    tree = "toy" if toy else "gpt2"
    updates = {
        f"{tree}, {rule}": partial(updated, rule, tree, rounds)
        for tree, rules in ({"toy": UPDATES["resnet50"]} if toy else UPDATES).items()
        for rule in rules
    }
    if options:
        updates["no command buffers"] = partial(updated, CLIPPED, tree, rounds, options)
    yield Part("Updates", UPDATE_HEAD, updates)
    costs = {tree: partial(moments.cost, tree, rounds)}
    yield Part("Moments of an update of adam", moments.HEAD, costs)


def other_parts(toy: bool, rounds: int, steps: int) -> Iterator[Part]:
    """Yield the parts of small leaves, of calls and of long runs of some steps."""
    layers, width = (3, 4) if toy else (150, 32)

    def many_leaves() -> list[measure.Row]:
        size, sides = layers * (width + 1) * width, packed.of_train_step(layers, width)
        return [packed.measured("train step, adam", 2 * layers, size, sides, rounds)]

    yield Part("Many small leaves", packed.HEAD, {f"{2 * layers} leaves": many_leaves})
    calls = {
        f"{leaves} leaves": partial(dispatch.run, [leaves], [1], 1 if toy else 10)
        for leaves in ((2,) if toy else (4, 100))
    }
    yield Part("Calls, in microseconds of CPU", dispatch.HEAD, calls)
    runs = {name: partial(soak, name, steps) for name in FORMS}
    yield Part(f"Long runs, of {steps} steps", SOAK_HEAD, runs)


def print_page(page: Iterable[Part], seconds: float) -> list[measure.Row]:
    """Return the rows of the page, and print it; start nothing that may end after some seconds."""
    found, began, longest = [], time.perf_counter(), 0.0
    for title, head, rows in page:
        print(f"\n### {title}\n\n{head}", flush=True)
        left_out = []
        for name, make in rows.items():
            start = time.perf_counter()
            if start - began + longest > seconds:
                left_out.append(f"{name} (no time)")
                continue
            try:
                found += make()
            except jax.errors.JaxRuntimeError as why:
                if "RESOURCE_EXHAUSTED" not in str(why):
                    raise
                left_out.append(f"{name} (no memory)")
            longest = max(longest, time.perf_counter() - start)
        if left_out:
            print(f"\nLeft out: {'; '.join(left_out)}.", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} seconds, without the imports", flush=True)
    return found


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--soak", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=480.0)
    options = measure.parse(parser, rounds=2, soak=20)
    # The option is of GPUs; a CPU's compiler ignores it.
    has_buffers = options.toy or jax.default_backend() == "gpu"
    about = options.toy, options.rounds, NO_COMMAND_BUFFERS if has_buffers else None
    others = other_parts(options.toy, options.rounds, options.soak)
    page = itertools.chain(step_parts(*about), update_parts(*about), others)
    measure.report(options, "", lambda: print_page(page, options.seconds))


if __name__ == "__main__":
    main()
