"""A program trained by optfn, as its text says, and how that differs from the reference run."""

import collections
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import warnings
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils

import optfn
from optfn.distributed import PipelineParams, stack_stages, unstack_stages
from reference_run import run as reference
from reference_run import source
from reference_run.model import first_model_state, held_batches
from reference_run.program import STACKED, Program, first_params

# Relative to the largest number of the leaf. float32 programs differ by their rounding.
SECONDS = 60  # of one program, with the compilation of its step
# Of bfloat16 params the gradients are rounded too, to three digits, before workers add them, and
# moments in 8 or 16 bits have two or three.
TOLERANCES = {"float64": 2e-5, "float32": 5e-4, "bfloat16": 3e-2}


@functools.lru_cache(maxsize=200)
def compiled(text: str) -> dict:
    """Return the names that the text of a step defines. One step serves all programs of it."""
    names: dict = {}
    header = source.HEADER[source.HEADER.index("import jax") :]  # this process has its devices
    exec(header + text, names)
    return names


@contextlib.contextmanager
def small_arrays_on_host():
    """Send small arrays to the host too, as `source.ON_HOST` does, and as no other test does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # an older tree keeps nothing on the host
            from optfn.loss.jaxprs import row_loops
            from optfn.mesh.compilers import memories

            stack.enter_context(mock.patch.multiple(memories, LARGE=1))
            stack.enter_context(mock.patch.multiple(row_loops, CHUNK=32))
        yield


@small_arrays_on_host()
def execute(p: Program, directory: str | None = None) -> dict:
    """Run a program, and return what a user can read at its end.

    directory: of its checkpoints and logs, if not a new one that goes with the run.
    """
    names = dict(compiled(source.step_text(p, p.way)))
    exec("import os, signal, tempfile\n" + source.data_text(p), names)
    exec(source.evaluation_text(p), names)
    own = names["directory"]
    names["directory"] = directory or own
    try:
        for part in p.parts:
            made = compiled(source.step_text(p.of_part(part), part.get("way", p.way)))
            names |= {k: x for k, x in made.items() if not k.startswith("__")}
            exec(source.fit_text(p, part), names)
        if "compare" in p.spelling:
            compare_copies(names["state"])
        return observe(p, part, names)
    except FloatingPointError:
        finish_writes()
        return {"raised": "FloatingPointError"} | left_behind(p, names["directory"])
    finally:
        finish_writes()
        shutil.rmtree(own, ignore_errors=True)
        for ending in (".jsonl", ".html"):
            Path(own + ending).unlink(missing_ok=True)


def finish_writes():
    """Wait for the last checkpoint of a run that dies, which is still under way."""
    with contextlib.suppress(ImportError):  # an older tree has the function elsewhere
        from optfn.checkpoint.background import wait_for_writes

        wait_for_writes()


@contextlib.contextmanager
def at_most(seconds):
    """End what takes longer by a TimeoutError: a run that never ends is a failure as others are."""

    def stop(*_):
        raise TimeoutError(f"the run has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def on_host(tree):
    """Return arrays on the host, joined if several processes have their shards."""

    def join(x):
        if jax.dtypes.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        is_apart = isinstance(x, jax.Array) and not (
            x.is_fully_addressable or x.is_fully_replicated
        )
        return multihost_utils.process_allgather(x, tiled=True) if is_apart else x

    return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(join, tree)))


def whole(params):
    """Return the arrays of params: those of a pipeline stage by stage, and rows of a divided table
    in their order."""
    if isinstance(params, PipelineParams):
        stages = unstack_stages(on_host(params.stages))
        params = {k: np.stack([x[k] for x in stages]) for k in STACKED} | params.shared
    params = params._asdict() if hasattr(params, "_asdict") else params
    if "stages" in params:
        layers = getattr(params["stages"], "layers", params["stages"])
        params = {k: x for k, x in params.items() if k != "stages"} | layers
    return on_host(params)


def template(p: Program):
    """Return params as `load_params` takes them."""
    params = first_params(p)
    shared = {k: x for k, x in params.items() if not (p.stages and k in STACKED)}
    if not p.is_pipeline:
        layers = {k: params[k] for k in STACKED}
        shared |= {"stages": layers if p.stacked else optfn.Stacked(layers)} if p.stages else {}
        return collections.namedtuple("Model", p.fields)(**shared) if p.is_record else shared
    stages = [{k: params[k][i] for k in STACKED} for i in range(p.stages)]
    return PipelineParams(stack_stages(stages), shared)


def compare_copies(state):
    """Compare the copies of each array that the devices of a mesh keep."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
    meshes = {x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)}
    for mesh in meshes:
        if mesh.size > 1:
            optfn.distributed.compare_replicas(state, mesh)


def one_of_copies(state):
    """Return the state of the first device of a pmap, whose params are those of all."""
    for x in jax.tree.leaves(state.params):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return jax.tree.map(lambda x: x[0], state)


