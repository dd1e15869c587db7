"""Shared set-up: CPU with several devices, deterministic, strict."""

import gc
import os

# Traces are many objects that live as long as the tests: looking for cycles in them takes long.
gc.set_threshold(200_000, 20, 100)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_terminal_summary(terminalreporter):
    """Print the recordings that are not compared, each with its reason."""
    import test_recordings

    terminalreporter.section("recordings not compared")
    for case, reason in test_recordings.skipped().items():
        terminalreporter.write_line(f"{case}: {reason}")
