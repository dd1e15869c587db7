"""What a run says and refuses when it finds a checkpoint in its directory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import square_error

import optfn

X = np.random.default_rng(0).normal(size=(10, 8, 3)).astype(np.float32)


STEP = optfn.make_train_step(square_error, optfn.adam(1e-2))


def run(directory, batches=X, step=STEP, **options):
    state = step.init(jnp.zeros(3))
    return optfn.fit(step, state, batches, checkpoint=directory, **{"progress": False} | options)


def test_a_run_says_from_which_step_it_resumes(tmp_path, capfd):
    run(tmp_path, X[:4], progress=True)
    assert "resumed" not in capfd.readouterr().err
    run(tmp_path, X, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"resumed from step 4 of {tmp_path}/"
    assert not any("finished" in line for line in lines)


def test_a_state_of_numpy_arrays_resumes(tmp_path):
    """As `jax.device_get` gives it."""
    whole = run(None)[0]
    begin = jax.device_get(STEP.init(jnp.zeros(3)))
    optfn.fit(STEP, begin, X[:2], checkpoint=tmp_path, progress=False)
    state, _ = optfn.fit(STEP, begin, X, checkpoint=tmp_path, progress=False)
    np.testing.assert_array_equal(state.params, whole.params)


@pytest.mark.parametrize("options", [{}, {"steps": 4}, {"evaluate_every": 1, "patience": 1}])
def test_a_run_that_is_finished_says_so(options, tmp_path, capfd):
    if "patience" in options:
        values = iter([1.0, 2.0])
        options = options | {"evaluate": lambda w: next(values)}
    state, _ = run(tmp_path, X[:4], **options)
    again, _ = run(tmp_path, X[:4], progress=True, **options)
    assert int(again.step) == int(state.step)
    said = capfd.readouterr().err.splitlines()
    assert said == [
        f"resumed from step {int(state.step)} of {tmp_path}/",
        f"the run in {tmp_path}/ is already finished; no step was taken",
    ]
    run(tmp_path, X[:4], progress=False, **options)
    assert not capfd.readouterr().err


def test_resume_false_refuses_a_directory_with_a_checkpoint(tmp_path):
    run(tmp_path, X[:4], resume=False)
    newest = tmp_path / "step_000000004.npz"
    with pytest.raises(ValueError, match=f"resume=False, but there is {newest}. Pass another"):
        run(tmp_path, X, resume=False)
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]
    with pytest.raises(TypeError, match="resume must be True or False"):
        run(tmp_path, X, resume="no")


def test_another_learning_rate_than_that_of_the_checkpoint_is_said_once(tmp_path):
    run(tmp_path, X[:4])
    slow = optfn.make_train_step(square_error, optfn.adam(1e-4))
    words = (
        "resumes with the learning rate of its checkpoint, 0.01, and not with that of tx, 0.0001"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        _, history = run(tmp_path, X, slow)
    assert [entry.filename for entry in caught] == [__file__]
    np.testing.assert_allclose(history["learning_rate"], 0.01)


def test_another_rate_given_as_an_array_is_that_of_the_run_and_is_said_once(tmp_path):
    fast, slow = (
        optfn.make_train_step(square_error, optfn.adam(jnp.array(x))) for x in (1e-2, 1e-4)
    )
    run(tmp_path, X[:4], fast)
    words = "with the learning rate of tx, 0.0001, because it is given as an array, and not.* 0.01$"
    with pytest.warns(UserWarning, match=words) as caught:
        _, history = run(tmp_path, X, slow)
    assert [entry.filename for entry in caught] == [__file__]
    np.testing.assert_allclose(history["learning_rate"], [0.01] * 4 + [1e-4] * 6)
    run(tmp_path, X, slow)


@pytest.mark.parametrize("inject", [lambda make: make, optax.inject_hyperparams])
def test_a_rate_that_a_schedule_drives_may_differ(inject, tmp_path):
    step = optfn.make_train_step(square_error, inject(optfn.adam)(lambda t: 0.01 / (1 + t)))
    run(tmp_path, X[:4], step)
    _, history = run(tmp_path, X, step)
    np.testing.assert_allclose(history["learning_rate"], 0.01 / (1 + np.arange(10)), rtol=1e-6)


def test_a_rate_that_optax_injects_is_that_of_the_checkpoint(tmp_path):
    fast, slow = (
        optfn.make_train_step(square_error, optax.inject_hyperparams(optfn.adam)(learning_rate=x))
        for x in (1e-2, 1e-4)
    )
    run(tmp_path, X[:4], fast)
    words = r"rate of its checkpoint, 0.01, and not with that of tx, 0.0001.*inject_hyperparams"
    with pytest.warns(UserWarning, match=words):
        _, history = run(tmp_path, X, slow)
    np.testing.assert_allclose(history["learning_rate"], 0.01)


def test_checkpoints_of_several_processes_below_a_directory_are_said(tmp_path):
    run(tmp_path / "0", X[:4])
    (tmp_path / "7").mkdir()
    with pytest.warns(UserWarning, match=r"begins anew, but .*0 has some.*several processes"):
        run(tmp_path, X[:4])
    run(tmp_path, X)  # it has checkpoints of its own now


@pytest.mark.parametrize("patience", [None, 3])
def test_a_resumed_run_knows_the_evaluation_of_the_state_that_it_began_with(patience, tmp_path):
    """The state of step 4 is the best; evaluations are due at 6, 8, 10."""
    step = optfn.make_train_step(square_error, optfn.sgd(0.01))
    begun, _ = optfn.fit(step, step.init(jnp.zeros(3)), list(X[:4]), progress=False)
    best = np.asarray(begun.params)

    def go_on(steps, directory):
        return optfn.fit(
            step, jax.tree.map(jnp.copy, begun), list(X[4:]), steps=steps, keep_best=True,
            evaluate=lambda w: float(not np.array_equal(w, best)), evaluate_every=2,
            patience=patience, checkpoint=directory, progress=False,
        )  # fmt: skip

    go_on(3, tmp_path / "stopped")
    runs = [go_on(6, tmp_path / name) for name in ("stopped", "whole")]
    assert [int(state.step) for state, _ in runs] == [4, 4]
    assert runs[0][1]["stopped"] == runs[1][1]["stopped"] == ("patience" if patience else "steps")
