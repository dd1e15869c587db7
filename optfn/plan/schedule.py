"""The walk through a schedule, instruction by instruction, on the two clocks.

A compiler writes a collective in one of these forms:

* `all-gather`: synchronous. Compute waits.
* `all-gather-start` … `all-gather-done`, and `async-start`, `call-start` or `fusion-start` around
  one: on its way between them, unless the compiler says `is_sync`.
* A TPU's TensorCore: a fusion with `AsyncCollectiveStart`, fusions that carry the collective beside
  their work, and a fusion with `AsyncCollectiveDone`. It moves only while one of these runs.
* A TPU's sparse cores: `custom-call-start` loads a program, `custom-call-update` sends it off,
  `custom-call-done` waits.
* A fusion of another kind with a collective, such as a TPU's `all-reduce-scatter`: synchronous.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from optfn.mesh.compilers.chips import Chip
from optfn.plan.clocks import Clocks, Totals, Transfer
from optfn.plan.communication import KINDS, Collective, read_collective
from optfn.plan.hbm import FREE, Traffic
from optfn.plan.hlo import Computation, Instruction, Program
from optfn.plan.links import Time
from optfn.plan.products import find_products, is_gemm

# Instructions that pass on their operand: a collective that ends in it is still on its way.
_PASSES_ON = {
    "get-tuple-element", "bitcast", "tuple", "copy", "opt-barrier", "optimization-barrier",
}  # fmt: skip
_WRAPPERS = {"async", "call", "fusion", "custom-call"}
# Copies to fast memory, which the compiler places beside the products that need them.
_PREFETCHES = {"copy-start", "copy-done", "slice-start", "slice-done"}
# Custom calls that only name or annotate their operands.
_NAMES = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
}  # fmt: skip
_COMPUTES = {
    "abs", "add", "and", "atan2", "bitcast-convert", "broadcast", "cbrt", "ceil", "cholesky",
    "clamp", "clz", "compare", "complex", "concatenate", "convert", "convolution", "copy", "cos",
    "cosine", "count-leading-zeros", "divide", "dot", "dynamic-reshape", "dynamic-slice",
    "dynamic-update-slice", "erf", "exponential", "exponential-minus-one", "fft", "floor", "fusion",
    "gather", "imag", "is-finite", "log", "log-plus-one", "logistic", "map", "maximum", "minimum",
    "multiply", "negate", "not", "or", "pad", "popcnt", "power", "real", "reduce",
    "reduce-precision", "reduce-window", "remainder", "reshape", "reverse", "rng",
    "rng-bit-generator", "rng-get-and-update-state", "round-nearest-afz", "round-nearest-even",
    "rsqrt", "scatter", "select", "select-and-scatter", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "slice", "sort", "sqrt", "stochastic-convert",
    "subtract", "tan", "tanh", "topk", "transpose", "triangular-solve", "xor",
}  # fmt: skip


class Loop(NamedTuple):
    """A loop of a schedule: its name, the sums of one iteration, how often it runs.

    `times` is None where the program does not say it; the loop then counts once.
    """

    name: str
    body: Totals
    times: int | None


class Schedule:
    """The schedule of a program on chips of a kind.

    Args:
      program: the compiled program.
      chip: the constants.
      time: returns the time of a collective on the links.
      synchronous: whether every collective stops compute at its start, for a check.
    """

    def __init__(
        self,
        program: Program,
        chip: Chip,
        time: Callable[[Collective], Time],
        synchronous: bool = False,
    ) -> None:
        self.program, self.chip, self.time, self.synchronous = program, chip, time, synchronous
        self.traffic = Traffic(program)
        self.loops: list[Loop] = []

    def totals(self) -> Totals:
        """Walk the computation that a call runs, and return its sums."""
        return _ScheduleWalk(self, self.program.entry).totals()

    def transfer(self, x: Instruction, home: str, settings: str = "") -> Transfer:
        """Return the transfer of a collective: its seconds and lanes by the links, its bytes."""
        collective = read_collective(x, home, self.program.num_partitions, settings)
        seconds, lanes = self.time(collective)
        # In one queue a collective waits for the one before it, whichever links that uses.
        lanes = None if collective.is_queued else lanes
        return Transfer(collective.kind, seconds, collective.sent, lanes)

    def transfers_inside(self, x: Instruction) -> list[Transfer]:
        """Return the transfers of the collectives that an instruction's computations run, without
        those in loops."""
        return [
            self.transfer(y, name, x.attributes)
            for name in x.called
            for y, name in self._collectives(name)
        ]

    def _collectives(self, name: str) -> Iterator[tuple[Instruction, str]]:
        """Yield each collective that a computation runs, and the computation that contains it.

        Loops are left out, because each runs its collectives in a separate walk.
        """
        for x in self.program.computations.get(name, {}).values():
            if _kind(x):
                yield x, name
            elif x.opcode != "while":
                for called in x.called:
                    yield from self._collectives(called)

    def seconds(self, x: Instruction, home: Computation, totals: Totals) -> float:
        """Return an instruction's seconds of compute, by the cycles of a TPU's compiler or else its
        bytes and products, and add its FLOPs to `totals`.

        They are the cycles that a TPU's compiler estimates; else the time of its bytes in HBM or of
        its products, whichever is longer. An instruction that only names or views takes none.
        """
        self._check(x)
        if x.opcode in FREE or x.target in _NAMES:
            return 0.0
        busy = 0.0  # seconds of the matrix units
        for product in find_products(self.program, x, home):
            totals.flops += product.flops
            totals.recomputed += product.flops if product.is_recomputed else 0.0
            # Products of float32 run at half of the peak of bfloat16, of 8 bits at twice of it.
            busy += product.flops * product.bits / 16
        if self.chip.clock is not None and x.cycles is not None:
            return x.cycles / self.chip.clock
        moved = self.traffic.num_bytes(x, home) / self.chip.hbm
        return max(moved, busy / (self.chip.flops * self.chip.efficiency))

    def _check(self, x: Instruction) -> None:
        """Raise a ValueError for an instruction whose cost is not known."""
        opcode = x.opcode.removesuffix("-start")
        if opcode == "custom-call":
            is_timed = self.chip.clock is not None and x.cycles is not None
            if x.target in _NAMES or is_gemm(x) or is_timed:
                return
        elif opcode in _COMPUTES or x.opcode in FREE or opcode in _WRAPPERS:
            return
        of = f" of {x.target!r}" if x.target else ""
        raise ValueError(
            f"estimate_step: the cost of the instruction {x.opcode}{of} is not known, in "
            f"%{x.name} = {x.shape[:80]} {x.opcode}(…)"
        )


def _kind(x: Instruction) -> str:
    """Return the kind of a collective or of its start, "" for anything else."""
    kind = x.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


class _ScheduleWalk:
    """The walk through one computation, from idle links.

    `held` has the transfers of each instruction that starts them, carries them or passes them on.
    """

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule, self.name = schedule, name
        self.body = schedule.program.computations[name]
        self.clocks = Clocks()
        self.held: dict[str, list[Transfer]] = {}

    def totals(self) -> Totals:
        """Visit all instructions of the body, and return their totals."""
        for x in self.body.values():
            self.visit(x)
        return self.clocks.finish()

    def visit(self, x: Instruction) -> None:
        """Advance the clocks by one instruction, by the rule of its opcode.

        Called computations are walked; a start sends transfers off, and its done waits for them; a
        synchronous collective stops compute; prefetches take nothing; anything else computes.
        """
        base = x.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if x.opcode in ("while", "conditional", "call"):
            self.visit_called(x)
        elif x.opcode in _PASSES_ON and self.transfers_of(x):
            self.held[x.name] = self.transfers_of(x)
        elif x.opcode in KINDS:
            self.run([self.schedule.transfer(x, self.name)])
        elif x.opcode.endswith("-done") and (base in KINDS or base in _WRAPPERS):
            for transfer in self.transfers_of(x):
                self.clocks.wait(transfer)
        elif x.opcode.endswith("-update"):
            self.visit_update(x)
        elif x.opcode.endswith("-start") and (base in KINDS or base in _WRAPPERS):
            self.visit_start(x)
        elif x.opcode == "fusion":
            self.visit_fusion(x)
        elif x.opcode not in _PREFETCHES:
            self.compute(x)

    def transfers_of(self, x: Instruction) -> list[Transfer]:
        """Return the transfers of an instruction's operands, each once."""
        found = {id(t): t for name in x.operands for t in self.held.get(name, ())}
        return [*found.values()]

    def compute(self, x: Instruction, carried: Sequence[Transfer] = ()) -> None:
        """Advance the clocks by the compute of an instruction, while the `carried` transfers
        move."""
        seconds = self.schedule.seconds(x, self.body, self.clocks.totals)
        self.clocks.compute(seconds, carried)

    def run(self, transfers: list[Transfer]) -> None:
        """Start collectives, and stop compute until they are done."""
        for transfer in transfers:
            self.clocks.start(transfer, is_asynchronous=False)
            self.clocks.wait(transfer)

    def send(self, x: Instruction, transfers: list[Transfer]) -> None:
        """Start asynchronous collectives, and stop compute until they are done if the compiler or
        the check makes them synchronous."""
        self.held[x.name] = transfers
        for transfer in transfers:
            self.clocks.start(transfer, is_asynchronous=True)
            if self.schedule.synchronous or '"is_sync":true' in x.attributes:
                self.clocks.wait(transfer)

    def visit_called(self, x: Instruction) -> None:
        """Walk the computations that an instruction calls and add their totals, a loop's as often
        as it runs, and only the longest branch of a conditional."""
        if x.opcode == "while":
            body = x.attribute("body").lstrip("%")
            times = self.schedule.program.trips(x, self.body)
            totals = _ScheduleWalk(self.schedule, body).totals()
            self.schedule.loops.append(Loop(body, totals, times))
            self.clocks.loop(totals, 1 if times is None else times)
        else:
            # The program does not say which branch runs; the longest bounds the time.
            branches = [_ScheduleWalk(self.schedule, name).totals() for name in x.called]
            self.clocks.loop(max(branches, key=lambda totals: totals.seconds), 1)

    def visit_start(self, x: Instruction) -> None:
        """Start the collectives of a start instruction, or hold them for its update if a sparse
        core has one, and add its compute if it has no collective.

        Compute of another core or stream counts where it starts, as if nothing ran beside it.
        """
        if _kind(x):
            self.send(x, [self.schedule.transfer(x, self.name)])
            return
        transfers = self.schedule.transfers_inside(x)
        if not transfers:
            self.work(x)
        elif x.opcode == "custom-call-start" and self.has_update(x):
            self.held[x.name] = transfers
        else:
            self.send(x, transfers)

    def has_update(self, x: Instruction) -> bool:
        """Tell whether an update follows, which starts the program that a sparse core loaded."""
        updates = (y for y in self.body.values() if y.opcode == "custom-call-update")
        return any(x.name in y.operands for y in updates)

    def work(self, x: Instruction) -> None:
        """Add the compute of a start: of the computations that it calls, or else of itself."""
        if x.opcode == "fusion-start" or not x.called:
            self.compute(x)
            return
        for name in x.called:
            self.clocks.loop(_ScheduleWalk(self.schedule, name).totals(), 1)

    def visit_update(self, x: Instruction) -> None:
        """Start the collectives that a sparse core has loaded, unless they are on their way."""
        transfers = self.transfers_of(x)
        if x.opcode == "custom-call-update" and not any(t in self.clocks.flying for t in transfers):
            self.send(x, transfers)
        self.held[x.name] = transfers

    def visit_fusion(self, x: Instruction) -> None:
        """Advance the clocks by a fusion: it starts, carries or ends a collective of a TensorCore,
        or it computes and runs the collectives inside it synchronously."""
        inside = [y for _, y in self.schedule.program.inside(x) if y.opcode == "custom-call"]
        targets = {y.target for y in inside}
        if "AsyncCollectiveStart" in targets:
            transfers = self.schedule.transfers_inside(x)
            for transfer in transfers:
                transfer.is_carried = True
            self.send(x, transfers)
        elif "AsyncCollectiveDone" in targets:
            for transfer in self.transfers_of(x):
                self.clocks.wait(transfer)
        elif _is_carrier(x):
            self.held[x.name] = [t for t in self.transfers_of(x) if t.is_carried]
            self.compute(x, self.held[x.name])
        else:
            transfers = self.schedule.transfers_inside(x)
            # Without an estimate of cycles, the time of a fusion around a collective is the links'.
            if not transfers or x.cycles is not None:
                self.compute(x)
            self.run(transfers)


def _is_carrier(x: Instruction) -> bool:
    """Tell whether a TPU's fusion moves an asynchronous collective beside its work."""
    is_named = any(name.startswith("async_collective_fusion") for name in x.called)
    return is_named or "continuation_config" in x.attributes
