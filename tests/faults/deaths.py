"""Processes that die, end by a signal, stop or never start."""

import random
import signal
import time
from pathlib import Path

from faults import worker
from faults.runs import (
    ALL_END,
    BIT_FOR_BIT,
    GONE,
    SAME,
    STEPS,
    Processes,
    alone,
    ends_the_same,
    fresh,
    goes_on,
    newest,
    undisturbed,
)
from faults.table import fault, require


def killed(
    directory: Path, *victims: int, words: str = "step 3", seed: int = 0, heartbeat: int = 10
) -> str:
    """Kill processes of two at a random moment after some words; start again."""
    with Processes(directory, pause=0.03, slow_disk=0.03, heartbeat=heartbeat) as run:
        run.wait_for(victims[0], words)
        time.sleep(random.Random(seed).uniform(0.0, 0.2))
        began = time.monotonic()
        for i in victims:
            run.signal(i, signal.SIGKILL)
        seen = [run.fails(i, GONE) for i in {0, 1} - set(victims)]
        seconds = time.monotonic() - began
    ended = [f"the other ends after {seconds:.1f} s ({words})" for words in seen]
    return "; ".join([*ended, goes_on(directory)])


@fault("kill −9 of a worker", BIT_FOR_BIT, quick=True)
def kill_worker(directory: Path) -> str:
    return killed(directory, 1, heartbeat=4)


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


@fault(
    "kill −9 of a run of one process, at three random moments",
    "started again, the run ends bit for bit the same",
)
def kill_alone(directory: Path) -> str:
    pick, want = random.Random(0), worker.digest(alone(None).params)
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
    want = undisturbed(step) if count > 1 else worker.digest(alone(None, steps=step).params)
    saved = [newest(directory / str(i)) for i in range(count)]
    require(2 <= step < STEPS, f"the run ended after step {step}")
    require(saved == [step] * count, f"checkpoints of steps {saved}, not {step}")
    require(found == want, "params are not those of that step")
    return f"all end after step {step}, and save it"


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
