"""python -m reference_run.processes --programs 100 --seed 1: two processes run each drawn program
together, on a mesh of two devices of each."""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

machine.add_flags(machine.QUICK_COMPILER)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", help="one program, as JSON")
    parser.add_argument("--process", type=int, help="the number of this one, which a parent starts")
    parser.add_argument("--port", type=int)
    parser.add_argument("--directory")
    return parser.parse_args(arguments)


def start_processes(arguments):
    """Run two processes to their end, and return whether one has failed."""
    with socket.socket() as s, tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
        command = [sys.executable, "-m", "reference_run.processes", *arguments]
        command += ["--port", str(port), "--directory", directory]
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        both = [
            subprocess.Popen([*command, "--process", str(i)], env=environment) for i in range(2)
        ]
        return bool(sum(abs(x.wait()) for x in both))


def is_of_processes(p):
    """Tell whether two processes can run a program: it takes two devices of each.

    What stays out: calls whose checkpoints may be files in one way and parts in another, or lie in
    another directory in each process; evaluations that read arrays, of which another process has
    some; SIGTERM, which JAX's runtime remembers for all later programs; and loops that a user
    writes.
    """
    from reference_run.source import WAYS

    ways = [WAYS[name] for name in {p.way, *(part.get("way", p.way) for part in p.parts)}]
    is_saved_alike = len(ways) == 1 or not p.saves
    sizes = {max(x.workers, 1) * x.stages if x.stages else x.devices for x in ways}
    reads = p.estimates_statistics or (bool(p.evaluate) and not p.evaluate["values"])
    is_ended = any("signal" in part for part in p.parts)
    is_carried = any(part.get("carry", "state") not in ("state", "mapping") for part in p.parts)
    more = reads or is_ended or is_carried or p.reports or not is_saved_alike
    return sizes == {4} and p.loop == "fit" and not more


def run(options):
    """Run the same programs as the other process; the first one compares and prints."""
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{options.port}", 2, options.process)
    machine.share_context()
    from reference_run import draws, known, limits, product
    from reference_run.program import Program, to_json

    def differences(p, name):
        directory = Path(options.directory, name)
        directory.mkdir(exist_ok=True)
        bad, _ = product.check(p, str(directory))
        words = known.refusal(p)
        return [] if words and words in str(bad[:1]) else bad

    def check(p, number):
        if options.process == 0:
            print(f"program {number}: {p.way}", file=sys.stderr, flush=True)
        bad = differences(p, str(number))
        if "would write files into the same directory" in str(bad[:1]):
            bad = differences(p, f"{number}-{options.process}")
        if bad and options.process == 0:
            print(f"--- program {number} fails\n{json.dumps(to_json(p))}")
            for name, wanted, found in bad[:3]:
                print(f"  {name}: wanted {str(wanted)[:300]}, found {str(found)[:600]}")
            sys.stdout.flush()
        return bool(bad)

    if options.program:
        return check(Program(**json.loads(options.program)), 0)
    rng, count, failures = random.Random(options.seed), 0, 0
    while count < options.programs:
        structure = draws.structures(rng)
        for _ in range(6):
            p = draws.runs(rng, structure)
            if is_of_processes(p) and not limits.unsaid(p) and count < options.programs:
                failures += check(p, count)
                count += 1
    if options.process == 0:
        print(f"{count} programs, {failures} failures")
    return bool(failures)


def main(arguments):
    options = parse(arguments)
    return start_processes(arguments) if options.process is None else run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
