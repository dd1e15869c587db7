"""Bytes that each device sends in a compiled step, read from its program."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from benchmarks import hlo

# What a device of a ring of n sends, as a multiple of the bytes of the result.
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)


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
      branch: which branch runs of each choice between more than two; None, as of a choice between
        two, counts the one that sends most.
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
      branch: which branch runs of each choice between more than two; None, as of a choice between
        two, counts the one that sends most.
    """
    return of_text(compiled.as_text(), rounds, branch)


def of_text(text: str, rounds: int = 1, branch: int | None = None) -> list[Collective]:
    """Return the collectives of the text of a program, of any platform; see `collectives`."""
    program = hlo.Program(text)

    def of(x: hlo.Instruction, name: str, times: int) -> Iterator[Collective]:
        kind, start, _ = x.opcode.partition("-start")
        # A TPU has an asynchronous collective in each fusion from its start to its end.
        around = [y.attributes for y in program.computations[name].values()]
        is_async = bool(start) or any("AsyncCollectiveStart" in y for y in around)
        ends = any("AsyncCollectiveDone" in y for y in around)
        if not is_async and (ends or name.startswith("async_collective")):
            return
        with_operands = start and (kind != "all-reduce" or x.shape.startswith("(("))
        group, size = _group(x.attributes), _bytes(_results(x.shape) if with_operands else x.shape)
        if "all-reduce-scatter" in name:  # a TPU's reduce-scatter
            kind, size = "reduce-scatter", size / len(group)
        yield Collective(kind, times * size, group, times, is_async)

    def found_in(name: str, times: int) -> Iterator[Collective]:
        for x in program.computations[name].values():
            if x.opcode.removesuffix("-start") in FACTORS:
                yield from of(x, name, times)
                continue
            trips = program.trips(x) or rounds
            found = [list(found_in(called, times * trips)) for called in x.called]
            if x.opcode in ("async-start", "custom-call-start"):  # the second on a sparse core
                found = [[y._replace(is_async=True) for y in some] for some in found]
            if branch is not None and len(found) > 2:
                found = [found[branch]]
            elif found and x.opcode == "conditional":
                found = [max(found, key=lambda some: sum(x.size for x in some))]
            yield from itertools.chain(*found)

    return list(found_in(program.entry, 1))


def _group(line: str) -> tuple[int, ...]:
    """Return the devices of the first group of a collective, in any of the forms of HLO.

    {{0,1},{2,3}};  [2,4]<=[8] or [4,2]<=[2,4]T(1,0): groups of a permuted range;  and
    mesh['a'=2,'b'=4] {'b'}: groups along axes, also of devices in another order, as in
    mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}; and of a permutation those that it connects.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed[1].split(",")))
    if ranged := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = [int(n) for n in ranged[3].split(",")]
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        if ranged[4]:
            numbers = numbers.transpose([int(n) for n in ranged[4].split(",")])
        return tuple(numbers.reshape(int(ranged[1]), int(ranged[2]))[0].tolist())
    if along := MESH_GROUPS.search(line):
        axes = re.findall(r"'([^']+)'=(\d+)", along[1])
        numbers = np.arange(int(np.prod([int(n) for _, n in axes])))
        if along[2]:
            order = [int(n) for n in along[3].split(",")]
            numbers = numbers.reshape([int(n) for n in along[2].split(",")]).transpose(order)
        numbers = numbers.reshape([int(n) for _, n in axes])
        chosen = re.findall(r"'([^']+)'", along[4])
        first = tuple(slice(None) if name in chosen else 0 for name, _ in axes)
        return tuple(numbers[first].ravel().tolist())
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        return _connected(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if "replica_groups={}" in line:
        return ()
    raise ValueError(f"replica groups of another form: {line}")


def _connected(pairs: list[tuple[str, str]]) -> tuple[int, ...]:
    """Return the devices that a permutation connects with that of its first pair."""
    found = {int(pairs[0][0])}
    for _ in pairs:
        for pair in pairs:
            ends = set(map(int, pair))
            found |= ends if ends & found else set()
    return tuple(sorted(found))


def _results(shape: str) -> str:
    """Return the second entry of a tuple: a start gives (operands, results, …)."""
    depth, commas = 0, []
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 1:
            commas.append(i)
    return shape[slice(*[*commas, len(shape)][:2])]


def _bytes(shapes: str) -> float:
    """Return the bytes of arrays as HLO writes them, such as (f32[4,8]{1,0}, s32[])."""
    total = 0.0
    for dtype, shape in re.findall(r"([a-z]+\d*)\w*\[([\d,]*)\]", shapes):
        bits = re.search(r"\d+", dtype)
        size = int(bits[0]) / 8 if bits else 1  # pred
        for n in filter(None, shape.split(",")):
            size *= int(n)
        total += size
    return total
