"""The shape of the project: imports one way, public names, docstrings, README."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import optax
import pytest
import registry

import optfn

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "optfn"
# A module imports only from what stands before it.
LAYERS = [
    "checks",
    "numerics",
    "quantization",
    "slices",
    "rows",
    "packed",
    "tree",
    "equations",
    "leafwise",
    "packing",
    "core",
    "sparse",
    "learning_rate",
    "schedules",
    "transforms.regularization",
    "transforms.clipping",
    "transforms.moment",
    "transforms.quantized",
    "transforms.lazy",
    "transforms.scaling",
    "wrappers.attributes",
    "wrappers.averaging",
    "wrappers.precision",
    "wrappers.accumulation",
    "wrappers.guard",
    "optimizers.assembly",
    "optimizers.sgd",
    "optimizers.adagrad",
    "optimizers.adam",
    "optimizers.ftrl",
    "distributed.plan",
    "distributed.buffers",
    "distributed.stacking",
    "distributed.stage",
    "distributed.layout",
    "distributed.model",
    "distributed.engine",
    "distributed.pipeline",
    "distributed.mesh",
    "distributed.selection",
    "distributed.wire",
    "distributed.residual",
    "distributed.compression",
    "distributed.optimizer",
    "distributed.placement",
    "distributed.local",
    "train.state",
    "train.checkpoint",
    "train.rotor",
    "train.costs",
    "train.recompute",
    "train.parallel",
    "train.step",
    "train.loop",
    "train.inspection",
]
SIGNATURES = {
    "sgd": "learning_rate, *",
    "momentum": "learning_rate, momentum, *, nesterov=False",
    "lars": "learning_rate, momentum, *, lars_coeff=1e-3, lars_weight_decay=5e-4, eps=0.0, "
    "exclude=None",
    "adagrad": "learning_rate, *, eps=1e-6, initial_accumulator_value=0.0",
    "decayed_adagrad": "learning_rate, *, decay=0.95, eps=1e-6",
    "adadelta": "learning_rate, *, rho=0.95, eps=1e-6",
    "rmsprop": "learning_rate, *, rho=0.95, eps=1e-6, momentum=0.0, centered=False",
    "adam": "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *, lazy=False, eps_hat=True, "
    "moment_dtype=None",
    "adamw": "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *, weight_decay=0.01, exclude=None, "
    "lazy=False, eps_hat=False, moment_dtype=None",
    "adamax": "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *",
    "ftrl": "learning_rate, *, l1=0.0, l2=0.0, lr_power=-0.5",
    "lamb": "learning_rate=1e-3, *, weight_decay=0.01, b1=0.9, b2=0.999, eps=1e-6, "
    "bias_correction=False, exclude=None",
    "asgd": "learning_rate=1e-3, *, batch_num=1, weight_decay=0.0",
}
COMMON = "grad_clip=None, regularization=None, param_attrs=None, multi_precision=False"


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "optfn.") if not m.ispkg]
    return [name.removeprefix("optfn.") for name in found]


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optfn"):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in whole:
                known = name if name.removeprefix("optfn.") in LAYERS else node.module
                names.add(known.removeprefix("optfn."))
    return names


def test_every_module_has_its_layer():
    assert sorted(modules()) == sorted(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_go_one_way(module):
    path = PACKAGE / (module.replace(".", "/") + ".py")
    later = imports_of(path) - set(LAYERS[: LAYERS.index(module)])
    assert not later, f"{module} imports {later}, which is not before it"


@pytest.mark.parametrize("module", LAYERS)
def test_no_test_library_at_run_time(module):
    text = (PACKAGE / (module.replace(".", "/") + ".py")).read_text()
    assert not re.search(r"^\s*(import|from) (chex|flax|torch|pytest)", text, re.MULTILINE)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_promised_ones(name):
    """Names, order, kinds and defaults, read as Python."""
    text = SIGNATURES[name]
    expected = f"def f({text}, {COMMON}): ..."
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


def test_every_public_name_is_in_the_registry():
    """A new transform without contract tests fails here."""
    built = {entry.name for entry in registry.EVERYTHING.values()}
    assert set(optfn.__all__) == {n for n in built if "." not in n} | registry.OTHER_NAMES
    assert {n for n in dir(optfn.schedules) if n.startswith("reduce")} == {"reduce_on_plateau"}


@pytest.mark.parametrize("name", sorted(registry.EVERYTHING))
def test_factories_make_what_the_registry_says(name):
    assert isinstance(registry.EVERYTHING[name].make(), optax.GradientTransformation)


@pytest.mark.parametrize("module", LAYERS)
def test_docstrings(module):
    """Everything public says what it does; every factory names its source and its state."""
    loaded = importlib.import_module(f"optfn.{module}")
    assert loaded.__doc__
    for name, thing in vars(loaded).items():
        own = getattr(thing, "__module__", None) == loaded.__name__
        if name.startswith("_") or not own or not callable(thing):
            continue
        assert thing.__doc__, f"{module}.{name} has no docstring"
        if module.startswith(("transforms", "optimizers", "wrappers")) and name in optfn.__all__:
            assert "tate" in thing.__doc__, f"{name} does not say what state it keeps"
            for argument in inspect.signature(thing).parameters:
                described = f"\n  {argument}: " in inspect.getdoc(thing)
                assert described, f"{name}: {argument} undocumented"


@pytest.mark.parametrize("module", ["", *(f".{m}" for m in LAYERS)])
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(f"optfn{module}"))
    assert result.failed == 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_program_runs_as_printed(capsys):
    text = (ROOT / "README.md").read_text()
    program = blocks("python")[0]
    lines = text.splitlines()
    end = lines.index("```", lines.index("```python") + 1)
    assert end <= 12, "the program is complete by line 12"
    exec(compile(program, "README.md", "exec"), {})
    assert "loss" in capsys.readouterr().err


def test_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert [block.split() for block in blocks("sh")] == [["make", "demo", "make", "test"]]


def test_readme_lists_every_optimizer():
    text = (ROOT / "README.md").read_text()
    for name in SIGNATURES:
        assert f"`{name}`" in text, name
