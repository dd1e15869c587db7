"""The speed in a log, and logs that go to an object such as a run of Weights & Biases."""

import itertools
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import optfn
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


def test_a_tracker_gets_each_step_once():
    tracker = Tracker()
    _, history = run(tracker, evaluate=lambda w: 7.0, evaluate_every=5)
    assert [step for step, _ in tracker.rows] == list(range(1, 13))
    assert [row["loss"] for _, row in tracker.rows] == history["loss"].tolist()
    assert [step for step, row in tracker.rows if "evaluation" in row] == [5, 10, 12]


def test_a_tracker_and_a_file_stand_beside_each_other(tmp_path):
    tracker = Tracker()
    run([tracker, tmp_path / "run.jsonl"])
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == [{"step": step} | row for step, row in tracker.rows]


def test_the_speed_is_the_mean_over_ten_seconds(monkeypatch):
    """Steps end two seconds apart; the first only starts the clock."""
    monkeypatch.setattr(speed, "monotonic", itertools.count(100.0, 2.0).__next__)
    tracker = Tracker()
    run(tracker)
    found = {step: row.get("examples_per_second") for step, row in tracker.rows}
    assert {step: x for step, x in found.items() if x} == {6: 5 * 8 / 10, 11: 5 * 8 / 10}


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


def test_a_logger_of_python_is_no_log():
    with pytest.raises(TypeError, match=r"Weights & Biases, with the method log; got .*Logger"):
        run(logging.getLogger("optfn"))
