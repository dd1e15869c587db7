"""The parts of the documentation that follow from code and docstrings.

    make tables        writes the rows of `tables` into their pages

In a page rows keep their order, new ones come last, and rows of other names stay. A line
`<!-- table: name -->` becomes a table when the site is built.
"""

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests import pairs

ROOT = Path(__file__).resolve().parents[1]
Factory = Callable[..., Any]


def public(package: str) -> dict[str, Any]:
    """Return by its path what a module exports, or what is exported of those in a folder."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    homes = {home.name for home in pkgutil.walk_packages(module.__path__, f"{package}.")}
    exported = {**public("optfn.distributed"), **public("optfn")}
    return {path: x for path, x in exported.items() if getattr(x, "__module__", None) in homes}


def expanded(markdown: str) -> str:
    """Return a page with its generated tables, and with each public name for `::: package.*`."""

    def lines(match: re.Match[str]) -> str:
        return "\n\n".join(f"::: {path}" for path in public(match[1]))

    def table(match: re.Match[str]) -> str:
        return ON_THE_SITE[match[1]]()

    markdown = re.sub(r"^<!-- table: (\w+) -->$", table, markdown, flags=re.MULTILINE)
    return re.sub(r"^::: ([\w.]+)\.\*$", lines, markdown, flags=re.MULTILINE)


def named(package: str) -> dict[str, Factory]:
    """Return the public factories of a package by name."""
    return {path.split(".")[-1]: factory for path, factory in public(package).items()}


def paragraphs(factory: Factory) -> list[str]:
    """Return the paragraphs of a docstring."""
    return (inspect.getdoc(factory) or "").split("\n\n")


def equation(optimizer: Factory) -> str:
    """Return the equations, which are the indented paragraph after the first sentence."""
    text = paragraphs(optimizer)[1]
    assert text.startswith("    "), f"{optimizer.__name__}: the docstring has no equations"
    return "; ".join(" ".join(line.split()) for line in text.splitlines()).replace("|", r"\|")


def chain(optimizer: Factory) -> str:
    """Return the transforms of an optimizer in their order."""
    factory = inspect.unwrap(optimizer)
    needed = [k for k, p in inspect.signature(factory).parameters.items() if p.default is p.empty]
    return _links(factory(**dict.fromkeys(needed, 0.5)))


def _links(rules: Sequence[Any]) -> str:
    """Return the names of the rules of a chain."""
    return " → ".join(_link(rule) for rule in rules if rule.name != "dense_rows")


def _link(rule: Any) -> str:
    """Return the name of a rule; for muon, the rules of the matrices and of the other leaves."""
    if rule.links:
        restricted = [link.links[0] for link in rule.links]
        return f"({'; others: '.join(_links(x.links or [x]) for x in restricted)})"
    return str(rule.name)


def recordings(name: str) -> str:
    """Return the pattern of an optimizer's recordings, if there are any."""
    return f"`*_{name}*`" if any((ROOT / "tests/recordings").glob(f"*_{name}*.npz")) else ""


def fluid_class(optimizer: Factory) -> str:
    """Return the class of fluid or Paddle that the source in a docstring names."""
    source = " ".join(text for text in paragraphs(optimizer) if text.startswith("Source: "))
    found = re.search(r"\b(fluid|Paddle)'s (\w+)\.$", source)
    return f"{found[1]}'s `{found[2]}`".removeprefix("fluid's ") if found else ""


def reasons() -> dict[str, str]:
    """Return when to choose each optimizer: the end of its first row in docs/choose.md."""
    text = (ROOT / "docs/choose.md").read_text()
    rows = re.findall(r"^\| `optfn\.(\w+)\(.*\| (.*) \|$", text, re.MULTILINE)
    return dict(reversed(rows))


def value(schedule: Factory) -> str:
    """Return the first sentence of a schedule's docstring without its verb."""
    return " ".join(paragraphs(schedule)[0].split()).removeprefix("Return ").rstrip(".")


def equations() -> str:
    """Return the table of all optimizers: equations, chains and recordings."""
    head = "| optimizer | equation | chain after clip and regularization | recordings |\n"
    optimizers = named("optfn.optimizers").items()
    rows = (f"| {k} | {equation(x)} | {chain(x)} | {recordings(k)} |" for k, x in optimizers)
    return head + "|---|---|---|---|\n" + "\n".join(rows)


