"""minimize: evaluation, early stopping, the best state, callbacks, logs, signals."""

import contextlib
import gc
import io
import json
import signal
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from problems import scripted

import optfn
from optfn.run import loop
from optfn.run.progress import Progress, count_examples, format_metrics

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


def fitted(step, state, batches, **options):
    return optfn.fit(step, state, batches, progress=False, **options)


def test_a_fit_that_resumes_counts_the_steps_since_its_state(tmp_path):
    step = optfn.make_train_step(loss_fn, optfn.adam(0.1))

    def begun():
        return fitted(step, step.init(jnp.zeros(3)), X[:4])[0]

    fitted(step, begun(), X[4:], steps=3, checkpoint=tmp_path)
    seen = []
    state, history = fitted(
        step, begun(), X[4:], steps=8, checkpoint=tmp_path,
        callback=lambda n, state, metrics: seen.append(n),
    )  # fmt: skip
    assert seen == [8, 9, 10, 11, 12] and history["loss"].shape == (8,)
    np.testing.assert_array_equal(state.params, run(X[:12], optfn.adam(0.1))[0].params)
    later, _ = fitted(step, state, X[12:20])
    with pytest.raises(ValueError, match="is from step 12, but state is from a later step, 20"):
        fitted(step, later, X[20:], checkpoint=tmp_path)


def test_a_guard_that_gave_up_ends_its_own_run_only():
    """Two runs share a step; the one whose gradients are finite goes on."""
    step = optfn.make_train_step(
        loss_fn, optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=0), donate=False
    )
    good = step.init(jnp.zeros(3))
    bad, _ = step(good, np.full((8, 3), np.nan, np.float32))
    good, _ = step(good, X[0])
    assert np.isfinite(good.params).all()
    with pytest.raises(FloatingPointError, match="skip_nonfinite"):
        step(bad, X[1])


def test_a_guard_that_gave_up_within_a_round_ends_the_run():
    """Also where the steps after it, in the same round, have finite gradients."""
    tx = optfn.skip_nonfinite(optfn.sgd(0.0), max_consecutive=0)
    mesh = optfn.distributed.data_mesh(2)
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh, local_steps=2)
    batch = X[0].copy()
    batch[0] = np.nan  # the first step of the first worker
    state, metrics = step(step.init(jnp.zeros(3)), batch)
    assert bool(metrics["gave_up"])
    with pytest.raises(FloatingPointError, match="skip_nonfinite"):
        step(state, X[1])


def test_metrics_that_have_moved_to_the_host_are_the_same(monkeypatch):
    _, want = run(steps=10)
    monkeypatch.setattr("optfn.run.history._CHUNK", 3)
    _, history = run(steps=10)
    chex.assert_trees_all_equal(history, want)
    assert history["loss"].shape == (10,)


@pytest.mark.parametrize("options", [{"keep_best": True}, {"patience": 1}])
def test_a_dict_of_evaluations_needs_monitor_where_they_are_compared(options):
    seen = []

    def evaluate(w):
        seen.append(w)
        return {"good": 0.0, "error": 1.0}

    words = "monitor must name one of the numbers that evaluate returns, error, good; got None"
    with pytest.raises(ValueError, match=words):
        run(evaluate=evaluate, evaluate_every=2, **options)
    assert len(seen) == 1


def without_keep_best_and_then_with(values, steps, directory):
    """Return what comes back, after a first run of so many steps that kept no best state."""
    options = {"evaluate": scripted(values), "evaluate_every": 1, "checkpoint": directory}
    run(steps=steps, **options)
    return run(steps=len(values), keep_best=True, **options)


def test_a_better_evaluation_whose_state_was_not_kept_is_said(tmp_path):
    words = "the state of step 4. The evaluation of step 1 was better, 1, but its state"
    with pytest.warns(UserWarning, match=words) as caught:
        state, history = without_keep_best_and_then_with([1.0, 5.0, 4.0, 2.0, 3.0], 2, tmp_path)
    assert [entry.filename for entry in caught] == [__file__]
    assert int(state.step) == 4 and history["evaluation"].tolist() == [1.0, 5.0, 4.0, 2.0, 3.0]
    with pytest.warns(UserWarning, match=words):  # what was kept is found again
        state, _ = run(steps=5, evaluate=distance, keep_best=True, checkpoint=tmp_path)
    assert int(state.step) == 4


def test_a_better_evaluation_of_this_run_needs_no_warning(tmp_path):
    state, _ = without_keep_best_and_then_with([2.0, 5.0, 1.0, 3.0], 2, tmp_path)
    assert int(state.step) == 3