def observe(p: Program, part: dict, names: dict) -> dict:
    """Return what a user can read of a run: what it returned, and its checkpoints."""
    finish_writes()
    state, left = names["state"], left_behind(p, names["directory"])
    if state is None:
        return {"killed": part["kill"]} | left
    state = one_of_copies(state) if np.ndim(state.step) else state
    history = dict(names["history"])
    stopped = str(history.pop("stopped"))
    average = None
    if p.names("ema", "model_average"):
        found = optfn.averaged_params(state.opt_state, state.params, name=p.average_name)
        average = whole(optfn.unpack(found))
    return {
        "calls": len(history.get("loss", ())),
        "step": int(state.step),
        "params": whole(optfn.unpack(state.params)),
        "model_state": state.model_state and on_host(state.model_state),
        "average": average,
        "history": {k: np.asarray(v) for k, v in history.items()},
        "stopped": stopped,
        "statistics": p.estimates_statistics and estimate_statistics(p, state, names["loss_fn"]),
    } | left


def estimate_statistics(p: Program, state, loss_fn) -> dict:
    """Return the statistics of the model over the batches that are held back."""
    given = state.params, state.model_state, held_batches(p)
    options = {"has_aux": p.aux, "rng": 7 if p.key else False}
    return on_host(optfn.estimate_statistics(loss_fn, *given, **options))


def left_behind(p: Program, directory) -> dict:
    """Return what a run leaves on the disk: its checkpoints, and its log."""
    log = read_log(directory + ".jsonl") if p.log else {}
    return {"disk": read_disk(p, directory), "log": log}


def read_log(name) -> dict:
    """Return the numbers of each step in a file of JSON lines; null, for no number, is NaN."""
    found = {}
    for line in Path(name).read_text().splitlines():
        row = {k: np.nan if x is None else x for k, x in json.loads(line).items()}
        n = row.pop("step")
        found[n] = found.get(n, {}) | row
    return found


def read_disk(p: Program, directory) -> dict:
    """Return what each checkpoint in a directory has, by step: params, averages, model state."""
    return {
        int(match[1]): read_checkpoint(p, os.path.join(directory, name))
        for name in os.listdir(directory)
        if (match := re.fullmatch(r"\D*(\d+)(\.npz)?", name))
    }


def read_checkpoint(p: Program, path) -> dict:
    """Return the arrays of a checkpoint by name."""
    first = first_model_state(p)
    if p.model_state == "key":
        first["key"] = jax.random.key(0)

    def load(prefix, **average):
        params = optfn.load_params(path, template(p), model_state=first, **average)
        params, model_state = params if p.model_state else (params, None)
        return {prefix: whole(params), f"{prefix}model_state/": on_host(model_state)}

    trees = load("")
    if p.names("ema", "model_average"):
        trees |= load("average/", average=p.average_name or True)
    return {f"{name}{k}": x for name, tree in trees.items() for k, x in (tree or {}).items()}


def is_close(a, b, tolerance) -> bool:
    """Tell whether arrays are equal but for rounding."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return False
    finite = np.abs(a[np.isfinite(a)])
    scale = 1.0 + finite.max() if finite.size else 1.0
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * min(scale, 1e6) / 10, equal_nan=True)


def compare(p: Program, want: dict, got: dict) -> list:
    """Return the differences, as (name, wanted, found)."""
    tolerance = TOLERANCES["bfloat16" if p.is_rounded else p.dtype]
    near = functools.partial(is_close, tolerance=tolerance)
    bad = []
    for k in ("killed", "raised", "calls", "step", "stopped"):
        if want.get(k) != got.get(k):
            bad.append((k, want.get(k), got.get(k)))
    if want.get("raised") != got.get("raised"):
        return bad
    for k in ("params", "model_state", "average", "statistics"):
        for leaf, x in (want.get(k) or {}).items():
            if not near(x, (got.get(k) or {}).get(leaf, np.nan)):
                bad.append((f"{k}/{leaf}", x, (got.get(k) or {}).get(leaf)))
    found = got.get("history", {})
    for k, x in want.get("history", {}).items():
        if k not in found or not near(x, found[k]):
            bad.append((f"history/{k}", x, found.get(k)))
    if p.log:
        # A loss is read, and may end the run, when the next step is under way.
        last = max(want["log"], default=0) if "raised" in want else p.num_steps
        read = {n: line for n, line in got["log"].items() if n <= last}
        bad += compare_logs(want["log"], read, near)
    if sorted(want["disk"]) != sorted(got["disk"]):
        return [*bad, ("checkpoints", sorted(want["disk"]), sorted(got["disk"]))]
    for n, arrays in want["disk"].items():
        for name, x in arrays.items():
            if not near(x, got["disk"][n].get(name, np.nan)):
                bad.append((f"checkpoint {n}/{name}", x, got["disk"][n].get(name)))
    return bad


def compare_logs(want: dict, got: dict, near) -> list:
    """Return the differences of two logs; one of optfn has more, such as speeds."""
    if sorted(want) != sorted(got):
        return [("steps of the log", sorted(want), sorted(got))]
    bad = []
    for n, line in want.items():
        for k, x in line.items():
            x = x if np.isfinite(x) else np.nan
            if k not in got[n] or not near(x, got[n][k]):
                bad.append((f"log/{n} {k}", x, got[n].get(k)))
        if more := [k for k in got[n] if k.startswith("evaluation") and k not in line]:
            bad.append((f"log/{n} evaluation", None, more))
    return bad


def check(p: Program, directory: str | None = None) -> tuple[list, set]:
    """Return the differences between a program's two runs, and what the run reached."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = reference.run(p, source.WAYS)
        reached = want.pop("reached", set())
        try:
            with at_most(SECONDS):
                got = execute(p, directory)
        except Exception as error:
            return [(f"raised {type(error).__name__}", "", str(error))], reached
    return compare(p, want, got), reached
