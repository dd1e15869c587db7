"""An estimate of the seconds of a compiled step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from optfn.mesh.compilers.chips import CHIPS, Chip, make_cpu_error, recognize_chip
from optfn.plan.hlo import Program
from optfn.plan.links import Place, Switch, Torus, list_places
from optfn.plan.schedule import Schedule


class LoopEstimate(NamedTuple):
    """One iteration of a loop of a step, such as a layer's forward or backward pass.

    name: of its body in the program.
    times: how often it runs in each call of the computation around it; None where the program does
      not say it, and the loop counts once.
    seconds, compute, communication, exposed: of one iteration, from idle links.
    """

    name: str
    times: int | None
    seconds: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """The seconds, bytes and FLOPs of a compiled step on each chip, inferred from its schedule.

    Attributes:
      chip: the constants of the chip.
      seconds: of a step: compute, and the communication that compute waits for.
      compute: seconds of compute.
      communication: seconds of the links, by kind of collective.
      exposed: seconds that compute waits for the links, by kind.
      sent: bytes that a chip sends, by kind, in rings.
      count: collectives, by kind.
      asynchronous: the collectives among them that can overlap compute, by kind.
      flops: FLOPs of all products.
      recomputed_flops: FLOPs of products that run again in the backward pass, under
        `jax.checkpoint`. Products in the bubbles of a pipeline are not among them.
      kept: bytes of params, state and batch; None for text, which does not say it.
      temporaries: bytes beside them; None for text.
      loops: the loops of the step.
    """

    chip: Chip
    seconds: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    sent: Mapping[str, float]
    count: Mapping[str, int]
    asynchronous: Mapping[str, int]
    flops: float
    recomputed_flops: float
    kept: int | None
    temporaries: int | None
    loops: tuple[LoopEstimate, ...]

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: FLOPs without recomputation, divided by the FLOPs that the
        chip's peak allows in the seconds of the step, or 0 for a step without seconds."""
        if not self.seconds:
            return 0.0
        return (self.flops - self.recomputed_flops) / (self.seconds * self.chip.flops)

    def __str__(self) -> str:
        """Return a few lines for people."""

        def ms(seconds: float) -> str:
            return f"{1e6 * seconds:.2f} µs" if 0 < seconds < 1e-5 else f"{1e3 * seconds:.2f} ms"

        whole, exposed = sum(self.communication.values()), sum(self.exposed.values())
        lines = [
            f"{self.chip.name}, inferred from the compiled schedule: nothing was run",
            f"step {ms(self.seconds)} = compute {ms(self.compute)} + exposed {ms(exposed)} of "
            f"{ms(whole)} communication",
        ]
        for kind, count in self.count.items():
            lines.append(
                f"  {kind}: {count:,}, {self.asynchronous[kind]:,} asynchronous, "
                f"{ms(self.communication[kind])}, exposed {ms(self.exposed[kind])}, "
                f"{self.sent[kind] / 1e6:,.1f} MB sent"
            )
        flops = f"{self.flops / 1e12:.2f} TFLOP, {self.recomputed_flops / 1e12:.2f} of them again"
        lines.append(f"{flops}; model FLOPs utilization {100 * self.utilization:.1f} %")
        if self.kept is not None and self.temporaries is not None:
            lines.append(
                f"{self.kept / 1e9:.2f} GB kept, {self.temporaries / 1e9:.2f} GB temporaries"
            )
        return "\n".join(lines)


