"""Grids of parameters of which CI runs a part, and `make nightly` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int = 2, first: int = 0) -> list[Any]:
    """Return pytest parameters, all but each `every`-th of them marked as nightly.

    Args:
      values: a mapping, whose keys are taken, values, tuples of values, or pytest parameters.
      every: how many there are for one that CI runs.
      first: the number of the first one that it runs.
    """
    found = []
    for i, value in enumerate(values):
        marks = () if i % every == first else (pytest.mark.nightly,)
        is_param = hasattr(value, "marks")
        parts = value.values if is_param else value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*parts, marks=marks, id=value.id if is_param else None))
    return found


def by_entry(entries: dict[str, Any], every: int = 2, first: int = 0) -> Any:
    """Return the mark of a test that takes each `entry` of the registry, thinned."""
    named = [pytest.param(entry, id=name) for name, entry in entries.items()]
    return pytest.mark.parametrize("entry", thinned(named, every, first))
