"""The programs in README.md and docs/*.md run, as they are printed."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = {p.name: p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FENCE = re.compile(r"^ *(`{3,}|~{3,})([^\n]*)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)


def fences(page: str) -> list[tuple[int, str, str]]:
    """Return (line, language, text) of each fenced block of a page."""
    text = PAGES[page].read_text()
    found = FENCE.finditer(text)
    return [(text.count("\n", 0, m.start(3)), m.group(2).strip(), m.group(3)) for m in found]


def programs(page: str) -> list[tuple[int, str]]:
    return [(line, text) for line, language, text in fences(page) if language == "python"]


def run(page: str) -> list[dict]:
    """Run the programs of a page one after the other; return the names there are after each.

    A program goes on from those above it. Errors and warnings stand at the page's own lines.
    """
    names, after = {"__name__": page}, []
    for line, text in programs(page):
        exec(compile("\n" * line + text, PAGES[page], "exec"), names)
        after.append(dict(names))
    return after


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_what_they_are(page):
    """No program hides under another name, or in a fence that does not end."""
    assert {language for _, language, _ in fences(page)} <= {"python", "sh", "text"}
    marks = re.findall(r"^ *(?:```|~~~)", PAGES[page].read_text(), re.MULTILINE)
    assert len(marks) == 2 * len(fences(page))


def trains(capsys, names: dict) -> None:
    losses = names["history"]["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert "loss" in capsys.readouterr().err


def trains_on_all_devices(capsys, *after: dict) -> None:
    *trained, simulated = after
    for names in trained:
        assert names["mesh"].size == len(jax.devices()) == 8
        assert any(np.any(x) for x in jax.tree.leaves(names["state"]))
    exchanging = next(names for names in after if "exchange" in names)
    assert set(exchanging["state"].opt_state[0].residual["layers"]) == {"w"}
    assert "sparse_loco" in simulated


# What is asked of the names after each program of a page, beside that it runs.
CHECKS = {"README.md": trains, "distributed.md": trains_on_all_devices}


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)])
def test_programs_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # programs may write files
    after = run(page)
    if page in CHECKS:
        CHECKS[page](capsys, *after)


def test_checked_pages_have_programs():
    assert all(programs(page) for page in CHECKS)
