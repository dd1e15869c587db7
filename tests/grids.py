"""Grids of cases of which CI runs those that a test names, and `make nightly` all."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a case of values that `make nightly` alone runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def suite(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Return the cases as pytest parameters; those that are not named are nightly.

    Raises `ValueError` if a name is not among the cases: so nothing is left out by a renamed case.

    Args:
      cases: a mapping, whose keys are taken, values, tuples of values, or pytest parameters.
      names: the cases that CI runs: the ids of pytest parameters, or the cases themselves.
    """
    found, missing = [], list(names)
    for case in cases:
        is_param = hasattr(case, "marks")
        parts = case.values if is_param else case if isinstance(case, tuple) else (case,)
        name = case.id if is_param else case
        marks = () if name in names else (pytest.mark.nightly,)
        found.append(pytest.param(*parts, marks=marks, id=case.id if is_param else None))
        if name in missing:
            missing.remove(name)
    if missing:
        raise ValueError(f"the cases have no {missing}")
    return found


def by_name(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the values of a mapping as pytest parameters; those that are not named are nightly."""
    return suite([pytest.param(case, id=name) for name, case in cases.items()], *names)


def by_entry(entries: Mapping[str, Any], *names: str) -> Any:
    """Return the mark of a test that takes each `entry` of the registry; CI runs those named."""
    return pytest.mark.parametrize("entry", by_name(entries, *names))
