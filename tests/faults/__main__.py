"""Try the faults that are asked for, and print their table."""

import argparse
import os
import sys
from pathlib import Path

import jax
from tqdm import tqdm

import faults
from faults.table import FAULTS, Result, table, tried


def main() -> None:
    """Try the faults that are asked for."""
    parser = argparse.ArgumentParser(description=faults.__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="those of the test suite")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="NAME")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    # Two devices, as the workers have together.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    names = options.only or [k for k, f in FAULTS.items() if f.quick or not options.quick]
    results: list[Result] = []
    with tqdm(names, unit="fault", file=sys.stderr) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            results.append(tried(name))
            if options.out:
                options.out.write_text(table(results))
    print(table(results))
    sys.exit(any(r.outcome == "WRONG" for r in results))


if __name__ == "__main__":
    main()
