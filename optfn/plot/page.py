"""The report of a run: a single HTML file, without scripts and without links to files."""

import io
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from optfn._version import __version__
from optfn.checkpoint.storage import replace_text
from optfn.core import checks
from optfn.interop import packages
from optfn.plot.run import RunHistory, check_history, find_points
from optfn.plot.run import history as draw_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colour of text and lines in the picture. It becomes CSS's `currentColor`, which is dark on a
# light page and light on a dark one.
_INK = "#010203"
_INK_OF = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .2rem .8rem .2rem 0; text-align: left }
th { font-weight: 600; vertical-align: top } thead th, td.number { text-align: right }
thead th:first-child { text-align: left }
td.number { font-variant-numeric: tabular-nums } tr { border-bottom: 1px solid #8884 }
pre { overflow: auto; max-height: 30rem; font-size: .8rem } svg { width: 100%; height: auto }
"""

# A browser that reads this requests nothing, whatever the names in the page are.
# A report has text from a run in it: the browser must run no script, and load nothing, from it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report(
    history: RunHistory,
    path: str | os.PathLike[str],
    *,
    title: str = "Training run",
    about: Mapping[str, object] | None = None,
    summary: str = "",
    local_steps: int = 1,
) -> Path:
    """Write the report of a run as one HTML file, and return its path.

    It has the curves that `history` draws; a table of the first, smallest, largest and last value
    of each; the optimizer's state for each parameter; versions and devices. All of it is in one
    file, which you can send or keep, and which follows the light or dark mode of the browser.
    `minimize(..., report=path)` writes it during the run.

    Args:
      history: the history that `minimize` returns.
      path: the file. It is replaced only when the new one is complete.
      title: the heading.
      about: further facts, such as the hyper-parameters, by name.
      summary: the text of `optfn.summary(tx, params)`.
      local_steps: as for `minimize`: how many steps an entry of the history stands for.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError, ValueError: `history` is not the history of a run.
    """
    series = check_history(history)
    checks.instance("about", about, Mapping | None, "a mapping from names")
    facts = {"written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"} | dict(about or {})
    body = [
        f"<h1>{escape(title)}</h1>",
        _format_facts(facts),
        "<h2>Curves</h2>",
        _draw_svg(series, local_steps),
        "<h2>Numbers</h2>",
        _format_table(_HEAD, _summarize_series(series, local_steps)),
    ]
    if summary:
        body += ["<h2>State of the optimizer</h2>", f"<pre>{escape(summary)}</pre>"]
    body += ["<h2>Environment</h2>", _format_facts(environment())]
    return replace_text(checks.path("path", path), _format_page(title, body))


def environment() -> dict[str, str]:
    """Return devices, processes and versions by name, as text."""
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "devices": ", ".join(f"{n} × {kind}" for kind, n in devices.items()),
        "processes": str(jax.process_count()),
        "optfn": __version__,
        **{name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _format_page(title: str, body: Iterable[str]) -> str:
    """Return an HTML page with the lines of its body, whose policy forbids it to load anything."""
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    )
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body]
    return "\n".join([*lines, "</body>", "</html>", ""])


def _format_facts(facts: Mapping[str, object]) -> str:
    """Return an HTML table with a row for each name and value."""
    rows = (
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return "\n".join(["<table>", *rows, "</table>"])


_HEAD = ("", "first", "least", "at step", "greatest", "at step", "last", "not finite")


def _summarize_series(series: RunHistory, local_steps: int) -> list[tuple[str, ...]]:
    """Return a row of the table of numbers for each array that has entries, without the steps of
    evaluations."""
    rows = []
    for name, values in sorted(series.items(), key=lambda item: item[0] != "loss"):
        if name == "evaluation_step" or not values.size:
            continue
        steps, _ = find_points(series, name, local_steps)
        finite = np.flatnonzero(np.isfinite(values))
        extremes = ["–"] * 4
        if finite.size:
            of_finite = values[finite]
            at = finite[of_finite.argmin()], finite[of_finite.argmax()]
            extremes = [text for i in at for text in (_format_number(values[i]), f"{steps[i]:,}")]
        bad = f"{values.size - finite.size:,}"
        rows.append((name, _format_number(values[0]), *extremes, _format_number(values[-1]), bad))
    return rows


def _format_number(x: float) -> str:
    return f"{float(x):.6g}"


def _format_table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return an HTML table of numbers. The first cell of each row is its name."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = ["<table>", f"<thead><tr>{titles}</tr></thead>", "<tbody>"]
    for name, *cells in rows:
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


def _draw_svg(series: RunHistory, local_steps: int) -> str:
    """Return the curves as an SVG element whose ink follows the color of the page."""
    matplotlib = packages.optional_module("matplotlib", "plot")
    settings = dict.fromkeys(_INK_OF, _INK) | {"svg.fonttype": "none", "text.usetex": False}
    with matplotlib.rc_context(settings):
        figure: Figure = packages.optional_module("matplotlib.figure", "plot").Figure(
            figsize=(8, 1), layout="constrained"
        )
        draw_history(series, local_steps=local_steps, figure=figure)
        figure.set_figheight(0.5 + 1.9 * len(figure.axes))
        text = io.StringIO()
        # A date would change the file with each write.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    # An element within a page has no header of XML.
    svg = re.sub(r".*?(?=<svg )", "", text.getvalue(), count=1, flags=re.DOTALL)
    return svg.replace(_INK, "currentColor").strip()
