"""What happens to a run that something goes wrong with: a table of faults, tried on real processes.

    make faults            or            python tests/faults.py [--quick] [--only NAME …]

Each fault is a function: it does the damage, and returns what was seen if that is what is promised.
A run that has not ended in time is a hang, and fails; so do workers that end with different params.
Faults of links and disks need root, and Linux's ip, tc, unshare and mount; elsewhere they are left
out with the reason. The exit status is 1 if a fault fails.
"""

import argparse
import contextlib
import fcntl
import functools
import heapq
import importlib.util
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import fault_worker
import jax
import numpy as np

import optfn
from optfn.distributed import data_mesh
from optfn.run.newest import checkpoints

HERE = Path(__file__).parent
STEPS = fault_worker.STEPS
BOUND = 120  # seconds in which each run ends; on a loaded machine it takes some of them to start
GONE = r"heartbeat timeout|Connection (closed|reset)|was disconnected|Gloo|UNAVAILABLE|DEADLINE"


class Wrong(Exception):
    """A fault ended in another way than promised."""


class Skipped(Exception):
    """The machine lacks what a fault needs."""


class Fault(NamedTuple):
    """A fault: `run` takes an empty directory and returns what was seen."""

    run: Callable[[Path], str]
    what: str
    promised: str
    quick: bool


FAULTS: dict[str, Fault] = {}


def fault(what: str, promised: str, *, quick: bool = False) -> Callable[[Any], Any]:
    """Add a function to the table."""

    def add(run: Callable[[Path], str]) -> Callable[[Path], str]:
        FAULTS[run.__name__] = Fault(run, what, promised, quick)
        return run

    return add


def require(holds: object, words: str) -> None:
    """Raise `Wrong` unless something holds."""
    if not holds:
        raise Wrong(words)


# Runs


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
            command = [*around(i), sys.executable, str(HERE / "fault_worker.py"), words]
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
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@functools.cache
def undisturbed(steps: int = STEPS) -> str:
    """Return the hash of params of the run without a fault, on two devices of this process."""
    batches = fault_worker.batches()
    return fault_worker.digest(fault_worker.train(data_mesh(2), None, batches, steps=steps).params)


def alone(directory: Path | None, **options: Any) -> Any:
    """Return the state after a run on one device of this process."""
    return fault_worker.train(None, directory, fault_worker.batches(), **options)


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
    found = checkpoints(directory)
    return int(found[-1].stem[5:]) if found else 0


# Processes that die


def killed(directory: Path, *victims: int, words: str = "step 3", seed: int = 0) -> str:
    """Kill processes of two at a random moment after some words; start again."""
    with Processes(directory, pause=0.03, slow_disk=0.03) as run:
        run.wait_for(victims[0], words)
        time.sleep(random.Random(seed).uniform(0.0, 0.2))
        began = time.monotonic()
        for i in victims:
            run.signal(i, signal.SIGKILL)
        seen = [run.fails(i, GONE) for i in {0, 1} - set(victims)]
        seconds = time.monotonic() - began
    ended = [f"the other ends after {seconds:.1f} s ({words})" for words in seen]
    return "; ".join([*ended, goes_on(directory)])


BIT_FOR_BIT = "the others end with an error; started again, the run ends bit for bit the same"


@fault("kill −9 of a worker", BIT_FOR_BIT, quick=True)
def kill_worker(directory: Path) -> str:
    return killed(directory, 1)


@fault("kill −9 of the coordinator", BIT_FOR_BIT)
def kill_coordinator(directory: Path) -> str:
    return killed(directory, 0)


@fault("power cut: kill −9 of all", "started again, the run ends bit for bit the same")
def kill_all(directory: Path) -> str:
    return killed(directory, 0, 1)


@fault("kill −9 of a worker while it saves, at three random moments", BIT_FOR_BIT)
def kill_while_saving(directory: Path) -> str:
    seen = [killed(fresh(directory / str(k)), 1, words="saving", seed=k) for k in range(3)]
    return seen[-1]


