"""Checkpoints in parts, written in the background: resumed, moved, damaged, carried over."""

import os
import shutil
import stat
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import equal

import optfn
from optfn.checkpoint.background import wait_for_writes
from optfn.distributed import data_mesh
from optfn.mesh.layout.fingerprint import fingerprint, fingerprints

RNG = np.random.default_rng(0)
PARAMS = {
    "t": RNG.normal(size=(64, 4)).astype(np.float32),
    "w": RNG.normal(size=(4, 8)).astype(jnp.bfloat16),
    "n": np.int32(3),
    "empty": np.zeros((0, 4), np.float32),
}
BATCHES = [
    (RNG.integers(0, 64, 16).astype(np.int32), RNG.normal(size=(16, 8)).astype(np.float32))
    for _ in range(2)
]


def loss_fn(params, batch):
    ids, y = batch
    return jnp.mean((params["t"][ids] @ params["w"].astype(jnp.float32) - y) ** 2)


STEP = optfn.make_train_step(
    loss_fn, optfn.adam(0.01, lazy=True), tables="t", mesh=data_mesh(8), shard_tables=True
)


def template():
    return STEP.init(PARAMS)


def save(directory, *steps):
    for n in steps:
        state = template()._replace(step=jnp.int32(n))
        optfn.save_checkpoint(directory, state, {"loss": np.ones(n)})
    wait_for_writes()


def test_the_state_may_be_overwritten_right_after_saving(tmp_path):
    state, _ = STEP(template(), BATCHES[0])
    saved = jax.device_get(state)
    path = optfn.save_checkpoint(tmp_path, state, {"loss": np.ones(1)})
    for _ in range(20):
        state, _ = STEP(state, BATCHES[1])
    found, history = optfn.restore_checkpoint(tmp_path, template())
    assert path.is_dir() and path.name == "step_000000001"
    equal(found, saved)
    np.testing.assert_array_equal(history["loss"], np.ones(1))


def test_flipped_bytes_are_found_and_the_one_before_is_read(tmp_path):
    save(tmp_path, 2, 4)
    first, last = sorted(tmp_path.iterdir())
    want = optfn.restore_checkpoint(tmp_path, template())
    assert int(want[0].step) == 4
    damaged = 0
    for file in sorted(last.rglob("*")):
        if file.is_file() and "/d/" in str(file) and file.stat().st_size > 200:
            data = bytearray(file.read_bytes())
            for k in range(len(data) // 3, len(data), max(1, len(data) // 7)):
                data[k] ^= 0x10
            file.write_bytes(bytes(data))
            damaged += 1
    assert damaged
    with pytest.warns(UserWarning, match="skipped: .*step_000000004"):
        state, _ = optfn.restore_checkpoint(tmp_path, template())
    assert int(state.step) == 2 and first.exists()


DAMAGED = """
    import sys
    import jax.numpy as jnp, numpy as np, optfn

    step = optfn.make_train_step(lambda p, x: 0.0 * p["0"].sum(), optfn.adam(0.1))
    state = step.init({str(k): np.random.default_rng(k).normal(size=(16, 80)) for k in range(150)})
    for n in (1, 2):
        state = state._replace(step=jnp.int32(n))
        path = optfn.save_checkpoint(sys.argv[1], state, sharded=True, background=False)
    for file in path.rglob("*"):
        if file.is_file() and "/d/" in str(file) and file.stat().st_size > 2000:
            data = bytearray(file.read_bytes())
            for k in range(len(data) // 3, len(data), len(data) // 7):
                data[k] ^= 0x10
            file.write_bytes(data)
    print("restores", file=sys.stderr, flush=True)
    found, _ = optfn.restore_checkpoint(sys.argv[1], state)
    print("restored", int(found.step), file=sys.stderr, flush=True)
    optfn.save_checkpoint(sys.argv[2], found.params, step=1, sharded=True, background=True)
"""


@pytest.mark.nightly
def test_a_damaged_directory_of_many_arrays_is_one_warning(tmp_path):
    """Orbax, and its event loop, say nothing besides; the last save of a program is finished."""
    pytest.importorskip("orbax.checkpoint")
    places = [str(tmp_path / name) for name in ("damaged", "last")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DAMAGED), *places],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stderr.partition("restores\n")[2].splitlines()
    assert "skipped: " in said[0] and "step_000000002 is truncated or damaged" in said[0]
    assert said[-1] == "restored 1" and len(said) <= 3, said  # with the line of the call
    params = {str(k): np.random.default_rng(k).normal(size=(16, 80)) for k in range(150)}
    params = jax.tree.map(np.float32, params)
    equal(optfn.restore_checkpoint(places[1], jax.tree.map(np.zeros_like, params))[0], params)


