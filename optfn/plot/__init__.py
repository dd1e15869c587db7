"""Plots of runs, learning rates and costs with matplotlib, and the report of a run.

Each function draws on `ax`, or on a new figure, and returns the axes. `history` returns a figure,
and `report` writes a file. matplotlib is imported when you first call one of them.
"""

from optfn.plot.curves import dgc_ramp, schedules
from optfn.plot.page import report
from optfn.plot.resources import memory, recompute, timetable, tuning
from optfn.plot.run import history, learning_rate, losses, norms

__all__ = [
    "dgc_ramp", "history", "learning_rate", "losses", "memory", "norms", "recompute", "report",
    "schedules", "timetable", "tuning",
]  # fmt: skip
