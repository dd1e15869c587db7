"""Bytes that each device sends in a compiled step, read from its program."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from optfn.plan.communication import read_group
from optfn.plan.hlo import Instruction, Program, read_arrays

# What a device of a ring of n sends, as a multiple of the bytes of the result.
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


class Collective(NamedTuple):
    """A collective of a compiled program: its kind, the bytes of its results, and its devices.

    size: the bytes of all times that it runs.
    devices: the numbers of the devices of one group; () for all of them.
    times: how often it runs in a step.
    is_async: whether it begins at one place and ends at another, so that it can overlap products.
    """

    kind: str
    size: float
    devices: tuple[int, ...]
    times: int
    is_async: bool = False

    @property
    def sent(self) -> float:
        """The bytes that a device of a ring sends, given a group of known devices."""
        return FACTORS[self.kind](len(self.devices)) * self.size


def bytes_sent(compiled: Any, devices: int, rounds: int = 1, branch: int | None = None) -> float:
    """Return the bytes that a device sends, in rings of all devices.

    Args:
      compiled: a compiled program of the CPU, where collectives are not split in two.
      devices: how many there are.
      rounds: how often each loop runs whose number of iterations the compiler does not know.
      branch: which branch runs of each choice; None counts the one that sends most.
    """
    return sum(FACTORS[x.kind](devices) * x.size for x in collectives(compiled, rounds, branch))


def bytes_by_axes(compiled: Any, mesh: Mesh, rounds: int = 1) -> dict[tuple[str, ...], float]:
    """Return the bytes that a device sends along the axes of a mesh, in rings of each group."""
    sent: Counter[tuple[str, ...]] = Counter()
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    for kind, size, devices, *_ in collectives(compiled, rounds):
        group = devices or tuple(range(numbers.size))
        places = np.argwhere(np.isin(numbers, group))
        along = tuple(
            str(name)
            for name, column in zip(mesh.axis_names, places.T, strict=True)
            if np.ptp(column)
        )
        sent[along] += FACTORS[kind](len(group)) * size
    return dict(sent)


def collectives(compiled: Any, rounds: int = 1, branch: int | None = None) -> list[Collective]:
    """Return the collectives of a program, each with the bytes of its results in all iterations.

    Args:
      compiled: the program.
      rounds: how often each loop runs whose number of iterations the compiler does not know.
      branch: which branch runs of each choice; None counts the one that sends most.
    """
    return of_text(compiled.as_text(), rounds, branch)


def of_text(text: str, rounds: int = 1, branch: int | None = None) -> list[Collective]:
    """Return the collectives of the text of a program, of any platform; see `collectives`."""
    program = Program(text)

    def of(x: Instruction, name: str, times: int) -> Iterator[Collective]:
        kind, start, _ = x.opcode.partition("-start")
        # A TPU has an asynchronous collective in each fusion from its start to its end.
        targets = {y.target for y in program.computations[name].values()}
        is_async = bool(start) or "AsyncCollectiveStart" in targets
        ends = "AsyncCollectiveDone" in targets
        if not is_async and (ends or name.startswith("async_collective")):
            return
        group, size = read_group(x), sum(array.num_bytes for array in read_arrays(x.result))
        if "all-reduce-scatter" in name:  # a TPU's reduce-scatter
            kind, size = "reduce-scatter", size / len(group)
        yield Collective(kind, times * size, group, times, is_async)

    def found_in(name: str, times: int) -> Iterator[Collective]:
        home = program.computations[name]
        for x in home.values():
            if x.opcode.removesuffix("-start") in FACTORS:
                yield from of(x, name, times)
                continue
            trips = program.trips(x, home) if x.opcode == "while" else 1
            each = times * (rounds if trips is None else trips)
            found = [list(found_in(called, each)) for called in x.called]
            if x.opcode in ("async-start", "custom-call-start"):  # the second on a sparse core
                found = [[y._replace(is_async=True) for y in some] for some in found]
            if found and x.opcode == "conditional":
                most = max(found, key=lambda some: sum(x.size for x in some))
                found = [most if branch is None else found[branch]]
            yield from itertools.chain(*found)

    return list(found_in(program.entry, 1))