@fault(
    "kill −9 of a worker while both write a checkpoint in parts (orbax), at three random moments",
    BIT_FOR_BIT,
)
def kill_while_saving_parts(directory: Path) -> str:
    options = {"shard": "state", "each": {i: {"directory": str(directory / "run")} for i in (0, 1)}}
    whole = {i: {"directory": str(directory / "whole")} for i in (0, 1)}
    with Processes(directory, **options | {"each": whole}) as run:
        want = run.ends()[0]
    for k in range(3):
        with Processes(directory, pause=0.1, **options) as run:
            run.wait_for(1, f"step {newest(directory / 'run') + 2} ")
            time.sleep(random.Random(k).uniform(0.0, 0.2))
            run.signal(1, signal.SIGKILL)
            run.fails(0, GONE)
    with Processes(directory, **options) as run:
        found = run.ends()[0]
    require(found == want, f"the run that goes on ends at {found}, not {want}")
    return "goes on bit for bit"


def fresh(directory: Path) -> Path:
    directory.mkdir()
    return directory


@fault(
    "kill −9 of a run of one process, at three random moments",
    "started again, the run ends bit for bit the same",
)
def kill_alone(directory: Path) -> str:
    pick, want = random.Random(0), fault_worker.digest(alone(None).params)
    for _ in range(3):
        with Processes(directory, 1, pause=0.03, slow_disk=0.02) as run:
            run.wait_for(0, f"step {newest(directory / '0') + 1} ")
            time.sleep(pick.uniform(0.0, 0.1))
            run.signal(0, signal.SIGKILL)
            run.wait(0)
    return goes_on(directory, 1, want)


def signalled(directory: Path, number: signal.Signals, *receivers: int, count: int = 2) -> str:
    """Send a signal to some processes; all end well after one step, with a checkpoint of it."""
    with Processes(directory, count, pause=0.5, save_every=100) as run:
        run.wait_for(receivers[0], "step 2 ")
        for i in receivers:
            run.signal(i, number)
        ends = run.ends()
    step, found, _ = ends[0]
    want = undisturbed(step) if count > 1 else fault_worker.digest(alone(None, steps=step).params)
    saved = [newest(directory / str(i)) for i in range(count)]
    require(2 <= step < STEPS, f"the run ended after step {step}")
    require(saved == [step] * count, f"checkpoints of steps {saved}, not {step}")
    require(found == want, "params are not those of that step")
    return f"all end after step {step}, and save it"


ALL_END = "all processes end well after the same step, which is saved"


@fault("SIGTERM to one process of two", ALL_END)
def sigterm_one(directory: Path) -> str:
    return signalled(directory, signal.SIGTERM, 1)


@fault("SIGTERM to both processes", ALL_END)
def sigterm_all(directory: Path) -> str:
    return signalled(directory, signal.SIGTERM, 0, 1)


@fault("SIGINT to one process of two", ALL_END)
def sigint_one(directory: Path) -> str:
    return signalled(directory, signal.SIGINT, 0)


@fault("SIGINT to both processes, as Ctrl-C sends it", ALL_END)
def sigint_all(directory: Path) -> str:
    return signalled(directory, signal.SIGINT, 0, 1)


@fault("SIGTERM and SIGINT to a run of one process", "it ends well after the step and saves it")
def signal_alone(directory: Path) -> str:
    signalled(fresh(directory / "term"), signal.SIGTERM, 0, count=1)
    return signalled(fresh(directory / "int"), signal.SIGINT, 0, count=1)


SAME = "the run ends bit for bit the same"


@fault("a worker stopped for 3 s and continued", SAME)
def stop_and_continue(directory: Path) -> str:
    with Processes(directory, pause=0.05, heartbeat=20) as run:
        run.wait_for(1, "step 3 ")
        run.signal(1, signal.SIGSTOP)
        time.sleep(3.0)
        run.signal(1, signal.SIGCONT)
        return ends_the_same(run)


@fault("a worker stopped for longer than the heartbeat timeout", BIT_FOR_BIT)
def stop_for_long(directory: Path) -> str:
    with Processes(directory, pause=0.05, heartbeat=4) as run:
        run.wait_for(1, "step 3 ")
        run.signal(1, signal.SIGSTOP)
        began = time.monotonic()
        seen = run.fails(0, GONE)
        seconds = time.monotonic() - began
        run.signal(1, signal.SIGCONT)
        run.fails(1, GONE)
    return f"the other ends after {seconds:.1f} s ({seen}); {goes_on(directory)}"


@fault("a worker that never starts", "the others end with an error within the time to initialize")
def never_starts(directory: Path) -> str:
    with Processes(directory, 1, processes=2, initialization=10) as run:
        return run.fails(0, r"DEADLINE_EXCEEDED[^\n]{0,80}")


# Other numbers of processes


