"""The programs in README.md and in docs/ run, as they are printed; links and names hold."""

import ast
import html
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest
from grids import nightly
from questions import QUESTIONS

import optfn
from benchmarks import targets
from docs import crosslinks, equations, errors, notebooks, tables
from docs.programs import DOCS, FENCE, PAGES, ROOT, agree, fences, programs, run
from docs.search import Search


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_what_they_are(page):
    """No program hides under another name, or in a fence that does not end."""
    assert {language for _, language, _ in fences(page)} <= {"python", "output", "sh", "text"}
    marks = re.findall(r"^ *(?:```|~~~)", PAGES[page].read_text(), re.MULTILINE)
    assert len(marks) == 2 * len(fences(page))


def trains(capsys, *after: dict) -> None:
    losses = after[0]["history"]["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert "loss" in capsys.readouterr().err
    whole, resumed, divided = (np.asarray(after[-1][x]) for x in ("whole", "resumed", "divided"))
    np.testing.assert_array_equal(resumed, whole)
    np.testing.assert_allclose(divided, whole, rtol=1e-5, atol=1e-7)
    assert Path("run").is_dir()


def trains_on_all_devices(capsys, *after: dict) -> None:
    trained = [names for names in after if "mesh" in names]
    assert len(trained) >= len(after) - 1
    for names in trained:
        assert names["mesh"].size == len(jax.devices()) == 8
        assert any(np.any(x) for x in jax.tree.leaves(names["state"]))


def sends_less(capsys, *after: dict) -> None:
    trains_on_all_devices(capsys, *after)
    exchanging = next(names for names in after if "choice" in names)
    assert set(exchanging["state"].opt_state[0].residual["layers"]) == {"w"}
    assert "Signs" in after[-1]


def every_run_learns(capsys, *after: dict) -> None:
    runs = [names["history"]["loss"] for names in after if "history" in names]
    assert runs
    for losses in runs:
        assert np.mean(losses[-5:]) < 0.9 * losses[0]


# What is asked of the names after each program of a page, beside that it runs.
CHECKS = {"README.md": trains, "distributed.md": trains_on_all_devices, "links.md": sends_less}
CHECKS |= dict.fromkeys(
    ("moving/fluid.md", "tour.md", "loop.md", "recipes.md", "own-transform.md"), every_run_learns
)


# These train for ten seconds and longer.
LONG = {f"notebooks/{name}.md" for name in ("digits", "language-model", "recommender")}


@pytest.mark.parametrize(
    "page", [nightly(page) if page in LONG else page for page in PAGES if programs(page)]
)
def test_programs_run(page, capsys, tmp_path, monkeypatch):
    """Without an error, and to the output that stands below: `make outputs` writes it anew."""
    monkeypatch.chdir(tmp_path)  # programs may write files
    after = []
    for program, (names, printed) in zip(programs(page), run(page), strict=True):
        after.append(names)
        if program.output:
            assert agree(printed, program.output), f"{page}:{program.line} prints\n{printed}"
    if page in CHECKS:
        CHECKS[page](capsys, *after)


def test_outputs_agree_up_to_rounding():
    shown = "loss 0.17, 1.2e-5 and 3 layers\nname   bytes\n-------------\nw      1,024\n"
    assert agree("loss 0.18, 1.22e-5 and 3 layers\nname    bytes\n-----\nw       1,024", shown)
    assert not agree(shown.replace("0.17", "0.27"), shown)
    assert not agree(shown.replace("1.2e-5", "1.2e-4"), shown)
    assert not agree(shown.replace("3 layers", "4 layers"), shown)
    assert not agree(shown.replace("1,024", "1,025"), shown)
    assert not agree(shown.replace("layers", "blocks"), shown)
    assert not agree(shown + "another line", shown)
    assert not agree("", shown)


def test_will_it_fit_describes_the_gpu_that_the_benchmarks_compile_for():
    assert targets.H100 in PAGES["will-it-fit.md"].read_text()


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
    "current_step_lr() load( clear_gradients() "
    "loss startup_program parameter_list parameters no_grad_set grad_clip callbacks",
    "The rest of a program": "fluid.layers.embedding(is_sparse=True) paddle.batch( "
    "fluid.DataFeeder fluid.default_main_program().clone(for_test=True) fluid.layers.accuracy "
    "fluid.io.save_inference_model fluid.CompiledProgram",
}


