"""The pages of benchmarks/results/: a table for each JSON file or printed table of a benchmark.

    make tables     or      python -m benchmarks.pages
    python -m benchmarks.pages --run soak "muon --seeds 5"

writes the pages and the headline tables of benchmarks/README.md. A page has the question of its
script, the command that measures, the explanation in the script's docstring, and the figures. They
come from the files that scripts keep (`compiled.json`, `pods.json`, `studies/exchange.json`, …),
from `results.json` for ratios, and from `printed.json`, which has the tables that other scripts
printed, some with fewer rows or columns: `python -m benchmarks.check --publish` keeps the tables of
the suite, and `--run` runs scripts and keeps the table of each in place of the table of the same
command.

In README.md a comment such as `<!-- results/compiled.md: v5e, matrix -->` stands above a table; its
rows are looked up by their first cell, and filled from the columns of the same names.

Nothing here imports JAX.
"""

import argparse
import ast
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.studies import front

HERE = Path(__file__).parent
PRINTED, RESULTS, README = HERE / "printed.json", HERE / "results", HERE / "README.md"
RUNS, LINKS = "studies/exchange.json", "studies/links.json"
Row = dict[str, Any]
Cell = Callable[[Row], str]


class Section(NamedTuple):
    """A part of a page: its heading, if it has one, a sentence, and a table."""

    heading: str
    about: str
    lines: list[str]


class Page(NamedTuple):
    """The page of a script: where its figures lie, and their sections; `about` is of all."""

    script: str
    source: str
    about: str
    sections: list[Section]

    def text(self) -> str:
        """Return the page in Markdown."""
        question, explained = _docstring(HERE / f"{self.script}.py")
        parts = [f"# {question}", *explained, self.about]
        for heading, about, lines in self.sections:
            parts += [f"## {heading}" if heading else "", about, "\n".join(lines)]
        written = f"`python -m benchmarks.pages` writes this page from `benchmarks/{self.source}`."
        parts.append(f"{written} [All benchmarks](../README.md)")
        return "\n\n".join(x for x in parts if x) + "\n"

    def table(self, heading: str) -> list[str]:
        """Return the table of a section; "" is the first one."""
        found = [x.lines for x in self.sections if heading in ("", x.heading)]
        return found[0]


def _docstring(module: Path) -> tuple[str, list[str]]:
    """Return the first sentence of a module's docstring, and its paragraphs without commands."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    first, *paragraphs = text.split("\n\n")
    return " ".join(first.split()), [x for x in paragraphs if not x.startswith("    ")]


def table(columns: dict[str, Cell], rows: Iterable[Row]) -> list[str]:
    """Return a table, a line for each row; a cell that lacks its figure is a dash."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join(_cell(x, row) for x in columns.values())} |" for row in rows]


def _cell(shown: Cell, row: Row) -> str:
    try:
        return shown(row)
    except KeyError:
        return "-"


def number(column: str, form: str = "", over: float = 1) -> Cell:
    """Return what shows a column of a row in a format, divided by `over`."""
    return lambda row: format(row[column] / over, form) if form else str(row[column])


def _read(name: str) -> tuple[str, list[Row]]:
    """Return what a file of rows depends on, and its rows."""
    found = json.loads((HERE / name).read_text())
    return _named(found["about"]), found["rows"]


