"""The shape of the project: imports one way, public names, docstrings, README."""

import ast
import contextlib
import doctest
import functools
import graphlib
import importlib
import inspect
import operator
import pkgutil
import pydoc
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
import registry
from catalogue import OPTIMIZERS, Entry

import optfn

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optfn"
TESTS = ROOT / "tests"
COMMON = "grad_clip=None, regularization=None, param_attrs=None, multi_precision=False"


@functools.cache
def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "optfn.") if not m.ispkg]
    return [name.removeprefix("optfn.") for name in found]


# From the ground up: a module or folder imports those before it only.
LAYERS = (
    "_version", "core", "mesh.compilers", "mesh.collectives", "workers", "leaves", "interop",
    "mesh.state", "transforms", "wrappers", "optimizers", "schedules", "loss.jaxprs",
    "loss.recomputation", "mesh.layout", "tables", "loss", "sparse", "compression", "pipeline",
    "train", "checkpoint", "plan", "distributed", "plot", "run",
)  # fmt: skip


@functools.cache
def imports_of(module: str) -> set[str]:
    """Return the modules of optfn that a module imports, when it is loaded or in a function."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())):
        if isinstance(node, ast.Import):
            assert not any(a.name.split(".")[0] == "optfn" for a in node.names), module
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "optfn":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".removeprefix("optfn.")
                is_module = (PACKAGE / whole.replace(".", "/")).with_suffix(".py").exists()
                is_folder = (PACKAGE / whole.replace(".", "/")).is_dir()
                names.add(whole if is_module or is_folder else node.module.removeprefix("optfn."))
    return names


def room(module: str) -> str:
    """Return the folder of a module, or the module itself where it stands at the root."""
    return module.rpartition(".")[0] or module


def in_order(arrows: dict[str, set[str]]) -> None:
    """Raise graphlib.CycleError if the arrows go in a circle."""
    tuple(graphlib.TopologicalSorter(arrows).static_order())


def test_imports_go_one_way():
    """Modules do not import each other in a circle, and folders import lower layers only."""
    in_order({module: imports_of(module) for module in modules()})
    assert {room(module) for module in modules()} == set(LAYERS)
    for module in modules():
        below = LAYERS[: LAYERS.index(room(module)) + 1]
        up = {other for other in imports_of(module) if room(other) not in below}
        assert not up, f"{module} imports {up}"


def test_one_file_names_primitives_their_params_and_versions_of_jax():
    """What the next JAX renames is mended in `loss/jaxprs/primitives.py`."""
    reads = re.compile(r"\.primitive\.name|\.params(\[\"|\.get\()|jax\.__version_info__")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if reads.search(path.read_text())
    }
    assert found == {"loss/jaxprs/primitives.py"}


def test_no_test_library_at_run_time():
    for module in modules():
        text = (PACKAGE / (module.replace(".", "/") + ".py")).read_text()
        assert not re.search(r"^\s*(import|from) (chex|flax|torch|pytest)", text, re.M), module


# Every transform; equations against their references; whole programs.
BESIDE = {"contract", "rules", "product", "outside"}


def test_folders_of_tests_mirror_the_package():
    """Each has the name of a folder of optfn; four are about the whole of it."""
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert folders - BESIDE <= {module.split(".")[0] for module in modules() if "." in module}
    assert not BESIDE - folders


def test_no_test_file_imports_another():
    """What they share lies at the root of tests/; names of files are names of modules."""
    files = sorted(TESTS.rglob("test_*.py"))
    assert len({path.stem for path in files}) == len(files)
    for path in [*files, *TESTS.glob("*.py")]:
        assert not re.search(r"^ *(from|import (.*, )?) *test_\w+", path.read_text(), re.M), path


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_signatures_are_the_promised_ones(name):
    """Names, order, kinds and defaults, read as Python."""
    expected = f"def f({OPTIMIZERS[name].signature}, {COMMON}): ..."
    want = ast.parse(expected).body[0].args
    got = inspect.signature(getattr(optfn, name)).parameters
    kinds = {k: p.kind for k, p in got.items()}
    positional = [k for k in got if kinds[k] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keyword = [k for k in got if kinds[k] is inspect.Parameter.KEYWORD_ONLY]
    assert positional == [a.arg for a in want.args]
    assert keyword == [a.arg for a in want.kwonlyargs]
    defaults = dict(zip(positional[::-1], want.defaults[::-1], strict=False))
    defaults |= dict(zip(keyword, want.kw_defaults, strict=True))
    for k, node in defaults.items():
        assert got[k].default == ast.literal_eval(node), k


def test_docstrings():
    """Everything public says what it does; every factory describes its arguments."""
    for module in modules():
        loaded = importlib.import_module(f"optfn.{module}")
        assert loaded.__doc__, module
        for name, thing in vars(loaded).items():
            own = getattr(thing, "__module__", None) == loaded.__name__
            if name.startswith("_") or not own or not callable(thing):
                continue
            assert thing.__doc__, f"{module}.{name} has no docstring"
            if module.startswith(("transforms", "optimizers", "wrappers")):
                missing = arguments_without_a_line(thing) if name in optfn.__all__ else []
                assert not missing, f"{module}.{name}"


def test_names_in_docstrings_of_packages_exist():
    """Each dotted name `optfn.…` in the docstring of a package or a public module."""
    names = {"optfn", *(f"optfn.{module}" for module in modules())}
    found = [
        (name, *match.split("."))
        for name in names
        for match in re.findall(r"`(optfn(?:\.\w+)+)`", importlib.import_module(name).__doc__ or "")
    ]
    assert len(found) > 20
    for name, *words in found:
        place = ".".join(words)
        try:
            importlib.import_module(place)
        except ModuleNotFoundError:
            parent = importlib.import_module(".".join(words[:-1]))
            assert hasattr(parent, words[-1]), (name, place)


def arguments_without_a_line(factory: Any) -> list[str]:
    text = inspect.getdoc(factory)
    return [k for k in inspect.signature(factory).parameters if f"\n  {k}: " not in text]


# What the docstrings count per parameter: the rules, and the averages after sgd, which keeps none.
COUNTED = registry.OPTIMIZERS | registry.TRANSFORMS
del COUNTED["reduce_on_plateau"]  # a schedule
del COUNTED["asgd"]  # of one batch, whose gradients it does not keep
COUNTED |= {k: registry.WRAPPERS[k] for k in ("exponential_moving_average", "model_average")}
BATCHES = {"asgd_batches": 3, "scale_by_asgd": 2}  # what their docstrings call n


def state_bytes(entry: Entry, columns: int) -> int:
    """Return the bytes of the state for a leaf of 4 rows."""
    leaf = jax.ShapeDtypeStruct((4, columns), "float32")
    state = jax.eval_shape(entry.make().init, {"w": leaf})
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", COUNTED)
def test_docstrings_name_source_and_bytes_of_state(name):
    """The bytes per parameter that the docstring has are those by which the state grows."""
    entry = COUNTED[name]
    text = inspect.getdoc(operator.attrgetter(entry.name)(optfn))
    # The rate is nobody's rule.
    assert entry.name == "scale_by_learning_rate" or re.search(r"^Source: ", text, re.MULTILINE)
    said = re.search(r"^(State: |No state).*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL).group()
    found = (state_bytes(entry, 4096) - state_bytes(entry, 1024)) / (4 * (4096 - 1024))
    counts = {float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!·)", said)}
    counts |= {float(x) * BATCHES[name] for x in re.findall(r"(\d+)·n", said)}
    if found == 0:
        assert "per parameter" not in said
    else:
        assert "per parameter" in said and round(found, 2) in counts, (found, said)


def test_doctests():
    for module in ["optfn", *(f"optfn.{m}" for m in modules())]:
        assert doctest.testmod(importlib.import_module(module)).failed == 0, module


def test_one_sentence_says_what_the_project_is():
    """In the README, the package, its metadata and the site."""
    sentence = (optfn.__doc__ or "").splitlines()[0]
    assert (ROOT / "README.md").read_text().splitlines()[1] == sentence
    assert f'\ndescription = "{sentence}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f'\nsite_description: "{sentence}"\n' in (ROOT / "mkdocs.yml").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_make_help_has_every_target():
    listed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    found = re.findall(r"^make ([\w-]+) +\S", listed.stdout, re.MULTILINE)
    assert {*found, "compilers"} == set(targets.split())


def test_an_extra_has_those_that_the_makefile_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    said = re.findall(r"^\S+/\.(\w+): HAS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert said
    for extra, names in said:
        needs = [extra]
        for name in needs:
            needs += [x for x in extras if f"optfn[{x}]" in extras[name] and x not in needs]
        assert {*names.split()} <= {*needs}


def test_readme_begins_with_a_program():
    lines = (ROOT / "README.md").read_text().splitlines()
    end = lines.index("```", lines.index("```python") + 1)
    assert end <= 12, "the program is complete by line 12"


def test_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert [block.split() for block in blocks("sh")] == [["make", "demo", "make", "test"]]


# Images that the field does not use.
IMAGES = r"behind_edge|ground floor|behind (a|the) door|dressed|the edge (of|around) (a|the) rule"


def test_the_code_uses_the_words_of_the_glossary():
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    words = [line.split("|")[1].strip() for line in glossary.splitlines() if line.startswith("| ")]
    assert len(words) == len(set(words)) > 30
    for path in sorted((ROOT / "optfn").rglob("*.py")):
        assert not re.search(IMAGES, path.read_text()), path


PUBLIC = [
    (module.__name__, name)
    for module in (optfn, optfn.schedules, optfn.sparse, optfn.distributed)
    for name in module.__all__
    if callable(getattr(module, name))
]


@pytest.mark.parametrize("name", registry.ALL)
def test_help_says_that_a_factory_returns_one_transformation(name):
    """The annotated type is the type of what a call returns."""
    entry = registry.ALL[name]
    factory = operator.attrgetter(entry.name)(optfn)
    made = entry.make()
    for annotated in (
        factory.__annotations__["return"], inspect.signature(factory).return_annotation
    ):  # fmt: skip
        assert annotated is optax.GradientTransformationExtraArgs
    assert isinstance(made, annotated)
    text = pydoc.plain(pydoc.render_doc(factory))
    assert "Unchecked" not in text and "-> optax" in text


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_no_signature_shows_a_name_that_is_not_public(module, name):
    public = operator.attrgetter(name)(importlib.import_module(module))
    with contextlib.suppress(ValueError):  # a class without a signature
        assert not re.search(r"Unchecked|optfn[\w.]*\._\w", str(inspect.signature(public)))
