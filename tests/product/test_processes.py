"""Real processes on the loopback: `jax.distributed`, and replicas; tests/faults/ kills workers."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import train_worker

import optfn

TESTS = Path(__file__).parents[1]
# Within which the others notice that a worker is gone: its sockets close, or heartbeats stop.
TIME_BOUND = 60


def launch(directory, processes, steps, *words, devices=1):
    """Start the processes and return (return code, stdout, stderr) of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    program = str(TESTS / "train_worker.py")
    started = [
        subprocess.Popen(
            [sys.executable, program, *map(str, (port, processes, i, steps, directory)), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    end = time.monotonic() + TIME_BOUND
    try:
        out = [p.communicate(timeout=max(1, end - time.monotonic())) for p in started]
        return [(p.returncode, *texts) for p, texts in zip(started, out, strict=True)]
    finally:
        for p in started:
            p.kill()


def found_in(results, word):
    """Return what each process found by one of the words of train_worker.py."""
    for code, out, error in results:
        assert code == 0, out + error
    lines = [[line for line in out.splitlines() if line[:2] == '["'] for _, out, _ in results]
    return [dict(map(json.loads, each))[word] for each in lines]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return the directory and the results of two processes, which start once for four tests."""
    directory = tmp_path_factory.mktemp("two")
    return directory, launch(directory, 2, 0, "sharded", "nonfinite", "unlike", "tuned")


def replicas(results):
    """Return the hash and the number of workers of each run, a list for each process."""
    for code, out, error in results:
        assert code == 0, out + error
    return [re.findall(r"replica (\w+) workers (\d+)", out) for _, out, _ in results]


def test_replicas_are_the_same_bits(tmp_path):
    """Through gloo: after dense phase and ramp of DGC, and with compressors of both kinds."""
    found = replicas(launch(tmp_path, 3, 8, "dgc", "exchange"))
    assert found == [found[0]] * 3
    assert [workers for _, workers in found[0]] == ["3", "3"]


def test_sharded_processes_train_as_one_device(two):
    """Through gloo, whose reduce-scatter cannot be used (jax issue 40830)."""
    directory, results = two
    each = found_in(results, "sharded")
    assert each[0] == each[1]
    params = {"w": np.zeros((20, 30), np.float32), "b": np.zeros(30, np.float32)}
    for kind, found in zip(train_worker.SHARDED, each[0], strict=True):
        assert found["mu"] == [10, 30]  # half of (20, 30) on each
        assert (found["memory"] == "pinned_host") == (kind == "host")
        loss, tx, options, batches = train_worker.sharded_run(kind)
        options = {k: v for k, v in options.items() if k == "tables"}
        state, history = optfn.minimize(loss, tx, params, batches, progress=False, **options)
        np.testing.assert_allclose(found["loss"], history["loss"][-1], rtol=1e-5)
        for name in params:
            np.testing.assert_allclose(found[name], state.params[name], rtol=1e-4, atol=1e-6)
        # What the two processes wrote together, read by one.
        one = optfn.make_train_step(loss, tx, **options)
        restored, _ = optfn.restore_checkpoint(directory / "sharded" / kind, one.init(params))
        for name in params:
            np.testing.assert_array_equal(restored.params[name], np.float32(found[name]))


def test_two_levels_are_those_of_one_process(tmp_path):
    """Two processes of two devices each train as one process with all of them, bit for bit.

    The gradient of the fourth batch is NaN in one entry, which one device of one process keeps.
    """
    results = launch(tmp_path, 2, 0, "two_levels", devices=2)
    first, second = found_in(results, "two_levels")
    for name, run in train_worker.two_levels(2).items():
        found = first[name]
        assert found["hashes"] == second[name]["hashes"] == run["hashes"]
        np.testing.assert_array_equal(found["losses"], run["losses"])
        before, nan, after = found["hashes"][2:]
        assert before == nan != after
        assert np.isfinite(found["losses"][4])


def test_processes_go_on_from_the_newest_finite_checkpoint(two):
    """The NaN is in an example of one of them; divided params of 2 MiB, or files of each."""
    first, second = found_in(two[1], "nonfinite")
    for kind in ("parts", "whole"):
        for found in (first[kind], second[kind]):
            bad, resumed, whole = found
            assert bad["names"] == ["step_000000002", "step_000000004"]
            assert len(bad["said"]) == 1 and "the loss of step 3 is nan" in bad["said"][0]
            assert len(resumed["said"]) == 1 and "of step 2, and was loaded" in resumed["said"][0]
            assert resumed["names"] == ["step_000000004"]
            assert resumed["digest"] == whole["digest"] and not whole["said"]


def test_mistakes_of_several_processes_are_errors_before_the_first_step(two):
    """Examples of its own in each process, and one directory for the files of both."""
    first, second = found_in(two[1], "unlike")
    assert first == second
    assert first["own examples"].startswith(
        "batches of process 1 differ in their numbers from process 0's: pass the same array"
    )
    assert first["same examples"] == first["global array"] == first["own directories"]
    assert "2 processes would write files into the same directory" in first["one directory"]
    assert '/shared/{jax.process_index()}"' in first["one directory"]
    assert first["left"] == []
    assert first["in parts"][0] == 1


def test_processes_agree_on_the_last_step(two):
    """Else the others would wait for ever for the process that has ended."""
    first, second = found_in(two[1], "unlike")
    for found in (first, second):
        assert (
            "number of batches, by their lengths; processes 0, 1, … have [4, 3]" in found["fewer"]
        )
        assert (
            "for step 4 of this call; processes 0, 1, … have [1, 0]" in found["fewer of a stream"]
        )
        assert found["enough"][0] == 3 and found["callback of one"][0] == 2
        assert "process 1 has no directory, but other processes" in found["directory of one"]


def test_processes_tune_to_the_same_order(two):
    """A way that fails in one process is run by none: the others would wait for it."""
    first, second = found_in(two[1], "tuned")
    assert [way for way, *_ in first] == [way for way, *_ in second]
    assert [seconds for _, seconds, _ in first] == [seconds for _, seconds, _ in second]
    assert all(seconds and not problem for _, seconds, problem in first[:2])
    assert first[2] == [{"microbatches": 2}, None, "failed in process 1"]
    assert second[2] == [{"microbatches": 2}, None, "ValueError: no batch of three here"]
