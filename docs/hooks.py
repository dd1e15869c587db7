"""What MkDocs does not do by itself: pages from outside docs/, notebooks, links, equations, and
the order of what the search finds."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from docs import equations
from docs.crosslinks import linked, linked_but_first_cells
from docs.notebooks import notebook
from docs.tables import expanded

# Where pages outside docs/ stand on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "tests/faults.md": "faults-tried.md",
}
RESULTS = sorted(Path(__file__).parents[1].glob("benchmarks/results/*.md"))
PAGES |= {f"benchmarks/results/{page.name}": f"benchmarks/{page.name}" for page in RESULTS}
SOURCES = {place: source for source, place in PAGES.items()}
ROW = re.compile(r"^(\| \w+ \|)((?:\\\||[^|\n])+=(?:\\\||[^|\n])+)(\|.*)$", re.MULTILINE)
# Pages that the search shows after those that explain, since they have the words of most questions.
SEARCHED_LAST = dict.fromkeys(
    ("reference/", "benchmarks", "changelog", "contributing", "faults-tried"), 0.1
) | {"reference/errors": 0.7}  # a whole message still finds it
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|png))(?=[#)])")


def on_files(files, config):
    """Add the pages from outside docs/, and those in notebooks/ as notebooks for Jupyter."""
    for source, place in PAGES.items():
        with open(source, encoding="utf-8") as file:
            files.append(File.generated(config, place, content=file.read()))
    for page in [file for file in files if file.src_uri.startswith("notebooks/")]:
        place = page.src_uri.replace(".md", ".ipynb")
        files.append(File.generated(config, place, content=notebook(page.content_string)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Expand `::: package.*`, and turn links that hold in the repository into those of the site."""
    place = page.file.src_uri
    for beginning, boost in SEARCHED_LAST.items():
        if place.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    folder = posixpath.dirname(SOURCES.get(place, f"docs/{place}"))

    def moved(link):
        target = posixpath.normpath(posixpath.join(folder, link.group(1)))
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}"

    with_names = linked_but_first_cells if place.startswith("moving/") else linked
    text = with_names(LINK.sub(moved, markdown))
    text = expanded(text)
    return ROW.sub(typeset, text) if place == "reference/optimizers.md" else text


def typeset(row):
    """Return a row of the table of optimizers with its equations, in the second cell, as MathML."""
    first, cell, rest = row.groups()
    cell = equations.inline(cell.replace("\\|", "|").strip()) or cell
    return f"{first} {cell} {rest}"
