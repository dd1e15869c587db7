"""Which ratios have fallen since the tables were published? Milliseconds are never compared.

    python -m benchmarks.check [--only NAME …] [--results bench-out/results.json] [--publish]

Runs the suite, or reads what a run of it wrote (`--results`), and compares its ratios with those in
benchmarks/results.json. What is more than 15 % worse is printed, and the exit status is 1. With
`--publish` the ratios of the run are written to benchmarks/results.json instead, its tables to
benchmarks/printed.json, and the pages of benchmarks/results/ anew; those of scripts that it did not
run stay.
"""

import argparse
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure, pages
from benchmarks.__main__ import ABOUT, SUITE

PUBLISHED = Path(__file__).parent / "results.json"
FALL = 0.15
# Columns in which more is better, and those in which less is.
MORE = ("ratio", "ratio_min", "first_ratio", "torch_ratio", "torch_ratio_min", "speed")
LESS = ("over_floor", "over_floor_min", "cpu_ratio", "flops_over", "sent_over", "cpu_over")

# Ratios by script, row and column.
Ratios = dict[str, dict[str, dict[str, float]]]


def name_of(row: measure.Row) -> str:
    """Return the name of a row: what stands in it before the first measured number."""
    first = itertools.takewhile(lambda x: not isinstance(x, float), row.values())
    return ", ".join(map(str, first))


def ratios_of(results: dict[str, Any]) -> Ratios:
    """Return the ratios in what the suite wrote."""
    return {
        script: {
            name_of(row): {k: round(row[k], 3) for k in (*MORE, *LESS) if k in row}
            for row in found["rows"]
        }
        for script, found in results["scripts"].items()
        if found["rows"]
    }


def worse(published: Ratios, found: Ratios) -> Iterator[str]:
    """Yield a line for each published ratio that is worse by more than 15 % in `found`."""
    for script, rows in found.items():
        for name, columns in rows.items():
            before = published.get(script, {}).get(name, {})
            for column in (k for k in columns if k in before):
                old, new = before[column], columns[column]
                share = new / old if column in MORE else old / new
                if share < 1 - FALL:
                    yield f"{script}: {name}: {column} {old:.2f} → {new:.2f}"


def main() -> None:
    """Compare, or publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SUITE, default=list(SUITE))
    parser.add_argument("--results", type=Path, help="what the suite wrote; it does not run")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results.json")
    options = parser.parse_args()
    if options.results is None:
        command = [sys.executable, "-m", "benchmarks", "--only", *options.only]
        subprocess.run(command, check=True)
        options.results = Path("bench-out") / "results.json"
    results = json.loads(options.results.read_text())
    published = json.loads(PUBLISHED.read_text()) if PUBLISHED.exists() else {}
    found = ratios_of(results)
    if options.publish:
        about = {k: v for k, v in results["about"].items() if k in ABOUT}
        published |= {script: {"about": about, "rows": rows} for script, rows in found.items()}
        PUBLISHED.write_text(json.dumps(published, indent=1, ensure_ascii=False) + "\n")
        for script in found:
            ran = results["scripts"][script]
            pages.keep(shlex.join(ran["command"]), ran["text"])
        pages.write()
        return
    lines = list(worse({script: entry["rows"] for script, entry in published.items()}, found))
    compared = sum(map(len, found.values()))
    print("\n".join([*lines, f"{len(lines)} ratios of {compared} rows fell by more than 15 %"]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
