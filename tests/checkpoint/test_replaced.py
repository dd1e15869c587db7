"""A checkpoint that is saved again at its step: killed at any point, there is the old or the new.

The program replaces a directory on the disk, and kills itself at the k-th call that changes one. It
needs no device, so that it can fork for each k.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.checkpoint.background import wait_for_writes
from optfn.checkpoint.newest import list_checkpoints

PROGRAM = """
    import json, os, pathlib, shutil, signal, sys
    from optfn.checkpoint import directory as checkpoint_directory, newest

    source, target, kills = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    name = "step_000000001"

    def replace(place, last):
        calls = 0

        def counted(call):
            def made(*args, **options):
                nonlocal calls
                calls += 1
                if calls == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)
            return made

        for word in ("replace", "rename", "unlink", "rmdir", "fsync", "mkdir"):
            setattr(os, word, counted(getattr(os, word)))
        checkpoint_directory.OrbaxDirectory()._publish(place / f"{name}.unsynced", place / name)
        newest.remove_oldest(place / name, 1)
        os._exit(0)

    killed = 0
    while True:
        place = target / str(killed)
        shutil.copytree(source, place)
        child = os.fork()
        if not child:
            replace(place, killed + 1)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        killed += 1
    print(json.dumps(killed))
"""


def states():
    old = {"step": np.int32(1), "w": np.arange(3.0, dtype=np.float32)}
    return old, old | {"w": old["w"] + 10}


def test_a_directory_that_is_replaced_is_the_old_or_the_new_one_at_each_kill(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    source, target = tmp_path / "source", tmp_path / "killed"
    old, new = states()
    fresh = {"step": np.int32(0), "w": np.zeros(3, np.float32)}
    path = optfn.save_checkpoint(source, new, sharded=True)
    wait_for_writes()
    unsynced = path.with_suffix(".unsynced")
    shutil.move(path, unsynced)
    shutil.copytree(unsynced, tmp_path / "new")
    optfn.save_checkpoint(source / "other", old, sharded=True)
    wait_for_writes()
    shutil.move(source / "other" / path.name, path)
    (source / "other").rmdir()
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(source), str(target), "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    count = json.loads(done.stdout)
    assert count > 10
    seen = []
    for k in range(count + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none is damaged
            found, _ = optfn.restore_checkpoint(target / str(k), fresh)
        assert int(found["step"]) == 1 and len(list_checkpoints(target / str(k))) == 1
        (is_new,) = {bool(x) for x in np.asarray(found["w"]) >= 10}
        np.testing.assert_array_equal(found["w"], (old, new)[is_new]["w"])
        seen.append(is_new)
        if k % 10 == 0:  # the next save leaves nothing behind, whatever was
            later = optfn.save_checkpoint(
                target / str(k), old | {"step": np.int32(2)}, keep=1, sharded=True
            )
            wait_for_writes()
            assert [*later.parent.iterdir()] == [later]
    assert seen == sorted(seen) and not seen[0] and seen[-1]


def test_minimize_that_saves_its_last_step_again_keeps_it(tmp_path, monkeypatch):
    """By `save_every` and, with the last evaluation, at the end; the disk is lost in between."""
    import optfn.checkpoint.directory as module

    pytest.importorskip("orbax.checkpoint")
    options = {"checkpoint": tmp_path, "keep": 1, "save_every": 2, "progress": False}
    options |= {"mesh": optfn.distributed.data_mesh(8), "shard": "params"}
    arguments = lambda p, x: jnp.sum((p * x) ** 2), optfn.sgd(0.1), np.ones(8, np.float32)
    batches = [np.ones((8, 8), np.float32)] * 2
    replaced = []

    def fails(old, new):
        replaced.append(os.path.basename(new))
        if len(replaced) == 3:  # the new one of the second save
            raise KeyboardInterrupt
        os.rename(old, new)

    monkeypatch.setattr(module.os, "replace", fails)
    with pytest.raises(KeyboardInterrupt):
        optfn.minimize(*arguments, batches, evaluate=lambda p: 1.0, **options)
    monkeypatch.undo()
    assert replaced == ["step_000000002", "step_000000002.aside", "step_000000002"]
    state, history = optfn.minimize(*arguments, batches, **options)
    assert int(state.step) == 2 and len(history["loss"]) == 2
