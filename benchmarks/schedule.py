"""What of a compiled step's communication is hidden behind compute? Its schedule says it.

    python -m benchmarks.schedule FILE.hlo ... --chip v5e:4x4 --loops
    python -m benchmarks.schedule --model 7B --only "FSDP*;GSPMD"

The first reads texts of compiled programs (`make pods OPTIONS="--texts FOLDER"` writes some), with
chips in the order of `data_mesh`, the second the rows that `make pods` has kept. Columns are those
of `optfn.distributed.estimate_step`: step is compute and exposed, the communication for which
compute waits. `--loops` adds a row for one iteration of each loop, such as a layer's forward or
backward pass.

`--check` reads each text once more as if every collective were synchronous: all communication is
exposed then, and a step is compute and communication.
"""

import argparse
import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import pods
from optfn.distributed import Chip, StepEstimate
from optfn.plan.communication import KINDS
from optfn.plan.hlo import Program
from optfn.plan.links import Place, list_box, list_places
from optfn.plan.schedule import Schedule
from optfn.plan.step_estimate import make_estimate, make_links

HEAD = "compute ms | communication ms | exposed ms | step ms | exposed % | MFU %"
SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A",
         "collective-permute": "CP"}  # fmt: skip


def cells(
    compute: float,
    communication: Mapping[str, float],
    exposed: Mapping[str, float],
    step: float,
    utilization: float | None = None,
) -> str:
    """Return the cells of a row, and what of each kind is exposed."""
    kinds = [
        f"{SHORT[kind]} {1e3 * exposed[kind]:.2f} of {1e3 * communication[kind]:.2f}"
        for kind in KINDS
        if kind in communication
    ]
    sums = compute, sum(communication.values()), sum(exposed.values()), step
    share = f"{100 * sum(exposed.values()) / step:.1f}" if step else "-"
    mfu = "-" if utilization is None else f"{100 * utilization:.1f}"
    return " | ".join([*(f"{1e3 * x:.2f}" for x in sums), share, mfu, ", ".join(kinds)])


def file_lines(name: str, found: StepEstimate, loops: bool) -> Iterator[str]:
    """Yield the row of a program, and those of its loops."""
    all_cells = cells(
        found.compute, found.communication, found.exposed, found.seconds, found.utilization
    )
    yield f"| {name} | {all_cells} |"
    for x in found.loops if loops else ():
        times = "?" if x.times is None else x.times
        inner = cells(x.compute, x.communication, x.exposed, x.seconds)
        yield f"| {times} × {x.name} | {inner} |"


def list_mesh_places(lengths: Sequence[int], ring_of: int) -> list[Place]:
    """Return the places of a torus as `data_mesh` lists them: x first, or by hosts if no dimension
    is a ring, whose length is a multiple of `ring_of`."""
    is_ring = any(length > 1 and length % ring_of == 0 for length in lengths)
    return list_box(lengths) if is_ring else list_places(lengths)


def estimate_schedule(
    text: str, chip: Chip, *, synchronous: bool = False, places: Sequence[Place] = ()
) -> StepEstimate:
    """Return the estimate of a program's text, in which every collective stops compute if
    `synchronous` is given.

    `places` are the places of its devices on the torus; without them, JAX's order by hosts.
    """
    program = Program(text)
    links = make_links(program, chip, places)
    return make_estimate(Schedule(program, chip, links.time, synchronous), None)


def estimated(text: str, chip: Chip, synchronous: bool = False) -> StepEstimate:
    """Return the estimate of a text, whose devices are in the order of `data_mesh`."""
    places = list_mesh_places(chip.torus, chip.ring_of) if chip.ring_of else ()
    return estimate_schedule(text, chip, synchronous=synchronous, places=places)


def check(text: str, chip: Chip) -> str:
    """Return what of a step is exposed and what is neither, if all collectives are synchronous."""
    found = estimated(text, chip, synchronous=True)
    communication = sum(found.communication.values())
    share = sum(found.exposed.values()) / communication if communication else 1.0
    rest = found.seconds - found.compute - communication
    return (
        f"  all synchronous: {100 * share:.1f} % exposed, {1e3 * rest:.3f} ms of a step are neither"
    )


def kept_lines(models: str, topologies: str, ways: str) -> Iterator[str]:
    """Yield the rows of `pods.json` whose names match patterns."""

    def matches(name: str, patterns: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(";"))

    for (model, topology, way), row in pods.KEPT.rows().items():
        if not (matches(model, models) and matches(topology, topologies) and matches(way, ways)):
            continue
        if "step" in row:
            sums = " | ".join(f"{1e3 * row[column]:.2f}" for column in pods.SECONDS)
            share = 100 * row["exposed"] / row["step"]
            mfu = 100 * row["utilization"]
            yield f"| {model}, {topology}, {way} | {sums} | {share:.1f} | {mfu:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="texts; without them the kept rows")
    parser.add_argument("--chip", help='"h100", or the chip of a TPU with its slice: "v5e:4x4"')
    parser.add_argument("--loops", action="store_true", help="add a row for each loop")
    parser.add_argument("--check", action="store_true", help="check with synchronous collectives")
    parser.add_argument("--model", default="*", metavar="A;B", help="of kept rows, or patterns")
    parser.add_argument("--topology", default="*", metavar="A;B")
    parser.add_argument("--only", default="*", metavar="A;B", help="ways")
    options = parser.parse_args()
    if options.files and not options.chip:
        sys.exit("a text names no chip: give --chip")
    kinds = " | exposed of each kind, ms" if options.files else ""
    print(f"| program | {HEAD}{kinds} |\n" + "|---" * (8 if options.files else 7) + "|")
    if not options.files:
        for line in kept_lines(options.model, options.topology, options.only):
            print(line)
    for file in options.files:
        text, chip = file.read_text(), Chip.of(options.chip)
        for line in file_lines(file.stem, estimated(text, chip), options.loops):
            print(line)
        if options.check:
            print(check(text, chip), file=sys.stderr)


if __name__ == "__main__":
    main()
