"""The machine under the tests: devices, compilers, compiled programs, memory.

A plugin of pytest, which conftest.py names. It is imported before JAX.
"""

import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

# Traces are many objects that live as long as the tests: looking for cycles in them takes long.
gc.set_threshold(200_000, 20, 100)
DEVICES = " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are lowered in 5 % less time without the lines of code that their operations come from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Most of the suite's time goes into compiling some ten thousand small programs, each used once or
# twice. Without LLVM's optimizations, and with the older emitters of fusions, one takes 15 to 20 ms
# of CPU instead of 45 to 90. XLA reads its flags once in a process; one that it does not know ends
# the process, and the second is gone in jaxlib 0.12.
QUICK_COMPILER = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICK_COMPILER += " --xla_cpu_use_fusion_emitters=false"
# A compiled program holds 1.5 to 2 MB for as long as a cache of JAX has it. From here on they are
# dropped between tests; what a worker grows by in a single test is less than the rest of its share.
CLEAR_ABOVE = 1e9
WORKER_BYTES = 1.5e9
# Programs are kept for later runs, also those that the code no longer makes: in a folder that
# begins anew when it has grown to this.
MOST_KEPT = 500e6


def add_flags(flags: str) -> None:
    """Add to XLA's flags, once: workers inherit them, and JAX's cache has them in its keys."""
    if flags not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags


add_flags(DEVICES)


def pytest_addoption(parser):
    parser.addoption(
        "--quick-compiler",
        action="store_true",
        help="compile without optimizations, and leave out the tests marked as `optimized`",
    )


def pytest_configure(config):
    if config.getoption("quick_compiler"):
        add_flags(QUICK_COMPILER)
        clear_kept_programs(config)
    # The process that hands out tests and reports needs no JAX; the workers wait for it.
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import jax

    jax.devices()  # before examples and benchmarks are imported, which ask for other numbers
    # References have products of float32, which TPUs and GPUs make in fewer bits by default.
    jax.config.update("jax_default_matmul_precision", "float32")
    share_context()
    if config.getoption("quick_compiler"):
        keep_programs(config)


def share_context():
    """Lower all programs in one context of MLIR.

    JAX makes one for each program, which takes 5 ms: a third of what a small program takes before
    it is compiled. A context keeps the constants of its programs, so `clear_programs` drops it.
    """
    from jax._src.interpreters import mlir

    mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def kept_programs(config) -> Path:
    """Return the folder of compiled programs, for this compiler and its flags."""
    flags = hashlib.sha256(QUICK_COMPILER.encode()).hexdigest()[:8]
    return config.rootpath / ".cache/programs" / f"{importlib.metadata.version('jaxlib')}-{flags}"


def clear_kept_programs(config):
    """Let the folder of compiled programs begin anew where it has grown to `MOST_KEPT`."""
    folder = kept_programs(config)
    kept = folder.iterdir() if folder.exists() and not hasattr(config, "workerinput") else ()
    if sum(file.stat().st_size for file in kept) > MOST_KEPT:
        shutil.rmtree(folder)


def keep_programs(config):
    """Let workers and later runs read what was compiled once: it takes 3 ms a program.

    JAX's keys are made of the program, the flags and the version. Not for optimized programs: what
    the tests read of them should be the compiler's own figures. Nor for programs of several
    devices: XLA reads some with two mesh axes from a file as other programs, which wait for ever at
    a rendezvous, or give what stands in memory (jaxlib 0.10.2 and 0.12). Processes that tests start
    do not leave these out, and keep none.
    """
    import jax
    from jax._src import compiler

    jax.config.update("jax_compilation_cache_dir", str(kept_programs(config)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    make_key = compiler._get_cache_key

    def key_of_one_device(options, *, devices, **rest):
        return make_key(options, devices=devices, **rest) if devices.size == 1 else None

    compiler._get_cache_key = key_of_one_device


# Memory


def available_memory() -> float:
    """Return the bytes that new processes can take, of the machine and of its control group."""
    bounds = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    group = Path("/sys/fs/cgroup")
    try:
        machine = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        bounds.append(float(machine["MemAvailable"].split()[0]) * 1024)
        most = float((group / "memory.max").read_text())
        taken = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        bounds.append(most - sum(float(taken[k]) for k in ("anon", "kernel", "shmem")))
    except (OSError, KeyError, ValueError):
        pass  # not Linux, or no bound ("max")
    return min(bounds)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return a worker for each core, at most 8, and no more than memory allows."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, 8, int(available_memory() // WORKER_BYTES)))


def resident_memory() -> float:
    """Return the bytes this process holds, 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def clear_programs() -> None:
    """Drop what JAX has compiled, and give back its memory."""
    import jax
    from jax._src.interpreters import mlir

    jax.clear_caches()
    mlir.make_ir_context.cache_clear()
    gc.collect()
    # glibc keeps the freed blocks: without this the process stays as large as it was.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


CLEARED = [0.0]  # what the process held after each time


def pytest_runtest_logfinish(nodeid):
    """Drop the compiled programs where they have become many, and not after each test of a few."""
    if resident_memory() > max(CLEAR_ABOVE, CLEARED[-1] + (WORKER_BYTES - CLEAR_ABOVE) / 2):
        clear_programs()
        CLEARED.append(resident_memory())


def peak_memory() -> float:
    """Return the most bytes this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def pytest_sessionfinish(session):
    """Hand what a worker held at most to the process that reports.

    Before a process ends pytest and Python look for cycles again: seconds, in so many traces.
    """
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_memory"] = peak_memory()
    gc.freeze()


PEAKS = {}  # bytes by worker


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Note what a worker of xdist held."""
    PEAKS[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak_memory", 0.0)


def pytest_terminal_summary(terminalreporter):
    """Print the memory taken."""
    peaks = PEAKS or {"this process": peak_memory()}
    terminalreporter.section("memory at most, MB")
    terminalreporter.write_line(", ".join(f"{k} {v / 1e6:.0f}" for k, v in sorted(peaks.items())))