def estimate_step(
    compiled: jax.stages.Compiled | str, chip: Chip | str | None = None
) -> StepEstimate:
    """Estimate the seconds of a step that is compiled for TPUs or GPUs, without running it.

    The compiler's schedule is read with two clocks, of compute and of the links. A synchronous
    collective stops compute. An asynchronous collective runs from its start to its end, after those
    that began before; if it has not finished there, compute waits for it, and this time is exposed.
    The body of a loop is read once, from idle links, and counts as often as the loop runs; of a
    conditional the longest branch counts.

    The time of compute on a TPU is the compiler's estimate for each instruction. On a GPU it is the
    time of the FLOPs or of the bytes of each kernel, whichever is longer. A collective takes a
    latency, and the time of the bytes that a ring sends through the links that it uses.

    The estimate cannot know: how much slower products are while links write to the memory; real
    latencies; the share of a GPU that NCCL takes; jitter between chips; the time of the host and
    the input; the way of a permutation, assumed to be the shortest. The cycles of a TPU are its
    compiler's estimates. On one H100, without links, steps took 1.15 to 1.28 times the estimate
    (`benchmarks/chip.py`); no further figure was compared with a run. So use the estimate to choose
    between programs for the same chips, not to predict when a run ends.

    Args:
      compiled: the result of `step.lower(...).compile()`, or its `as_text()`.
      chip: None to recognise the chip by the devices of the program; a name: "v5e", "v5p", "v6e",
        "h100", "h200", for text of a TPU also with its slice, "v5e:4x4"; or a `Chip` of constants.
        Text does not say where its devices are: they count as JAX lists them, by hosts, and
        `data_mesh` has another order where the torus has rings. A compiled program has its order.

    Raises:
      ValueError: for a program of CPUs, whose compiler schedules no communication; for text without
        a schedule, or without `chip`; for chips whose constants are not known; and for an
        instruction whose cost is not known, such as a kernel of Pallas: the message names it.
      TypeError: for anything else than a compiled program or its text.
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(
            "estimate_step: compiled must be the result of step.lower(...).compile(), or its text, "
            f"got {type(compiled).__name__}"
        )
    devices = [] if isinstance(compiled, str) else _find_devices(compiled)
    constants = Chip.of(chip) if isinstance(chip, str) else chip
    # Also with a given chip: `recognize_chip` refuses a program of CPUs, which has no schedule.
    if devices and (constants is None or devices[0].platform == "cpu"):
        recognized = recognize_chip(devices)
        constants = constants or recognized
    if constants is None:
        raise ValueError(
            'estimate_step: text names no chip; pass chip="h100", or chip="v5e:4x4" with the slice'
        )
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    if constants.name in CHIPS and constants.clock is None and program.is_for_cpu:
        raise make_cpu_error()
    places = [tuple(device.coords) for device in devices if hasattr(device, "coords")]
    schedule = Schedule(program, constants, make_links(program, constants, places).time)
    memory = None if isinstance(compiled, str) else compiled.memory_analysis()
    return make_estimate(schedule, memory)


def make_estimate(schedule: Schedule, memory: Any) -> StepEstimate:
    """Return the totals of a schedule and of its loops, with the compiler's figures of memory."""
    totals = schedule.totals()
    loops = [
        LoopEstimate(
            x.name, x.times, x.body.seconds, x.body.compute, dict(x.body.communication),
            dict(x.body.exposed),
        )
        for x in schedule.loops
    ]  # fmt: skip
    return StepEstimate(
        chip=schedule.chip,
        seconds=totals.seconds,
        compute=totals.compute,
        communication=dict(totals.communication),
        exposed={kind: totals.exposed[kind] for kind in totals.count},
        sent=dict(totals.sent),
        count={kind: round(count) for kind, count in totals.count.items()},
        asynchronous={kind: round(count) for kind, count in totals.asynchronous.items()},
        flops=totals.flops,
        recomputed_flops=totals.recomputed,
        kept=None if memory is None else memory.argument_size_in_bytes,
        temporaries=None if memory is None else memory.temp_size_in_bytes,
        loops=tuple(loops),
    )


def _find_devices(compiled: jax.stages.Compiled) -> list[Any]:
    """Return the devices of a program in the order of its mesh, or by number without one, or raise
    a ValueError if it has no arrays."""
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        # Partition i of a program runs on device i of its mesh, whatever the numbers of devices.
        if isinstance(sharding, jax.sharding.NamedSharding):
            return [*sharding.mesh.devices.flat]
        return sorted(sharding.device_set, key=lambda device: device.id)
    raise ValueError("estimate_step: a program without arrays has no devices")


def make_links(program: Program, chip: Chip, places: Sequence[Place]) -> Switch | Torus:
    """Return the links between the devices of a program: a torus if the chip has rings, else a
    switch.

    Raises:
      ValueError: the text has no schedule, no cycles for a TPU, or another number of chips.
    """
    if not program.is_scheduled:
        raise ValueError(
            "estimate_step: the text has no schedule; it must be the text of a compiled program, "
            "step.lower(...).compile().as_text()"
        )
    if chip.clock is not None and not program.has_cycles:
        raise ValueError(
            f"estimate_step: the program is not one of a TPU such as {chip.name}: its compiler "
            "estimated no cycles"
        )
    if chip.ring_of is None:
        return Switch(chip)
    places = places or list_places(chip.torus or (1,) * (program.num_partitions == 1))
    if len(places) != program.num_partitions:
        raise ValueError(
            f"estimate_step: the program is for {program.num_partitions} chips; name the slice, as "
            f'in chip="{chip.name}:4x4", got {len(places)}'
        )
    return Torus(chip, places)
