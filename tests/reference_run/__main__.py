"""python -m reference_run --programs 500 --seed 1: draw programs, and compare their two runs."""

import argparse
import os
import sys
import tempfile

import machine

machine.add_flags(machine.QUICK_COMPILER)
# Checkpoints are written to memory: a third of the time would go into waiting for a disk.
if os.path.isdir("/dev/shm"):
    tempfile.tempdir = "/dev/shm"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=6, help="programs of each compiled step")
    parser.add_argument("--seconds", type=float, default=1e9, help="end earlier")
    parser.add_argument("--shrink", type=float, default=20, help="seconds for each kind of failure")
    parser.add_argument("--avoid", action="store_true", help="leave out what meets a known fault")
    parser.add_argument("--tree", help="the checkout of optfn that is tried")
    parser.add_argument("--kept", action="store_true", help="only the failures that are kept")
    parser.add_argument("--keep", action="store_true", help="keep what fails in failures.json")
    parser.add_argument("--json", help="a file for the outcome")
    parser.add_argument("--first", action="store_true", help="end at the first failure")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    if options.tree:
        sys.path.insert(0, os.path.abspath(options.tree))
    import jax

    jax.config.update("jax_enable_x64", True)
    machine.share_context()
    from reference_run import session

    return session.Session(options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
