"""A loss that is not finite: one warning, or the end; no finite checkpoint is lost for it."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn.checkpoint.background import wait_for_writes
from optfn.checkpoint.newest import list_checkpoints
from optfn.run import history

FORMS = pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
BAD = 6  # the step whose batch has the NaN


def loss_fn(params, x):
    return jnp.mean((params["w"] * x - 1.0) ** 2)


def batches(steps=12, bad=BAD, value=np.nan):
    found = np.random.default_rng(0).normal(size=(steps, 8, 8)).astype(np.float32)
    if bad:
        found[bad - 1, 3, 3] = value
    return list(found)


def run(data, directory=None, *, tx=None, **options):
    return optfn.minimize(
        loss_fn, tx or optfn.sgd(0.1), {"w": np.ones(8, np.float32)}, data,
        checkpoint=directory, progress=False, **options,
    )  # fmt: skip


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(entry.message) for entry in caught if entry.category is UserWarning]


@pytest.mark.parametrize(
    "how, value",
    [
        ("at the end", np.nan), ("log", np.inf), ("callback", np.nan), ("progress", np.inf),
        ("save", np.nan),
    ],
)  # fmt: skip
def test_one_warning_names_the_first_step_and_what_helps(how, value, tmp_path, capfd):
    options = {
        "at the end": {},
        "log": {"log": tmp_path / "run.jsonl"},
        "callback": {"callback": lambda step, state, metrics: None},
        "progress": {"progress": True},
        "save": {"checkpoint": tmp_path / "run", "save_every": 1},
    }[how]
    arguments = loss_fn, optfn.sgd(0.1), {"w": np.ones(8, np.float32)}, batches(value=value)
    (_, history), said = warnings_of(
        lambda: optfn.minimize(*arguments, **{"progress": False} | options)
    )
    (words,) = said
    assert f"the loss of step {BAD} is {history['loss'][BAD - 1]}." in words
    for help in ("skip_nonfinite", "grad_clip", "lower learning rate", "JAX_DEBUG_NANS"):
        assert help in words
    assert (
        np.isfinite(history["loss"][: BAD - 1]).all()
        and not np.isfinite(history["loss"][BAD:]).any()
    )


def test_the_step_is_right_with_local_steps_and_after_a_restart(tmp_path):
    mesh = {"mesh": optfn.distributed.data_mesh(8), "local_steps": 2}
    _, (words,) = warnings_of(
        lambda: run([x.reshape(2, 4, 8).repeat(2, 1).reshape(16, 8) for x in batches()], **mesh)
    )
    assert f"the loss of step {2 * BAD} is nan" in words
    run(batches()[:4], tmp_path)
    _, (words,) = warnings_of(lambda: run(batches(), tmp_path))
    assert f"the loss of step {BAD} is nan" in words


@pytest.mark.parametrize(
    "tx, bad",
    [
        (optfn.sgd(0.1), 0),
        (optfn.skip_nonfinite(optfn.sgd(0.1)), BAD),
        (optax.apply_if_finite(optax.sgd(0.1), 3), BAD),
    ],
    ids=["finite", "optfn", "optax"],
)
def test_finite_runs_and_runs_that_leave_such_steps_out_say_nothing(tx, bad, tmp_path):
    options = {"save_every": 1, "on_nonfinite": "stop", "steps": BAD}
    (state, _), said = warnings_of(lambda: run(batches(bad=bad), tmp_path, tx=tx, **options))
    assert not said and np.isfinite(state.params["w"]).all()


def test_a_run_goes_on_from_the_newest_finite_checkpoint_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match=f"the loss of step {BAD} is nan"):
        run(batches(13), tmp_path, save_every=1)
    # The same batches, now without the NaN.
    words = (
        rf"skipped: .*step_0*13.* are not finite. The newest finite .* step {BAD - 1}, and was lo"
    )
    with pytest.warns(UserWarning, match=words):
        state, _ = run(batches(13, bad=0), tmp_path, save_every=1)
    want, _ = run(batches(13, bad=0))
    np.testing.assert_array_equal(state.params["w"], want.params["w"])


@FORMS
def test_a_finite_loss_before_params_that_are_not(sharded, tmp_path):
    """The params of a step are those after its loss."""
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    params = {"w": jnp.array([1.0, jnp.inf], jnp.bfloat16)}
    state = optfn.make_train_step(loss_fn, optfn.adam(0.1)).init(params)
    good = state._replace(params={"w": jnp.ones(2, jnp.bfloat16)})
    for n, x in enumerate((good, state, state, state), 1):
        x = x._replace(step=jnp.int32(n))
        optfn.save_checkpoint(tmp_path, x, {"loss": np.ones(n)}, keep=1, sharded=sharded)
    with pytest.warns(UserWarning, match="newest finite checkpoint is step_000000001.*of step 1"):
        found, _ = optfn.restore_checkpoint(tmp_path, state)
    assert int(found.step) == 1 and len(list_checkpoints(tmp_path)) == 2
    (last,) = [path for path in list_checkpoints(tmp_path) if "4" in path.name]
    again, history = optfn.load_checkpoint(last, state)
    assert jnp.isinf(again.params["w"][1]) and history.keys() == {"loss"}
    assert last.exists()
    with pytest.warns(UserWarning, match="newest finite"):
        np.testing.assert_array_equal(optfn.load_params(tmp_path, params)["w"], [1, 1])


@FORMS
def test_where_no_checkpoint_is_finite_the_newest_is_loaded_with_a_warning(sharded, tmp_path):
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init({"w": np.ones(2)})
    optfn.save_checkpoint(tmp_path, state, {"loss": np.array([1.0, np.nan])}, sharded=sharded)
    wait_for_writes()
    with pytest.warns(
        UserWarning, match="or its loss are not finite, and there is no finite check"
    ):
        found, _ = optfn.restore_checkpoint(tmp_path, state)
    np.testing.assert_array_equal(found.params["w"], np.ones(2))
    optfn.save_checkpoint(tmp_path, state, {"loss": np.array([np.nan, 1.0])}, sharded=sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfn.restore_checkpoint(tmp_path, state)


@pytest.mark.parametrize("log", [True, False])
def test_stop_ends_the_run_once_the_log_is_written(log, tmp_path):
    path = tmp_path / "run.jsonl"
    options = {"log": path} if log else {}
    taken = []

    def counted():
        for x in batches(40):
            taken.append(x)
            yield x

    words = f"the loss of step {BAD} is nan.*on_nonfinite='stop'"
    with pytest.raises(FloatingPointError, match=words):
        run(counted(), tmp_path / "run", on_nonfinite="stop", save_every=1, **options)
    wait_for_writes()
    assert BAD <= len(taken) < 40
    names = [f"step_{n:09d}.npz" for n in (BAD - 2, BAD - 1)]
    assert [x.name for x in list_checkpoints(tmp_path / "run")] == names
    if log:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
        assert lines[BAD - 1]["loss"] is None and lines[BAD - 2]["loss"] is not None
    with pytest.raises(ValueError, match="on_nonfinite must be one of 'warn', 'stop'; got 'raise'"):
        run(batches(), on_nonfinite="raise")


def test_a_run_without_a_log_reads_its_losses_once_and_at_its_end(monkeypatch):
    """All steps together, not one by one."""
    reads, real = [], history._copy_to_host
    monkeypatch.setattr(history, "_copy_to_host", lambda x: (reads.append(len(x)), real(x))[1])
    monkeypatch.setattr(optfn.run.log, "scalars", lambda metrics: pytest.fail("read for the log"))
    with pytest.warns(UserWarning, match="the loss of step"):
        run(batches())
    assert [n for n in reads if n] == [12]