def _named(about: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def _grouped(columns: dict[str, Cell], rows: Sequence[Row], *by: str) -> list[Section]:
    """Return a section for each value of the columns `by`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[name]) for name in by), []).append(row)
    return [Section(heading, "", table(columns, group)) for heading, group in groups.items()]


def _by(command: str, about: str) -> str:
    """Return the sentence that says what measured the figures of a page."""
    return f"`{command}` made these figures: {about}." if about else f"`{command}` made them."


def _cycles(row: Row, column: str = "cycles") -> str:
    return f"{row[column] / 1e6:.2f}" if row[column] else "-"


def compiled() -> Page:
    """Return the page of updates that were compiled for TPUs and a GPU."""
    about, rows = _read("compiled.json")
    columns = {
        "rule": number("rule"),
        "floor B": number("floor", ".1f"),
        "B/floor": number("over_floor", ".2f"),
        "optax: B/floor": number("optax_over_floor", ".2f"),
        "temporaries B": number("temporaries", ".1f"),
        "optax: temporaries B": number("optax_temporaries", ".1f"),
        "M cycles": _cycles,
        "optax: M cycles": lambda row: _cycles(row, "optax_cycles"),
        "kernels": number("kernels"),
        "optax: kernels": number("optax_kernels"),
        "loops": number("loops"),
        "compile s": number("seconds", ".1f"),
    }
    sections = _grouped(columns, rows, "target", "tree")
    return Page("compiled", "compiled.json", _by("make compiled", about), sections)


def compiled_exchange() -> Page:
    """Return the page of exchanges that were compiled for TPUs and a CPU."""
    about, rows = _read("compiled_exchange.json")
    plain = {(x["target"], x["model"], x["step"]): x for x in rows}

    def dense(row: Row) -> Row:
        return plain[row["target"], row["model"], row["of"]]

    columns: dict[str, Cell] = {
        "step": number("step"),
        "compared with": number("of"),
        "temporaries B": number("temporaries", ".1f"),
        "more": lambda x: f"{x['temporaries'] - dense(x)['temporaries']:+.1f}",
        "HBM B": number("hbm", ".0f"),
        "HBM, ×": lambda x: f"{x['hbm'] / dense(x)['hbm']:.1f}",
        "M cycles": _cycles,
        "compile s": number("seconds", ".1f"),
        "compile s, ×": lambda x: f"{x['seconds'] / max(dense(x)['seconds'], 0.1):.1f}",
    }
    made = _by("python -m benchmarks.compiled_exchange", about)
    sections = _grouped(columns, rows, "target", "model")
    return Page("compiled_exchange", "compiled_exchange.json", made, sections)


def pods() -> Page:
    """Return the page of steps that were compiled for many chips."""
    about, rows = _read("pods.json")

    columns: dict[str, Cell] = {
        "way": number("way"),
        "GB kept": number("kept", ".3f", 1e9),
        "GB of temporaries": number("temporaries", ".3f", 1e9),
        "compute ms": number("compute", ".2f", 1e-3),
        "communication ms": number("communication", ".2f", 1e-3),
        "exposed ms": number("exposed", ".2f", 1e-3),
        "step ms": number("step", ".2f", 1e-3),
        "MFU %": number("utilization", ".1f", 1e-2),
        "all-reduce": number("all-reduce", ","),
        "all-gather": number("all-gather", ","),
        "reduce-scatter": number("reduce-scatter", ","),
        "all-to-all": number("all-to-all", ","),
        "permute": number("collective-permute", ","),
        "whole all-reduces": number("whole", ",.0f"),
        "MB sent": number("sent", ",.1f", 1e6),
        "sent/plan": lambda x: f"{x['sent'] / x['planned']:.2f}" if x["planned"] else "-",
        "B sent a MFLOP": lambda x: f"{1e6 * x['sent'] / x['flops']:.1f}",
        "compile s": number("seconds", ".0f"),
    }
    sections = _grouped(columns, rows, "model", "topology")
    return Page("pods", "pods.json", _by("make pods", about), sections)


def host() -> Page:
    """Return the page of steps with the state of the optimizer on the host."""
    about, rows = _read("host.json")

    def optional(name: str, form: str, unit: float = 1.0) -> Cell:
        return lambda x: format(x[name] / unit, form) if name in x else "-"

    columns: dict[str, Cell] = {
        "state": number("way"),
        "GB of arguments": number("kept", ".1f", 1e9),
        "GB of temporaries": number("temporaries", ".1f", 1e9),
        "GB a device": lambda x: f"{(x['kept'] + x['temporaries']) / 1e9:.1f}",
        "GB on the host": number("host", ".1f", 1e9),
        "GB of temporaries there": number("host_temporaries", ".2f", 1e9),
        "loops": number("loops"),
        "GB over the link": optional("link", ".1f", 1e9),
        "link s": optional("link_seconds", ".2f"),
        "microbatches": lambda x: str(max(1, round(x["microbatches"]))) if "link" in x else "-",
        "compile s": number("seconds", ".0f"),
    }
    sections = _grouped(columns, rows, "model", "topology")
    return Page("host", "host.json", _by("make host", about), sections)


def exchange() -> Page:
    """Return the page of loss against bytes, and of the seconds to a loss."""
    (about, runs), (_, links) = _read(RUNS), _read(LINKS)
    sections = []
    for width in (32, 96):
        found = front.schemes(runs, width)
        head, rule, *lines = front.table(found).splitlines()
        for inner in dict.fromkeys(scheme.inner for scheme in found):
            of_inner = [line for line in lines if line.startswith(f"| {inner} |")]
            sections.append(Section(f"{inner}, width {width}", "", [head, rule, *of_inner]))
    rows = front.seconds(front.schemes(runs, 32), links)
    waited = front.seconds_table(rows).splitlines()
    sections.append(Section("Seconds to the loss of dense adamw and 2 %", "", waited))
    made = _by(f"python -m benchmarks.studies.exchange --json benchmarks/{RUNS}", about)
    return Page("studies/front", RUNS, made, sections)


def exchange_link() -> Page:
    """Return the page of steps on shaped links."""
    about, rows = _read(LINKS)
    columns: dict[str, Cell] = {
        "Mbit/s": lambda x: str(x["mbits"] or "not limited"),
        "scheme": number("scheme"),
        "ms a step (min)": lambda x: f"{x['ms']:.1f} ({x['min_ms']:.1f})",
        "CPU ms": number("cpu_ms", ".1f"),
        "bytes a step and worker": number("bytes", ",.0f"),
        "formula": number("formula", ",.0f"),
        "over": lambda x: f"{100 * (x['bytes'] / x['formula'] - 1):+.1f} %",
        "compute + bytes/rate, ms": number("sum_ms", ".1f"),
        "measured over that": lambda x: f"{x['ms'] / x['sum_ms']:.2f}",
    }
    command = "python -m benchmarks.studies.exchange_link --width 32 --length 64 --rounds 9"
    sections = [Section("", "", table(columns, rows))]
    return Page("studies/exchange_link", LINKS, _by(command, about), sections)


def parts() -> Page:
    """Return the page of what parts cost in loss."""
    figures = json.loads((HERE / "studies/parts.json").read_text())
    found: dict[tuple[str, str], list[float]] = {}
    for name in sorted(figures, key=lambda name: int(re.findall(r"seed (\d+)", name)[0])):
        run, scheme = re.split(r", seed \d+: ", name)
        found.setdefault((run, scheme), []).append(figures[name])
    sections = []
    columns: dict[str, Cell] = {
        "step": number("scheme"),
        "bits per byte": lambda x: f"{statistics.mean(x['bits']):.4f}",
        "from dense, %": lambda x: f"{statistics.mean(x['more']):+.2f}",
        "of each seed": lambda x: ", ".join(f"{each:+.2f}" for each in x["more"]),
    }
    for run in dict.fromkeys(run for run, _ in found):
        dense = found[run, "dense"]
        rows = [
            {
                "scheme": scheme,
                "bits": bits,
                "more": [100 * (a / b - 1) for a, b in zip(bits, dense, strict=True)],
            }
            for (other, scheme), bits in found.items()
            if other == run
        ]
        sections.append(Section(run, "", table(columns, rows)))
    made = _by("python -m benchmarks.studies.parts --kept benchmarks/studies/parts.json", "")
    return Page("studies/parts", "studies/parts.json", made, sections)


def ratios() -> Page:
    """Return the page of the ratios that `make bench-check` compares."""
    published = json.loads((HERE / "results.json").read_text())
    sections = []
    for script, entry in published.items():
        names = dict.fromkeys(name for row in entry["rows"].values() for name in row)
        columns: dict[str, Cell] = {"row": number("row")}
        columns |= {name: number(name, ".2f") for name in names}
        rows = [{"row": name, **row} for name, row in entry["rows"].items()]
        if names:
            sections.append(Section(script, _named(entry["about"]), table(columns, rows)))
    return Page("check", "results.json", _by("python -m benchmarks.check --publish", ""), sections)


def printed() -> dict[str, Page]:
    """Return the pages of tables that were kept as they were printed, a section for each run."""
    found = {}
    for name, runs in json.loads(PRINTED.read_text()).items():
        sections = [Section(f"`{x['command']}`", x["about"], x["printed"]) for x in runs]
        script = f"{_folder(name)}{name}".replace(".", "/")
        found[name] = Page(script, PRINTED.name, "", sections)
    return found


def keep(command: str, text: str) -> None:
    """Keep what a script has printed: a line of what its figures depend on, and its table."""
    about, _, lines = text.strip().partition("\n")
    run = {"command": command, "about": about, "printed": lines.strip().splitlines()}
    found = json.loads(PRINTED.read_text()) if PRINTED.exists() else {}
    runs = {x["command"]: x for x in found.get(_name_of(command), [])} | {command: run}
    found[_name_of(command)] = [*runs.values()]
    PRINTED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def run(script: str) -> None:
    """Run "soak --steps 100", a script with its options, and keep what it prints."""
    command = f"python -m benchmarks.{_folder(script.split()[0])}{script}"
    words = [sys.executable, *shlex.split(command)[1:]]
    keep(command, subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _name_of(command: str) -> str:
    """Return the name of the module in "python -m benchmarks.studies.soak --steps 100"."""
    return command.split()[2].split(".")[-1]


def _folder(name: str) -> str:
    """Return "studies." for a script of this folder."""
    return "" if (HERE / f"{name}.py").exists() else "studies."


def pages() -> dict[str, Page]:
    """Return all pages by name."""
    of_files = (compiled, compiled_exchange, pods, host, exchange, exchange_link, parts, ratios)
    return {make.__name__: make() for make in of_files} | printed()


HEADLINES = re.compile(
    r"(<!-- results/(?P<page>\w+)\.md(?:: (?P<heading>[^>]*))? -->\n\n?)(?P<table>(?:\|.*\n)+)"
)


def headlines(text: str, found: dict[str, Page]) -> str:
    """Return README.md with the figures of the pages in its tables."""

    def filled(match: re.Match[str]) -> str:
        source = _cells(found[match["page"]].table(match["heading"] or ""))
        head, rule, *rows = _cells(match["table"].splitlines())
        at = [source[0].index(name) for name in head]
        by_name = {row[at[0]].strip("*"): row for row in source[2:]}
        rows = [[row[0], *(by_name[row[0]][i] for i in at[1:])] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
        return match[1] + "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]]) + "\n"

    return HEADLINES.sub(filled, text)


def _cells(lines: Sequence[str]) -> list[list[str]]:
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def written() -> dict[Path, str]:
    """Return the text that each page should have."""
    found = pages()
    texts = {RESULTS / f"{name}.md": page.text() for name, page in found.items()}
    return texts | {README: headlines(README.read_text(), found)}


def write() -> None:
    """Write the pages, and remove those that have no figures any more."""
    texts = written()
    RESULTS.mkdir(exist_ok=True)
    for path in set(RESULTS.glob("*.md")) - texts.keys():
        path.unlink()
    for path, text in texts.items():
        path.write_text(text)


def main() -> None:
    """Run the scripts that are asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="+", metavar="SCRIPT", default=[])
    for script in parser.parse_args().run:
        run(script)
    write()


if __name__ == "__main__":
    main()
