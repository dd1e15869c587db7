"""Pictures with matplotlib, of runs, rates and costs, and the report of a run.

Each function draws on `ax`, or on a new figure, and returns the axes; `history` has a figure of its
own, and `report` a file. matplotlib is imported when the first of them is called.
"""

from optfn.plot.costs import memory, recompute, timetable
from optfn.plot.page import report
from optfn.plot.rates import dgc_ramp, schedules
from optfn.plot.run import history, learning_rate, losses, norms

__all__ = [
    "dgc_ramp",
    "history",
    "learning_rate",
    "losses",
    "memory",
    "norms",
    "recompute",
    "report",
    "schedules",
    "timetable",
]
