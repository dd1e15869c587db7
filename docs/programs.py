"""The programs of README.md and docs/: run them, and keep their output below them.

    make outputs                         writes the output of every program into its page
    make outputs PAGES="tour.md loop.md"  of these pages

A page is a program in parts: each `python` block goes on from those above it. An `output` block
below a program has its text; a picture that the program saves, and that the page shows, goes into
docs/pictures. `tests/product/test_docs.py` runs the same programs and compares.
"""

import contextlib
import io
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": ROOT / "README.md"}
PAGES |= {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
FENCE = re.compile(r"^ *(`{3,}|~{3,})([^\n]*)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n?```output\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?")


class Program(NamedTuple):
    """A block of a page: the line before its first one, and the output that stands below it."""

    line: int
    code: str
    output: str


def fences(page: str) -> list[tuple[int, str, str]]:
    """Return (line, language, text) of each fenced block of a page."""
    text = PAGES[page].read_text()
    found = FENCE.finditer(text)
    return [(text.count("\n", 0, m.start(3)), m.group(2).strip(), m.group(3)) for m in found]


def programs(page: str) -> list[Program]:
    """Return the programs of a page."""
    text = PAGES[page].read_text()
    return [
        Program(text.count("\n", 0, m.start("code")), m["code"], m["output"] or "")
        for m in PROGRAM.finditer(text)
    ]


def run(page: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Run the programs of a page; after each, yield the names that there are, and what it printed.

    Errors and warnings have the page's own lines.
    """
    names: dict[str, Any] = {"__name__": page}
    for program in programs(page):
        printed = io.StringIO()
        code = compile("\n" * program.line + program.code, PAGES[page], "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        yield dict(names), "\n".join(x.rstrip() for x in printed.getvalue().splitlines())


def agree(printed: str, shown: str) -> bool:
    """Tell whether two outputs are the same, up to blanks and rounding.

    Numbers may differ by 5 %, or by two units in the last place shown: they depend on the
    processor and on the version of JAX. Whole numbers are compared as they are.
    """
    printed, shown = (" ".join(re.sub(r"-{2,}", " ", text).split()) for text in (printed, shown))
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=False)
    same_text = NUMBER.split(printed) == NUMBER.split(shown)
    return same_text and all(itertools.starmap(_close, numbers))


def _close(printed: str, shown: str) -> bool:
    if re.fullmatch(r"[-−]?[\d,]+", shown):
        return printed == shown
    x, y = (float(text.replace(",", "").replace("−", "-")) for text in (printed, shown))
    digits, _, exponent = shown.partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals) if decimals else 0.0
    return math.isclose(x, y, rel_tol=0.05, abs_tol=2 * unit)


def write(page: str) -> None:
    """Write the output of each program of a page below it, where it is another than there is."""
    pictures = re.findall(r"!\[[^\]]*\]\([^)]*?([\w-]+\.png)\)", PAGES[page].read_text())
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # programs may write files
        outputs = iter([printed for _, printed in run(page)])
        os.chdir(before)
        for name in pictures:
            if (Path(folder) / name).exists():
                shutil.copy(Path(folder) / name, DOCS / "pictures" / name)

    def block(match: re.Match[str]) -> str:
        printed = next(outputs)
        if not printed:
            return f"```python\n{match['code']}```\n"
        if agree(printed, match["output"] or ""):
            return match.group()
        return f"```python\n{match['code']}```\n\n```output\n{printed}\n```\n"

    PAGES[page].write_text(PROGRAM.sub(block, PAGES[page].read_text()))


if __name__ == "__main__":
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:] or [page for page in PAGES if programs(page)]:
        print(name, flush=True)
        write(name)
