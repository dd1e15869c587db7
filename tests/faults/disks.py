"""Disks that are full, or can be read only."""

import contextlib
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optfn
from faults import worker
from faults.runs import GONE, Processes, alone, do, fresh, goes_on, newest, undisturbed
from faults.table import fault, require


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a disk of 200 kB."""
    disk = fresh(directory / "0")
    do("mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def cannot_save(directory: Path, words: str, damage: Any, mend: Any, count: int = 1) -> str:
    """Damage the disk of process 0 after some steps: it ends by an error, and goes on later."""
    with small_disk(directory) as disk:
        with Processes(directory, count, pause=0.1) as run:
            run.wait_for(0, "step 3 ")
            damage(disk)
            seen = run.fails(0, rf"OSError: \[Errno \d+\] cannot save the state \({words}\)")
            if count > 1:
                run.fails(1, GONE)
        before = newest(disk)
        require(not list(disk.glob("*.unfinished")), "a part of a file was left")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            template = optfn.make_train_step(worker.loss_fn, worker.optimizer())
            state, _ = optfn.restore_checkpoint(disk, template.init(worker.params_of()))
        require(int(state.step) == before >= 2, f"the checkpoint before is of {int(state.step)}")
        mend(disk)
        want = undisturbed() if count > 1 else worker.digest(alone(None).params)
        return f"{seen}; {goes_on(directory, count, want)}"


def fill(disk: Path) -> None:
    """Fill a disk, and for a second also the space that a removed file gives back."""
    end = time.monotonic() + 1.0
    with open(disk / "filling", "wb", buffering=0) as file:
        while time.monotonic() < end:
            try:
                file.write(bytes(1024))
            except OSError:
                time.sleep(0.005)


def empty(disk: Path) -> None:
    (disk / "filling").unlink()


DISK = "an error names the file; the older checkpoint stays whole, and the run goes on from it"


@fault("a disk that is full while saving", DISK)
def disk_full(directory: Path) -> str:
    return cannot_save(directory, "No space left.*", fill, empty)


@fault("the disk of one worker of two is full", DISK + "; the others end as well")
def disk_full_of_one(directory: Path) -> str:
    return cannot_save(directory, "No space left.*", fill, empty, count=2)


@fault("a disk that becomes read-only", DISK)
def disk_read_only(directory: Path) -> str:
    def mount(mode: str) -> Callable[[Path], None]:
        return lambda disk: do("mount", "-o", f"remount,{mode}", str(disk))

    return cannot_save(directory, "Read-only.*", mount("ro"), mount("rw"))