class Stage(NamedTuple):
    """The machines of a stage of a run, one process each, and the event that ends it.

    "kill b" ends a machine, "call" the stage because another machine has come; "" is the last one.
    """

    machines: str
    event: str = ""
    words: str = ""  # when it happens: process 0 has written them
    after: float = 0.0  # seconds without a machine before the stage


class Went(NamedTuple):
    """How a stage went: the step that it began after, those that it made, its end."""

    count: int
    begin: int
    made: int
    digest: str
    seconds: float  # from the event to the first step of the next stage


def stages(directory: Path, plan: list[Stage], **options: Any) -> list[Went]:
    """Start a run again for each stage, as an elastic launcher does; say how the stages went.

    It stands in for one: as torchrun, it gives each process its number, their number and the
    coordinator, waits for the others of one that has died, and asks all to end by SIGTERM when a
    machine comes. Each machine has a disk of its own, but for checkpoints in parts, and gets
    another number in each stage.
    """
    found, event_at = [], time.monotonic()
    for k, stage in enumerate(plan):
        places = ["shared" if "shard" in options else m for m in stage.machines]
        each = {i: {"directory": str(directory / place)} for i, place in enumerate(places)}
        logs = fresh(directory / f"stage {k}")
        time.sleep(stage.after)
        with Processes(logs, len(stage.machines), each, **EACH | options) as run:
            run.wait_for(0, "step ")
            seconds = time.monotonic() - event_at
            if stage.event:
                run.wait_for(0, stage.words)
            event_at, watched = time.monotonic(), 0
            if stage.event.startswith("kill"):
                victim = stage.machines.index(stage.event[-1])
                watched = int(victim == 0)
                run.signal(victim, signal.SIGKILL)
                for i in range(len(stage.machines)):
                    run.wait(i)
                digest = ""
            else:
                if stage.event:
                    run.signal(0, signal.SIGTERM)
                digest = run.ends()[0][1]
            steps = [
                int(n) for n in re.findall(r"^step (\d+)", run.texts(watched)[0], re.MULTILINE)
            ]
        per_call = options.get("local_steps", 1)
        begin = steps[0] - per_call
        found.append(Went(len(stage.machines), begin, steps[-1] - begin, digest, seconds))
    return found


# The pause after each step leaves the time to act on what a step has printed.
EACH = {"examples": 12, "pause": 0.5, "heartbeat": 5}


def without_deaths(directory: Path, went: list[Went], **options: Any) -> str:
    """Return the hash of params of a run that stops by itself where the numbers changed."""
    ends = [*(stage.begin for stage in went[1:]), STEPS]
    options = EACH | options | {"pause": 0}
    for stage, end in zip(went, ends, strict=True):
        places = ["shared" if "shard" in options else str(i) for i in range(stage.count)]
        each = {i: {"directory": str(directory / place)} for i, place in enumerate(places)}
        with Processes(directory, stage.count, each, steps=end, **options) as run:
            last = run.ends()[0]
    return last[1]


def elastic(directory: Path, *plan: Stage, **options: Any) -> str:
    """Go through the stages of a run, and compare it with one that has the same without deaths."""
    went = stages(fresh(directory / "run"), list(plan), **options)
    want = without_deaths(fresh(directory / "same"), went, **options)
    numbers = ", ".join(f"{x.count} from step {x.begin}" for x in went)
    require(went[-1].digest == want, f"difference: {numbers}: {went[-1].digest}, not {want}")
    made = sum(x.made for x in went)
    words = ", ".join(f"{x.seconds:.1f}" for x in went[1:])
    return f"{numbers}: the same bits; {STEPS} steps kept of {made}; on again after {words} s"


ELASTIC = (
    "those who live go on from the newest checkpoint, bit for bit as with the same numbers of "
    "workers without deaths"
)


@fault("kill −9 of one of three workers: on with two, then with three again", ELASTIC)
def elastic_worker(directory: Path) -> str:
    plan = Stage("abc", "kill b", "step 3 "), Stage("ac", "call", "step 7 "), Stage("abc")
    return elastic(directory, *plan, save_every=2)


@fault("kill −9 of the coordinator of three, which save by the clock: on with two", ELASTIC)
def elastic_coordinator(directory: Path) -> str:
    return elastic(directory, Stage("abc", "kill a", "step 5 "), Stage("cb"), save_seconds=0.5)


