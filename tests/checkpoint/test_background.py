"""Checkpoints in the background: whole, in time, and their errors where they can be seen."""

import datetime
import errno
import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.checkpoint import background, checkpoint, storage
from optfn.checkpoint import directory as parts
from optfn.run import saving

PARAMS = {"w": np.arange(6, dtype=np.float32), "h": np.ones(3, jnp.bfloat16)}


def make(**options):
    def loss_fn(params, batch, rng):
        return jnp.sum((params["w"] - batch) ** 2) + jnp.sum(params["h"].astype(jnp.float32))

    step = optfn.make_train_step(loss_fn, optfn.adam(0.1), rng=0, **options)
    return step, step.init(PARAMS)


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (jax.random.key_data(v) if optfn.core.tree.is_key(v) else v for v in (x, y))
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def held(monkeypatch):
    """Hold what is written in the background until the event is set."""
    event, sync = threading.Event(), os.fsync

    def slowly(descriptor):
        assert event.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    yield event
    event.set()
    background.wait_for_writes()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_relative_directory_stays_where_it_was_when_the_program_named_it(
    tmp_path, monkeypatch, sharded
):
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    path = optfn.save_checkpoint("run", PARAMS, step=1, sharded=sharded, background=True)
    monkeypatch.chdir(there)
    background.wait_for_writes()
    assert path.exists() and path.parent == here / "run" and not [*there.iterdir()]


def test_a_run_goes_on_in_its_directory_where_a_callback_changes_to_another(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    step, state = make()
    options = {"save_every": 1, "evaluate": lambda _: 0.0, "keep_best": True, "progress": False}
    optfn.fit(
        step, state, [np.ones(6, np.float32)] * 4, checkpoint="run", report="run.html",
        callback=lambda n, *_: n == 2 and os.chdir(there), **options,
    )  # fmt: skip
    assert sorted(x.name for x in here.iterdir()) == ["run", "run.html"]
    assert (here / "run" / "step_000000004.npz").exists() and not [*there.iterdir()]


def test_a_directory_is_written_at_once_where_no_thread_starts_at_exit(tmp_path, monkeypatch):
    """On Python 3.12.0 to 3.12.2 a save in the last line of a program would be lost."""
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(checkpoint, "STARTS_THREADS_AT_EXIT", False)
    for step, options in enumerate(({}, {"background": True})):
        path = optfn.save_checkpoint(tmp_path, PARAMS, step=step, sharded=True, **options)
        assert path.is_dir() and not background._writing


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_state_may_be_overwritten_while_it_is_written(tmp_path, held):
    step, state = make()
    state, _ = step(state, np.ones(6, np.float32))
    want, history = jax.tree.map(jnp.copy, state), {"loss": np.ones(2)}
    path = optfn.save_checkpoint(tmp_path, state, history, background=True)
    history["loss"][:] = 7
    for _ in range(5):
        state, _ = step(state, np.ones(6, np.float32))
    assert not path.exists()
    held.set()
    found, kept = optfn.restore_checkpoint(tmp_path, make()[1])
    equal(found, want)
    np.testing.assert_array_equal(kept["loss"], [1, 1])


def test_a_file_in_the_background_is_the_one_that_is_written_at_once(tmp_path):
    _, state = make()
    first = optfn.save_checkpoint(tmp_path / "at once", state, {"loss": np.ones(1)})
    second = optfn.save_checkpoint(tmp_path / "later", state, {"loss": np.ones(1)}, background=True)
    background.wait_for_writes()
    with np.load(first) as one, np.load(second) as other:
        assert one.files == other.files
        for name in one.files:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])


def test_two_directories_are_written_one_after_the_other_while_the_run_goes_on(tmp_path, held):
    _, state = make()
    first, second = (
        optfn.save_checkpoint(tmp_path / name, state, background=True) for name in ("run", "best")
    )
    assert not first.exists() and not second.exists()
    held.set()
    background.wait_for_writes()
    assert first.exists() and second.exists()


@pytest.mark.parametrize("where", ["save", "restore", "wait"])
def test_an_error_of_the_background_is_raised_at_the_next_call_and_once(
    where, tmp_path, monkeypatch
):
    _, state = make()
    optfn.save_checkpoint(tmp_path, state)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        later = state._replace(step=jnp.int32(1))
        optfn.save_checkpoint(tmp_path, later, background=True)
        calls = {
            "save": lambda: optfn.save_checkpoint(tmp_path, later),
            "restore": lambda: optfn.restore_checkpoint(tmp_path, state),
            "wait": background.wait_for_writes,
        }
        with pytest.raises(OSError, match=r"cannot save the state \(No space.*step_000000001"):
            calls[where]()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000.npz"]
    found, _ = optfn.restore_checkpoint(tmp_path, state)
    assert int(found.step) == 0


