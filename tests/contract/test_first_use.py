"""How much a reader follows from `adam(1e-3, grad_clip=...)` on; see `benchmarks/code.py`.

Each ability is an import inside a function that only its users reach. One that
is admitted on the way of every optimizer shows here.
"""

import ast
from pathlib import Path

import pytest

from benchmarks import code

CORE = Path(code.PACKAGE / "core")


@pytest.fixture(scope="module")
def first_use() -> tuple[code.Count, int]:
    return code.first_use()


def test_a_first_use_runs_little(first_use):
    runs, _ = first_use
    assert runs.lines <= 460 and runs.definitions <= 90 and runs.files <= 11, runs


def test_an_update_walks_few_trees(first_use):
    _, walks = first_use
    assert 0 < walks <= 8


def test_a_first_use_reaches_little_more_by_name():
    """Errors of leaves and states are a quarter of it: the core imports them as it needs them."""
    reached = code.reached()
    assert reached.lines <= 930 and reached.definitions <= 165 and reached.files <= 15, reached


def test_the_module_of_adam_imports_little():
    loaded, modules = code.imported("optfn.optimizers.adam"), code.modules()
    assert len(loaded) <= 15, loaded
    assert sum(len(modules[name].code) for name in loaded) <= 1240


def test_the_core_is_small_and_closed():
    """It imports itself alone; test_project.py looks into functions too."""
    core = {name: m for name, m in code.modules().items() if m.path.is_relative_to(CORE)}
    assert len(core) <= 13 and sum(len(m.code) for m in core.values()) <= 1075
    for name, module in core.items():
        for base, found in module.imports.values():
            assert base in core or f"{base}.{found}" in core, (name, base, found)


def test_the_counters_see_what_they_count(tmp_path):
    """Prose and nested functions are left out, decorators are not."""
    path = tmp_path / "module.py"
    path.write_text(
        '"""Prose."""\n\n# A comment.\n@decorator\ndef outer():\n    """Prose."""\n'
        "    def inner():\n        return 1\n\n    return inner\n"
    )
    assert code.counted({(str(path), 4)}) == (3, 1, 1)
    assert code.counted({(str(path), 4), (str(path), 7)}) == (5, 2, 1)
    assert isinstance(code.Module(path).tree, ast.Module)
