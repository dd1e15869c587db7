"""minimize: evaluation, early stopping, the best state, callbacks, logs, signals."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.run.progress import Progress, num_examples, words

X = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)


def loss_fn(w, batch):
    return jnp.mean((batch @ w - batch @ TARGET) ** 2)


def distance(w):
    return float(jnp.sum((w - TARGET) ** 2))


def run(batches=X, tx=None, **options):
    return optfn.minimize(
        loss_fn, tx or optfn.sgd(0.1), jnp.zeros(3), batches, progress=False, **options
    )


def params_after(steps):
    """Return params after so many steps of SGD, in NumPy."""
    w = np.zeros(3)
    for x in X[:steps].astype(np.float64):
        w = w - 0.1 * 2 / len(x) * x.T @ (x @ (w - TARGET))
    return w


def test_evaluations_are_of_the_steps_they_name():
    state, history = run(steps=10, evaluate=distance, evaluate_every=4)
    assert history["evaluation_step"].tolist() == [4, 8, 10]
    want = [np.sum((params_after(n) - TARGET) ** 2) for n in (4, 8, 10)]
    np.testing.assert_allclose(history["evaluation"], want, rtol=1e-4)
    assert history["loss"].shape == (10,)
    np.testing.assert_allclose(state.params, params_after(10), rtol=1e-4)


def test_a_dict_of_evaluations_and_only_one_at_the_end():
    def evaluate(w):
        return {"distance": jnp.sum((w - TARGET) ** 2), "first": w[0]}

    state, history = run(steps=6, evaluate=evaluate)
    assert history["evaluation_step"].tolist() == [6]
    assert history["evaluation/distance"] == pytest.approx([distance(state.params)])
    assert history["evaluation/first"] == pytest.approx([float(state.params[0])])
    _, history = run(steps=6, evaluate=distance, evaluate_every=3)
    assert history["evaluation_step"].tolist() == [3, 6]  # the last one not twice


def test_packed_params_are_evaluated_as_the_tree():
    def loss(params, batch):
        return loss_fn(params["w"], batch)

    options = {"evaluate": lambda p: distance(p["w"]), "progress": False, "steps": 5}
    _, history = optfn.minimize(
        loss, optfn.sgd(0.1), {"w": jnp.zeros(3)}, X, packed=True, **options
    )
    np.testing.assert_allclose(
        history["evaluation"], [np.sum((params_after(5) - TARGET) ** 2)], rtol=1e-4
    )


def scripted(values):
    """Return an evaluation that gives these numbers one after the other."""
    remaining = iter(values)
    return lambda w: next(remaining)


def test_metrics_that_have_moved_to_the_host_are_the_same(monkeypatch):
    _, want = run(steps=10)
    monkeypatch.setattr("optfn.run.history._CHUNK", 3)
    _, history = run(steps=10)
    chex.assert_trees_all_equal(history, want)
    assert history["loss"].shape == (10,)


def test_patience_ends_the_run_and_the_best_state_comes_back():
    values = [3.0, 2.0, 2.5, 2.0, 1.0]
    options = {"evaluate_every": 2, "patience": 2}
    state, history = run(evaluate=scripted(values), **options)
    assert history["evaluation"].tolist() == [3.0, 2.0, 2.5, 2.0]  # no better twice
    assert int(state.step) == 8
    best, _ = run(evaluate=scripted(values), keep_best=True, **options)
    assert int(best.step) == 4
    np.testing.assert_allclose(best.params, params_after(4), rtol=1e-4)


def test_the_best_state_and_the_patience_survive_a_restart(tmp_path):
    values = [3.0, 1.0, 2.0, 2.5, 2.6]
    options = {"evaluate_every": 2, "patience": 3, "keep_best": True, "save_every": 2}
    whole, history = run(evaluate=scripted(values), **options)
    run(evaluate=scripted(values[:3]), steps=6, checkpoint=tmp_path, **options)
    best, resumed = run(evaluate=scripted(values[3:]), checkpoint=tmp_path, **options)
    assert int(best.step) == int(whole.step) == 4
    chex.assert_trees_all_equal(jax.device_get(best), jax.device_get(whole))
    chex.assert_trees_all_equal(resumed, history)


def test_monitor_names_the_number_that_has_to_fall():
    def evaluate(values):
        script = scripted(values)
        return lambda w: {"good": 0.0, "error": script(w)}

    _, history = run(evaluate=evaluate([1, 2]), evaluate_every=1, patience=1, monitor="error")
    assert history["evaluation/error"].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"monitor must be one of .*error, good; got 'loss'"):
        run(evaluate=evaluate([1]), monitor="loss")


def test_the_callback_gets_numbers_and_may_stop():
    seen = []

    def callback(step, state, metrics):
        seen.append((step, metrics, np.asarray(state.params)))
        return step == 3

    state, history = run(steps=10, callback=callback, evaluate=distance, evaluate_every=2)
    assert [step for step, _, _ in seen] == [1, 2, 3] and int(state.step) == 3
    for n, metrics, params in seen:
        assert type(metrics["loss"]) is float
        assert metrics["loss"] == pytest.approx(float(history["loss"][n - 1]))
        np.testing.assert_allclose(params, params_after(n), rtol=1e-4)
    assert ["evaluation" in metrics for _, metrics, _ in seen] == [False, True, False]
    assert history["evaluation_step"].tolist() == [2, 3]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_one_object_a_step(tmp_path):
    path = tmp_path / "logs" / "run.jsonl"
    seen_while_running = []

    def callback(step, state, metrics):
        seen_while_running.append(len(lines_of(path)))

    _, history = run(steps=7, log=path, evaluate=distance, evaluate_every=5, callback=callback)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == list(range(1, 8))
    np.testing.assert_array_equal([line["loss"] for line in lines], history["loss"])
    assert [line["step"] for line in lines if "evaluation" in line] == [5, 7]
    assert seen_while_running[-1] >= 5


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path):
    path, options = tmp_path / "run.jsonl", {"checkpoint": tmp_path / "run", "save_every": 4}
    with pytest.raises(RuntimeError, match="power cut"):
        run(_cut_after(6), log=path, **options)
    assert len(lines_of(path)) == 6  # two more than the checkpoint has
    run(steps=9, log=path, **options)
    assert [line["step"] for line in lines_of(path)] == list(range(1, 10))


def _cut_after(steps):
    yield from X[:steps]
    raise RuntimeError("power cut")


def test_what_json_does_not_have_is_null(tmp_path):
    path = tmp_path / "run.jsonl"
    run([np.full((8, 3), np.inf, np.float32)], log=path)
    assert lines_of(path)[0]["loss"] is None


PROGRAM = """
    import signal, sys, time
    import jax.numpy as jnp, numpy as np, optfn

    # A shell that starts programs in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def batches():
        for n in range(1000):
            if n == 5:
                print("five", flush=True)
            if n >= 5:
                time.sleep(0.05)
            yield np.ones((4, 3), np.float32)

    state, history = optfn.minimize(
        lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optfn.sgd(0.1), jnp.zeros(3), batches(),
        checkpoint=sys.argv[1], evaluate=lambda w: 7.0, steps=1000, report=sys.argv[2],
    )
    print("state", int(state.step), len(history["loss"]), history["evaluation"].tolist())
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_with_what_there_is(name, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), tmp_path, tmp_path / "run.html"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout.readline() == "five\n"
    process.send_signal(getattr(signal, name))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    state, usual = output.splitlines()
    words = state.split()
    assert words[1] == words[2] and 5 <= int(words[1]) < 1000 and words[3] == "[7.0]"
    assert usual == "True"
    assert f"stopped by {name} after step {words[1]}" in errors
    assert (tmp_path / f"step_{int(words[1]):09d}.npz").exists()
    report = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"<td>stopped by {name} after step {words[1]}</td>" in report


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_small_losses_and_examples_per_second():
    file = Terminal()
    with Progress(3, True, file=file) as report:
        for n in range(1, 4):
            report(n, {"loss": 1.25e-6, "evaluation/error": 0.5}, X[0])
    assert "loss 1.2500e-06 error 0.50000" in file.getvalue()
    assert "examples/s" in file.getvalue()
    assert words({"loss": np.nan}) == "loss nan"


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (np.zeros((8, 3)), 8),
        ({"x": np.zeros((8, 3)), "y": np.zeros(8)}, 8),
        ((np.zeros((8, 3)), np.zeros(4)), None),
        ((np.zeros((8, 3)), 1.0), None),
        (None, None),
    ],
)
def test_examples_are_counted_where_the_batch_has_a_leading_axis(batch, examples):
    assert num_examples(batch) == examples


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"evaluate": 3}, TypeError, "evaluate must be a function of params; got 3"),
        ({"evaluate_every": 2}, ValueError, "evaluate_every needs evaluate"),
        ({"patience": 2}, ValueError, "patience needs evaluate"),
        ({"keep_best": True}, ValueError, "keep_best needs evaluate"),
        ({"evaluate": distance, "evaluate_every": 0}, ValueError, "evaluate_every must be"),
        ({"evaluate": distance, "patience": 1.5}, TypeError, "patience must be"),
        ({"evaluate": lambda w: "x"}, TypeError, "must return a number or a dict.*got 'x'"),
        ({"evaluate": lambda w: {"a": w}}, TypeError, "for 'a'"),
        ({"callback": "print"}, TypeError, r"callback must be a function of \(step, state"),
        ({"log": 3}, TypeError, "log must be a path; got 3"),
    ],
)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        run(steps=1, **options)
