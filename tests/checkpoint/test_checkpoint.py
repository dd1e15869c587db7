"""A run that is stopped, or killed, and goes on: bit for bit as if it had not been."""

import copy
import io
import os
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.mesh.layout import processes

X = np.random.default_rng(0).normal(size=(40, 8, 3)).astype(np.float32)


def loss_fn(w, batch):
    return jnp.mean((batch @ w.astype(jnp.float32) - 1.0) ** 2)


def optimizer():
    tx = optfn.adam(optfn.schedules.noam(8, 10), multi_precision=True)
    return optfn.accumulate(optfn.chain(tx, optfn.exponential_moving_average(0.9)), 2)


STEP = optfn.make_train_step(loss_fn, optimizer())


def begin():
    return STEP.init(jnp.zeros(3, jnp.bfloat16))


def run(directory=None, steps=40, **options):
    return optfn.fit(STEP, begin(), X, steps=steps, progress=False, checkpoint=directory, **options)


def test_a_directory_of_checkpoints_is_no_checkpoint(tmp_path):
    state, _ = run(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"step_000000002.npz; .*restore_checkpoint\(directory"):
        optfn.load_checkpoint(tmp_path, state)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path):
    """tests/faults has other damages."""
    run(tmp_path, steps=10, save_every=5)
    newest = optfn.checkpoint.newest.list_checkpoints(tmp_path)[-1]
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{newest.name} is truncated or damaged"):
        optfn.load_checkpoint(newest, begin())
    with pytest.warns(UserWarning, match=newest.name):
        state, _ = run(tmp_path)
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(run()[0]))


def rewritten(path, change):
    """Write a checkpoint again with other entries: change maps its arrays to (name, bytes, how)."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    with zipfile.ZipFile(path, "w") as file:
        for name, array in change(arrays).items():
            buffer, compression = io.BytesIO(), zipfile.ZIP_STORED
            if isinstance(array, tuple):
                array, compression = array
            if isinstance(array, bytes):
                buffer.write(array)
            else:
                np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=True)
            file.writestr(f"{name}.npy", buffer.getvalue(), compression)


class Run:
    """Would make a directory if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def header(shape):
    """Return an array's bytes that promise more than they have."""
    buffer = io.BytesIO()
    fields = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue() + bytes(12)


CHANGES = {
    "a bomb": (
        lambda a, path: a | {"train/params": (np.zeros(1 << 24), zipfile.ZIP_DEFLATED)},
        "it would take 134,.* bytes, more than 16,.*, the most",
    ),
    "a header that lies": (
        lambda a, path: a | {"train/params": header((1 << 40,))},
        "has 12 bytes of data, which cannot be an array of dtype float32",
    ),
    "a pickle": (
        lambda a, path: a | {"train/params": np.array([Run(path)], object)},
        "which cannot be an array of dtype object",
    ),
    "no version": (
        lambda a, path: {k: v for k, v in a.items() if k != "version"},
        "lacks the version of its format",
    ),
    "a newer version": (lambda a, path: a | {"version": np.asarray(99)}, "format version 99"),
    "another run": (
        lambda a, path: a | {"train/params": np.zeros(4, np.uint16)},
        r"'params' has shape \(4,\)",
    ),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_files_that_somebody_made(change, words, tmp_path):
    run(tmp_path / "run", steps=2)
    (path,) = (tmp_path / "run").iterdir()
    rewritten(path, lambda arrays: change(arrays, tmp_path / "ran"))
    with pytest.raises(ValueError, match=words):
        optfn.load_checkpoint(path, begin())
    assert not (tmp_path / "ran").exists()


def test_entries_that_overlap_are_refused(tmp_path):
    """A short file whose directory lists one large entry many times."""
    run(tmp_path, steps=2)
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path, "w") as file:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.zeros(1 << 20))
        file.writestr("a.npy", buffer.getvalue())
        for _ in range(9):
            file.filelist.append(copy.copy(file.getinfo("a.npy")))
    with pytest.raises(ValueError, match=r"it would take 83,.* bytes|Overlapped entries"):
        optfn.load_checkpoint(path, begin())


