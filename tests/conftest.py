"""Which tests run, and what is said at the end; machine.py has the compilers and the memory."""

import collections

import pytest

pytest_plugins = ["machine"]


@pytest.fixture
def plain_expressions(monkeypatch):
    """Compile on a CPU what all other platforms compile."""
    from optfn.compilers import xla

    monkeypatch.setattr(xla, "CPU_PLATFORMS", ())


@pytest.fixture(params=["of a CPU", "plain"])
def expressions(request):
    """Run a test with both expressions of `optfn.compilers.xla`."""
    if request.param == "plain":
        request.getfixturevalue("plain_expressions")


def pytest_addoption(parser):
    parser.addoption(
        "--nightly", action="store_true", help="run the tests marked as `nightly` as well"
    )
    parser.addoption(
        "--cases", type=int, metavar="K", help="run at most the first K cases of each test"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what is nightly, tests of optimized programs unless XLA optimizes, and cases."""

    def marked(mark):
        leave_out(lambda item: item.get_closest_marker(mark), config, items)

    if not config.getoption("nightly"):
        marked("nightly")
    if config.getoption("quick_compiler"):
        marked("optimized")
    most = config.getoption("cases")
    if most is not None:
        seen = collections.Counter()

        def is_beyond(item):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            return seen[test] > most

        leave_out(is_beyond, config, items)


def leave_out(is_left, config, items):
    """Take the tests for which `is_left` is true out of those that run."""
    left = {item for item in items if is_left(item)}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter):
    """Print the recordings and the programs of others that are left out, with the reasons.

    A run of a single file or folder says nothing of them, but for their own.
    """
    import clients
    import recorded

    left_out = {
        "recordings not compared": ("rules", recorded.skipped()),
        "programs of others that are not tried": ("outside", clients.left_out()),
    }
    chosen = terminalreporter.config.args
    for title, (folder, reasons) in left_out.items():
        if any(f"tests/{folder}".startswith(x.strip("/")) or f"/{folder}" in x for x in chosen):
            terminalreporter.section(title)
            for name, reason in reasons.items():
                terminalreporter.write_line(f"{name}: {reason}")
