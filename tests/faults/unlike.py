"""Workers that are not like the others."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from faults import worker
from faults.runs import (
    OTHER_PARAMS,
    REPLICAS,
    SAME,
    STEPS,
    Processes,
    do,
    ends_the_same,
)
from faults.table import fault, require
from optfn.distributed import data_mesh


def differs(directory: Path, pattern: str, **options: Any) -> str:
    """Start a run whose worker 1 has options of its own: all end with an error."""
    with Processes(directory, each={1: options}) as run:
        seen, _ = (run.fails(i, pattern) for i in range(2))
    return seen


@fault("a worker with other params", OTHER_PARAMS, quick=True)
def other_params(directory: Path) -> str:
    return differs(directory, r"same params, but '[bvw]' in process 1 differs", seed=1)


@fault("a worker with batches of another shape", "an error in all processes before the first step")
def other_batches(directory: Path) -> str:
    return differs(directory, r"same batches, but those of process 1 differ", examples=12)


@fault("a worker with another version of optfn", "an error in all processes before the first step")
def other_version(directory: Path) -> str:
    return differs(directory, r"same versions, but those of process 1 differ", version="0.0.9")


@fault(
    "NaN, Inf, two huge numbers and a denormal one in the examples of one worker",
    "skip_nonfinite skips the first three on all workers, the third because its square overflows; "
    "the clip bounds the fourth; params are finite, and those of one process",
)
def bad_gradients(directory: Path) -> str:
    # Twice the third, which the gradient of a square may have on its way, is a float32 as well.
    bad = (float("nan"), float("inf"), 1e38, 1e15, 1e-40)
    with Processes(directory, bad=bad) as run:
        step, found, skipped = run.ends()[0]
    require((step, skipped) == (STEPS, 3), f"{skipped} of {step} steps were skipped")
    state = worker.train(data_mesh(2), None, worker.batches(bad=bad))
    require(all(np.isfinite(x).all() for x in jax.tree.leaves(state.params)), "not finite")
    require(found == worker.digest(state.params), "params are not those of one process")
    return "3 steps skipped on all; params the same bits, finite"


def flipped_in_one(directory: Path, **options: Any) -> str:
    """Flip a bit of a parameter in the last process: all end by an error."""
    count = options.get("count", 2)
    with Processes(directory, each={count - 1: {"flip": 4}}, **options) as run:
        return run.all_fail(r"the copies of '[^']+' differ between the devices")


@fault("one bit of a parameter flipped in the memory of one of two workers", REPLICAS)
def bit_of_params(directory: Path) -> str:
    return flipped_in_one(directory)


@fault(
    "clocks apart: a worker whose monotonic clock, and Python's, are a day ahead",
    SAME,
)
def clocks_apart(directory: Path) -> str:
    ahead = ["unshare", "-T", "--fork", "--kill-child", "--monotonic", "86400"]
    do(*ahead, "true")
    each = {1: {"clock": 86400.0}}
    with Processes(directory, each=each, around=lambda i: ahead if i else []) as run:
        return ends_the_same(run)
