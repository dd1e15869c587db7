"""What the text of a compiled program says about its cost on a device.

`cost_analysis()` of XLA counts fast memory on the chip like HBM, both sides of each prefetch, and
the body of a loop once; `memory_analysis()` leaves fast memory out. The counts here are of HBM
alone. Compare counts of one counter only.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8,
    "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
# Instructions that neither compute nor move: names, views, and the ends of what has a start.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all",
    "opt-barrier", "optimization-barrier", "add-dependency", "partition-id", "replica-id",
    "copy-done", "slice-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
}  # fmt: skip
SCALARS = 2048  # bytes; a tile of the scalars' layout on a TPU has 512
CALLS = {"while", "call", "conditional"}
STARTS = {"copy-start", "slice-start", "async-start"}
SLICES = {"slice", "dynamic-slice", "gather"}
VIEWS = {"bitcast", "reshape", "copy"}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|called_computations|true_computation|false_computation)="
    r"\{?%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Instruction(NamedTuple):
    """An instruction of HLO: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str  # what stands between the brackets

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        branches = _BRANCHES.search(self.attributes)
        found = _CALLED.findall(self.attributes)
        return found + (re.findall(r"[\w.-]+", branches[1].replace("%", "")) if branches else [])


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


def cost(text: str) -> Cost:
    """Return the cost of a compiled program, given its text."""
    program = Program(text)
    steps = list(program.executed())
    moved = [(program.moved(x), times) for x, times in steps if x.opcode not in CALLS]
    return Cost(
        num_bytes=sum(num_bytes * times for num_bytes, times in moved),
        kernels=sum(num_bytes > SCALARS for num_bytes, _ in moved),
        loops=sum(x.opcode in ("while", "conditional") for x, _ in steps),
        cycles=sum(times * _estimated(x) for x, times in steps),
    )


def _estimated(x: Instruction) -> int:
    found = _CYCLES.search(x.attributes)
    return int(found[1]) if found else 0


def hbm_bytes(shape: str) -> list[float]:
    """Return the bytes of each array of a type, with the padding of its tiles; 0 outside of HBM."""
    return [_array_bytes(*found) for found in _ARRAY.findall(shape) if found[0] in BITS]


_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # in another memory than the device's main one


def _tiles(layout: str) -> str:
    """Return a layout without its memory."""
    return _ELSEWHERE.sub("", layout)


