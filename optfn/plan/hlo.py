"""The text of a compiled program: its computations, their instructions, and the types of arrays."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8,
    "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|called_computations|branch_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # the number of a memory that is not the main one
_NO_ESTIMATE = 2**63 - 1  # the compiler writes it for work of a sparse core
_ARITHMETIC = {"dot", "convolution", "add", "subtract", "multiply", "divide"}
_PASSED_ON = {"copy", "bitcast", "copy-done", "copy-start", "optimization-barrier"}


class Array(NamedTuple):
    """The type of an array, such as bf16[16,256]{1,0:T(8,128)(2,1)}."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> float:
        """The bytes of the entries, without padding."""
        return self.size * BITS[self.dtype] / 8

    @property
    def hbm_bytes(self) -> float:
        """The bytes in HBM with the padding of tiles, 0 for an array in another memory."""
        if _ELSEWHERE.search(self.layout):
            return 0
        return self.tiled_bytes

    @property
    def tiled_bytes(self) -> float:
        """The bytes in any memory, with the dimensions of a tile rounded up to whole tiles."""
        sizes = list(self.shape)
        # "1,0:T(8,128)": the axes from minor to major, and the tile of the minor ones.
        if tile := re.search(r"T\(([\d,]+)\)", self.layout):
            minor = [int(x) for x in self.layout.split(":")[0].split(",") if x]
            for axis, size in zip(minor, reversed(read_integers(tile[1])), strict=False):
                sizes[axis] = -(-sizes[axis] // size) * size
        return math.prod(sizes) * BITS[self.dtype] / 8


def read_arrays(shape: str) -> list[Array]:
    """Return the arrays of a type, which may be a tuple, without tokens and opaque values."""
    return [
        Array(dtype, read_integers(dims), layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
        if dtype not in ("token", "opaque")
    ]


class Instruction(NamedTuple):
    """An instruction: `name = shape opcode(argument), attributes`.

    operands: the names of instructions in the argument.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        return [
            name
            for names in _CALLED.findall(self.attributes)
            for name in re.findall(r"[\w.-]+", names)
        ]

    def attribute(self, name: str) -> str:
        """Return the text of `name=…` or `name={…}`, "" where it is missing."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return found[1].strip("{}") if found else ""

    def setting(self, name: str) -> str:
        """Return the value of `"name":value` of the compiler's settings, "" where it is missing."""
        found = re.search(rf'"{name}":"?([\w.$-]+)', self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The cycles that the compiler of a TPU estimates, None where it says none."""
        found = self.setting("estimated_cycles")
        return int(found) if found and int(found) < _NO_ESTIMATE else None

    @property
    def target(self) -> str:
        """The name of the function that a custom call runs, or ""."""
        return self.attribute("custom_call_target").strip('"')

    @property
    def result(self) -> str:
        """The type of its results, which for a start is the second one of its type (operands,
        results, …).

        The type of an all-reduce-start may also have its results alone.
        """
        is_start = self.opcode.endswith(("-start", "custom-call-update"))
        results_only = self.opcode == "all-reduce-start" and not self.shape.startswith("((")
        if not is_start or results_only:
            return self.shape
        return [*split_tuple(self.shape), ""][1]


Computation = dict[str, Instruction]
State = Callable[[int], int | None]  # the integers of a tuple by place, None for an unknown one


class Program:
    """A compiled program.

    computations: the instructions of each by name, in the order of their execution.
    entry: the name of the computation that a call runs.
    num_partitions: the number of devices.
    is_scheduled: whether the order is a schedule.
    has_cycles: whether its compiler estimates cycles of instructions, as a TPU's does.
    """

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.computations: dict[str, Computation] = {}
        current: Computation = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif found := _read_instruction(line):
                current[found.name] = found
        head_line = text.partition("\n\n")[0]
        partitions = re.search(r"num_partitions=(\d+)", head_line)
        self.num_partitions = int(partitions[1]) if partitions else 1
        self.is_scheduled = "is_scheduled=true" in head_line
        self.has_cycles = '"estimated_cycles":' in text
        # A field of xla::cpu::BackendConfig, in kernels that run on several threads.
        self._has_threads = '"outer_dimension_partitions":' in text

    @property
    def is_for_cpu(self) -> bool:
        """Whether kernels of its text run on threads, or products or sums of its entry lie outside
        of fusions, as the compiler of a CPU leaves them. That of a GPU makes a fusion or a call of
        a library of each. The text of a CPU's program with one small kernel has neither mark."""
        entry = self.computations[self.entry].values()
        return self._has_threads or any(x.opcode in _ARITHMETIC for x in entry)

    def inside(self, x: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yield each instruction of the computations that x calls, with its computation, and of
        fusions, calls and asynchronous starts among these instructions."""
        for name in x.called:
            body = self.computations.get(name, {})
            for y in body.values():
                yield body, y
                if y.called and y.opcode in ("fusion", "call", "async-start"):
                    yield from self.inside(y)

    def trips(self, loop: Instruction, home: Computation) -> int | None:
        """Return how often a loop runs, as the compiler says or by `counter < bound`, or None if
        neither tells it."""
        if said := _TRIPS.search(loop.attributes):
            return int(said[1])
        initial = home.get(loop.operands[0]) if loop.operands else None
        if initial is None or initial.opcode != "tuple":
            return None
        condition = self.computations[loop.attribute("condition").lstrip("%")]
        body = self.computations[loop.attribute("body").lstrip("%")]
        before = after = self._read_state(initial, home, lambda _: None)
        if (root := _root(body)).opcode == "tuple":
            after = self._read_state(root, body, before)
        (first, bound), (second, _) = (self._read_sides(condition, x) for x in (before, after))
        if first is None or bound is None or second is None or second <= first:
            return None
        # A TPU's compiler unrolls loops: the counter then grows by 2.
        return max(0, -((first - bound) // (second - first)))

    def _read_state(self, x: Instruction, home: Computation, outer: State) -> State:
        """Return the function that reads the integer at a place of a tuple of the computation
        `home`, None for an unknown one."""
        return lambda i: self._read_integer(x.operands[i], home, outer)

    def _read_sides(self, condition: Computation, state: State) -> tuple[int | None, int | None]:
        """Return both sides of a condition `counter < bound`, None for an unknown side, and both
        None for another condition."""
        root = _root(condition)
        if root.opcode == "fusion":
            state = self._read_state(root, condition, state)
            condition = self.computations[root.called[0]]
            root = _root(condition)
        if root.opcode != "compare" or root.attribute("direction") != "LT":
            return None, None
        counter, bound = (self._read_integer(name, condition, state) for name in root.operands)
        return counter, bound

    def _read_integer(self, name: str, home: Computation, state: State) -> int | None:
        """Return the value of an integer by its instruction's name, or None if it is not known,
        with the parameters' values from `state`."""
        x = home.get(name)
        if x is None:
            return None
        if x.opcode == "constant":
            return int(x.argument) if re.fullmatch(r"-?\d+", x.argument) else None
        if x.opcode == "parameter":  # of a fusion
            return state(int(x.argument))
        if x.opcode == "get-tuple-element" and home[x.operands[0]].opcode == "parameter":
            return state(int(x.attribute("index")))
        if x.opcode == "fusion" and not x.shape.startswith("("):
            called = self.computations[x.called[0]]
            return self._read_integer(_root(called).name, called, self._read_state(x, home, state))
        if x.opcode in _PASSED_ON:
            return self._read_integer(x.operands[0], home, state)
        if x.opcode == "add":
            terms = [self._read_integer(operand, home, state) for operand in x.operands]
            return None if None in terms else sum(term or 0 for term in terms)
        return None


def _root(computation: Computation) -> Instruction:
    return next(x for x in computation.values() if x.is_root)


def _read_instruction(line: str) -> Instruction | None:
    """Return the instruction in a line of a program's text, or None if the line has none."""
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = found[3]
    # A type ends behind a tuple's brackets, or at the space behind a layout.
    shape = rest[: _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")]
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


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the bracket at `start`, or the length of the text
    if none does."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    return len(text)


def split_tuple(shape: str) -> list[str]:
    """Return the types in a tuple's type."""
    depth, parts, start = 0, [], 1
    for bracket in re.finditer(r"[(\[{)\]},]", shape):
        if bracket[0] in "([{":
            depth += 1
        elif bracket[0] in ")]}":
            depth -= 1
        if (bracket[0] == "," and depth == 1) or not depth:
            parts.append(shape[start : bracket.start()].strip())
            start = bracket.end()
    return parts


def read_integers(text: str) -> tuple[int, ...]:
    """Return the integers ≥ 0 of a list such as "4,8" or "{4,8}", or () for an empty text."""
    return tuple(map(int, re.findall(r"\d+", text)))