def test_an_array_that_was_changed_on_the_disk_does_not_have_its_checksum(tmp_path, monkeypatch):
    import optfn.checkpoint.directory as module

    def others(leaves):
        sums = module.fingerprints(leaves)
        return lambda: sums + np.uint32([[0, 1]])

    monkeypatch.setattr(module, "begin_fingerprints", others)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="truncated or damaged: the checksum of 'train/step'"):
        optfn.restore_checkpoint(tmp_path, template())


def rewritten(path, change):
    """Change the entries of a directory behind the back of its checksums."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.restore(path)
        shutil.rmtree(path)
        checkpointer.save(path, change({k: np.array(x) for k, x in saved.items()}))


BESIDE = {
    "loss": np.arange(3, dtype=np.float64),
    "batches": np.arange(9, dtype=np.uint8),
    "swapped": np.arange(3, dtype=">f4"),
    "narrow": np.full(3, -0.0, jnp.bfloat16),
}


@pytest.mark.parametrize("name", ["history/loss", "history/batches", "about"])
def test_a_bit_flipped_beside_the_arrays_is_found_and_the_one_before_is_read(name, tmp_path):
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(PARAMS)

    def flip(saved):
        place = bytes(saved["about"]).index(b"1") if name == "about" else 0  # of the version
        saved[name].view(np.uint8)[place] ^= 1
        return saved

    for step in (1, 2):
        state = state._replace(step=jnp.int32(step))
        path = optfn.save_checkpoint(tmp_path, state, BESIDE, sharded=True)
    wait_for_writes()
    rewritten(path, lambda saved: saved)
    found, history = optfn.restore_checkpoint(tmp_path, state)
    assert int(found.step) == 2
    chex.assert_trees_all_equal(history, BESIDE)
    rewritten(path, flip)
    with pytest.warns(UserWarning, match=f"skipped: .*{path.name}.*the checksum of '{name}' is wr"):
        found, history = optfn.restore_checkpoint(tmp_path, state)
    assert int(found.step) == 1
    chex.assert_trees_all_equal(history, BESIDE)


def test_an_entry_that_is_gone_from_a_directory_is_missed(tmp_path):
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(PARAMS)
    path = optfn.save_checkpoint(tmp_path, state, BESIDE, sharded=True)
    wait_for_writes()
    rewritten(path, lambda saved: {k: x for k, x in saved.items() if k != "history/batches"})
    with pytest.raises(ValueError, match=f"{path.name} is truncated or damaged: 'history/batches'"):
        optfn.load_checkpoint(path, state)


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_all_of_a_checkpoint_is_on_the_disk_when_it_has_its_name(sharded, tmp_path, monkeypatch):
    """Each file is synced after its last write, each directory after it got its last name."""
    synced = {}

    def content(path):
        about = os.stat(path)
        names = sorted(os.listdir(path)) if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
        return about.st_ino, (about.st_size, names)

    def sync(descriptor, fsync=os.fsync):
        fsync(descriptor)
        inode, seen = content(descriptor)
        synced[inode] = seen

    monkeypatch.setattr(os, "fsync", sync)
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(PARAMS)
    path = optfn.save_checkpoint(tmp_path, state, BESIDE, sharded=sharded)
    wait_for_writes()
    places = [tmp_path, path, *path.rglob("*")]
    assert len(places) == 2 if not sharded else len(places) > 5
    for place in places:
        inode, seen = content(place)
        assert synced.get(inode) == seen, place


def test_which_form_is_chosen_and_what_a_directory_holds(tmp_path):
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(PARAMS)
    assert optfn.save_checkpoint(tmp_path, state).name == "step_000000000.npz"
    path = optfn.save_checkpoint(tmp_path, state._replace(step=jnp.int32(1)), sharded=True)
    assert path.name == "step_000000001"
    found, _ = optfn.restore_checkpoint(tmp_path, state)
    assert int(found.step) == 1 and found.params["empty"].shape == (0, 4)
    assert optfn.save_checkpoint(tmp_path, template(), sharded=False).suffix == ".npz"
    wait_for_writes()
    with pytest.raises(TypeError, match="sharded must be"):
        optfn.save_checkpoint(tmp_path, state, sharded=2)


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(24.0).reshape(8, 3),
        nightly(jnp.arange(16, dtype=jnp.int8)),
        nightly(jnp.arange(16) % 3 == 0),
        nightly(jnp.arange(16, dtype=jnp.bfloat16)),
        nightly((1 + 2j) * jnp.arange(8.0)),
        nightly(jax.random.split(jax.random.key(0), 8)),
    ],
    ids=lambda x: str(x.dtype),
)
def test_a_checksum_depends_on_every_element_and_its_place_not_on_the_layout(x):
    mesh = data_mesh(8)
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    compiled = jax.jit(fingerprint)
    want = np.asarray(compiled(x))
    np.testing.assert_array_equal(compiled(spread), want)
    seen = {want.tobytes()}
    for k in range(1, len(x)):
        seen.add(np.asarray(compiled(x[jnp.r_[k, 1:k, 0, k + 1 : len(x)]])).tobytes())
    swapped = len(
        {np.asarray(jax.random.key_data(v) if "key" in str(v.dtype) else v).tobytes() for v in x}
    )
    assert len(seen) >= min(swapped, len(x))


def test_checksums_of_many_arrays_are_those_of_each():
    """Arrays of two kinds by turns, more than one program computes."""
    mesh = data_mesh(8)
    spread = [NamedSharding(mesh, P("data")), NamedSharding(mesh, P())]
    arrays = [jax.device_put(jnp.arange(16.0) + k, spread[k % 2]) for k in range(22)]
    found = fingerprints([*arrays, np.arange(3)])
    each = jax.jit(fingerprint)
    want = [np.asarray(each(x)) for x in [*arrays, jnp.arange(3)]]
    np.testing.assert_array_equal(found, want)
    assert len({x.tobytes() for x in found}) == 23


@pytest.mark.optimized
def test_a_checksum_takes_no_memory():
    x = jax.ShapeDtypeStruct(
        (512, 512), jnp.float32, sharding=NamedSharding(data_mesh(8), P("data"))
    )
    compiled = jax.jit(fingerprint).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1000 < 4 * 512 * 512 / 8


def test_without_orbax_the_error_names_the_extra(tmp_path, monkeypatch):
    state = optfn.make_train_step(loss_fn, optfn.sgd(0.1)).init(PARAMS)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[orbax\]"'):
        optfn.save_checkpoint(tmp_path, state, sharded=True)


@pytest.mark.parametrize("key", ["", "b/", "/"])
def test_a_key_that_orbax_cuts_is_refused_when_it_is_saved(key, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    tree = {"p": {key: jnp.ones(3)}, "step": jnp.array(1)}
    with pytest.raises(ValueError, match=rf"the names 'p/{key}' end with an empty key"):
        optfn.save_checkpoint(tmp_path, tree, sharded=True)
    assert not [*tmp_path.iterdir()]
    optfn.save_checkpoint(tmp_path, tree)
    chex.assert_trees_all_equal(optfn.restore_checkpoint(tmp_path, tree)[0], tree)


def test_a_path_with_dots_is_that_of_the_directory(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    state = optfn.make_train_step(lambda w, x: jnp.sum(w), optfn.sgd(0.1)).init(jnp.ones(3))
    path = optfn.save_checkpoint("../up", state, sharded=True)
    assert path == tmp_path / "up" / "step_000000000"
    for place in ("../up", tmp_path / "work" / ".." / "up"):
        found, _ = optfn.restore_checkpoint(place, state)
        np.testing.assert_array_equal(found.params, state.params)


@pytest.mark.parametrize("name", ["layers=[64,64]", "a\\b"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(name, tmp_path):
    """A run says so before its first step; files may lie there."""
    state = optfn.make_train_step(lambda w, x: jnp.sum(w), optfn.sgd(0.1)).init(jnp.ones(3))
    with pytest.raises(ValueError, match="must have no '\\['"):
        optfn.save_checkpoint(tmp_path / name, state, sharded=True)
    with pytest.raises(ValueError, match="must have no '\\['"):
        optfn.minimize(
            lambda w, x: 1 / 0, optfn.adam(0.1), jnp.ones((8, 4096)), [np.ones(8)],
            mesh=data_mesh(), shard="params", checkpoint=tmp_path / name, progress=False,
        )  # fmt: skip
    optfn.save_checkpoint(tmp_path / name, state, sharded=False)
    assert optfn.restore_checkpoint(tmp_path / name, state) is not None
