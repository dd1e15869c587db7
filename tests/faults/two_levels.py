"""Two levels: four processes, two machines of two."""

import signal
from pathlib import Path

from faults.runs import (
    ALL_END,
    BIT_FOR_BIT,
    GONE,
    OTHER_PARAMS,
    REPLICAS,
    STEPS,
    Processes,
    fresh,
    newest,
)
from faults.table import fault, require
from faults.unlike import flipped_in_one

TWO = {"count": 4, "two_level": True}


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
