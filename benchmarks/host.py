"""How much memory does a step need with the optimizer's state on the host? Compiled, and not run.

    make host
    make host OPTIONS="--model 7B --topology 'v5e:4x4' --only 'streamed*'"

Llama 2 7B and 70B of `benchmarks.pods`, in bfloat16 with float32 masters, adamw and a clip by the
global norm, 2,048 tokens on each chip, `shard="params"` on several. The state is on the device; or
on the host, `state_memory="pinned_host"`, which streams it in chunks; or on the host and fetched
whole, an array at a time, as the same update does without loops. "Small" has moments in int8 and
masters of 24 bits. "Accumulated" is an `accumulate` of 8 gradients, whose sums are on the host too;
its link is that of a call with a step, and a call without one moves a quarter of it.

Bytes are those of a chip, and of the host for it. Temporaries are without the fast memory of the
chip. Loops are those of the whole program. The link is what an update moves, both directions, and
its seconds at the speed of `Chip.host_link`; microbatches are those of 2,048 tokens on a chip after
which the link takes a fifth of a step, with a half of the chip's peak in the products.

The goal: temporaries of at most those on the device and 5 % of the state, and none on the host.

Rows are kept in `benchmarks/host.json`; a run of some of them replaces these.
"""

import argparse
import contextlib
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import optfn
from benchmarks import measure, pods, scale, targets
from optfn.distributed import Chip, plan_memory
from optfn.mesh.compilers import memories

KEPT = measure.Kept(
    Path(__file__).with_suffix(".json"),
    ("model", "topology", "way"),
    ("jax", "libtpu", "jax-cuda12-plugin"),
)
HEAD = (
    "| model | topology | way | GB of arguments | GB of temporaries | GB a device | GB on the host "
    "| GB of temporaries there | loops | GB over the link | link s | microbatches | compile s |\n"
    + "|---" * 13
    + "|"
)
TOPOLOGIES = {
    "7B": ("1x1x1", "1x8x1", "v5e:4x4", "v5p:4x4x4"),
    "70B": ("1x8x1", "v5p:4x4x4"),
    "toy": ("v5e:2x2",),
}
SMALL = optfn.adamw(
    1e-4, multi_precision=24, moment_dtype="int8", grad_clip=optfn.clip_by_global_norm(1.0)
)
ON_DEVICE, STREAMED, WHOLE = "on the device", "streamed", "fetched whole"
ACCUMULATED = "accumulated, streamed"
WAYS = (ON_DEVICE, STREAMED, WHOLE, "small, streamed", ACCUMULATED)


def fetch_whole(fn: Any, args: Any, *_: Any) -> Any:
    """Return fn(*args) as `row_loops.run_by_rows` does, with each array on the host fetched."""
    leaves, structure = jax.tree.flatten(args)
    results, result_structure = jax.tree.flatten(
        fn(*jax.tree.unflatten(structure, map(memories.to_device, leaves)))
    )
    for i, x in enumerate(leaves):
        if memories.is_on_host(x):
            results[i] = memories.to_host(results[i])
    return jax.tree.unflatten(result_structure, results)


def division_of(model: str, way: str, chips: Sequence[Any]) -> scale.Division:
    """Return how a model is divided, with its optimizer and the memory of its state."""
    division = pods.divisions(model)["FSDP"]
    options: dict[str, Any] = {"shard": "params"} if len(chips) > 1 else {}
    if not way.endswith(ON_DEVICE):
        options["state_memory"] = memories.PINNED_HOST
    tx = SMALL if way.startswith("small") else division.tx
    tx = optfn.accumulate(tx, 8) if way == ACCUMULATED else tx
    return division._replace(options=options, tx=tx)


def measured(model: str, topology: str, way: str) -> measure.Row:
    """Return the row of a model on the chips of a topology with its state in one way."""
    chips = targets.devices(pods.target_of(topology))
    division = division_of(model, way, chips)
    mesh = division.mesh(chips)
    start = time.process_time()
    with contextlib.ExitStack() as stack:
        if way == WHOLE:
            stack.enter_context(mock.patch("optfn.train.host_state.run_by_rows", fetch_whole))
        step = scale.made(division, mesh)
        lowered = step.lower(division.params, scale.batch_of_all(division, mesh))
    program = lowered.compile()
    memory = program.memory_analysis()
    return {
        "model": model, "topology": topology, "way": way, "chips": len(chips),
        "kept": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
        "host": memory.host_argument_size_in_bytes,
        "host_temporaries": memory.host_temp_size_in_bytes,
        "loops": len(re.findall(r" while\(", program.as_text())),
        "seconds": round(time.process_time() - start, 1),
    } | linked(division, mesh, model, topology)  # fmt: skip


def linked(division: scale.Division, mesh: Any, model: str, topology: str) -> measure.Row:
    """Return the bytes of an update over the link to the host, their seconds, and the microbatches
    of 2,048 tokens on a chip of which they take a fifth of the time."""
    if not division.options.get("state_memory"):
        return {}
    plan = plan_memory(division.tx, division.params, mesh, **division.options)
    chip = Chip.of(topology if ":" in topology else "h100")
    seconds = plan.host_link_bytes / chip.host_link
    size = sum(x.size for x in jax.tree.leaves(division.params))
    one = 8 * size * pods.LLAMAS[model].tokens / (0.5 * chip.flops)
    return {
        "link": plan.host_link_bytes,
        "link_seconds": seconds,
        "microbatches": 4 * seconds / one,
    }


def _prepare(topology: str) -> None:
    target = pods.target_of(topology)
    targets.prepare(target)
    if target.platform == "cuda":
        targets.keep_memories()


def found_rows(chosen: Sequence[tuple[str, str, str]]) -> Iterator[measure.Row]:
    """Yield the rows of some (model, topology, way), those of each topology from one process."""
    spawn = multiprocessing.get_context("spawn")
    for topology in dict.fromkeys(topology for _, topology, _ in chosen):
        with ProcessPoolExecutor(1, spawn, _prepare, (topology,)) as pool:
            for one in (one for one in chosen if one[1] == topology):
                yield pool.submit(measured, *one).result()


def line(row: measure.Row) -> str:
    """Return a row of the table."""

    def gigabytes(name: str) -> str:
        return f"{row[name] / 1e9:,.1f}" if name in row else "-"

    cells = [
        row["model"], row["topology"], row["way"], gigabytes("kept"), gigabytes("temporaries"),
        f"{(row['kept'] + row['temporaries']) / 1e9:,.1f}", gigabytes("host"),
        f"{row['host_temporaries'] / 1e9:.2f}", str(row["loops"]), gigabytes("link"),
        f"{row['link_seconds']:.2f}" if "link" in row else "-",
        f"{max(1, round(row['microbatches']))}" if "link" in row else "-", f"{row['seconds']:.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pods.add_choices(parser, ["7B", "70B"], "7B, 70B, toy")
    options = parser.parse_args()
    chosen = pods.choose(options, TOPOLOGIES, lambda model, topology: WAYS)
    print(HEAD)
    pods.print_rows(found_rows(chosen), line, KEPT, options.json)


if __name__ == "__main__":
    main()