@fault("a machine that comes late: on with three instead of two", ELASTIC)
def elastic_late(directory: Path) -> str:
    return elastic(directory, Stage("ab", "call", "step 4 "), Stage("cab"))


@fault("kill −9 of one of three workers with compressed gradients: on with two", ELASTIC)
def elastic_exchange(directory: Path) -> str:
    return elastic(directory, Stage("abc", "kill c", "step 4 "), Stage("ab"), exchange=True)


@fault("kill −9 of one of three workers with local steps: on with two", ELASTIC)
def elastic_local_steps(directory: Path) -> str:
    options = {"local_steps": 2, "examples": 24}
    return elastic(directory, Stage("abc", "kill c", "step 4 "), Stage("ab"), **options)


@fault("kill −9 of one of three workers with divided state: on with two, then with three", ELASTIC)
def elastic_state(directory: Path) -> str:
    plan = Stage("abc", "kill b", "step 3 "), Stage("ac", "call", "step 7 "), Stage("abc")
    return elastic(directory, *plan, shard="state")


@fault(
    "kill −9 of one of three workers with divided params and rows of a table: on with two", ELASTIC
)
def elastic_table(directory: Path) -> str:
    plan = Stage("abc", "kill c", "step 4 "), Stage("ab")
    return elastic(directory, *plan, shard="params", table=True)


@fault(
    "kill −9 of one of three workers: steps made again, by `save_every`; and where all wait 20 s "
    "for its machine",
    "not more steps are made again than lie between three checkpoints",
)
def elastic_goodput(directory: Path) -> str:
    seen = []
    for every, machines, after in (
        (1, "ac", 0.0),
        (3, "ac", 0.0),
        (6, "ac", 0.0),
        (3, "abc", 20.0),
    ):
        plan = [Stage("abc", "kill b", "step 8 "), Stage(machines, after=after)]
        went = stages(fresh(directory / f"{every} {machines}"), plan, save_every=every)
        made = sum(x.made for x in went)
        require(made - STEPS <= 2 * every + 1, f"{made} steps with save_every={every}")
        where = "waiting: " if after else ""
        seen.append(
            f"{where}save_every={every}: {STEPS} kept of {made} ({STEPS / made:.0%}), on again "
            f"after {went[1].seconds:.1f} s"
        )
    return "; ".join(seen)


@fault("torchrun: kill −9 of one of three machines, agent and worker: on with two", ELASTIC)
def elastic_torchrun(directory: Path) -> str:
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    port, run = free_port(), fresh(directory / "run")
    agents = [torchrun(run / name, port, name == "a") for name in "abc"]
    try:
        wait_for_line(run / "c.out", "step 4 ")
        end_machine(run / "c.out", agents.pop())
        for name, agent in zip("ab", agents, strict=True):
            require(agent.wait(BOUND) == 0, (run / f"{name}.err").read_text()[-1000:])
    finally:
        for name, agent in zip("abc", agents, strict=False):
            end_machine(run / f"{name}.out", agent)
    went = []
    for part in re.split(r"^worker \d+ of ", (run / "a.out").read_text(), flags=re.MULTILINE)[1:]:
        steps = [int(n) for n in re.findall(r"^step (\d+)", part, re.MULTILINE)]
        digest = re.findall(r"^ended \d+ (\w+)", part, re.MULTILINE)
        if steps:
            begin = steps[0] - 1
            went.append(
                Went(int(part.split()[0]), begin, steps[-1] - begin, *digest[:1] or [""], 0)
            )
    require([x.count for x in went] == [3, 2], f"stages {went}")
    want = without_deaths(fresh(directory / "same"), went)
    require(went[-1].digest == want, f"difference: {went[-1].digest}, not {want}")
    return f"3 from step 0, 2 from step {went[1].begin}: the same bits"


