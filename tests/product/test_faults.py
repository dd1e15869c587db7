"""The quick ones of the faults that `make faults` tries; tests/faults.md has all of them."""

from pathlib import Path

import faults
import pytest

PAGE = (Path(__file__).parents[1] / "faults.md").read_text()


@pytest.mark.parametrize("name", [name for name, fault in faults.FAULTS.items() if fault.quick])
def test_a_fault_ends_as_promised(name):
    result = faults.tried(name)
    if result.outcome == "left out":
        pytest.skip(result.seen)
    assert result.outcome == "as promised", result.seen


def test_the_page_has_a_row_for_each_fault():
    """With what is promised; `make faults` prints the rows."""
    for name, fault in faults.FAULTS.items():
        assert f"| {fault.what} | {fault.promised} | as promised" in PAGE, name
        assert f"| `{name}` |" in PAGE, name