def values() -> str:
    """Return the table of all schedules."""
    rows = (f"| {k} | {value(x)} |" for k, x in named("optfn.schedules").items())
    return "| schedule | value |\n|---|---|\n" + "\n".join(rows)


ON_THE_SITE = {"equations": equations, "values": values}
TO_BEGIN_WITH = ("sgd", "momentum", "adamw", "lamb", "muon")  # of the optimizers, in README
TARGETS = ("v5e", "v5p", "v6e", "H100")


def costs() -> dict[str, str]:
    """Return the rows of Adam's precisions: what compilers of TPUs and a GPU make of its update."""
    found = json.loads((ROOT / "benchmarks/compiled.json").read_text())["rows"]
    cells = {
        (row["rule"], row["target"]): f"{row['bytes']:.1f} ({row['temporaries']:.1f})"
        for row in found
        if row["tree"] == "matrix" and re.fullmatch(r"adam(, .*(moments|masters).*)?", row["rule"])
    }
    return {
        name: f"| {name} | {' | '.join(cells.get((name, x), '–') for x in TARGETS)} |"
        for name in dict.fromkeys(rule for rule, _ in cells)
    }


def together() -> dict[str, str]:
    """Return the rows of the pairs that a training step refuses; a pipeline is a value_and_grad."""
    rows = {}
    for pair, reason in pairs.IMPOSSIBLE.items():
        if "pipeline" not in pair:
            asked = " with ".join(x.asked for name, x in pairs.FEATURES.items() if name in pair)
            rows[asked.strip("`")] = f"| {asked} | {reason.why} |"
    return rows


def models() -> dict[str, Any]:
    """Return what tests/zoo/matrix.json says of the small models and of abilities of the step."""
    found: dict[str, Any] = json.loads((ROOT / "tests/zoo/matrix.json").read_text())
    return found


def idioms() -> dict[str, str]:
    """Return the rows of the small models: what each shows of its library."""
    return {name: f"| {name} | {entry['idiom']} |" for name, entry in models()["models"].items()}


def abilities() -> dict[str, str]:
    """Return the rows of abilities: the models of each library with which a step has them."""
    found = models()
    libraries = dict.fromkeys(name.split()[0] for name in found["models"])
    return {
        asked.strip("`"): f"| {asked} | {' | '.join(_cell(found, x, ability) for x in libraries)} |"
        for ability, asked in found["abilities"].items()
    }


def _cell(found: dict[str, Any], library: str, ability: str) -> str:
    """Return "✓", "–" where the ability applies to no model, or the models that stop."""
    outcomes = {
        name.split()[1]: entry["outcomes"][ability]
        for name, entry in found["models"].items()
        if name.split()[0] == library and not entry["outcomes"][ability].startswith("–")
    }
    stops = [idiom for idiom, outcome in outcomes.items() if outcome != "agrees"]
    if not outcomes:
        return "–"
    return f"not {', '.join(stops)}" if stops else "✓"


def tables() -> list[tuple[str, str, dict[str, str]]]:
    """Return for each table its page, how its head begins, and its rows by name."""
    optimizers, when = named("optfn.optimizers"), reasons()
    classes = {k: f"| `{k}` | {fluid_class(x)} | {when.get(k)} |" for k, x in optimizers.items()}
    return [
        ("README.md", "| optimizer | fluid class |", {k: classes[k] for k in TO_BEGIN_WITH}),
        ("docs/choose.md", "| update | v5e |", costs()),
        ("docs/distributed.md", "| what a step refuses | why |", together()),
        ("docs/reference/models.md", "| model | what it shows |", idioms()),
        ("docs/reference/models.md", "| ability | linen |", abilities()),
    ]


def pages() -> dict[Path, str]:
    """Return the text that each page with such tables should have."""
    found: dict[Path, str] = {}
    for page, head, rows in tables():
        path = ROOT / page
        lines = found.get(path, path.read_text()).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
        end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
        there = {line.split("|")[1].strip(" `"): line for line in lines[start:end]}
        lines[start:end] = (there | rows).values()
        found[path] = "\n".join(lines) + "\n"
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
