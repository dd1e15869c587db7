"""The table of faults, and what becomes of each."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Wrong(Exception):
    """A fault ended in another way than promised."""


class Skipped(Exception):
    """The machine lacks what a fault needs."""


class Fault(NamedTuple):
    """A fault: `run` takes an empty directory and returns what was seen."""

    run: Callable[[Path], str]
    what: str
    promised: str
    quick: bool


FAULTS: dict[str, Fault] = {}


def fault(what: str, promised: str, *, quick: bool = False) -> Callable[[Any], Any]:
    """Add a function to the table."""

    def add(run: Callable[[Path], str]) -> Callable[[Path], str]:
        FAULTS[run.__name__] = Fault(run, what, promised, quick)
        return run

    return add


def require(holds: object, words: str) -> None:
    """Raise `Wrong` unless something holds."""
    if not holds:
        raise Wrong(words)


class Result(NamedTuple):
    """How a fault ended: "as promised", "WRONG" or "left out"."""

    name: str
    outcome: str
    seen: str
    seconds: float


def tried(name: str) -> Result:
    """Try a fault in an empty directory."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        try:
            outcome, seen = "as promised", FAULTS[name].run(Path(directory))
        except Skipped as why:
            outcome, seen = "left out", str(why)
        except Wrong as why:
            outcome, seen = "WRONG", str(why)
    return Result(name, outcome, " ".join(seen.split()), time.monotonic() - began)


def table(results: list[Result]) -> str:
    """Return the results as a table in Markdown, and their numbers."""
    lines = ["| fault | promised | result | s | `make faults ONLY=` |", "|---|---|---|---|---|"]
    for r in results:
        fault = FAULTS[r.name]
        seen = f"{r.outcome}: {r.seen}".replace("|", "\\|")
        lines.append(f"| {fault.what} | {fault.promised} | {seen} | {r.seconds:.0f} | `{r.name}` |")
    good, wrong, out = (
        sum(r.outcome == k for r in results) for k in ("as promised", "WRONG", "left out")
    )
    hangs, silent = (sum(word in r.seen for r in results) for word in ("hang:", "difference:"))
    lines += [
        "",
        f"{len(results)} faults tried: {good} as promised, {wrong} wrong, {out} left out; {hangs} "
        f"hangs, {silent} silent differences; "
        f"{sum(r.seconds for r in results) / 60:.0f} minutes.",
    ]
    return "\n".join(lines)
