"""What each file of tests costs: seconds, and the programs that XLA compiles for it.

A plugin of pytest, which conftest.py names. At the end of a run it prints the dearest files.
"""

import collections
import sys

import pytest

SHOWN = 25  # files
COST = "cost"  # the name of the numbers that a report carries from a worker


class Programs:
    """Counts the programs that XLA compiles in this process, and the single operations of JAX among
    them, as eager code makes them."""

    def __init__(self):
        self.all = self.operations = 0
        self._is_listening = False

    def listen(self):
        """Begin to count, once JAX is there."""
        if self._is_listening or "jax" not in sys.modules:
            return
        import jax

        operations = {f"jit({name})" for name in (*dir(jax.lax), *dir(jax.numpy))}

        def note(event, duration, fun_name="", **_):
            if event == "/jax/core/compile/backend_compile_duration":
                self.all += 1
                self.operations += fun_name in operations

        jax.monitoring.register_event_duration_secs_listener(note)
        self._is_listening = True


PROGRAMS = Programs()
COSTS = collections.defaultdict(
    lambda: [0.0, 0, 0, 0]
)  # by file: seconds, tests, programs, operations


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note how many programs a test compiles."""
    PROGRAMS.listen()
    item.before = PROGRAMS.all, PROGRAMS.operations
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        before = item.before
        report.user_properties.append(
            (COST, (PROGRAMS.all - before[0], PROGRAMS.operations - before[1]))
        )
    return report


def pytest_runtest_logreport(report):
    """Add up the costs of a file, in the process that reports."""
    costs = COSTS[report.location[0]]
    costs[0] += report.duration
    for _, (programs, operations) in (x for x in report.user_properties if x[0] == COST):
        costs[1:] = costs[1] + 1, costs[2] + programs, costs[3] + operations


def pytest_terminal_summary(terminalreporter):
    """Print the dearest files, and the sum of all."""
    rows = sorted(COSTS.items(), key=lambda row: -row[1][0])
    rows = [(name, cost) for name, cost in rows if cost[1]]
    total = [sum(column) for column in zip(*(cost for _, cost in rows), strict=True)]
    if len(rows) < 2:
        return
    terminalreporter.section("seconds, tests, programs compiled, of these single operations of JAX")
    for name, (seconds, *counts) in [*rows[:SHOWN], (f"all {len(rows)} files", total)]:
        numbers = "".join(f"{x:>8,}" for x in counts)
        terminalreporter.write_line(f"{seconds:>8.1f}{numbers}  {name}")
