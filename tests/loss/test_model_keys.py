"""Keys in the model state: each worker, step and microbatch has a mask of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from jax.sharding import Mesh

import optfn
from optfn.distributed import data_mesh, sharded

X = np.random.default_rng(0).normal(size=(3, 16, 8)).astype(np.float32)
STEPS = len(X)
W = np.ones((8, 64), np.float32)


def two_levels():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("slow", "fast"))


MESHES = {"one": lambda: data_mesh(1), "four": lambda: data_mesh(4), "two": two_levels}

# The options of a step, and how many masks it draws at once.
WAYS = {
    "one device": ({}, 1),
    "workers": ({"mesh": "four"}, 4),
    "state": ({"mesh": "four", "shard": "state"}, 4),
    "params": ({"mesh": "four", "shard": "params"}, 4),
    "two levels": (
        {
            "mesh": "two",
            "data_axis": ("slow", "fast"),
            "shard": sharded("params", axis="fast"),
        },
        8,
    ),
    "of one": ({"mesh": "one"}, 1),
    "microbatches": ({"microbatches": 2}, 2),
    "workers, microbatches": ({"mesh": "four", "microbatches": 2}, 8),
    "params, microbatches": ({"mesh": "four", "shard": "params", "microbatches": 2}, 8),
}


def count_masks(draw, keys, way, params=W, local_steps=1):
    """Return the masks that three steps draw, and the last state.

    draw(params, keys, x) returns a mask with the keys for the next call.
    """
    options = dict(WAYS[way][0])
    if "mesh" in options:
        options["mesh"] = MESHES[options["mesh"]]()
    seen = []

    def loss_fn(params, keys, x):
        mask, new = draw(params, keys, x)
        jax.debug.callback(lambda mask: seen.append(np.asarray(mask).tobytes()), mask)
        return jnp.mean(mask) * sum(jnp.sum(w) for w in jax.tree.leaves(params)), new

    step = optfn.make_train_step(
        loss_fn, optfn.sgd(0.0), model_state=True, local_steps=local_steps, **options
    )
    state = step.init(params, keys)
    if local_steps == 1:
        for x in X:
            state, _ = step(state, x)
    else:
        state, _ = step(state, X[:local_steps].reshape(-1, 8))
    jax.block_until_ready(state)
    jax.effects_barrier()
    return seen, state


def data(key):
    return np.asarray(jax.random.key_data(key))


def draw_and_split(params, keys, x):
    key, new = jax.random.split(keys["key"])
    return jax.random.bernoulli(key, shape=(64,)), {"key": new, "fixed": keys["fixed"]}


def draw_by_count(params, keys, x):
    key = jax.random.fold_in(keys["key"][1], keys["count"])
    return jax.random.bernoulli(key, shape=(64,)), keys | {"count": keys["count"] + 1}


@pytest.mark.parametrize("way", suite(WAYS, "microbatches", "two levels", "params, microbatches"))
def test_a_key_that_the_loss_splits_gives_a_mask_for_each_worker_and_step(way):
    keys = {"key": jax.random.key(1), "fixed": jax.random.key(2)}
    seen, state = count_masks(draw_and_split, keys, way)
    assert len(seen) == len(set(seen)) == STEPS * WAYS[way][1]
    np.testing.assert_array_equal(data(state.model_state["fixed"]), data(keys["fixed"]))
    key = jax.random.key_data(state.model_state["key"])
    assert len({np.asarray(shard.data).tobytes() for shard in key.addressable_shards}) == 1


def test_an_array_of_keys_with_a_count_stays_as_it_is_and_gives_as_many_masks():
    keys = {"key": jax.random.split(jax.random.key(1), 3), "count": jnp.zeros((), jnp.uint32)}
    seen, state = count_masks(draw_by_count, keys, "workers, microbatches")
    assert len(seen) == len(set(seen)) == STEPS * 8
    np.testing.assert_array_equal(data(state.model_state["key"]), data(keys["key"]))


def test_workers_of_a_round_draw_their_own_masks():
    keys = {"key": jax.random.key(1), "fixed": jax.random.key(2)}
    seen, state = count_masks(draw_and_split, keys, "workers", local_steps=2)
    assert len(seen) == len(set(seen)) == 2 * 4
    np.testing.assert_array_equal(data(state.model_state["fixed"]), data(keys["fixed"]))


def test_a_mesh_of_one_draws_what_a_run_without_a_mesh_draws():
    keys = {"key": jax.random.key(1), "fixed": jax.random.key(2)}
    alone, of_one = (count_masks(draw_and_split, keys, way)[0] for way in ("one device", "of one"))
    assert alone == of_one


def test_each_step_worker_and_microbatch_has_a_key_of_unsafe_rbg_of_its_own():
    """Its folds commute, so that step 3 of worker 5 would be step 5 of worker 3."""
    seen = []

    def loss(w, ids, key):
        data = jax.random.key_data(key)
        jax.debug.callback(lambda x: seen.append(tuple(np.ravel(x).tolist())), data)
        return jnp.sum(w[ids])

    step = optfn.make_train_step(
        loss, optfn.sgd(0.0), rng=jax.random.key(7, impl="unsafe_rbg"), mesh=data_mesh(8),
        microbatches=4,
    )  # fmt: skip
    state = step.init(jnp.zeros(64))
    for _ in range(4):
        state, _ = step(state, np.arange(64))
    jax.effects_barrier()
    assert len(seen) == len({*seen}) == 8 * 4 * 4