def test_a_kept_state_that_the_history_does_not_have_is_made_again(tmp_path):
    """The run was cut between an evaluation and the next checkpoint."""
    options = {"evaluate_every": 1, "keep_best": True, "checkpoint": tmp_path, "save_every": 4}
    with pytest.raises(RuntimeError, match="power cut"):
        run(_cut_after(7), evaluate=scripted([3.0, 2.0, 4.0, 4.0, 4.0, 1.0, 5.0]), **options)
    with pytest.warns(UserWarning, match="step 5. The evaluation of step 2 was better"):
        state, _ = run(steps=5, evaluate=scripted([3.5]), **options)
    assert int(state.step) == 5
    state, _ = run(steps=7, evaluate=scripted([1.0, 5.0]), **options)
    assert int(state.step) == 6


def test_the_callback_gets_numbers_and_may_stop():
    seen = []

    def callback(step, state, metrics):
        seen.append((step, metrics))
        return step == int(state.step) == 3

    state, history = run(steps=10, callback=callback, evaluate=distance, evaluate_every=2)
    assert [step for step, _ in seen] == [1, 2, 3] and int(state.step) == 3
    for n, metrics in seen:
        assert type(metrics["loss"]) is float
        assert metrics["loss"] == pytest.approx(float(history["loss"][n - 1]))
    assert ["evaluation" in metrics for _, metrics in seen] == [False, True, False]


@pytest.mark.parametrize("yes", [np.True_, np.array(True), jnp.array(True)])
def test_a_callback_may_answer_with_a_bool_of_numpy_or_jax(yes):
    state, _ = run(steps=10, callback=lambda n, state, metrics: yes if n == 3 else ~yes)
    assert int(state.step) == 3


def test_an_answer_of_a_callback_that_is_no_bool_ends_nothing():
    state, _ = run(steps=3, callback=lambda n, state, metrics: metrics["loss"])
    assert int(state.step) == 3


@pytest.mark.parametrize("answer", [lambda state: state, lambda state: (state, {"loss": 1.0})])
def test_a_state_that_a_callback_returns_is_an_error(answer):
    """It would be ignored."""
    with pytest.raises(TypeError, match=r"(?s)callback returned .*State.*pass it to fit again"):
        run(steps=3, callback=lambda n, state, metrics: answer(state))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_is_written_while_the_run_goes_on(tmp_path):
    path, seen = tmp_path / "logs" / "run.jsonl", []
    run(steps=7, log=path, callback=lambda n, state, metrics: seen.append(len(lines_of(path))))
    assert seen[-1] >= 5 and len(lines_of(path)) == 7


def test_a_run_that_goes_on_has_the_earlier_lines_before_its_first_step(tmp_path):
    """A kill while that step compiles would lose them."""
    path, seen = tmp_path / "run.jsonl", []

    def batches():
        for x in X:
            seen.append(len(lines_of(path)))
            yield x

    options = {"log": path, "checkpoint": tmp_path / "saved", "save_every": 2}
    run(batches(), steps=4, **options)
    del seen[:]
    run(batches(), steps=6, **options)
    assert seen[0] == 4 and [line["step"] for line in lines_of(path)] == [1, 2, 3, 4, 5, 6]


def test_one_process_of_several_writes_the_log(tmp_path, monkeypatch):
    # As of a pipeline, whose step has no mesh: both would write the file at once.
    monkeypatch.setattr(loop.processes, "has_state_on_all_processes", lambda state: True)
    for number in (1, 0):
        monkeypatch.setattr(loop.jax, "process_index", lambda number=number: number)
        run(steps=3, log=tmp_path / "run.jsonl")
        assert (tmp_path / "run.jsonl").exists() == (number == 0)


def test_a_log_on_a_full_disk_is_named():
    with pytest.raises(OSError, match=r"log cannot be written: No space left .*: '/dev/full'"):
        run(steps=3, log="/dev/full")


def _cut_after(steps):
    yield from X[:steps]
    raise RuntimeError("power cut")


