"""Which tests run, and what is said at the end; machine.py has the compilers and the memory."""

pytest_plugins = ["machine"]


def pytest_addoption(parser):
    parser.addoption(
        "--nightly", action="store_true", help="run the tests marked as `nightly` as well"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what is nightly, and tests of optimized programs unless XLA optimizes them."""
    if not config.getoption("nightly"):
        leave_out("nightly", config, items)
    if config.getoption("quick_compiler"):
        leave_out("optimized", config, items)


def leave_out(mark, config, items):
    """Take the tests with this mark out of those that run."""
    left = [item for item in items if item.get_closest_marker(mark)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker(mark)]


def pytest_terminal_summary(terminalreporter):
    """Print the recordings and the programs of others that are left out, with the reasons."""
    import clients
    import recorded

    terminalreporter.section("recordings not compared")
    for case, reason in recorded.skipped().items():
        terminalreporter.write_line(f"{case}: {reason}")
    terminalreporter.section("programs of others that are not tried")
    for client, reason in clients.left_out().items():
        terminalreporter.write_line(f"{client}: {reason}")
