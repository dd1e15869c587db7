"""The speed in a log, and logs that go to an object such as a run of Weights & Biases."""

import itertools
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.mesh.compilers import chips
from optfn.run import speed

X = np.random.default_rng(0).normal(size=(12, 8, 3)).astype(np.float32)


class Tracker:
    """What `wandb.init()` returns, as far as a log uses it."""

    def __init__(self):
        self.rows = []

    def log(self, data, step=None, commit=None):
        self.rows.append((step, dict(data)))


def run(log, batches=X, **options):
    return optfn.minimize(
        lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optfn.sgd(0.1), jnp.zeros(3), batches,
        log=log, progress=False, **options,
    )  # fmt: skip


def test_a_tracker_and_a_file_get_each_step_once(tmp_path):
    tracker = Tracker()
    log = [tracker, tmp_path / "run.jsonl"]
    run(log, evaluate=lambda w: 7.0, evaluate_every=5)
    assert [step for step, _ in tracker.rows] == list(range(1, 13))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == [{"step": step} | row for step, row in tracker.rows]


def test_the_speed_is_the_mean_over_ten_seconds(monkeypatch):
    """Steps end two seconds apart; the first only starts the clock."""
    monkeypatch.setattr(speed, "monotonic", itertools.count(100.0, 2.0).__next__)
    tracker = Tracker()
    run(tracker)
    found = {step: row.get("examples_per_second") for step, row in tracker.rows}
    assert {step: x for step, x in found.items() if x} == {6: 5 * 8 / 10, 11: 5 * 8 / 10}


def test_a_short_run_has_its_speed_in_the_last_line(monkeypatch):
    """Steps end half a second apart, so that ten seconds never pass."""
    monkeypatch.setattr(speed, "monotonic", itertools.count(100.0, 0.5).__next__)
    tracker = Tracker()
    run(tracker, count_tokens=lambda x: 24)
    *others, (step, last) = tracker.rows
    assert step == 12 and not any("examples_per_second" in row for _, row in others)
    assert last["examples_per_second"] == 8 / 0.5 and last["tokens_per_second"] == 24 / 0.5


def test_batches_of_no_examples_have_no_speed(monkeypatch):
    """Their leaves have leading axes of several lengths."""
    monkeypatch.setattr(speed, "monotonic", itertools.count(100.0, 20.0).__next__)
    tracker = Tracker()
    optfn.minimize(
        lambda w, batch: jnp.mean(batch[0] @ w) + jnp.sum(batch[1]), optfn.sgd(0.1), jnp.zeros(3),
        [(X[0], np.ones(2, np.float32))] * 3, log=tracker, progress=False,
    )  # fmt: skip
    assert len(tracker.rows) == 3
    assert not any("examples_per_second" in row for _, row in tracker.rows)


def speeds(monkeypatch, count_tokens=None, batches=X, **options):
    """Return the speeds in a log of steps that end two seconds apart, by step."""
    monkeypatch.setattr(speed, "monotonic", itertools.count(100.0, 2.0).__next__)
    tracker = Tracker()
    run(tracker, batches, count_tokens=count_tokens, **options)
    return {
        step: {name: x for name, x in row.items() if name not in ("loss", "learning_rate")}
        for step, row in tracker.rows
        if "examples_per_second" in row
    }


@pytest.mark.parametrize("prefetch", [0, 1])
def test_tokens_are_counted_on_the_batches_of_the_user(monkeypatch, prefetch):
    seen = []

    def count_tokens(x):
        seen.append(type(x))
        return x.size

    found = speeds(monkeypatch, count_tokens, prefetch=prefetch)
    assert {step: x["tokens_per_second"] for step, x in found.items()} == {6: 12.0, 11: 12.0}
    assert len(seen) == 12 and set(seen) == {np.ndarray}


def test_utilization_is_of_the_peak_of_the_devices(monkeypatch):
    """A product forward and one back, 8 examples of 3 numbers; this CPU counts as a v5e."""
    monkeypatch.setitem(chips._KINDS, "cpu", "v5e")
    found = speeds(monkeypatch)
    each = 2 * 2 * 8 * 3 * 5 / 10 / 197e12
    assert {step: x["model_flops_utilization"] for step, x in found.items()} == {
        6: pytest.approx(each), 11: pytest.approx(each),
    }  # fmt: skip


def test_utilization_is_of_all_devices_and_all_shapes(monkeypatch):
    monkeypatch.setitem(chips._KINDS, "cpu", "v5e")
    batches = [np.ones((n, 3), np.float32) for n in (8, 16, 8, 16, 8, 24)]
    found = speeds(monkeypatch, batches=batches, mesh=optfn.distributed.data_mesh(2))
    share = 2 * 2 * (16 + 8 + 16 + 8 + 24) * 3 / 10 / (2 * 197e12)
    assert {step: x["model_flops_utilization"] for step, x in found.items()} == {
        6: pytest.approx(share)
    }


def test_a_cpu_has_no_utilization_and_counts_nothing(monkeypatch):
    monkeypatch.setattr(speed, "count_step_flops", None)
    assert all(set(x) == {"examples_per_second"} for x in speeds(monkeypatch).values())


def test_flops_that_are_not_known_are_no_utilization(monkeypatch):
    monkeypatch.setitem(chips._KINDS, "cpu", "v5e")
    monkeypatch.setattr(speed, "count_step_flops", lambda *_: None)
    assert all(set(x) == {"examples_per_second"} for x in speeds(monkeypatch).values())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"count_tokens": 512}, r"count_tokens must be a function \(batch\); got 512"),
        ({"count_tokens": lambda: 1}, r"count_tokens is called with \(batch\)"),
        ({"count_tokens": lambda x: x.shape}, r"count_tokens\(batch\) must be a Python integer"),
        ({"count_tokens": lambda x: jnp.sum(x > 0)}, r"Python integer \(wrap it in int\(\)\); got"),
        ({"count_tokens": lambda x: -1}, r"count_tokens\(batch\) must be >= 0; got -1"),
        ({"count_tokens": np.size, "log": None}, r"count_tokens needs log"),
    ],
)
def test_counts_of_tokens_are_checked(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        run(**{"log": Tracker(), **options})


def test_a_logger_of_python_and_a_number_are_no_logs():
    with pytest.raises(TypeError, match=r"Weights & Biases, with the method log; got .*Logger"):
        run(logging.getLogger("optfn"))
    with pytest.raises(TypeError, match=r"log must be a path or a SummaryWriter.* got 3"):
        run([Tracker(), 3])