def test_what_json_does_not_have_is_null(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.warns(UserWarning, match="the loss of step 1 is"):
        run([np.full((8, 3), np.inf, np.float32)], log=path)
    assert lines_of(path)[0]["loss"] is None


@pytest.mark.usefixtures("interrupt")
@pytest.mark.parametrize("name", ["SIGTERM", nightly("SIGINT")])
def test_a_signal_ends_the_run_with_what_there_is(name, tmp_path, capfd):
    number = getattr(signal, name)
    usual = signal.getsignal(number)

    def batches():
        for n, x in enumerate(X):
            if n == 5:
                signal.raise_signal(number)
            yield x

    state, history = optfn.minimize(
        loss_fn, optfn.sgd(0.1), jnp.zeros(3), batches(), checkpoint=tmp_path,
        evaluate=lambda w: 7.0, report=tmp_path / "run.html",
    )  # fmt: skip
    steps = int(state.step)
    assert steps == len(history["loss"]) == 5 and history["evaluation"].tolist() == [7.0]
    assert history["stopped"] == "signal"
    assert signal.getsignal(number) is usual
    words = f"stopped by {name} after step {steps}"
    assert words in capfd.readouterr().err
    assert (tmp_path / f"step_{steps:09d}.npz").exists()
    assert f"<td>{words}</td>" in (tmp_path / "run.html").read_text(encoding="utf-8")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_epochs_small_losses_and_examples_per_second():
    file = Terminal()
    with contextlib.redirect_stderr(file), Progress(3, True) as report:
        for n in range(1, 4):
            report(n, {"loss": 1.25e-6, "epoch": 1, "evaluation/error": 0.5}, X[0])
    for words in ("epoch 1 loss 1.2500e-06", "error 0.50000", "examples/s", "/3"):
        assert words in file.getvalue()
    assert format_metrics({"loss": np.nan}) == "loss nan"


@pytest.mark.parametrize("kind", ["none", "only writes"])
def test_a_run_needs_no_console(kind, monkeypatch):
    written = []
    stream = types.SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr("sys.stderr", None if kind == "none" else stream)
    loss = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731
    state, _ = optfn.minimize(loss, optfn.sgd(0.1), jnp.float32(1), [1.0, 2.0])
    assert int(state.step) == 2
    assert "".join(written).startswith("step 1 loss" if kind == "only writes" else "")


@pytest.mark.parametrize("kind", ["below a file", "nothing can be written"])
def test_a_place_without_checkpoints_is_an_error_before_the_first_step(kind, tmp_path):
    (tmp_path / "taken").write_text("")
    place, drawn = tmp_path / "taken" / "run" if kind == "below a file" else "/proc/run", []
    with pytest.raises(OSError, match=r"taken|proc"):
        run((drawn.append(1) or x for x in X[:3]), checkpoint=place)
    assert not drawn


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
    assert count_examples(batch) == examples


def test_batches_that_are_too_few_are_counted(tmp_path):
    with pytest.raises(ValueError, match=r"batches gave 3 batches, but 5 are needed for steps=5$"):
        run(X[:3], steps=5)
    for none in ([], np.ones((0, 8, 3))):
        with pytest.raises(ValueError, match=r"batches must hold at least one batch; got"):
            run(none)
    with pytest.raises(ValueError, match=r"at least one batch; got \[\] of type list$"):
        run([], epochs=2)
    words = "which gives its batches only once: it has been used up, or had none. Make a new one"
    with pytest.raises(ValueError, match=f"list_iterator, {words}"):
        run(iter([]), steps=3)
    batches = (x for x in X[:2])
    run(batches)
    with pytest.raises(ValueError, match=f"type generator, {words}"):
        run(batches)
    state, history = run(X[:10], checkpoint=tmp_path)
    passed = ". The run has already used the first 10$"
    with pytest.raises(ValueError, match="gave 6 batches, but 12 are needed for steps=12" + passed):
        run(X[:6], steps=12, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="gave 6 batches, but at least 10 are needed" + passed):
        run(X[:6], checkpoint=tmp_path)
    for finished in ({"batches": X[:10]}, {"batches": X[:6], "steps": 8}):
        again, same = run(**finished, checkpoint=tmp_path)
        chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
        assert same.pop("stopped") == ("steps" if "steps" in finished else "batches")
        chex.assert_trees_all_equal(same, {k: x for k, x in history.items() if k != "stopped"})


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
        (
            {"evaluate": distance, "monitor": "a"},
            ValueError,
            "monitor='a' names a number of a dict",
        ),
        (
            {"evaluate": lambda w: {"b": 0.0, "a": 1.0}, "monitor": "loss"},
            ValueError,
            "monitor must name one of .*a, b; got 'loss'",
        ),
        ({"callback": "print"}, TypeError, r"callback must be a function \(step, state"),
        ({"log": 3}, TypeError, "log must be a path or a SummaryWriter.*; got 3"),
    ],
)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        run(steps=1, **options)


