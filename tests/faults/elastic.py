"""Runs that go on with another number of processes."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from faults.runs import BOUND, HERE, STEPS, Processes, environment, free_port, fresh
from faults.table import Skipped, fault, require


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
            [*command, str(HERE / "worker.py"), words],
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