def test_nothing_to_restore_and_nothing_that_loads(tmp_path):
    assert optfn.restore_checkpoint(tmp_path / "none", begin()) is None
    run(tmp_path, steps=2)
    other = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(jnp.zeros(3, jnp.bfloat16))
    words = r"no checkpoint can be loaded: .*step_000000002\.npz is from another run: the state"
    with pytest.raises(ValueError, match=words):
        optfn.restore_checkpoint(tmp_path, other)


def test_a_run_names_the_remedy_for_a_directory_of_another_run(tmp_path):
    run(tmp_path, steps=2)
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1))
    state = step.init(jnp.zeros(3, jnp.bfloat16))
    words = r"^checkpoint: .* has the checkpoints of another run; use another directory .*not expec"
    with pytest.raises(ValueError, match=words):
        optfn.fit(step, state, X, progress=False, checkpoint=tmp_path)


def test_a_process_gets_a_copy_of_the_newest_checkpoint(tmp_path, monkeypatch):
    """This one is process 1 of two, with step 5; process 0 has step 10 as a file, or in parts."""
    run(tmp_path / "0", steps=10, save_every=5)
    run(tmp_path / "1", steps=5)
    content = (tmp_path / "0" / "step_000000010.npz").read_bytes()
    want, _ = optfn.restore_checkpoint(tmp_path / "0", begin())
    monkeypatch.setattr(processes, "has_state_on_all_processes", lambda state: True)
    monkeypatch.setattr(processes, "gather_values", lambda values: np.array([[10], values]))
    monkeypatch.setattr(processes, "broadcast_bytes", lambda source, mine: b"")
    with pytest.raises(ValueError, match="0 has a checkpoint of step 10 that is a directory"):
        optfn.restore_checkpoint(tmp_path / "1", begin())
    monkeypatch.setattr(processes, "broadcast_bytes", lambda source, mine: content)
    for directory in ("1", "lost"):
        with pytest.warns(
            UserWarning,
            match=r"10\.npz was missing here, and is now a copy of the file of process 0",
        ):
            state, _ = optfn.restore_checkpoint(tmp_path / directory, begin())
        chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(want))


def test_parameters_may_have_any_name(tmp_path):
    """Also those of the entries that stand beside the state in a file."""
    params = {name: {"w": jnp.ones(2)} for name in ("history", "version", "per_worker", "train")}
    state = optfn.make_train_step(loss_fn, optfn.adam(0.1)).init(params)
    optfn.save_checkpoint(tmp_path, state, {"loss": np.ones(1)})
    loaded, history = optfn.restore_checkpoint(tmp_path, state)
    chex.assert_trees_all_equal(loaded, state)
    assert list(history) == ["loss"]


def test_a_checkpoint_of_an_earlier_step_than_those_that_lie_there_stays(tmp_path):
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(jnp.zeros(3))
    for step in (4, 7, 5):
        path = optfn.save_checkpoint(tmp_path, state._replace(step=jnp.int32(step)), keep=2)
        assert path.exists()
    assert [p.stem for p in sorted(tmp_path.iterdir())] == ["step_000000005", "step_000000007"]
    optfn.save_checkpoint(tmp_path, state._replace(step=jnp.int32(6)), keep=1)
    assert [p.stem for p in tmp_path.iterdir()] == ["step_000000006"]


def test_bad_options(tmp_path):
    with pytest.raises(ValueError, match="save_every must be >= 1"):
        run(tmp_path, save_every=0)
    with pytest.raises(ValueError, match="keep must be >= 1"):
        run(tmp_path, keep=0)


def test_an_old_checkpoint_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    """As on a disk that becomes read-only between the write and the removal."""
    state = {"w": jnp.arange(3.0)}
    for step in (1, 2):
        optfn.save_checkpoint(tmp_path, state, step=step)

    def refuse(self, **_):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    words = r"cannot save the state \(Read-only file system\): an older checkpoint.*step_000000001"
    with pytest.raises(OSError, match=words):
        optfn.save_checkpoint(tmp_path, state, step=3)
    monkeypatch.undo()
    assert optfn.restore_checkpoint(tmp_path, state)[0]["w"].tolist() == [0, 1, 2]
