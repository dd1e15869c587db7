"""Typed PRNG keys in a state: files keep their data, and the name of their implementation."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optfn
from optfn.distributed import data_mesh


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