def _array_bytes(dtype: str, dims: str, layout: str) -> float:
    if _ELSEWHERE.search(layout):
        return 0
    sizes = [int(x) for x in dims.split(",") if x]
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile:  # "1,0:T(8,128)": the axes from minor to major, and the tile of the minor ones
        minor = [int(x) for x in layout.split(":")[0].split(",") if x]
        for axis, size in zip(minor, map(int, reversed(tile[1].split(","))), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return math.prod(sizes) * BITS[dtype] / 8


def _total(shape: str) -> float:
    return sum(hbm_bytes(shape))


class Program:
    """The computations of a program, by name, and the bytes that their instructions move."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif found := _instruction(line):
                current[found.name] = found
        self._home = {id(x): body for body in self.computations.values() for x in body.values()}
        self._reads = functools.cache(self._reads_of)

    def executed(self, name: str = "", times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yield what runs, instruction by instruction, with the number of times that it does.

        A loop of unknown length counts once, and so does each branch of a conditional.
        """
        for x in self.computations[name or self.entry].values():
            if x.opcode in FREE:
                continue
            yield x, times
            if x.opcode in CALLS:
                for called in x.called:
                    yield from self.executed(called, times * (self.trips(x) or 1))

    def trips(self, x: Instruction) -> int:
        """Return how often a loop runs: as the compiler says, or as long as a counter < a constant.

        1 for what is no loop, 0 where neither tells.
        """
        if x.opcode != "while":
            return 1
        if said := _TRIPS.search(x.attributes):
            return int(said[1])
        condition = self.computations[_CONDITION.search(x.attributes)[1]]
        root = next(x for x in condition.values() if x.is_root)
        limits = [condition[name] for name in root.operands if name in condition]
        found = [int(x.argument) for x in limits if x.opcode == "constant"]
        return found[0] if found and "direction=LT" in root.attributes else 0

    def moved(self, x: Instruction) -> float:
        """Return the bytes that an instruction reads from HBM and writes to it."""
        home = self._home[id(x)]
        shapes = [home[name].shape for name in x.operands if name in home]
        if x.opcode in STARTS:  # (one end, the other, …): a slice may go to fast memory or come
            ends = [found for found in _ARRAY.findall(x.shape) if found[1]][:2]
            sizes = [_array_bytes(dtype, dims, _tiles(layout)) for dtype, dims, layout in ends]
            return min(sizes, default=0) * sum(_array_bytes(*end) > 0 for end in ends)
        if x.opcode in SLICES:
            return 2 * _total(x.shape)
        if x.opcode == "dynamic-update-slice":
            return 2 * _total(shapes[1])
        reads = [_total(shape) for shape in shapes]
        written = _total(x.shape)
        if x.opcode == "fusion":
            within, results = self._reads(x.called[0])
            reads = [min(read, within.get(i, read)) for i, read in enumerate(reads)]
            written = min(written, results)
        return sum(reads) + written

    def _reads_of(self, name: str) -> tuple[dict[int, float], float]:
        """Return the bytes that a fusion reads of operands of which it reads slices, and writes."""
        body = self.computations[name]
        within = {}
        for x in body.values():
            if x.opcode == "parameter":
                found = self._sliced(body, x.name)
                if found is not None:
                    within[int(x.argument)] = found
        root = next(x for x in body.values() if x.is_root)
        return within, self._written(body, root)

    def _sliced(self, body: dict[str, Instruction], name: str) -> float | None:
        """Return the bytes that are read of a value in a fusion, None for all of it."""
        total = 0.0
        for x in body.values():
            for i in (i for i, operand in enumerate(x.operands) if operand == name):
                read: float | None = None
                if x.opcode in SLICES and i == 0:
                    read = _total(x.shape)
                elif x.opcode in ("dynamic-update-slice", "scatter") and i == 0:
                    read = 0.0
                elif x.opcode in VIEWS:
                    read = self._sliced(body, x.name)
                elif x.opcode == "fusion":
                    read = self._reads(x.called[0])[0].get(i)
                if read is None:
                    return None
                total += read
        return total

    def _written(self, body: dict[str, Instruction], x: Instruction) -> float:
        """Return the bytes that a fusion writes with result x: of an update in place, its slice."""
        if x.opcode == "dynamic-update-slice":
            return _total(body[x.operands[1]].shape)
        if x.opcode == "scatter":
            return _total(body[x.operands[-1]].shape)
        if x.opcode == "tuple":
            return sum(self._written(body, body[name]) for name in x.operands)
        if x.opcode == "bitcast":
            return self._written(body, body[x.operands[0]])
        if x.opcode == "fusion":
            return self._reads(x.called[0])[1]
        return _total(x.shape)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = found[3]
    shape = rest[: _end_of_shape(rest)]
    call = re.match(r"\s*([\w-]+)\(", rest[len(shape) :])
    if not call:
        return None
    start = len(shape) + call.end()
    end = _closing(rest, start - 1)
    argument = rest[start:end]
    operands = tuple(re.findall(r"%([\w.-]+)", argument))
    return Instruction(
        found[2], shape, call[1], operands, rest[end + 1 :], bool(found[1]), argument.strip()
    )


def _end_of_shape(text: str) -> int:
    """Return where a type ends: a tuple's brackets, or up to the space behind a layout."""
    if text.startswith("("):
        return _closing(text, 0) + 1
    return text.index(" ")


def _closing(text: str, start: int) -> int:
    """Return the place of the bracket that closes that at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text)
