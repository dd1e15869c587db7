"""The programs in README.md and in docs/ run, as they are printed; links and names hold."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import optfn
from docs import tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": ROOT / "README.md"}
PAGES |= {str(p.relative_to(DOCS)): p for p in sorted(DOCS.rglob("*.md"))}
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
    exchanging = next(names for names in after if "choice" in names)
    assert set(exchanging["state"].opt_state[0].residual["layers"]) == {"w"}
    assert "sparse_loco" in simulated


def every_run_learns(capsys, *after: dict) -> None:
    runs = [names["history"]["loss"] for names in after if "history" in names]
    assert runs
    for losses in runs:
        assert np.mean(losses[-5:]) < 0.9 * losses[0]


# What is asked of the names after each program of a page, beside that it runs.
CHECKS = {"README.md": trains, "distributed.md": trains_on_all_devices}
CHECKS |= dict.fromkeys(
    ("moving/fluid.md", "tour.md", "recipes.md", "own-transform.md"), every_run_learns
)


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)])
def test_programs_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # programs may write files
    after = run(page)
    if page in CHECKS:
        CHECKS[page](capsys, *after)


def test_checked_pages_have_programs():
    assert all(programs(page) for page in CHECKS)


# The arguments of each class on the pages of fluid, and on Paddle's page of ASGD.
FLUID = {
    "SGDOptimizer": "learning_rate regularization name",
    "MomentumOptimizer": "learning_rate momentum use_nesterov regularization name",
    "LarsMomentumOptimizer": "learning_rate momentum lars_coeff lars_weight_decay parameter_list "
    "regularization grad_clip name",
    "AdagradOptimizer": "learning_rate epsilon regularization name initial_accumulator_value",
    "DecayedAdagradOptimizer": "learning_rate decay epsilon regularization name",
    "AdadeltaOptimizer": "learning_rate epsilon rho regularization name",
    "RMSPropOptimizer": "learning_rate rho epsilon momentum centered regularization name",
    "AdamOptimizer": "learning_rate beta1 beta2 epsilon regularization name lazy_mode",
    "AdamaxOptimizer": "learning_rate beta1 beta2 epsilon regularization name",
    "FtrlOptimizer": "learning_rate l1 l2 lr_power regularization name",
    "LambOptimizer": "learning_rate lamb_weight_decay beta1 beta2 epsilon regularization "
    "exclude_from_weight_decay_fn name",
    "ASGD": "learning_rate batch_num parameters weight_decay grad_clip multi_precision name",
    "DGCMomentumOptimizer": "learning_rate momentum rampup_begin_step rampup_step sparsity "
    "use_nesterov local_grad_clip_norm num_trainers regularization name",
    "ExponentialMovingAverage": "decay thres_steps name update() apply(executor restore(executor)",
    "ModelAverage": "average_window_rate min_average_window max_average_window regularization name "
    "apply(executor restore(executor)",
    "RecomputeOptimizer": "optimizer _set_checkpoints( minimize state_dict set_dict",
    "PipelineOptimizer": "optimizer cut_list place_list concurrency_list queue_size sync_steps "
    "start_cpu_core_id",
    "Methods": "minimize( backward( apply_gradients( apply_optimize( state_dict() set_dict( step() "
    "set_state_dict( append_regularization_ops( clear_grad( get_lr() set_lr( set_lr_scheduler( "
    "loss startup_program parameter_list parameters no_grad_set grad_clip callbacks",
}


@pytest.mark.parametrize("heading", FLUID)
def test_moving_from_fluid_has_every_argument(heading):
    text = PAGES["moving/fluid.md"].read_text()
    section = re.search(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    missing = [word for word in FLUID[heading].split() if f"`{word}" not in section.group(1)]
    assert not missing


LINK = re.compile(r"\]\(([\w./-]+\.md)?(?:#([\w-]+))?\)")


def anchors(path: Path) -> set[str]:
    """Return the anchors that MkDocs and forges make of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(FENCE.sub("", PAGES[page].read_text())):
        path = PAGES[page].parent / target if target else PAGES[page]
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_pictures_are_there_and_small():
    """Each picture that a page shows, and no others; under 100 kB, so that pages load quickly."""
    shown = set()
    for path in PAGES.values():
        for target in re.findall(r"!\[[^\]]+\]\(([\w./-]+)\)", path.read_text()):
            shown.add((path.parent / target).resolve())
    files = {path.resolve() for path in (DOCS / "pictures").iterdir()}
    assert shown == files
    assert all(path.stat().st_size < 100_000 for path in files)


def test_the_reference_has_every_public_name_once():
    modules = (optfn, optfn.schedules, optfn.sparse, optfn.distributed, optfn.plot)
    names = [f"{module.__name__}.{name}" for module in modules for name in module.__all__]
    names = set(names) - {module.__name__ for module in modules}
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^::: (\S+)$", tables.expanded(pages), re.MULTILINE)
    assert sorted(listed) == sorted(names)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path):
    """mkdocs.yml is strict: links, anchors, docstrings, pages outside the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    page = (tmp_path / "reference" / "optimizers" / "index.html").read_text()
    assert "√(1 − β₂ᵗ)/(1 − β₁ᵗ)" in page and "<blockquote>" not in page
