"""Which tests run, and what is said at the end; machine.py has the compilers and the memory."""

import collections
import importlib
import signal

import pytest

pytest_plugins = ["machine", "costs"]


@pytest.fixture
def plain_expressions(monkeypatch):
    """Compile on a CPU what all other platforms compile."""
    from optfn.mesh.compilers import xla

    monkeypatch.setattr(xla, "CPU_PLATFORMS", ())


@pytest.fixture(params=["of a CPU", "plain"])
def expressions(request):
    """Run a test with both expressions of `optfn.mesh.compilers.xla`."""
    if request.param == "plain":
        request.getfixturevalue("plain_expressions")


def pytest_addoption(parser):
    parser.addoption(
        "--nightly", action="store_true", help="run the tests marked as `nightly` as well"
    )
    parser.addoption(
        "--cases", type=int, metavar="K", help="run at most the first K cases of each test"
    )
    parser.addoption(
        "--third",
        type=int,
        choices=(0, 1, 2),
        help="run every third test, from the first (0), second (1) or third (2) on",
    )


def pytest_ignore_collect(collection_path, config):
    """Leave out the files without a test of an optimized program where these alone are chosen.

    To import all files takes each worker some seconds.
    """
    if config.option.markexpr == "optimized" and collection_path.name.startswith("test_"):
        return "mark.optimized" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config, items):
    """Leave out what is nightly, tests of optimized programs unless XLA optimizes, and cases."""

    def marked(mark):
        leave_out(lambda item: item.get_closest_marker(mark), config, items)

    if not config.getoption("nightly"):
        marked("nightly")
    if config.getoption("quick_compiler"):
        marked("optimized")
    places, seen = {}, collections.Counter()
    third, most = config.getoption("third"), config.getoption("cases")

    def is_of_another_third(item):
        return places.setdefault(test_of(item), len(places)) % 3 != third

    def is_beyond(item):
        seen[test_of(item)] += 1
        return seen[test_of(item)] > most

    if third is not None:
        leave_out(is_of_another_third, config, items)
    if most is not None:
        leave_out(is_beyond, config, items)


def test_of(item):
    """Return the id of a test without its case."""
    return item.nodeid.partition("[")[0]


def leave_out(is_left, config, items):
    """Take the tests for which `is_left` is true out of those that run."""
    left = {item for item in items if is_left(item)}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


# What a run says at its end: a title, the folder of the tests, and where the reasons are.
SECTIONS = {
    "recordings not compared": ("rules", "recorded", "skipped"),
    "programs of others that are not tried": ("outside", "clients", "left_out"),
}
LEFT_OUT = {}  # the reasons by name, by title, as workers found them


def find_left_out(config):
    """Return the recordings and the programs of others that are left out, with the reasons.

    A run of a single file or folder has nothing of them, but for their own.
    """
    found = {}
    for title, (folder, module, function) in SECTIONS.items():
        place = f"tests/{folder}"
        if any(place.startswith(x.strip("/")) or f"/{folder}" in x for x in config.args):
            found[title] = getattr(importlib.import_module(module), function)()
    return found


def pytest_sessionfinish(session):
    """Hand what is left out to the process that reports, which imports none of these modules."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = find_left_out(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take from a worker of xdist what is left out."""
    LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter):
    """Print what is left out."""
    for title, reasons in (LEFT_OUT or find_left_out(terminalreporter.config)).items():
        terminalreporter.section(title)
        for name, reason in reasons.items():
            terminalreporter.write_line(f"{name}: {reason}")


@pytest.fixture
def interrupt():
    """Python's own handler of SIGINT: a shell's background job starts without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