@pytest.mark.parametrize("heading", FLUID)
def test_moving_from_fluid_has_every_argument(heading):
    text = PAGES["moving/fluid.md"].read_text()
    row = re.search(rf"^\| `{heading}`.*$", text, re.MULTILINE)  # of the table of optimizers
    section = re.search(rf"^##+ {heading}\n.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    found = (section or row)[0]
    assert [word for word in FLUID[heading].split() if f"`{word}" not in found] == []


LINK = re.compile(r"\]\(([\w./-]+\.md)?(?:#([\w-]+))?\)")


def anchors(path: Path) -> set[str]:
    """Return the anchors that MkDocs and forges make of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}


FIGURES = [ROOT / "benchmarks/README.md", *sorted(ROOT.glob("benchmarks/results/*.md"))]
LINKING = [*PAGES.values(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *FIGURES]


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        path = page.parent / target if target else page
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
    own = (DOCS / "own-transform.md").read_text()  # its names of the core are promised, too
    names |= {f"optfn.core.{name}" for name in re.findall(r"(?<![/\w])core\.([a-z_]+)", own)}
    names |= {f"optfn.core.leafwise.{name}" for name in re.findall(r"leafwise\.([a-z_]+)", own)}
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^::: (\S+)$", tables.expanded(pages), re.MULTILINE)
    assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("name", tables.named("optfn.optimizers"))
def test_typeset_equations_have_every_sign_of_the_docstring(name):
    factory = getattr(optfn, name)
    text = next(x for x in tables.paragraphs(factory) if x.startswith("    "))
    drawn = equations.block(text).partition("<annotation")[0]
    found = unicodedata.normalize("NFKC", html.unescape(re.sub(r"<[^>]*>", "", drawn)))
    source = unicodedata.normalize("NFKC", text.replace("'", "′").replace("\u0302", "^"))
    unseen = r"[\s/√·;_`()]|\^(?=\()"  # drawn as bars, roots and gaps; around what a bar separates
    assert re.sub(unseen, "", found) == re.sub(unseen, "", source)


def test_what_is_no_equation_stays_code():
    assert equations.block("    tx = optfn.adam(1e-3)[0]") is None
    assert equations.inline("the [first]") is None


def test_names_and_papers_become_links():
    text = """See `adam`, `optfn.minimize(loss_fn)` and arXiv 1412.6980.

# `adam`

    `adam`

[`adam`](tour.md), optax's `adam`, `history`, and `Rows`

```python
`adam`
```
"""
    links = {
        "See `adam`": "See [`adam`][optfn.adam]",
        "`optfn.minimize(loss_fn)`": "[`optfn.minimize(loss_fn)`][optfn.minimize]",
        "arXiv 1412.6980": "[arXiv 1412.6980](https://arxiv.org/abs/1412.6980)",
        "and `Rows`": "and [`Rows`][optfn.sparse.Rows]",
    }
    expected = text
    for before, after in links.items():
        expected = expected.replace(before, after)
    assert crosslinks.linked(text) == expected


def test_a_page_becomes_a_notebook_with_its_outputs():
    page = "# Title\n\nSee [the tour](../tour.md).\n\n```python\nprint(1)\n```\n\n"
    page += "```output\n1\n```\nEnd.\n"
    cells = json.loads(notebooks.notebook(page))["cells"]
    assert [cell["source"] for cell in cells] == ["# Title\n\nSee the tour.", "print(1)", "End."]
    assert cells[1]["outputs"][0]["text"] == "1\n"
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]


def test_link_texts_are_names_and_not_files():
    for page in PAGES:
        path = PAGES[page]
        texts = re.findall(r"\[([^\]\n]*)\]\(", FENCE.sub("", path.read_text()))
        assert not [text for text in texts if text.endswith(".md")], page


def test_docs_examples_and_benchmarks_need_no_path_of_pytest():
    """Each of their modules is imported as `make` imports it: from the root, without `tests/`."""
    folders = ("docs", "examples", "benchmarks", "benchmarks/studies")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    names = [name for name in names if not name.endswith("__main__")]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", program, *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, and the exit status of the build."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(place)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return place, built.returncode


@pytest.fixture(scope="module")
def search(site):
    return Search(json.loads((site[0] / "search" / "search_index.json").read_text()))


def test_the_site_builds_without_a_warning(site):
    """mkdocs.yml is strict: links, anchors, docstrings, pages outside the navigation."""
    place, status = site
    assert status == 0
    page = (place / "reference" / "optimizers" / "index.html").read_text()
    assert "√(1 − β₂ᵗ)/(1 − β₁ᵗ)" in page and "<blockquote>" not in page


def test_each_question_finds_its_page_among_the_first_three(search):
    lost = {}
    for question, answers in QUESTIONS.items():
        pages = [page.strip("/") for page in search.pages(question)]
        if not {*answers.split()}.intersection(pages[:3]):
            ranks = {x: pages.index(x) + 1 if x in pages else None for x in answers.split()}
            lost[question] = f"{ranks}, after {pages[:3]}"
    assert not lost, "\n".join(f"{question}: {where}" for question, where in lost.items())


def test_a_question_of_no_page_finds_none(search):
    assert search.pages("zzyzx") == []


@pytest.mark.parametrize("every", [nightly(1), 5])
def test_a_message_finds_the_page_of_errors(search, every):
    long = [text for text in errors.messages() if len(errors.order(text).split()) > 12]
    assert len(long) > 50
    asked = [text.replace("…", " ") for text in sorted(long)[::every]]
    assert [text for text in asked if "reference/errors/" not in search.pages(text)[:3]] == []


MESSAGE = re.compile(r"^\| (`+) ?(.+?) ?\1 \| (.+) \|$", re.MULTILINE)


def test_each_warning_and_error_of_the_code_has_a_line_in_order():
    """`docs.errors` says which errors are listed; each row tells its remedy, and leads to more."""
    rows = MESSAGE.findall(PAGES["reference/errors.md"].read_text())
    listed = [message for _, message, _ in rows]
    code = {errors.first_words(message) for message in errors.messages()}
    assert code.difference(listed) == set(), "new in the code"
    assert set(listed).difference(code) == set(), "no longer in the code"
    assert listed == sorted(code, key=errors.order)
    for _, message, remedy in rows:
        words, link = re.fullmatch(r"(.+) \[[^]]+\]\(([\w/#.-]+\.md[\w#-]*)\)", remedy).groups()
        assert len(words.split()) <= 20, message
        assert (DOCS / "reference" / link.partition("#")[0]).is_file(), message


@pytest.mark.parametrize("spoken", ["warn({!r})", "raise ValueError({!r})", "x = {!r}\nwarn(x)"])
def test_messages_are_found_where_code_says_them(spoken):
    warnings, raised = errors.said(ast.parse(spoken.format("no step. Pass steps=")))
    assert [errors.first_sentence(text) for text in warnings + raised] == ["no step"]
    assert (raised == []) == ("warn" in spoken)


def test_a_message_has_an_ellipsis_for_what_is_inserted():
    call = ast.parse('checks.warn(f"{a}{b}: step {n} of " + words + ". Stop it")')
    message = errors.first_sentence(errors.said(call)[0][0])
    assert message == "…: step … of …"
    assert errors.order(message) == "step of"


def test_a_row_has_a_message_up_to_a_mark_after_six_words():
    assert errors.first_words("1, 2: 3 4 5 6, 7") == "1, 2: 3 4 5 6"
    assert errors.first_words("1 2 3 4 5 6, and 7 (8)") == "1 2 3 4 5 6, and 7"
