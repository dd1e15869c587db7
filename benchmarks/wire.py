"""Bytes that each device sends in a compiled step, read from its program."""

import re
from collections.abc import Iterator
from typing import Any

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


def bytes_sent(compiled: Any, devices: int, rounds: int = 1) -> float:
    """Return the bytes that a device sends, in rings of all devices.

    Args:
      compiled: a compiled program of the CPU, where collectives are not split in two.
      devices: how many there are.
      rounds: how often each loop runs whose number of iterations the compiler does not know.
    """
    return sum(FACTORS[kind](devices) * size for kind, size in collectives(compiled, rounds))


def collectives(compiled: Any, rounds: int = 1) -> list[tuple[str, float]]:
    """Return the kind of each collective, and the bytes of its results in all iterations."""
    text = compiled.as_text()
    bodies = {m[2]: m[0] for m in COMPUTATION.finditer(text)}
    entry = next(m[2] for m in COMPUTATION.finditer(text) if m[1])

    def found_in(name: str, times: int) -> Iterator[tuple[str, float]]:
        for line in bodies[name].splitlines()[1:]:
            for shapes, kind in COLLECTIVE.findall(line):
                yield kind, times * _bytes(shapes)
            known = TRIPS.search(line)
            trips = (int(known[1]) if known else rounds) if " while(" in line else 1
            for names in CALLED.findall(line):
                for called in re.findall(r"[\w.-]+", names):
                    if called in bodies:
                        yield from found_in(called, times * trips)

    return list(found_in(entry, 1))


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
