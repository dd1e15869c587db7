"""More devices add no collective to a step, however its model is divided.

`python -m benchmarks.scale` compiles the same steps for 512 devices.
"""

import math

import pytest
from grids import suite

from benchmarks.scale import TOY, divisions, measured

DIVISIONS = divisions(TOY)


@pytest.mark.parametrize("name", suite(DIVISIONS, "two levels, quantize(4)"))
def test_more_devices_add_no_collective(name):
    division = DIVISIONS[name]
    least = 2 * math.prod(division.inner.values())  # two workers
    rows = [measured(name, division, n) for n in (least, 8)]
    assert least < 8 and rows[0]["collectives"] > 0
    assert all(row["collectives"] <= rows[0]["collectives"] for row in rows)
    assert [row["sent_over"] for row in rows] == pytest.approx([1.0] * len(rows), rel=0.05)


@pytest.mark.nightly
def test_gradients_of_rows_take_no_more_than_the_rows_that_a_device_keeps():
    """With two devices fewer rows can arrive than a device keeps, with eight more."""
    division = divisions(TOY._replace(entries=256))["tables"]
    two, eight = (measured("tables", division, n)["temporaries"] for n in (2, 8))
    assert eight < 2 * two  # the ids and rows of a round of the exchange take more as well
