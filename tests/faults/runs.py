"""Runs of several processes, and how they end."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import worker
from faults.table import Skipped, Wrong, require
from optfn.checkpoint.newest import list_checkpoints
from optfn.distributed import data_mesh

HERE = Path(__file__).parent
STEPS = worker.STEPS
BOUND = 120  # seconds in which each run ends; on a loaded machine it takes some of them to start
GONE = r"heartbeat timeout|Connection (closed|reset)|was disconnected|Gloo|UNAVAILABLE|DEADLINE"

# What several faults promise.
BIT_FOR_BIT = "the others end with an error; started again, the run ends bit for bit the same"
ALL_END = "all processes end well after the same step, which is saved"
SAME = "the run ends bit for bit the same"
OTHER_PARAMS = "an error in all processes that names the leaf"
REPLICAS = "an error in all processes that says of which leaf the copies differ"


class Processes:
    """The processes of one run, process i with the directory i. All have ended after `with`."""

    def __init__(
        self,
        directory: Path,
        count: int = 2,
        each: dict[int, dict[str, Any]] | None = None,
        around: Callable[[int], list[str]] = lambda i: [],
        **options: Any,
    ) -> None:
        self.started = []
        self.files = []
        port = {"port": free_port()}
        for i in range(count):
            own = {"directory": str(directory / str(i)), "process": i, "processes": count}
            words = json.dumps(port | own | options | (each or {}).get(i, {}))
            files = [open(directory / f"{i}.{kind}", "w+") for kind in ("out", "err")]  # noqa: SIM115
            command = [*around(i), sys.executable, str(HERE / "worker.py"), words]
            self.files.append(files)
            self.started.append(
                subprocess.Popen(command, env=environment(), stdout=files[0], stderr=files[1])
            )

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for file in (file for files in self.files for file in files):
            file.close()

    def texts(self, i: int) -> tuple[str, str]:
        """Return what a process has written to stdout and stderr."""
        found = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in self.files[i]]
        return found[0], found[1]

    def wait_for(self, i: int, words: str) -> None:
        """Wait until a process has written some words."""
        end = time.monotonic() + BOUND
        while words not in self.texts(i)[0]:
            require(time.monotonic() < end, f"hang: process {i} never wrote {words!r}")
            out, error = self.texts(i)
            ended = self.started[i].poll() is not None and words not in self.texts(i)[0]
            require(not ended, f"process {i} ended early: {out[-300:]}{error[-1000:]}")
            time.sleep(0.01)

    def signal(self, i: int, number: signal.Signals) -> None:
        """Send a signal to a process."""
        self.started[i].send_signal(number)

    def wait(self, i: int, bound: float = BOUND) -> int:
        """Return the exit status of a process; one that does not end is a hang."""
        try:
            return self.started[i].wait(bound)
        except subprocess.TimeoutExpired:
            raise Wrong(f"hang: process {i} still ran after {bound:.0f} s") from None

    def ends(self) -> list[tuple[int, str, int]]:
        """Return (step, hash of params, skipped steps) of all, which end well."""
        found = []
        for i in range(len(self.started)):
            code = self.wait(i)
            out, error = self.texts(i)
            require(code == 0, f"process {i} has status {code}: {error[-1000:]}")
            words = out.splitlines()[-1].split()
            found.append((int(words[1]), words[2], int(words[3])))
        require(len(set(found)) == 1, f"silent difference: {found}")
        return found

    def fails(self, i: int, pattern: str) -> str:
        """Return the words of an error that ends a process."""
        code = self.wait(i)
        error = self.texts(i)[1]
        match = re.search(pattern, error)
        require(code != 0 and match, f"process {i} has status {code}: {error[-1500:]}")
        assert match is not None
        return match[0]

    def all_fail(self, pattern: str) -> str:
        """Return the words of an error that ends all processes, as the first one has it."""
        first, *_ = [self.fails(i, pattern) for i in range(len(self.started))]
        return first


def environment() -> dict[str, str]:
    """Return the environment of a worker: one device on the CPU."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@functools.cache
def undisturbed(steps: int = STEPS) -> str:
    """Return the hash of params of the run without a fault, on two devices of this process."""
    batches = worker.batches()
    return worker.digest(worker.train(data_mesh(2), None, batches, steps=steps).params)


def alone(directory: Path | None, **options: Any) -> Any:
    """Return the state after a run on one device of this process."""
    return worker.train(None, directory, worker.batches(), **options)


def goes_on(directory: Path, count: int = 2, want: str | None = None) -> str:
    """Start the run again and compare its end with that of an undisturbed one."""
    want = undisturbed() if want is None else want
    with Processes(directory, count) as run:
        found = run.ends()[0]
    require(found[:2] == (STEPS, want), f"the run that goes on ends at {found}, not {want}")
    return "goes on bit for bit"


def ends_the_same(run: Processes) -> str:
    """Compare the end of a run that was not killed with that of an undisturbed one."""
    found = run.ends()[0]
    require(found[:2] == (STEPS, undisturbed()), f"the run ends at {found}")
    return "ends bit for bit the same"


def newest(directory: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    found = list_checkpoints(directory)
    return int(found[-1].stem[5:]) if found else 0


def fresh(directory: Path) -> Path:
    directory.mkdir()
    return directory


def do(*words: str) -> None:
    """Run a command of the system; without it, or without the right to, the fault is left out."""
    if shutil.which(words[0]) is None:
        raise Skipped(f"no {words[0]} on the path")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