def torchrun(directory: Path, port: int, is_host: bool) -> "subprocess.Popen[bytes]":
    """Start the agent of a machine, whose worker saves in `directory`.

    The agents meet at a store that the host keeps. Without a host by name it is the first to come,
    and a run ends with the machine that has the store.
    """
    words = json.dumps(EACH | {"agent": True, "directory": str(directory)})
    settings = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    settings += f",is_host={int(is_host)}"
    options = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={settings}"]
    options += ["--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=9"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1"]
    with open(f"{directory}.out", "w") as out, open(f"{directory}.err", "w") as error:
        return subprocess.Popen(
            [*command, str(HERE / "fault_worker.py"), words],
            env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=out,
            stderr=error,
        )


def end_machine(log: Path, agent: "subprocess.Popen[bytes]") -> None:
    """Kill the agent of a machine and its worker, whose number is in the log."""
    agent.kill()
    agent.wait()
    for worker in re.findall(r"pid (\d+)", log.read_text())[-1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)


def wait_for_line(path: Path, words: str) -> None:
    """Wait until a file has some words."""
    end = time.monotonic() + BOUND
    while words not in path.read_text():
        require(time.monotonic() < end, f"hang: {path.name} never had {words!r}")
        time.sleep(0.05)


# Workers that are not like the others


def differs(directory: Path, pattern: str, **options: Any) -> str:
    """Start a run whose worker 1 has options of its own: all end with an error."""
    with Processes(directory, each={1: options}) as run:
        seen, _ = (run.fails(i, pattern) for i in range(2))
    return seen


OTHER_PARAMS = "an error in all processes that names the leaf"


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
    "NaN, Inf, a huge and a denormal number in the examples of one worker",
    "skip_nonfinite skips the first two on all workers, the clip bounds the third; params are "
    "finite, and those of one process",
)
def bad_gradients(directory: Path) -> str:
    # Twice the third, which the gradient of a square may have on its way, is a float32 as well.
    bad = (float("nan"), float("inf"), 1e38, 1e-40)
    with Processes(directory, bad=bad) as run:
        step, found, skipped = run.ends()[0]
    require((step, skipped) == (STEPS, 2), f"{skipped} of {step} steps were skipped")
    state = fault_worker.train(data_mesh(2), None, fault_worker.batches(bad=bad))
    require(all(np.isfinite(x).all() for x in jax.tree.leaves(state.params)), "not finite")
    require(found == fault_worker.digest(state.params), "params are not those of one process")
    return "2 steps skipped on all; params the same bits, finite"


# Two levels: four processes, two machines of two


TWO = {"count": 4, "two_level": True}
REPLICAS = "an error in all processes that says of which leaf the copies differ"


def flipped_in_one(directory: Path, **options: Any) -> str:
    """Flip a bit of a parameter in the last process: all end by an error."""
    count = options.get("count", 2)
    with Processes(directory, each={count - 1: {"flip": 4}}, **options) as run:
        return run.all_fail(r"the copies of '[^']+' differ between the devices")


@fault("one bit of a parameter flipped in the memory of one of two workers", REPLICAS)
def bit_of_params(directory: Path) -> str:
    return flipped_in_one(directory)


@fault("two levels: one bit of a parameter flipped in the memory of one of four workers", REPLICAS)
def two_level_bit(directory: Path) -> str:
    return flipped_in_one(directory, **TWO)


@fault("two levels: SIGTERM to one process of four", ALL_END)
def two_level_sigterm(directory: Path) -> str:
    options = TWO | {"pause": 0.5, "save_every": 100}
    with Processes(directory, **options) as run:
        run.wait_for(3, "step 2 ")
        run.signal(3, signal.SIGTERM)
        step, found, _ = run.ends()[0]
    require(2 <= step < STEPS, f"the run ended after step {step}")
    saved = [newest(directory / str(i)) for i in range(4)]
    require(saved == [step] * 4, f"checkpoints of steps {saved}, not {step}")
    with Processes(fresh(directory / "same"), steps=step, **TWO) as run:
        require(run.ends()[0][1] == found, "params are not those of that step")
    return f"all end after step {step}, and save it"


@fault("two levels: a worker of four with other params", OTHER_PARAMS)
def two_level_params(directory: Path) -> str:
    with Processes(directory, each={3: {"seed": 1}}, **TWO) as run:
        return run.all_fail(r"same params, but '[bvw]' in process 3 differs")


@fault("two levels: kill −9 of one of four workers", BIT_FOR_BIT)
def two_level_kill(directory: Path) -> str:
    with Processes(fresh(directory / "whole"), **TWO) as run:
        want = run.ends()[0][1]
    with Processes(directory, pause=0.1, **TWO) as run:
        run.wait_for(2, "step 3 ")
        run.signal(2, signal.SIGKILL)
        for i in (0, 1, 3):
            run.fails(i, GONE)
    with Processes(directory, **TWO) as run:
        found = run.ends()[0]
    require(found[:2] == (STEPS, want), f"the run that goes on ends at {found}, not {want}")
    return "goes on bit for bit"


# Links


