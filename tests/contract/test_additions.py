"""What an addition still lacks: the message lists the places, with the line that each needs."""

import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import catalogue
import pytest
import reference_exchange
import reference_schedules
import references
import registry

import optfn
from docs import tables
from examples import gallery
from optfn.compression.compressors import ShownAsCall
from optfn.mesh.layout import sharding
from optfn.pipeline import plan

ROOT = Path(__file__).parents[2]
# Decorated as factories, but for other factories, or exported by another module.
INNER = {"dense_rows", "record_evaluation", "reduce_on_plateau"}


def decorated(package: str) -> dict[str, Any]:
    """Return the public functions with a decorator that the modules of a folder define."""
    folder = importlib.import_module(package)
    homes = [m.name for m in pkgutil.iter_modules(getattr(folder, "__path__", ()))]
    modules = [importlib.import_module(f"{package}.{home}") for home in homes] or [folder]
    return {
        name: x
        for module in modules
        for name, x in vars(module).items()
        if isinstance(x, types.FunctionType) and x.__module__ == module.__name__
        if hasattr(x, "__wrapped__") and not name.startswith("_") and name not in INNER
    }


OPTIMIZERS = decorated("optfn.optimizers")
TRANSFORMS = decorated("optfn.transforms")
WRAPPERS = decorated("optfn.wrappers")
SCHEDULES = decorated("optfn.schedules")
COMPRESSORS = {
    name: x
    for name, x in decorated("optfn.compression").items()
    if issubclass(inspect.get_annotations(x, eval_str=True)["return"], ShownAsCall)
}


def has(page: str, pattern: str) -> bool:
    """Tell whether a page has a line with the pattern."""
    return re.search(pattern, (ROOT / page).read_text(), re.MULTILINE) is not None


def complain(name: str, module: types.ModuleType, factory: Any, places: dict[str, bool]) -> None:
    """Fail with the places that lack a name: of these, and those that export it from a module."""
    file = module.__file__.removeprefix(f"{ROOT}/")
    places |= {
        f"{file}: from {factory.__module__} import {name}": hasattr(module, name),
        f'{file}: "{name}", in __all__': name in module.__all__,
        f"CHANGELOG.md: a line that names {name}": (
            name in TRANSFORMS or has("CHANGELOG.md", rf"\b{name}\b")
        ),
    }
    lacking = [place for place, is_there in places.items() if not is_there]
    if lacking:
        pytest.fail("\n".join([f"{name} is missing in", *lacking]), pytrace=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_complete(name):
    calls = catalogue.OPTIMIZERS[name].calls if name in catalogue.OPTIMIZERS else ()
    row, rule = name in calls, name in references.RULES
    places = {
        f"tests/references.py: a function {name}, decorated by @rule": rule,
        f'tests/catalogue.py: a row "{name}" in OPTIMIZERS, with a call "{name}"': row,
        f"docs/choose.md: | `optfn.{name}(...)` | bytes of state | choose it when |": (
            has("docs/choose.md", rf"^\| `optfn\.{name}\(")
        ),
    }
    complain(name, optfn, OPTIMIZERS[name], places)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_complete(name):
    row = name in {entry.name for entry in catalogue.TRANSFORMS.values()}
    line = f'tests/catalogue.py: "{name}": entry("{name}"), in TRANSFORMS'
    complain(name, optfn, TRANSFORMS[name], {line: row})


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_complete(name):
    row = name in {entry.name for entry in registry.WRAPPERS.values()}
    places = {
        f'tests/registry.py: "{name}": entry("{name}", ...), in WRAPPERS': row,
        f"docs/wrappers.md or docs/choose.md: a row `{name}(...)`": any(
            has(f"docs/{page}.md", rf"\b{name}\b") for page in ("wrappers", "choose")
        ),
    }
    complain(name, optfn, WRAPPERS[name], places)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_complete(name):
    drawn = name in {title.split(",")[0] for title in gallery.SCHEDULES}
    reference, cases = hasattr(reference_schedules, name), name in reference_schedules.CASES
    places = {
        f"tests/reference_schedules.py: a function {name}": reference,
        f'tests/reference_schedules.py: "{name}": [(...)], in CASES': cases,
        f'examples/gallery.py: "{name}": schedules.{name}(...), in SCHEDULES': drawn,
    }
    complain(name, optfn.schedules, SCHEDULES[name], places)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_is_complete(name):
    row = has("docs/links.md", rf"^\| `{name}\(")
    both = (hasattr(reference_exchange, function) for function in (name, f"{name}_bytes"))
    cases = name in {case.func.__name__ for case in reference_exchange.CASES.values()}
    places = {
        f"tests/reference_exchange.py: {name}(x, ...), {name}_bytes(shape, ...), and in CASES": (
            (all(both) and cases) or name == "power_sgd"  # of all workers, with tests of its own
        ),
        f"docs/links.md: | `{name}(...)` | packet | bytes |": row,
    }
    complain(name, optfn.distributed, COMPRESSORS[name], places)


@pytest.mark.parametrize("name", plan.SCHEDULES)
def test_a_pipeline_schedule_has_a_row(name):
    assert has("docs/pipeline.md", rf"^\| `{name}` \|")


@pytest.mark.parametrize("name", sharding.KINDS)
def test_a_way_of_sharding_has_a_row(name):
    """With the formulas of its bytes; docs/choose.md has numbers of them, and a test of these."""
    assert has("docs/distributed.md", rf'^\|.*\bshard="{name}"')


def test_nothing_is_listed_that_is_not_there():
    """And the folders have what is promised, by names."""
    assert OPTIMIZERS.keys() == catalogue.OPTIMIZERS.keys() == references.RULES.keys()
    assert SCHEDULES.keys() == reference_schedules.CASES.keys()
    assert SCHEDULES.keys() == {title.split(",")[0] for title in gallery.SCHEDULES}
    calls = re.findall(
        r"^\| `optfn\.(\w+)\(\d", (ROOT / "docs/choose.md").read_text(), re.MULTILINE
    )
    assert {*calls} - {"model_average"} == OPTIMIZERS.keys()
    assert SCHEDULES.keys() | {"record_evaluation", "reduce_on_plateau"} == {
        *optfn.schedules.__all__
    }
    assert COMPRESSORS.keys() >= {"top_k", "quantize", "power_sgd"}
    built = {entry.name for entry in registry.EVERYTHING.values() if "." not in entry.name}
    assert {*optfn.__all__} == built | registry.OTHER_NAMES
    assert built == OPTIMIZERS.keys() | TRANSFORMS.keys() | WRAPPERS.keys()


@pytest.mark.parametrize("name", gallery.OPTIMIZERS)
def test_the_gallery_needs_only_a_rate(name):
    """`OPTIONS` of examples/gallery.py has the other arguments without a default."""
    gallery.OPTIMIZERS[name](0.1)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_tables_are_those_of_the_docstrings(page):
    assert page.read_text() == tables.pages()[page], "make tables writes what is missing here"


def test_the_table_of_what_goes_together_has_no_other_rows():
    page, head, rows = next(x for x in tables.tables() if x[0] == "docs/distributed.md")
    table = (tables.ROOT / page).read_text().partition(head)[2].split("\n\n")[0]
    assert len(table.strip().splitlines()) == 1 + len(rows)
