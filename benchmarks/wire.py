"""Bytes that each device sends in a compiled step, read from its program."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

# What a device of a ring of n sends, as a multiple of the bytes of the result.
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*?^}", re.MULTILINE | re.DOTALL)
COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(FACTORS)})\(")
CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)


class Collective(NamedTuple):
    """A collective of a compiled program: its kind, the bytes of its results, and its devices.

    size: the bytes of all times that it runs.
    devices: the numbers of the devices of one group; () for all of them.
    times: how often it runs in a step.
    """

    kind: str
    size: float
    devices: tuple[int, ...]
    times: int


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
    for kind, size, devices, _ in collectives(compiled, rounds):
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
    text = compiled.as_text()
    bodies = {m[2]: m[0] for m in COMPUTATION.finditer(text)}
    entry = next(m[2] for m in COMPUTATION.finditer(text) if m[1])

    def found_in(name: str, times: int) -> Iterator[Collective]:
        for line in bodies[name].splitlines()[1:]:
            for shapes, kind in COLLECTIVE.findall(line):
                yield Collective(kind, times * _bytes(shapes), _group(line), times)
            known = TRIPS.search(line)
            trips = (int(known[1]) if known else rounds) if " while(" in line else 1
            for names in CALLED.findall(line):
                called = [name for name in re.findall(r"[\w.-]+", names) if name in bodies]
                found = [list(found_in(name, times * trips)) for name in called]
                if branch is not None and len(found) > 2:
                    found = [found[branch]]
                elif found and " conditional(" in line:
                    found = [max(found, key=lambda some: sum(x.size for x in some))]
                yield from itertools.chain(*found)

    return list(found_in(entry, 1))


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
