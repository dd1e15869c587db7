"""Links that nobody writes by hand: names in prose to the reference, papers to arXiv."""

import functools
import re

from docs.tables import public

# Left as they are: fenced and indented code, headings, and what is a link already.
PATTERN = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^ *(?P=fence) *$"
    r"|^#[^\n]*$|^(?: {4}|\t)[^\n]*$|^::: [^\n]*$"
    r"|\[[^\]\n]*(?:\n[^\]\n]*)?\](?:\([^)]*\)|\[[^\]]*\])"
    r"|(?P<foreign>'s )?`(?P<code>[^`\n]+)`"
    r"|arXiv (?P<paper>\d{4}\.\d{4,5})",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(
    r"(?:optfn\.)?(?P<path>(?:(?:distributed|schedules|sparse|plot)\.)?\w+)(?:\(.*\))?"
)
# Names that pages give to something else too, such as the metrics of a step.
AMBIGUOUS = {"metrics", "plan"}


@functools.cache
def targets() -> dict[str, str]:
    """Return the public names as pages write them, with their entries in the reference."""
    found = {path.removeprefix("optfn."): path for path in public("optfn")}
    for module in ("distributed", "schedules", "sparse", "plot"):
        entries = public(f"optfn.{module}")
        found |= {path.removeprefix("optfn."): path for path in entries}
        if module != "plot":  # whose names are everyday words
            found |= {path.split(".")[-1]: path for path in entries}
    modules = {"distributed", "schedules", "sparse", "plot"}
    return {name: path for name, path in found.items() if name not in AMBIGUOUS | modules}


def linked(markdown: str) -> str:
    """Return a text in which names of the library and papers are links."""

    def link(match: re.Match[str]) -> str:
        if paper := match["paper"]:
            return f"[arXiv {paper}](https://arxiv.org/abs/{paper})"
        if match["foreign"] or not match["code"]:  # such as flax's `TrainState`
            return match.group()
        name = NAME.fullmatch(match["code"])
        target = name and targets().get(name["path"])
        return f"[{match.group()}][{target}]" if target else match.group()

    return PATTERN.sub(link, markdown)


def linked_but_first_cells(markdown: str) -> str:
    """Return such a text, with first cells of tables left alone: they name other libraries."""
    rows = re.compile(r"^\|[^|\n]*(?=\|)", re.MULTILINE)
    cells = iter(rows.findall(markdown))
    return rows.sub(lambda _: next(cells), linked(markdown))
