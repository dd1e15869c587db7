"""What the text of a compiled program says about its cost on a device.

`cost_analysis()` of XLA counts fast memory on the chip like HBM, both sides of each prefetch, and
the body of a loop once; `memory_analysis()` leaves fast memory out. The counts here are of HBM
alone. Compare counts of one counter only.
"""

from collections.abc import Iterator
from typing import NamedTuple

from optfn.plan.hbm import FREE, Traffic
from optfn.plan.hlo import Computation, Instruction, Program, read_arrays

SCALARS = 2048  # bytes; a tile of the scalars' layout on a TPU has 512
CALLS = {"while", "call", "conditional"}


class Cost(NamedTuple):
    """The cost of a program.

    num_bytes: read from and written to HBM.
    kernels: the instructions that do, each once, without those on scalars.
    loops: loops, and conditionals.
    cycles: the compiler's estimate, 0 for a GPU, whose compiler gives none.
    """

    num_bytes: float
    kernels: int
    loops: int
    cycles: int


class Run(NamedTuple):
    """An instruction of the computation `home`, and how often it runs."""

    instruction: Instruction
    home: Computation
    times: int


def cost(text: str) -> Cost:
    """Return the cost of a compiled program, given its text."""
    program = Program(text)
    traffic = Traffic(program)
    runs = list(executed(program, program.entry))
    moved = [
        (traffic.num_bytes(x, home), times) for x, home, times in runs if x.opcode not in CALLS
    ]
    return Cost(
        num_bytes=sum(num_bytes * times for num_bytes, times in moved),
        kernels=sum(num_bytes > SCALARS for num_bytes, _ in moved),
        loops=sum(x.opcode in ("while", "conditional") for x, _, _ in runs),
        cycles=sum(times * (x.cycles or 0) for x, _, times in runs),
    )


def executed(program: Program, name: str, times: int = 1) -> Iterator[Run]:
    """Yield what a computation runs, instruction by instruction.

    A loop of unknown length counts once, and so does each branch of a conditional.
    """
    home = program.computations[name]
    for x in home.values():
        if x.opcode in FREE:
            continue
        yield Run(x, home, times)
        if x.opcode in CALLS:
            trips = program.trips(x, home) if x.opcode == "while" else 1
            for called in x.called:
                yield from executed(program, called, times * (1 if trips is None else trips))


def hbm_bytes(shape: str) -> list[float]:
    """Return the bytes of each array of a type, with the padding of its tiles; 0 outside of HBM."""
    return [array.hbm_bytes for array in read_arrays(shape)]