def test_minimize_raises_the_error_of_its_last_save(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot save the state"):
        optfn.minimize(
            lambda p, x: jnp.sum((p - x) ** 2), optfn.sgd(0.1), np.ones(2, np.float32),
            [np.ones(2, np.float32)], checkpoint=tmp_path, progress=False,
        )  # fmt: skip


@pytest.mark.nightly  # test_checkpoint_directory.py has a directory
def test_a_program_that_ends_finishes_its_checkpoint(tmp_path):
    program = f"""
        import jax.numpy as jnp, optfn
        step = optfn.make_train_step(lambda w, x: jnp.sum(w * x), optfn.adam(0.1))
        state = step.init(jnp.ones(1000))
        optfn.save_checkpoint({str(tmp_path)!r}, state, background=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    step = optfn.make_train_step(lambda w, x: jnp.sum(w * x), optfn.adam(0.1))
    found, _ = optfn.restore_checkpoint(tmp_path, step.init(jnp.zeros(1000)))
    np.testing.assert_array_equal(found.params, np.ones(1000))


def test_what_a_killed_process_began_to_write_is_removed(tmp_path):
    _, state = make()
    (tmp_path / "step_000000007.unfinished").write_bytes(b"half")
    (tmp_path / "step_000000005.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").write_text("of the user")
    optfn.save_checkpoint(tmp_path, state)
    assert {path.name for path in tmp_path.iterdir()} == {"step_000000000.npz", "notes"}


def test_a_run_saves_every_so_many_minutes(tmp_path, monkeypatch):
    """By a clock that goes on by 100 seconds a step: a checkpoint in each fourth step or so."""
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    saved = []

    def batches():
        for _ in range(20):
            now[0] += 100.0
            yield np.ones(2, np.float32)

    real = saving.write_checkpoint
    monkeypatch.setattr(
        saving,
        "write_checkpoint",
        lambda directory, state, *rest, **options: (
            saved.append(int(state.step)),
            real(directory, state, *rest, **options),
        ),
    )
    optfn.minimize(
        lambda p, x: jnp.sum((p - x) ** 2), optfn.sgd(0.1), np.ones(2, np.float32), batches(),
        checkpoint=tmp_path, progress=False, save_every=datetime.timedelta(minutes=6),
        prefetch=0,  # reading a batch moves the clock
    )  # fmt: skip
    assert saved == [4, 8, 12, 16, 20]


@pytest.mark.parametrize("every", [datetime.timedelta(), datetime.timedelta(seconds=-1), 0.5])
def test_a_time_between_checkpoints_is_longer_than_0(every, tmp_path):
    with pytest.raises((TypeError, ValueError), match="save_every must be"):
        optfn.minimize(
            lambda p, x: jnp.sum(p), optfn.sgd(0.1), np.ones(2), [], save_every=every,
            checkpoint=tmp_path,
        )  # fmt: skip


def test_an_object_store_gets_directories_at_its_address(tmp_path, monkeypatch):
    """Etils takes a folder for the bucket; orbax, which would write to the bucket, is another."""
    testing = pytest.importorskip("etils.epath.testing")
    epath = pytest.importorskip("etils.epath")
    written = []

    class Checkpointer:
        def save(self, path, args, force):
            written.append(os.fspath(path))
            epath.Path(path).mkdir(parents=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_get_checkpointer", Checkpointer)
    _, state = make()
    with testing.mock_epath():
        for n in range(3):
            path = optfn.save_checkpoint("gs://bucket/run", state._replace(step=jnp.int32(n)))
        background.wait_for_writes()
        assert os.fspath(path) == "gs://bucket/run/step_000000002"
        assert written == [f"gs://bucket/run/step_{n:09d}" for n in range(3)]
        assert sorted(p.name for p in epath.Path("gs://bucket/run").iterdir()) == [
            *("step_000000001", "step_000000002")
        ]
        with pytest.raises(ValueError, match="sharded=False writes a file, but the store of gs:"):
            optfn.save_checkpoint("gs://bucket/run", state, sharded=False)
    with pytest.raises(ImportError, match=r"gs://bucket/run: .*install"):
        optfn.save_checkpoint("gs://bucket/run", state)
    with pytest.raises(ValueError, match="ftp://bucket/run: checkpoints must be in a directory"):
        storage.to_path("ftp://bucket/run")