@contextlib.contextmanager
def cable(spaces: list[str]) -> Iterator[None]:
    """Join two namespaces by a link, eth0 in each."""
    end = ("type", "veth", "peer", "name", "eth0", "netns", spaces[1])
    do("ip", "-n", spaces[0], "link", "add", "eth0", *end)
    yield


@contextlib.contextmanager
def lossy_cable(spaces: list[str]) -> Iterator[None]:
    """Join two namespaces by a process that loses and delays packets, as Linux's netem does."""
    ends = []
    for i, name in enumerate(spaces):
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            device = f"f{os.getpid()}-{i}"
            fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", device.encode(), 0x1002))  # a tap
        except OSError as error:
            raise Skipped(f"/dev/net/tun: {error}") from None
        do("ip", "link", "set", device, "netns", name)
        do("ip", "-n", name, "link", "set", device, "name", "eth0")
        ends.append(end)
    over = threading.Event()
    relay = threading.Thread(target=relayed, args=(ends, over))
    relay.start()
    try:
        yield
    finally:
        over.set()
        relay.join()
        for end in ends:
            os.close(end)


def relayed(ends: list[int], over: threading.Event) -> None:
    """Pass packets between two devices: 2 % are lost, 20 % overtaken by others within 20 ms."""
    pick = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    for number in itertools.count():
        if over.is_set():
            return
        for end in select.select(ends, [], [], 0.002)[0]:
            packet, other = os.read(end, 1 << 16), ends[1 - ends.index(end)]
            late = pick.uniform(0.0, 0.02) if pick.random() < 0.2 else 0.0
            if pick.random() >= 0.02:
                heapq.heappush(waiting, (time.monotonic() + late, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is gone, or its queue full
                os.write(other, packet)


@contextlib.contextmanager
def network(cable: Any = cable) -> Iterator[tuple[list[str], Callable[[int], list[str]]]]:
    """Join two processes by a link; yield their namespaces, and what enters the i-th."""
    spaces = [f"faults{os.getpid()}-{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in spaces:
            do("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            do("ip", "-n", name, "link", "set", "lo", "up")
        stack.enter_context(cable(spaces))
        for i, name in enumerate(spaces):
            do("ip", "-n", name, "address", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            do("ip", "-n", name, "link", "set", "eth0", "up")
        hosts = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".hosts"))
        hosts.write("127.0.0.1 localhost\n10.78.0.1 f0\n10.78.0.2 f1\n")
        hosts.flush()
        script = f'mount --bind {hosts.name} /etc/hosts && hostname f$0 && exec "$@"'

        def enter(i: int) -> list[str]:
            return ["ip", "netns", "exec", spaces[i], "unshare", "-mu", "sh", "-c", script, str(i)]

        yield spaces, enter


def do(*words: str) -> None:
    """Run a command of the system; without it, or without the right to, the fault is left out."""
    if shutil.which(words[0]) is None:
        raise Skipped(f"no {words[0]} on the path")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")


def linked(directory: Path, enter: Any, **options: Any) -> Processes:
    """Start two processes in their namespaces."""
    return Processes(directory, around=enter, address="10.78.0.1", **options)


def disturbed_link(directory: Path, *discipline: str) -> str:
    """Run over links that tc disturbs."""
    with network() as (spaces, enter):
        for name in spaces:
            do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *discipline)
        with linked(directory, enter, heartbeat=20) as run:
            return ends_the_same(run)


@fault("a link throttled to 1 Mbit/s", SAME)
def link_throttled(directory: Path) -> str:
    with network() as (spaces, enter):
        for name in spaces:
            rate = ("rate", "1mbit", "burst", "4kb", "latency", "400ms")
            do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        return over(directory, enter)


@fault(
    "a link that loses 2 % of the packets, and delivers 20 % of them up to 20 ms later than others",
    SAME,
)
def link_lossy(directory: Path) -> str:
    with network(cable=lossy_cable) as (_, enter):
        return over(directory, enter)


def over(directory: Path, enter: Callable[[int], list[str]]) -> str:
    """Run over links, and compare the end with that of an undisturbed run."""
    with linked(directory, enter, heartbeat=20) as run:
        return ends_the_same(run)


@fault("a link that is cut", BIT_FOR_BIT)
def link_cut(directory: Path) -> str:
    with network() as (spaces, enter), linked(directory, enter, pause=0.05, heartbeat=4) as run:
        run.wait_for(1, "step 3 ")
        do("ip", "-n", spaces[1], "link", "set", "eth0", "down")
        began = time.monotonic()
        seen = [run.fails(i, GONE) for i in range(2)]
        seconds = time.monotonic() - began
    return f"both end after {seconds:.1f} s ({seen[0]}); {goes_on(directory)}"


@fault("a link that is cut for 2 s", SAME)
def link_interrupted(directory: Path) -> str:
    with network() as (spaces, enter), linked(directory, enter, pause=0.1, heartbeat=20) as run:
        run.wait_for(1, "step 3 ")
        do("ip", "-n", spaces[1], "link", "set", "eth0", "down")
        time.sleep(2.0)
        do("ip", "-n", spaces[1], "link", "set", "eth0", "up")
        return ends_the_same(run)


# Disks


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
            template = optfn.make_train_step(fault_worker.loss_fn, fault_worker.optimizer())
            state, _ = optfn.restore_checkpoint(disk, template.init(fault_worker.params_of()))
        require(int(state.step) == before >= 2, f"the checkpoint before is of {int(state.step)}")
        mend(disk)
        want = undisturbed() if count > 1 else fault_worker.digest(alone(None).params)
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


@fault("a disk that is full while saving", DISK, quick=True)
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


# Checkpoints


def saved(directory: Path, **options: Any) -> tuple[list[Path], Any]:
    """Return the checkpoints of a short run, and a template of its state."""
    alone(directory, steps=4, **options)
    step = optfn.make_train_step(fault_worker.loss_fn, fault_worker.optimizer())
    return checkpoints(directory), step.init(fault_worker.params_of())


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
    step = optfn.make_train_step(fault_worker.loss_fn, fault_worker.optimizer())
    params = fault_worker.params_of() | {"w": np.zeros((6, 17), np.float32)}
    said = refused(path, step.init(params))
    other = optfn.make_train_step(fault_worker.loss_fn, optfn.momentum(0.1, 0.9))
    refused(path, other.init(fault_worker.params_of()))
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
    path = checkpoints(directory / "1")[-1]
    path.write_bytes(path.read_bytes()[:1000])
    return goes_on(directory)


@fault("the checkpoints of one worker lost", COPIED)
def lost_of_one(directory: Path) -> str:
    with Processes(directory, steps=6) as run:
        run.ends()
    shutil.rmtree(directory / "0")
    return goes_on(directory)


# Clocks


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


# The table


class Result(NamedTuple):
    """How a fault ended: "as promised", "WRONG" or "left out"."""

    name: str
    outcome: str
    seen: str
    seconds: float


def tried(name: str) -> Result:
    """Try a fault in an empty directory."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        try:
            outcome, seen = "as promised", FAULTS[name].run(Path(directory))
        except Skipped as why:
            outcome, seen = "left out", str(why)
        except Wrong as why:
            outcome, seen = "WRONG", str(why)
    return Result(name, outcome, " ".join(seen.split()), time.monotonic() - began)


def table(results: list[Result]) -> str:
    """Return the results as a table in Markdown, and their numbers."""
    lines = ["| fault | promised | result | s | `make faults ONLY=` |", "|---|---|---|---|---|"]
    for r in results:
        fault = FAULTS[r.name]
        seen = f"{r.outcome}: {r.seen}".replace("|", "\\|")
        lines.append(f"| {fault.what} | {fault.promised} | {seen} | {r.seconds:.0f} | `{r.name}` |")
    good, wrong, out = (
        sum(r.outcome == k for r in results) for k in ("as promised", "WRONG", "left out")
    )
    hangs, silent = (sum(word in r.seen for r in results) for word in ("hang:", "difference:"))
    lines += [
        "",
        f"{len(results)} faults tried: {good} as promised, {wrong} wrong, {out} left out; {hangs} "
        f"hangs, {silent} silent differences; "
        f"{sum(r.seconds for r in results) / 60:.0f} minutes.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Try the faults that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="those of the test suite")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="NAME")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    # Two devices, as the workers have together.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    names = options.only or [k for k, f in FAULTS.items() if f.quick or not options.quick]
    from tqdm import tqdm

    results: list[Result] = []
    with tqdm(names, unit="fault", file=sys.stderr) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            results.append(tried(name))
            if options.out:
                options.out.write_text(table(results))
    print(table(results))
    sys.exit(any(r.outcome == "WRONG" for r in results))


if __name__ == "__main__":
    main()
