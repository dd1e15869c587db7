"""Run the suite: the script of each question, in a process of its own, one after the other.

    python -m benchmarks [--toy] [--only NAME …] [--out bench-out]

The tables are printed as they are measured. The output folder has `report.md`, all tables with the
device, the versions and the commit; `results.json`, the same for programs; and a log of each
script's errors. A script that cannot run on this machine is listed in both with the reason; so is
one that fails, which makes the exit status 1. This module uses no device, since a script may need
it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure

BAR = "{desc}{bar} {n_fmt} of {total_fmt} done, {elapsed}{postfix}"
ABOUT = ("device", "jax", "optax", "commit")  # of measure.where(), the same for all scripts


class Script(NamedTuple):
    """A module of this package, and its arguments."""

    module: str
    arguments: tuple[str, ...] = ()


# The rules that gain; sgd, momentum and Adam represent those at parity.
SOME = (
    *("--rounds", "5", "--only", "sgd", "momentum", "lars", "adadelta", "adam"),
    *("adam, clip by global norm", "lamb"),
)
SUITE = {
    "update": Script("update", ("--rounds", "9")),
    "update_gpt2": Script("update", ("--tree", "gpt2", *SOME)),
    "update_one": Script("update", ("--tree", "one", *SOME)),
    "first_call": Script("first_call", ("--rounds", "3")),
    "packed": Script("packed"),
    "fused_adam": Script("fused_adam"),
    "rows": Script("rows"),
    "moments": Script("moments", ("--seeds", "0")),
    "passes": Script("passes"),
    "selection": Script("selection"),
    "compression_link": Script("compression_link", ("--rounds", "5")),
    "pipeline": Script("pipeline"),
    "recompute": Script("recompute"),
    "sharding": Script("sharding"),
    "matrices": Script("matrices"),
    "tables": Script("tables"),
    "checkpoints": Script("checkpoints"),
}


class Result(NamedTuple):
    """The result of a script; `reason` says why it has no rows, `failed` if that is an error."""

    command: list[str]
    seconds: float
    text: str
    about: dict[str, str]
    rows: list[measure.Row]
    reason: str = ""
    failed: bool = False


class Progress:
    """A bar on a terminal, by tqdm where it is installed; otherwise a line for each script."""

    def __init__(self, scripts: int) -> None:
        self.scripts, self.done, self.began = scripts, 0, time.perf_counter()
        self.bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=scripts, bar_format=BAR)

    def start(self, name: str) -> None:
        """Say which script begins."""
        if self.bar is not None:
            self.bar.set_description(name)
        else:
            seconds = time.perf_counter() - self.began
            line = f"[{self.done + 1} of {self.scripts}] {name}, after {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)

    def write(self, line: str) -> None:
        """Print a line of a script, above the bar."""
        if self.bar is not None:
            self.bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def finish(self, seconds: float) -> None:
        """Count a script."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(f"the last one {seconds:.0f} s", refresh=False)
            self.bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()


def run(
    name: str, script: Script, out: Path, toy: bool, write: Callable[[str], None] = print
) -> Result:
    """Run a script; save its rows and errors in `out`, and pass each line it prints to `write`."""
    rows, log = out / f"{name}.json", out / f"{name}.log"
    rows.unlink(missing_ok=True)
    command = ["python", "-m", f"benchmarks.{script.module}", *script.arguments]
    command += ["--toy"] if toy else []
    began, lines = time.perf_counter(), []
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, *command[1:], "--json", str(rows)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                write(line.rstrip("\n"))
        except KeyboardInterrupt:
            process.terminate()
            raise
    seconds, text = time.perf_counter() - began, "".join(lines).strip()
    if process.returncode == 0 and rows.exists():
        found = json.loads(rows.read_text())
        return Result(command, seconds, text, found["about"], found["rows"])
    said = log.read_text().strip().splitlines() or [f"exit status {process.returncode}"]
    failed = process.returncode != measure.CANNOT_RUN
    return Result(command, seconds, text, {}, [], said[-1], failed)


def save(results: dict[str, Result], began: str, out: Path) -> None:
    """Write results.json and report.md."""
    about = next((r.about for r in results.values() if r.about), {})
    about = {k: about[k] for k in ABOUT if k in about} | {"began": began}
    scripts = {name: result._asdict() for name, result in results.items()}
    (out / "results.json").write_text(json.dumps({"about": about, "scripts": scripts}, indent=1))
    lines = ["# Benchmarks", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    lines += ["| script | seconds | rows |", "|---|---|---|"]
    for name, r in results.items():
        lines.append(f"| {name} | {r.seconds:.0f} | {_outcome(r)} |")
    for name, r in results.items():
        lines += ["", f"## {name}: `{' '.join(map(_quoted, r.command))}`", ""]
        lines += [f"{_outcome(r)}\n"] if r.reason else []
        lines.append(r.text)
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _outcome(result: Result) -> str:
    if result.reason:
        return f"{'failed' if result.failed else 'not run'}: {result.reason}"
    return str(len(result.rows))


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def main() -> None:
    """Run the scripts that are asked for, and save the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="each script at the sizes of a test")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SUITE, default=list(SUITE))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    results: dict[str, Result] = {}
    progress = Progress(len(options.only))
    try:
        for name in options.only:
            progress.start(name)
            progress.write(f"\n## {name}\n")
            results[name] = run(name, SUITE[name], options.out, options.toy, progress.write)
            if results[name].reason:
                progress.write(_outcome(results[name]))
            progress.finish(results[name].seconds)
            save(results, began, options.out)
    except KeyboardInterrupt:
        sys.exit(f"stopped; what was done is in {options.out}")
    finally:
        progress.close()
    print(f"\nreport: {options.out / 'report.md'}")
    if any(result.failed for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a script stops too
    main()
