"""The two forms of a checkpoint keep one contract, `storage.Backend`, and typed keys."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optfn
from optfn.checkpoint.directory import OrbaxDirectory
from optfn.checkpoint.file import NpzFile
from optfn.checkpoint.snapshot import Snapshot
from optfn.distributed import data_mesh

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "empty": jnp.zeros((0, 2)), "n": jnp.int32(3)}
BESIDE = {
    "history/loss": np.arange(3.0),
    "history/batches": np.frombuffer(b"[null]", np.uint8),
    "history/stopped": np.array("callback"),
}


@pytest.mark.parametrize("backend", [NpzFile(), OrbaxDirectory()], ids=["file", "directory"])
def test_a_backend_replaces_reads_and_removes_a_checkpoint(backend, tmp_path):
    if isinstance(backend, OrbaxDirectory):
        pytest.importorskip("orbax.checkpoint")
    state = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), optfn.adam(0.1)).init(PARAMS)
    path, kept = tmp_path / f"checkpoint{backend.suffix}", tmp_path / f"kept{backend.suffix}"
    backend.writer(kept, Snapshot.of(state), BESIDE)()
    for factor in (2, 3):
        saved = jax.tree.map(lambda x, factor=factor: x * factor, state)
        backend.writer(path, Snapshot.of(saved), BESIDE)()
    found = backend.read(
        path, Snapshot.of(state), lambda name: not name.startswith("scale_by_adam/")
    )
    want = optfn.state_dict(saved) | BESIDE
    assert found.keys() - {"per_worker", "dtypes"} == want.keys()
    for name, x in want.items():
        if name.startswith("scale_by_adam/"):
            assert found[name] is None or not x.size
        else:
            assert found[name].dtype == x.dtype
            np.testing.assert_array_equal(found[name], x)
    assert sorted(tmp_path.iterdir()) == [path, kept]
    backend.remove(path)
    assert list(tmp_path.iterdir()) == [kept]
    whole = backend.read(kept, Snapshot.of(state), lambda name: True)
    for name, x in optfn.state_dict(state).items():
        np.testing.assert_array_equal(whole[name], x)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_history_of_other_objects_is_an_error_at_once(sharded, tmp_path):
    state = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), optfn.adam(0.1)).init(PARAMS)
    with pytest.raises(TypeError, match="numbers or text; 'note' has dtype object"):
        optfn.save_checkpoint(tmp_path, state, {"note": {"a": 1}}, sharded=sharded)
    assert list(tmp_path.iterdir()) == []


def through_state_dict(state, template, folder):
    return optfn.load_state_dict(template, optfn.state_dict(state))


def through_checkpoint(state, template, folder):
    optfn.save_checkpoint(folder, state, step=1)
    return optfn.restore_checkpoint(folder, template)[0]


@pytest.mark.parametrize("kept", [through_state_dict, through_checkpoint])
@pytest.mark.parametrize("sharded", [False, True], ids=["a file", "a directory"])
def test_a_key_is_no_key_of_another_implementation(kept, sharded, tmp_path):
    """rbg and unsafe_rbg have equally many words, and draw other numbers of them."""
    w = jnp.ones(8)
    if sharded:
        w = jax.device_put(w, NamedSharding(data_mesh(), PartitionSpec("data")))
    state = {"key": jax.random.key(3, impl="rbg"), "w": w}
    loaded = kept(state, state | {"key": jax.random.key(0, impl="rbg")}, tmp_path / "same")
    assert jax.random.key_impl(loaded["key"]) == "rbg"
    chex.assert_trees_all_equal(*(jax.random.key_data(x["key"]) for x in (state, loaded)))
    with pytest.raises(ValueError, match="'key' is a key of rbg, but the template"):
        kept(state, state | {"key": jax.random.key(0, impl="unsafe_rbg")}, tmp_path / "other")
