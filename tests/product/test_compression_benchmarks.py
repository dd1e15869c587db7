"""The benchmarks of compression, at toy size."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import optfn
from benchmarks import compression_link, measure, network
from benchmarks.studies import compression_accuracy, exchange_link, two_level


def namespaces():
    """Return the names of the network namespaces there are."""
    if shutil.which("ip") is None:
        return ""
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


makes_a_network = pytest.mark.skipif(
    "OPTFN_TEST_NETWORK" not in os.environ,
    reason="it makes network namespaces: OPTFN_TEST_NETWORK=1",
)


@makes_a_network
def test_the_link_benchmark_at_toy_size(capsys):
    try:
        dense, wide, narrow = compression_link.run([2], [100], 1, 100_000)
    except measure.Refused as why:
        pytest.skip(f"no network namespaces here: {why}")
    assert dense["theory"] <= dense["bytes"] < 1.1 * dense["theory"]
    assert narrow["theory"] < wide["theory"] <= wide["bytes"] < dense["bytes"] / 20
    assert f"dgc{os.getpid()}-" not in namespaces()
    assert capsys.readouterr().out.count("|") == 3 * 12


@makes_a_network
def test_two_levels_send_their_parts_between_processes(monkeypatch, tmp_path):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["two_level", "--toy", "--json", str(file)])
    try:
        two_level.main()
    except SystemExit:
        pytest.skip("no network namespaces here")
    rows = {row["scheme"]: row for row in json.loads(file.read_text())["rows"]}
    mean = rows["FSDP inside, the mean between"]
    assert mean["slow"] == pytest.approx(1.0, abs=0.01)  # 2·(1/2)·4 bytes of a quarter
    assert mean["params"] == rows["data parallel"]["params"] / 4
    assert rows["two levels, H=5"]["slow"] == pytest.approx(0.2, abs=0.01)
    assert rows["two levels, exchange(quantize(4))"]["slow"] < 0.135
    assert rows["FSDP over all devices"]["link"] > 3 * mean["link"]


SCRIPTS = [compression_link, exchange_link, two_level]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda m: m.__name__)
def test_the_link_benchmark_says_what_it_lacks(monkeypatch, capsys, script):
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    monkeypatch.setattr(sys, "argv", ["compression_link"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == measure.CANNOT_RUN
    assert "no network namespaces" in (said := capsys.readouterr().err)
    assert said.endswith("no ip on the path\n")


def test_simulated_workers_follow_dense_momentum():
    """Dense momentum on the workers' gradients is dense momentum on the whole batch."""

    def loss_fn(p, x):
        return ((x @ p - 1) ** 2).mean()

    batches = list(np.random.default_rng(0).standard_normal((3, 8, 5)).astype(np.float32))
    tx, params = optfn.momentum(0.1, 0.9), np.zeros(5, np.float32)
    found, _ = optfn.minimize(
        loss_fn,
        compression_accuracy.simulated(tx),
        params,
        batches,
        progress=False,
        value_and_grad=compression_accuracy.of_workers(loss_fn),
    )
    want, _ = optfn.minimize(loss_fn, tx, params, batches, progress=False)
    np.testing.assert_allclose(found.params, want.params, rtol=1e-5)
