"""Checkpoints that are damaged, lost, or of another run."""

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import optfn
from faults import worker
from faults.runs import Processes, alone, goes_on
from faults.table import Wrong, fault, require
from optfn.checkpoint.newest import list_checkpoints


def saved(directory: Path, **options: Any) -> tuple[list[Path], Any]:
    """Return the checkpoints of a short run, and a template of its state."""
    alone(directory, steps=4, **options)
    step = optfn.make_train_step(worker.loss_fn, worker.optimizer())
    return list_checkpoints(directory), step.init(worker.params_of())


def refused(path: Path, template: Any) -> str:
    """Return the error with which a file is refused."""
    try:
        optfn.load_checkpoint(path, template)
    except ValueError as error:
        return str(error).replace(str(path), path.name)
    raise Wrong(f"{path.name} was loaded")


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@fault(
    "the newest checkpoint truncated at 100 places",
    "it is refused with its name; the one before is loaded",
    quick=True,
)
def truncated(directory: Path) -> str:
    (before, path), template = saved(directory)
    content = path.read_bytes()
    want, _ = optfn.load_checkpoint(before, template)
    for length in np.linspace(0, len(content) - 1, 100, dtype=int):
        path.write_bytes(content[:length])
        refused(path, template)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _ = optfn.restore_checkpoint(directory, template)
    require(same(state, want) and path.name in str(caught[0].message), "another one was loaded")
    return f"100 refused ({refused(path, template)})"


FLIPPED = "it is refused, or its arrays, history and position are as before"


@fault("one bit of a checkpoint flipped, 300 times", FLIPPED, quick=True)
def flipped(directory: Path) -> str:
    (_, path), template = saved(directory)
    return f"{flips([path], path, template, 300)} harmless (in the zip's own fields)"


@fault("one bit of a checkpoint in parts (orbax) flipped, 300 times", FLIPPED)
def flipped_parts(directory: Path) -> str:
    (_, path), template = saved(directory / "run")
    state, history = optfn.load_checkpoint(path, template)
    rng = np.random.default_rng(0)  # numbers that orbax does not compress: most flips hit them
    history |= {"loss": rng.random(4000, np.float32), "batches": rng.integers(0, 256, 2000, "u1")}
    path = optfn.save_checkpoint(directory, state, history, sharded=True, background=False)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return f"{flips(files, path, template, 300)} harmless (metadata that nothing reads)"


def flips(files: list[Path], path: Path, template: Any, times: int) -> str:
    """Flip bits of the files of a checkpoint, one at a time; say how many flips are refused."""
    pick, count = random.Random(0), 0
    want, sizes = optfn.load_checkpoint(path, template), [file.stat().st_size for file in files]
    for _ in range(times):
        (file,) = pick.choices(files, sizes)
        content = bytearray(file.read_bytes())
        place, bit = pick.randrange(len(content)), 1 << pick.randrange(8)
        content[place] ^= bit
        file.write_bytes(content)
        content[place] ^= bit
        try:
            found = optfn.load_checkpoint(path, template)
        except ValueError:
            count += 1
        else:
            is_same = found[1].keys() == want[1].keys() and same(found, want)
            require(is_same, f"a flip at byte {place} of {file.name} changed the checkpoint")
        file.write_bytes(content)
    return f"{count} refused, {times - count}"


@fault("a checkpoint of a run with another model or optimizer", "it is refused with its leaf")
def of_another_run(directory: Path) -> str:
    (_, path), _ = saved(directory)
    step = optfn.make_train_step(worker.loss_fn, worker.optimizer())
    params = worker.params_of() | {"w": np.zeros((6, 17), np.float32)}
    said = refused(path, step.init(params))
    other = optfn.make_train_step(worker.loss_fn, optfn.momentum(0.1, 0.9))
    refused(path, other.init(worker.params_of()))
    return said


@fault(
    "checkpoints of two runs with the same model swapped",
    "accepted: names, shapes and dtypes are the same, and optfn keeps no name of a run in a file",
)
def of_a_twin(directory: Path) -> str:
    (_, path), template = saved(directory / "one", seed=1)
    state, _ = optfn.load_checkpoint(path, template)
    require(int(state.step) == 4, "it was not loaded")
    return "loaded"


@fault("a checkpoint without its format's version, and of a newer format", "it is refused")
def other_format(directory: Path) -> str:
    (_, path), template = saved(directory)
    with np.load(path) as file:
        arrays = dict(file)
    version = arrays.pop("version")
    np.savez(path, **arrays)
    refused(path, template)
    np.savez(path, version=version + 1, **arrays)
    return refused(path, template)


COPIED = "it gets a copy of another worker's; the run ends bit for bit the same"


@fault("the newest checkpoint of one worker damaged", COPIED)
def damaged_of_one(directory: Path) -> str:
    with Processes(directory, steps=6) as run:
        run.ends()
    path = list_checkpoints(directory / "1")[-1]
    path.write_bytes(path.read_bytes()[:1000])
    return goes_on(directory)


@fault("the checkpoints of one worker lost", COPIED)
def lost_of_one(directory: Path) -> str:
    with Processes(directory, steps=6) as run:
        run.ends()
    shutil.rmtree(directory / "0")
    return goes_on(directory)