def test_fit_says_what_it_takes():
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1))
    state = step.init(jnp.zeros(3))
    with pytest.raises(TypeError, match=r"step must be a TrainStep, as make_train_step.*loss_fn"):
        fitted(loss_fn, state, X)
    with pytest.raises(TypeError, match=r"state must be a TrainState, such as step\.init"):
        fitted(step, jnp.zeros(3), X)
    fitted(step, state, X[:2])
    with pytest.raises(ValueError, match="the state has been used up: an earlier call of the step"):
        fitted(step, state, X[2:])


def test_each_evaluation_is_a_line_without_a_terminal(capsys):
    """The last one too, which is made after the last step was shown."""
    optfn.minimize(
        loss_fn, optfn.sgd(0.1), jnp.zeros(3), X, evaluate=lambda w: {"of": 7.0},
        evaluate_every=9, steps=39,
    )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    shown = [int(line.split()[1]) for line in lines if line.endswith("of 7.0000")]
    assert shown == [9, 18, 27, 36, 39]


@pytest.mark.parametrize("keep_best", [False, True])
def test_it_is_told_what_ended_a_run(keep_best, capsys):
    evaluate = scripted([1.0, 3.0, 2.0])
    options = {"evaluate": evaluate, "evaluate_every": 5, "patience": 2, "keep_best": keep_best}
    optfn.minimize(loss_fn, optfn.sgd(0.1), jnp.zeros(3), X, **options)
    *_, last = [x for x in capsys.readouterr().err.splitlines() if x.startswith("stopped")]
    words = "stopped by patience after step 15; the best evaluation is of step 5"
    assert last == words + (", whose state is returned" if keep_best else "")
    optfn.minimize(loss_fn, optfn.sgd(0.1), jnp.zeros(3), X, callback=lambda n, s, m: n == 7)
    assert "stopped early, after step 7" in capsys.readouterr().err
    options["evaluate"] = scripted([np.nan, np.nan])
    optfn.minimize(loss_fn, optfn.sgd(0.1), jnp.zeros(3), X, **options)
    assert "by patience after step 10; no evaluation is a number\n" in capsys.readouterr().err
    run(callback=lambda n, s, m: n == 7)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("by_optax", [False, True])
def test_gradients_that_wait_for_a_step_are_said(by_optax, capsys):
    wrap = optax.MultiSteps if by_optax else optfn.accumulate
    for steps, waiting in ((10, 2), (12, 0)):
        tx = wrap(optfn.sgd(0.1), 4)
        optfn.minimize(loss_fn, tx, jnp.zeros(3), X, steps=steps)
        said = f"within an accumulation: {waiting} gradients" in capsys.readouterr().err
        assert said == bool(waiting)


def test_the_third_shape_of_batches_is_said_once(capsys):
    sizes = [8, 8, 4, 8, 2, 1, 4, 3]
    optfn.minimize(loss_fn, optfn.sgd(0.1), jnp.zeros(3), [X[0][:n] for n in sizes])
    said = [x for x in capsys.readouterr().err.splitlines() if "shapes of batches" in x]
    assert len(said) == 1 and "3 shapes of batches: (2, 3), (4, 3), (8, 3);" in said[0]
    optfn.minimize(loss_fn, optfn.sgd(0.1), jnp.zeros(3), [X[0][:n] for n in sizes[:4]])
    assert "shapes of batches" not in capsys.readouterr().err


def test_arrays_of_aux_that_nobody_gets_are_named(capsys):
    def loss(w, x):
        error = jnp.max(jnp.abs(w - x))
        return jnp.mean((w - x) ** 2), {"per": (w - x) ** 2, "error": error, "key": key}

    key = jax.random.key(0)

    def fit(**options):
        batches = [np.ones(3, np.float32)] * 3
        run = optfn.minimize(loss, optfn.sgd(0.1), jnp.zeros(3), batches, has_aux=True, **options)
        return run[1], capsys.readouterr().err

    history, lines = fit()
    assert lines.count("without the arrays of aux: aux/per (3,)") == 1
    assert {"aux/per", "aux/key"}.isdisjoint(history) and len(history["aux/error"]) == 3
    assert "arrays" not in fit(callback=lambda n, state, metrics: None)[1]


@pytest.mark.parametrize("end", [{"steps": 2}, {"callback": lambda n, s, m: n == 2}])
def test_the_iterator_of_a_loader_is_closed_when_the_run_ends(end):
    closed = []

    class Loader:
        def __iter__(self):
            try:
                yield from np.ones((9, 3), np.float32)
            finally:
                closed.append(True)

    gc.disable()
    try:
        optfn.minimize(
            lambda w, x: jnp.mean((w - x) ** 2), optfn.sgd(0.1), jnp.zeros(3), Loader(),
            progress=False, **end,
        )  # fmt: skip
        assert closed == [True]
    finally:
        gc.enable()
